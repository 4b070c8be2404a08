"""Places where `doctor` tries masks: what skipping gains there, in steps that are really run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backdrop._core import tree
from backdrop._core.draw import make_lattice
from backdrop._core.informed import inclusion_probabilities, unit_norms
from backdrop.graph.table import Statistics
from backdrop.graph.trace import first_line
from backdrop.layers import Backdrop, drops_samples
from backdrop.placement.fields import by
from backdrop.placement.gradients import call
from backdrop.placement.steps import Batch, Reading, Run, take_turns
from backdrop.placement.suggest import Place, places_of, rounded, suggest
from backdrop.placement.surgery import insert
from backdrop.skip import Skip, skip_blocked
from backdrop.skip.engine import Engine, When

__all__ = ["Site", "SiteFound", "Tried", "Way", "own_masks", "samples", "sites_of_positions"]

PAYS = 1.1  # skipping has to be so many times faster
LEAN = 0.8  # or to take so much of the memory
WORTH = 1.5  # times less variance, from which on choosing by gradients is advised
APART = (4, 64)  # units that do not overlap, of places that are tried without sizes
FLOOR = 0.1  # of masks that choose by gradients
SAMPLES = (0.5, 0.8, 0.9)
PARTS = 8
MOST = 0.8  # of the multiplications before a mask: skipping these is enough


class Way(NamedTuple):
    """A step with masks, skipped.

    Args:
        p: of the mask.
        seconds: a step.
        faster: times plain, in the same rounds.
        memory: bytes at the peak.
        informed: whether units are chosen by their gradients.
        at_once: the most samples in work at a time.
    """

    p: float
    seconds: float
    faster: float
    memory: int
    informed: bool = False
    at_once: int | None = None


@dataclass(frozen=True)
class SiteFound:
    """What a mask at one place gains.

    Args:
        after: the module that the mask follows; "" for the output.
        why: why there, in words.
        statistics: what was done with batch statistics.
        rule: the p to start from, whatever skipping gains.
        plain: a step without masks, in the same rounds.
        ways: steps with masks.
        pays_from: from which p on skipping is faster; None where it is at none.
        informed: how many times less variance masks have that choose by gradients, for this batch and these weights;
            nan where that is not known.
        report: what was skipped, what not, and why.
        advised: the way to take; None where none gains anything.
        code: lines to paste.
        problem: why nothing could be measured.
    """

    after: str
    why: str
    statistics: Statistics
    rule: float
    plain: Reading | None
    ways: tuple[Way, ...]
    pays_from: float | None
    informed: float
    report: str
    advised: Way | None
    code: str
    problem: str = ""

    @property
    def gain(self) -> float:
        """To sort by."""
        return 0.0 if self.advised is None else self.advised.faster


class Tried(NamedTuple):
    """What was found, and the models that it was found with."""

    found: SiteFound
    masked: nn.Module | None  # with plain masks
    made: nn.Module | None  # with the way that is advised


class _Built(NamedTuple):
    masked: nn.Module | None
    made: nn.Module
    masks: list[Backdrop]


@dataclass(frozen=True)
class Site:
    """Where masks may go.

    Args:
        after: the module; "" for the output.
        where: in words.
        why: why there.
        ps: to measure with.
        rule: the p to start from.
        mask: makes the layer; None where masks are there already.
        code: of the layer, given p and whether it chooses by gradients.
    """

    after: str
    where: str
    why: str
    ps: tuple[float, ...]
    rule: float
    mask: Callable[[float], Backdrop] | None
    layer: str = ""

    def measure(
        self, plain: nn.Module, batch: Batch, device: torch.device, statistics: Statistics | None, rounds: int
    ) -> Tried:
        try:
            return self._measure(plain, batch, device, statistics, rounds)
        except (ValueError, TypeError, RuntimeError) as error:
            problem = first_line(error)
            nothing = SiteFound(
                self.after, self.why, "exact", self.rule, None, (), None, math.nan, "", None, "", problem
            )
            return Tried(nothing, None, None)

    def _measure(
        self, plain: nn.Module, batch: Batch, device: torch.device, statistics: Statistics | None, rounds: int
    ) -> Tried:
        chosen, built = self._built(plain, batch, statistics)
        shares = {mask: 1 - float(mask.p) for mask in built.masks}

        def set_p(p: float) -> None:
            for mask in built.masks:  # several keep what they have of each other
                mask.p = p if len(built.masks) == 1 else max(0.0, 1 - shares[mask] * (1 - p) / (1 - self.rule))

        def run(p: float) -> Run:
            def step() -> None:
                set_p(p)
                batch.step(built.made)

            return step

        gain = math.nan if batch.loss is None else _informed(self, plain, batch)
        readings = take_turns({"": lambda: batch.step(plain)} | {f"{p!r}": run(p) for p in self.ps}, device, rounds)
        without = readings.pop("")
        ways = [_way(p, reading, without) for p, reading in zip(self.ps, readings.values(), strict=True)]
        pays_from = _pays_from(ways, without)
        advised = self._advised(ways, without)
        when: When = "pays"
        set_p(self.ps[-1] if advised is None else advised.p)
        batch.step(built.made)
        report = str(_report(built.made))
        if advised is not None:
            when = _when(built.made, advised.p, device)
            if gain >= WORTH and self.mask is not None:
                for mask in built.masks:
                    mask.choose = "gradient"
                taken = take_turns({"": lambda: batch.step(plain), "it": run(advised.p)}, device, rounds)
                chosen_way = _way(advised.p, taken["it"], taken[""])._replace(informed=True)
                if "chosen by gradients" not in str(_report(built.made)):  # else it ran plain, and says so
                    ways.append(chosen_way)
                    if chosen_way.faster >= PAYS:
                        advised = chosen_way
                if not advised.informed:
                    for mask in built.masks:
                        mask.choose = "uniform"
            if not self.after and self.mask is not None and batch.rows >= 2 * PARTS:
                ways.append(self._in_parts(plain, batch, advised, chosen, device, rounds))
        code = "" if advised is None else self._code(advised, chosen, when)
        found = SiteFound(
            self.after, self.why, chosen, self.rule, without, tuple(ways), pays_from, gain, report, advised, code
        )
        return Tried(found, built.masked, built.made)

    def _built(self, plain: nn.Module, batch: Batch, statistics: Statistics | None) -> tuple[Statistics, _Built]:
        """With the policy that is asked for; else with "sampled" where "exact" skips little."""
        built = self._build(plain, statistics or "exact")
        batch.step(built.made)
        share = max((entry.share for entry in _report(built.made)), default=0.0)
        if statistics is not None or share >= MOST:
            return statistics or "exact", built
        other = self._build(plain, "sampled")
        batch.step(other.made)
        if max((entry.share for entry in _report(other.made)), default=0.0) > share + 0.1:
            return "sampled", other
        return "exact", built

    def _build(self, plain: nn.Module, statistics: Statistics) -> _Built:
        if self.mask is None:
            made = skip_blocked(plain, statistics=statistics, when="always")
            return _Built(plain, made, [each for each in made.modules() if isinstance(each, Backdrop)])
        mask = self.mask(self.ps[-1])
        if not self.after:
            return _Built(None, Skip(plain, mask, statistics=statistics, when="always"), [mask])
        masked = insert(plain, {self.after: mask})
        made = skip_blocked(masked, statistics=statistics, when="always")
        return _Built(masked, made, [each for each in made.modules() if isinstance(each, Backdrop)])

    def _in_parts(
        self, plain: nn.Module, batch: Batch, advised: Way, statistics: Statistics, device: torch.device, rounds: int
    ) -> Way:
        """The same with an eighth of the samples in work at a time."""
        assert self.mask is not None
        mask, at_once = self.mask(advised.p), -(-batch.rows // PARTS)
        mask.choose = "gradient" if advised.informed else "uniform"
        made = Skip(plain, mask, statistics=statistics, when="always", at_once=at_once)
        taken = take_turns({"": lambda: batch.step(plain), "it": lambda: batch.step(made)}, device, rounds)
        return _way(advised.p, taken["it"], taken[""])._replace(informed=advised.informed, at_once=at_once)

    def _advised(self, ways: Sequence[Way], plain: Reading) -> Way | None:
        """That of the p to start from, if it is faster; else of the least p that is; else the leanest."""
        faster = [way for way in ways if way.faster >= PAYS]
        first = [way for way in faster if way.p == self.rule] or faster
        if first:
            return first[0]
        lean = [way for way in ways if way.memory <= LEAN * plain.memory and way.faster > 1 / 2]
        return min(lean, key=lambda way: way.memory) if lean else None

    def _code(self, way: Way, statistics: Statistics, when: When) -> str:
        settings = [] if statistics == "exact" else [f'statistics="{statistics}"']
        settings += [] if when == "pays" else [f'when="{when}"']
        options = "".join(f", {each}" for each in settings)
        if self.mask is None:
            return f"from backdrop import skip_blocked\n\nmodel = skip_blocked(model{options})"
        more = ', choose="gradient"' if way.informed else ""
        layer = self.layer.format(f"{way.p:.12g}", f"exact=True{more}")
        name = self.layer.partition("(")[0]
        if not self.after:
            return f"from backdrop import {name}, Skip\n\nmodel = Skip(model, {layer}{options})"
        return (
            f"from backdrop import {name}, insert, skip_blocked\n\n"
            f'model = insert(model, {{"{self.after}": {layer}}})\nmodel = skip_blocked(model{options})'
        )


def samples() -> Site:
    """A mask behind the output."""
    return Site(
        "",
        "on the samples, behind the output",
        "for a loss over the whole batch",
        SAMPLES,
        0.9,
        lambda p: Backdrop(p, exact=True),
        "Backdrop({}, {})",
    )


def own_masks(model: nn.Module) -> Site | None:
    """Those that a model has, at once."""
    masks = [each for each in model.modules() if isinstance(each, Backdrop) and float(each.p) > 0]
    if not masks:
        return None
    highest = max(float(mask.p) for mask in masks)
    ps = tuple(sorted({highest, round(1 - (1 - highest) / 4, 6)}))
    names = [name for name, each in model.named_modules() if isinstance(each, Backdrop)]
    return Site(", ".join(names), "as the model has it", "the model's own", ps, highest, None)


def sites_of_positions(model: nn.Module, shape: tuple[int, ...], sizes: float | Iterable[float] | None) -> list[Site]:
    """Where structures of these sizes are, or the two places that skipping gains most at."""
    if sizes is not None:
        found = suggest(model, shape, sizes)
        places = {place.after: place for place in places_of(model, shape)}
        return [_site(places[each.after], f"for structures of size {each.size:g}") for each in found]
    chosen: dict[str, Site] = {}
    for apart in APART:
        fitting = [p for p in places_of(model, shape) if not p.open and (p.field.independent or 0) >= apart]
        if fitting:
            place = fitting[-1]
            why = f"the last place with {apart} or more positions that do not overlap; sizes= finds one for yours"
            chosen.setdefault(place.after, _site(place, why))
    if not chosen:
        raise ValueError("there is no place that everything passes with positions that do not overlap")
    return list(chosen.values())


def _site(place: Place, why: str) -> Site:
    units, rule = place.units, place.first
    kept = sorted({max(1, round(units * (1 - rule) / times)) for times in (1, 4, 16)}, reverse=True)
    ps = tuple(rule if i == 0 else rounded(number / units) for i, number in enumerate(kept))
    seen = f"where a position sees {by(place.field.size or ())} cells; {why}"
    return Site(place.after, f"behind {place.after}", seen, ps, rule, place.layer, place.code("{}", "{}"))


def _way(p: float, reading: Reading, plain: Reading) -> Way:
    return Way(p, reading.seconds, plain.seconds / reading.seconds, reading.memory)


def _pays_from(ways: Sequence[Way], plain: Reading) -> float | None:
    """Time grows along a line with the share that is kept, fitted to what was measured."""
    shares, times = [1 - way.p for way in ways], [1 / way.faster for way in ways]
    if len(ways) < 2:
        return ways[0].p if ways and ways[0].faster >= PAYS else None
    middle, mean = sum(shares) / len(shares), sum(times) / len(times)
    spread = sum((share - middle) ** 2 for share in shares)
    slope = sum((share - middle) * (t - mean) for share, t in zip(shares, times, strict=True)) / spread
    if slope <= 0:
        return min((way.p for way in ways if way.faster >= PAYS), default=None)
    share = middle + (1 / PAYS - mean) / slope
    return None if share <= 0 else max(0.0, 1 - share)


def _report(made: nn.Module) -> Any:
    return made.report if isinstance(made, Skip) else made.skip_report


def _when(made: nn.Module, p: float, device: torch.device) -> When:
    """The least that makes the engine skip, which goes by its model of costs."""
    engine: Any = made.engine if isinstance(made, Skip) else made.forward
    assert isinstance(engine, Engine)
    parts = [part for graph in engine.graphs for plan in graph.plans.values() for part in plan.parts if part.way]
    choices: tuple[When, ...] = ("pays", "lean")
    for when in choices:
        said = []
        for part in parts:
            before, part.settings = part.settings, part.settings._replace(when=when)
            said.append(part.estimate([float(layer.p) for layer in part.layers], device)[0])
            part.settings = before
        if not any(said):
            return when
    return "always"


def _informed(site: Site, plain: nn.Module, batch: Batch) -> float:
    """The variance of uniform masks over that of masks that choose by gradients, by the gradients that arrive."""
    if site.mask is None:
        return math.nan
    mask, seen = site.mask(site.rule), list[Tensor]()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        for _, leaf in tree.leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(seen.append)  # type: ignore[no-untyped-call]

    handle = plain.get_submodule(site.after).register_forward_hook(note)
    try:
        batch.value(call(plain, batch.inputs)).backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
        plain.zero_grad(set_to_none=True)
    rows = [grad for grad in seen if grad.ndim and (not drops_samples(mask) or len(grad) == batch.rows)]
    if not rows:
        return math.nan
    pairs = [(grad, make_lattice(grad.shape, mask.dims, 1)) for grad in rows]
    norms = unit_norms(*pairs)
    number = max(1, round(norms.shape[1] * (1 - site.rule)))
    blind = (norms.shape[1] / number - 1) * float(norms.square().sum())
    pi = inclusion_probabilities(norms, number, FLOOR)
    chosen = float(((1 / pi - 1) * norms.square()).sum())
    return blind / chosen if chosen > 0 else math.nan


def copied(model: nn.Module) -> nn.Module:
    """In training mode, with empty gradients."""
    made = copy.deepcopy(model).train()
    for parameter in made.parameters():
        parameter.grad = None
    return made
