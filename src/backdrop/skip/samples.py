"""Samples dropped: run the kept ones with gradients and the others without, and put the rows back in order.

Right for calls whose result for one sample depends on that sample alone, which the rules say of every call of a segment
(`backdrop.graph.table`); a call that no rule knows is tried out on random numbers, with its gradients. Where calls use
batch statistics (see statistics.py) both kinds of samples take every call together, and the statistics are those of
all.

Where a mask chooses by gradients, all samples run without them, in parts, and the chosen ones again with gradients once
the backward pass has come to the mask.

With `at_once`, no pass has more samples than that in work. The kept ones then run without gradients too, part by part,
if there are more of them, and again with gradients in the backward pass, each part from the same random numbers. With p
= 0 that is gradient caching (Gao et al., 2021).

Samples of a source are read for each part, the next part while this one is computed, in the forward pass and again
where the backward pass computes again. So of inputs there are never more than two parts at once."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from backdrop._core import kernels
from backdrop._core.draw import is_zero
from backdrop._core.product import multiply
from backdrop._shared import Draw
from backdrop._source import ReadAhead, moved
from backdrop.graph import cost
from backdrop.graph.table import Statistics
from backdrop.graph.unread import Unread
from backdrop.layers import Backdrop
from backdrop.skip.programs import InStep, Program
from backdrop.skip.report import Entry
from backdrop.skip.saved import load, save
from backdrop.skip.segments import Segment

AT_ONCE = 384  # at least so many samples run together without gradients, where nobody says otherwise
# Calls that take images in any order in memory; others, such as view, may ask for the one they were given.
ANY_ORDER = {
    *("conv2d", "batch_norm", "group_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"),
    *("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "sigmoid"),
    *("tanh", "softplus", "add", "sub", "mul", "truediv", "div", "clamp", "cat", "mean", "pad", "interpolate"),
    *("dropout", "dropout2d", "flatten", "reshape", "linear", "permute", "layer_norm", "getitem", "chunk", "split"),
    "itself",
}


class Split(NamedTuple):
    """Which rows run with gradients, and what these are multiplied by at each exit."""

    kept: Tensor
    rest: Tensor
    weights: list[Tensor]  # of the kept rows; zero at those that are there for their number alone
    known: bool = False  # whether all rows are kept, in their order


class Spent(NamedTuple):
    """A step on some samples, by the cost model."""

    kept: float  # samples with gradients
    parts: int  # in which the others run
    step: float  # seconds of a plain step
    skipped: float  # seconds where the others run without gradients


class Samples:
    """A segment, and the masks behind its exits."""

    def __init__(
        self, segment: Segment, masks: dict[fx.Node, Backdrop], policy: Statistics, at_once: int | None
    ) -> None:
        self.segment, self.policy, self.at_once = segment, policy, at_once
        self.exits = list(segment.exits)
        self.masks = [masks[node] for node in self.exits]
        first = self.exits[0]
        axis = segment.exits[first].axes[0]
        assert axis is not None
        self.number = segment.traced.shape(first)[axis]
        self.norms = "batch" in segment.couples
        self.program = Program(segment)
        self.lean = Program(segment, fused=True)
        self.in_step = InStep(segment, policy) if self.norms else None
        self.all_first: Program | None = None
        self.kept_again: Program | None = None
        if self.norms and at_once is None and not segment.traced.draws & segment.steps.keys():
            self.all_first = Program(segment, keep_statistics=True)
            self.kept_again = Program(segment, policy=policy)
        self.rows = [segment.demands.get(node) for node in segment.entries]
        called = {str(getattr(node.target, "__name__", node.target)).strip("_") for node in segment.steps}
        self.any_order = "conv2d" in called and called <= ANY_ORDER

    def compile(self) -> None:
        """From now on, all code as Inductor makes it."""
        for program in (self.program, self.lean, self.all_first, self.kept_again):
            if program is not None:
                program.compile()

    def kept_samples(self, p: float | None = None) -> float:
        """On average: those that any of the masks keeps, as they are or with this p."""
        dropped = 1.0
        for mask in set(self.masks):
            dropped *= (float(mask.p) if mask.training else 0.0) if p is None else p
        return max(1.0, self.number * (1 - dropped))

    def spent(self, known: cost.Cost, device: torch.device, p: float | None = None) -> Spent:
        """What a step takes by the cost model, from what a pass costs, as the masks are or with this p."""
        kept, twice = self.kept_samples(p), self._is_twice(device)
        if self.chooses:
            kept_first, twice = 0.0, True
            parts = 1 if self.norms else self._number_of_parts(self.number, kept_first)
        else:
            parts = 1 if twice else self._number_of_parts(self.number - kept, kept)
        step = known.step(device)

        def skipped() -> float:
            return known.step_of_some(device, kept / self.number, parts, norms=self.norms, twice=twice)

        while parts > 1 and self.at_once is None and not cost.pays(skipped(), step):  # fewer take more memory
            parts //= 2
        return Spent(kept, parts, step, skipped())

    @property
    def chooses(self) -> bool:
        """Whether a mask chooses samples by the gradients that arrive."""
        return any(mask.choose == "gradient" and mask.training and not is_zero(mask.p) for mask in self.masks)

    def refuses(self) -> str:
        """Why samples cannot be chosen by gradients, if so."""
        if not self.chooses:
            return ""
        if self.segment.traced.draws & self.segment.steps.keys():
            return "samples chosen by gradients run again, and cannot draw the same random numbers (dropout) once more"
        if self.norms and self.all_first is None:
            return "samples chosen by gradients, batch statistics and at_once do not go together"
        return ""

    def _is_twice(self, device: torch.device) -> bool:
        """Whether kept samples run twice: with all others, and again with gradients."""
        return self.all_first is not None and device.type == "cpu"

    def run(self, values: Sequence[Any], parts: int, entries: Sequence[Entry]) -> tuple[list[Tensor], str]:
        """The exits' values with the masks behind them, and in words how they were computed."""
        streams = any(isinstance(value, Unread) for value in values)
        if streams and not (torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values)):
            return self._without_any(values, parts), f"{self.number} samples ran without gradients"
        if self.chooses:
            run = Run(self, entries_of_report=entries, parts_of_all=parts)
            return self._later(run, values), "backward has not run yet"
        split = self._split(_device_of(values))
        said = f"{len(split.kept)} of {self.number} samples ran with gradients"
        if self.norms:
            return self._together(values, split, parts), said
        if self.at_once is not None and len(split.kept) > self.at_once:
            return self._later(Run(self, split), values), f"{said}, at most {self.at_once} at once"
        return self._apart(values, split, parts), said

    def _split(self, device: torch.device) -> Split:
        drawn: dict[Backdrop, Tensor] = {}
        active = [mask for mask in self.masks if mask.training and not is_zero(mask.p)]
        plain = all(not isinstance(mask.p, Tensor) and mask.group is None for mask in active)
        fixed = plain and len(set(active)) == 1 and active[0].exact
        with contextlib.nullcontext() if not plain or fixed else _beside(device):
            for mask in self.masks:
                if mask not in drawn:
                    drawn[mask] = self._draw(mask, device)
            if not active:
                every = torch.arange(self.number, device=device)
                return Split(every, every[:0], [drawn[mask] for mask in self.masks], True)
            split = self._split_by(drawn, fixed)
        if device.type == "cuda":
            for each in (*drawn.values(), split.kept):
                each.record_stream(torch.cuda.current_stream(device))
        return split

    def _split_by(self, drawn: dict[Backdrop, Tensor], fixed: bool) -> Split:
        """Those that any mask keeps; just as many as p says if they are fixed."""
        dropped = functools.reduce(torch.logical_and, [weight == 0 for weight in drawn.values()])
        order = dropped.to(torch.uint8).argsort(stable=True)
        if fixed and len(drawn) == 1:
            kept = round(self.number * (1 - float(self.masks[0].p)))
        else:
            kept = kernels.few_shapes(self.number - int(dropped.count_nonzero()), dropped.device)
        # Some at least: with a mask over many processes, ours may have none, and parameters need their gradient.
        # Two, because torch has calls that are wrong for one: batch_norm with running statistics, with some strides.
        kept = min(self.number, max(2, kept))
        index = order[:kept]
        return Split(index, order[kept:], [drawn[mask].index_select(0, index) for mask in self.masks])

    def _draw(self, mask: Backdrop, device: torch.device) -> Tensor:
        if not mask.training or (is_zero(mask.p) and mask.group is None):
            return torch.ones(self.number, device=device, dtype=torch.float64)
        return mask.draw_weight(self._like(mask, device)).flatten()

    def _like(self, mask: Backdrop, device: torch.device) -> Tensor:
        """Something that this mask has a weight per sample for."""
        (dim,) = (mask.dims,) if isinstance(mask.dims, int) else mask.dims
        axes = (1,) * (-dim - 1)  # behind that of samples, where it is counted from the last one
        return torch.empty(self.number, *axes, device=device, dtype=torch.float64)

    def _take(self, values: Sequence[Any], rows: Tensor, known: bool = False) -> list[Any]:
        """The rows of every value that has some for each sample; everything else is shared."""
        return self._moved(self._read(values, rows), values, rows, known)

    def _read(self, values: Sequence[Any], rows: Tensor) -> list[Tensor | None]:
        """The rows of sources, where they are read."""
        return [value.rows(rows) if isinstance(value, Unread) else None for value in values]

    def _moved(self, read: list[Tensor | None], values: Sequence[Any], rows: Tensor, known: bool = False) -> list[Any]:
        taken = []
        for value, own, demand in zip(values, read, self.rows, strict=True):
            if own is not None:
                taken.append(moved(own, value.device))
            elif demand is None or demand.axes[0] is None or not isinstance(value, Tensor) or known:
                taken.append(value)
            elif demand.inner == 1:
                taken.append(value.index_select(demand.axes[0], rows))
            else:
                inner = torch.arange(demand.inner, device=rows.device)
                taken.append(value.index_select(demand.axes[0], (rows[:, None] * demand.inner + inner).flatten()))
        return taken

    def _each(self, values: Sequence[Any], parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Any]]]:
        """The rows of each part, and what they are of all values; with sources the next part is read meanwhile."""
        if not any(isinstance(value, Unread) for value in values):
            for rows in parts:
                yield rows, self._take(values, rows)
            return
        with ReadAhead(functools.partial(self._read, values), [rows.cpu() for rows in parts]) as found:
            for rows, read in zip(parts, found, strict=True):
                yield rows, self._moved(read, values, rows)

    def refuses_sources(self, values: Sequence[Any]) -> str:
        """Why samples cannot come from sources, if so."""
        for value, demand in zip(values, self.rows, strict=True):
            if isinstance(value, Unread) and (demand is None or demand.axes[0] != 0 or demand.inner != 1):
                return "its first axis is not that of the samples that the mask drops"
        if self.norms:
            return "batch statistics in training need all samples at once; put these layers in eval mode"
        return ""

    def _without_gradients(self, program: Program, values: Sequence[Any], rows: int = 0) -> Any:
        """On a CPU images with their channels together, which saves convolutions the time to put them so."""
        turned = self.any_order and any(map(_turns, values))
        if turned:
            values = [x.contiguous(memory_format=torch.channels_last) if _turns(x) else x for x in values]
        found = program(values, rows)
        outputs = found[0] if program.keep_statistics else found
        if turned:
            outputs[:] = [x.contiguous() for x in outputs]
        return found

    def _fill(self, merged: list[Tensor], values: Sequence[Any], parts: Sequence[Tensor]) -> None:
        """The outputs of these rows, part by part without gradients, put where they belong."""
        for rows, taken in self._each(values, parts):
            self._place(merged, self._without_gradients(self.lean, taken, len(rows)), rows)

    def _without_any(self, values: Sequence[Any], parts: int) -> list[Tensor]:
        every = torch.arange(self.number, device=_device_of(values))
        merged: list[Tensor] = []
        with torch.no_grad():
            self._fill(merged, values, self._parts(every, parts))
        for mask, leaf in dict(zip(self.masks, merged, strict=True)).items():
            mask.shared_draw(leaf, False)  # those of many processes count the call
        return merged

    def _apart(self, values: Sequence[Any], split: Split, parts: int) -> list[Tensor]:
        """The others without gradients, in parts; then the kept ones; then both in order."""
        merged: list[Tensor] = []
        with torch.no_grad():
            self._fill(merged, values, self._parts(split.rest, parts))
        if torch.is_autocast_enabled(split.kept.device.type):
            torch.clear_autocast_cache()  # of weights that were cast without gradients
        outputs = self.program(self._take(values, split.kept, split.known), len(split.kept))
        with torch.no_grad():
            self._place(merged, outputs, split.kept)
        return _merge(outputs, merged, split, self.masks)

    def _together(self, values: Sequence[Any], split: Split, parts: int) -> list[Tensor]:
        """All parts call by call, because calls with batch statistics need them all; the kept ones have gradients.

        On a CPU, where many calls on small parts are slow, all samples take one pass without gradients, and the kept
        ones another with the statistics of the first.
        """
        assert self.in_step is not None
        if self._is_twice(split.kept.device):
            assert self.all_first is not None
            assert self.kept_again is not None
            with torch.no_grad():
                whole, seen = self._without_gradients(self.all_first, values)
            if torch.is_autocast_enabled("cpu"):
                torch.clear_autocast_cache()  # of weights that were cast without gradients
            again = self.kept_again(self._take(values, split.kept), len(split.kept), seen)
            return _merge(again, whole, split, self.masks)
        rows = [split.kept, *self._parts(split.rest, parts)]
        taken = []
        for i, each in enumerate(rows):
            with torch.set_grad_enabled(i == 0):
                taken.append(self._take(values, each))
        outputs = self.in_step(taken, [len(each) for each in rows])
        merged: list[Tensor] = []
        with torch.no_grad():
            for each, output in zip(rows, outputs, strict=True):
                self._place(merged, output, each)
        return _merge(outputs[0], merged, split, self.masks)

    def _later(self, run: Run, values: Sequence[Any]) -> list[Tensor]:
        """Nobody keeps gradients in the forward pass; the backward pass runs samples again, part by part."""
        run.others = [value if isinstance(value, Unread) or not isinstance(value, Tensor) else None for value in values]
        tensors = [value for value, other in zip(values, run.others, strict=True) if other is None]
        found: tuple[Tensor, ...] = _Again.apply(run, *tensors)  # type: ignore[no-untyped-call]
        return list(found)

    def _parts(self, rest: Tensor, parts: int) -> Sequence[Tensor]:
        """The rows without gradients that run at a time."""
        if not len(rest):
            return ()
        if self.at_once is not None:
            return torch.split(rest, self.at_once)
        return rest.tensor_split(parts)

    def _number_of_parts(self, rest: float, kept: float) -> int:
        if self.at_once is not None:
            return max(1, math.ceil(rest / self.at_once))
        parts = rest / max(AT_ONCE, 4 * kept)
        return max(1, round(parts) if self.norms else math.ceil(parts))  # with norms all parts are there at once anyway

    def _place(self, merged: list[Tensor], outputs: Sequence[Tensor], rows: Tensor) -> None:
        """Write the rows of outputs where they belong in tensors for all samples, made on the first call."""
        if not merged:
            merged.extend(
                torch.empty_like(leaf[:1].expand(self.number, *leaf.shape[1:]), requires_grad=False) for leaf in outputs
            )
        for whole, leaf in zip(merged, outputs, strict=True):
            if len(leaf) != len(rows):
                raise RuntimeError(
                    f"{len(rows)} samples gave {len(leaf)} rows, so that a rule for one of the calls is wrong: "
                    f"{', '.join(self.segment.skipped)}"
                )
            whole.index_copy_(0, rows, leaf)


def turned(x: Tensor) -> Tensor:
    """With its channels together, if that is worth the while."""
    if not _turns(x, (4, 5)):
        return x
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def _turns(x: Any, axes: tuple[int, ...] = (4,)) -> bool:
    """Whether it is worth the while to put the channels of images together."""
    return (
        isinstance(x, Tensor)
        and x.ndim in axes
        and x.shape[1] > 1
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and (x.is_contiguous() or len(axes) > 1)
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU, beside the work that is queued there, for which reading a number would wait."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@functools.lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _merge(
    outputs: Sequence[Tensor], merged: Sequence[Tensor], split: Split, masks: Sequence[Backdrop]
) -> list[Tensor]:
    """The tensors for all samples, with the gradients of the kept ones."""
    return [
        _Merge.apply(leaf, [whole], split.kept, weight, mask) if leaf.requires_grad else whole  # type: ignore[no-untyped-call]
        for leaf, whole, weight, mask in zip(outputs, merged, split.weights, masks, strict=True)
    ]


def _weighted(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.dtype in (torch.float64, torch.complex128)
    weight = weight if wide else weight.float()
    return multiply(rows, weight.view(-1, *[1] * (rows.ndim - 1)))


class _Merge(torch.autograd.Function):
    """Forward: the values for all samples. Backward: the masked gradient of the kept ones."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, whole: list[Tensor], rows: Tensor, weight: Tensor, mask: Backdrop) -> Tensor:
        ctx.rows, ctx.weight, ctx.mask = rows, weight, mask
        return whole.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.mask is not None:
            ctx.mask.weight_is_used()
            ctx.mask = None
        return _weighted(grad.index_select(0, ctx.rows), ctx.weight), None, None, None, None


@dataclass
class Run:
    """A forward pass without gradients, and a backward pass in parts: of what is kept, or of what gradients choose."""

    samples: Samples
    split: Split | None = None  # None: chosen in the backward pass
    entries_of_report: Sequence[Entry] = ()
    parts_of_all: int = 1  # in which the forward pass runs where nothing is drawn yet
    others: list[Any] = field(default_factory=list)  # entries that are no tensors
    states: list[Any] = field(default_factory=list)  # of the random numbers, before each part of kept rows
    autocast: list[dict[str, Any]] = field(default_factory=list)
    drawn: dict[Backdrop, Tensor] = field(default_factory=dict)  # by masks that do not choose, beside those that do
    choosers: dict[Backdrop, Draw | Backdrop] = field(default_factory=dict)
    seen: Any = None  # batch statistics
    used: bool = False

    def entries(self, tensors: Sequence[Tensor]) -> list[Any]:
        given = iter(tensors)
        return [next(given) if other is None else other for other in self.others]

    def parts(self) -> list[tuple[Tensor, list[Tensor]]]:
        assert self.split is not None
        at_once = self.samples.at_once or max(1, len(self.split.kept))
        weights = [torch.split(weight, at_once) for weight in self.split.weights]
        return list(zip(torch.split(self.split.kept, at_once), map(list, zip(*weights, strict=True)), strict=True))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        samples, values, merged = self.samples, self.entries(tensors), list[Tensor]()
        if self.split is None:
            return self._forward_all(values, tensors[0].device)
        for rows, taken in samples._each(values, [rows for rows, _ in self.parts()]):
            self.states.append(_random_state(tensors[0].device))
            samples._place(merged, samples.program(taken, len(rows)), rows)
        samples._fill(merged, values, samples._parts(self.split.rest, 1))
        return merged

    def _forward_all(self, values: list[Any], device: torch.device) -> list[Tensor]:
        samples, merged = self.samples, list[Tensor]()
        for mask in dict.fromkeys(samples.masks):
            if mask.choose == "gradient" and mask.training and not is_zero(mask.p):
                self.choosers[mask] = mask.chooser(samples._like(mask, device))
            else:
                self.drawn[mask] = samples._draw(mask, device)
        if samples.norms:
            assert samples.all_first is not None
            whole, self.seen = samples._without_gradients(samples.all_first, values)
            return list(whole)
        samples._fill(merged, values, samples._parts(torch.arange(samples.number, device=device), self.parts_of_all))
        return merged

    def _choose(self, grads: Sequence[Tensor | None]) -> Split:
        """By the gradients that arrive at each mask, over all that it masks."""
        samples, said, drawn = self.samples, list[str](), dict(self.drawn)
        for mask, chooser in self.choosers.items():
            own = [grad for grad, by in zip(grads, samples.masks, strict=True) if by is mask and grad is not None]
            if not own and mask.group is not None:  # the others wait for what we have
                own = [samples._like(mask, _device_of(grads)).zero_()]
            if not own:  # nothing arrives
                drawn[mask] = torch.zeros(samples.number, device=_device_of(grads), dtype=torch.float64)
                continue
            weight, effective = chooser.choose_weight_and_count(*own)
            drawn[mask] = weight.flatten().double()
            said.append(f"{effective:.3g}")
        (mask, *others) = drawn
        fixed = not others and mask.exact and mask.group is None and not isinstance(mask.p, Tensor)
        split = samples._split_by(drawn, fixed)
        text = f"{len(split.kept)} of {samples.number} samples ran with gradients"
        for entry in self.entries_of_report:
            entry.last = f"{text}, chosen by gradients worth {' and '.join(said)} equal ones"
        return split

    def backward(
        self, grads: Sequence[Tensor | None], tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        samples, device = self.samples, tensors[0].device
        if not self.used:
            self.used = True
            for mask in set(samples.masks):
                mask.weight_is_used()
        result: list[Tensor | None] = [None] * len(tensors)
        if all(grad is None for grad in grads):
            return result
        if self.split is None:
            self.split = self._choose(grads)
        before = _random_state(device)
        demands = [d for d, other in zip(samples.rows, self.others, strict=True) if other is None]
        shared = [d is None or d.axes[0] is None for d in demands]
        try:
            parts, values = self.parts(), self.entries([t.detach() for t in tensors])
            each = samples._each(values, [rows for rows, _ in parts])
            for (_, weights), state, (rows, taken) in zip(parts, self.states or [None] * len(parts), each, strict=True):
                leaves = [value for value, other in zip(taken, self.others, strict=True) if other is None]
                leaves = [
                    leaf.detach().requires_grad_(want) if leaf.is_floating_point() or leaf.is_complex() else leaf
                    for leaf, want in zip(leaves, wanted, strict=True)
                ]
                given = iter(leaves)
                taken = [next(given) if other is None else own for own, other in zip(taken, self.others, strict=True)]
                for leaf, whole, known in zip(leaves, shared, result, strict=True):
                    leaf.grad = known if whole else None  # to which torch adds in place
                if state is not None:
                    _set_random_state(device, state)
                with torch.enable_grad(), contextlib.ExitStack() as stack:
                    for settings in self.autocast:
                        stack.enter_context(torch.autocast(**settings))
                    if self.seen is not None:
                        assert samples.kept_again is not None
                        outputs = samples.kept_again(taken, len(rows), self.seen)
                    else:
                        outputs = samples.program(taken, len(rows))
                pairs = [
                    (output, _weighted(grad.index_select(0, rows), weight))
                    for output, grad, weight in zip(outputs, grads, weights, strict=True)
                    if grad is not None and output.requires_grad
                ]
                inputs = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
                if not pairs:
                    continue
                ends, seeds = zip(*pairs, strict=True)
                del outputs, pairs
                torch.autograd.backward(ends, seeds, inputs=inputs)
                del ends, seeds
                for i, (leaf, whole) in enumerate(zip(leaves, shared, strict=True)):
                    new, demand = leaf.grad, demands[i]
                    if new is None or whole:
                        result[i] = new if whole else result[i]
                        continue
                    assert demand is not None
                    if result[i] is None:
                        result[i] = torch.zeros_like(tensors[i])
                    index = rows
                    if demand.inner > 1:
                        index = (rows[:, None] * demand.inner + torch.arange(demand.inner, device=device)).flatten()
                    result[i].index_add_(demand.axes[0], index, new.to(tensors[i].dtype))  # type: ignore
        finally:
            _set_random_state(device, before)
        return result


def _device_of(values: Sequence[Any]) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        save(ctx, tensors, [True] * len(tensors))
        run.autocast = [
            {"device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
            for kind in {"cpu", tensors[0].device.type}
        ]
        return tuple(run.forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.run.backward(grads, load(ctx), ctx.needs_input_grad[1:])
