"""Segments: the calls before a mask whose blocked gradients need not be computed, and what they start from.

A segment is found by walking back from its mask. A call belongs to it if all that use its result do, so that the
gradient that arrives at the mask is all the gradient it gets, and if a rule (see `backdrop.graph.table`) says what it
reads for a part of its result. What the calls of a segment read and is not of the segment are its *entries*: they are
computed by the plain model, and get their gradient from the segment as they would from any other function.

For every value the walk knows its *demand*: along which axes the samples and the positions of the mask lie in it, and,
where positions are dropped, the box of cells that belongs to one unit (see positions.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from backdrop.graph import table
from backdrop.graph.cost import Cost, total
from backdrop.graph.running import running_batch_norm
from backdrop.graph.sliding import named
from backdrop.graph.table import Call, MisalignedError, Slide, Statistics, Step, Tap, UnsupportedError, Where
from backdrop.graph.trace import Traced, name_of
from backdrop.graph.verify import verified
from backdrop.skip.windows import Demand

TORN = "its running statistics are also those of a call that is not skipped"
POOLS = ("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
MODES = {"autocast": "an autocast", "inference_mode": "an inference_mode", "no_grad": "a no_grad"}
NOTHING = Cost(0, 0, 0)
LARGEST_UNIT = 64  # times the mask's own patch, where upsampling asks for larger units


@dataclass
class Segment:
    """The calls before a mask, or before several that drop samples of the same values."""

    traced: Traced
    exits: dict[fx.Node, Demand]
    steps: dict[fx.Node, Step] = field(default_factory=dict)  # in the order of execution
    pooled: set[fx.Node] = field(default_factory=set)  # of them, those with one value for all positions of a sample
    entries: list[fx.Node] = field(default_factory=list)
    demands: dict[fx.Node, Demand] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)  # where it ends, and why
    before: Cost = NOTHING  # all that lies before the mask and carries gradients
    whole: list[fx.Node] = field(default_factory=list)  # values with positions of which pooled ones read all

    @cached_property
    def skipped(self) -> list[str]:
        return list(dict.fromkeys(name_of(node) for node in self.steps))

    @cached_property
    def cost(self) -> Cost:
        return total([self.traced.costs[node] for node in self.steps])

    @cached_property
    def share(self) -> float:
        """Of the multiplications before the mask."""
        if not self.before.multiplications:
            return 1.0 if self.steps else 0.0
        return min(1.0, self.cost.multiplications / self.before.multiplications)

    def need(self, node: fx.Node, source: fx.Node) -> Demand:
        """The cells of `source` that `node` reads for its own box."""
        return _input(self.demands[node], self.steps[node].inputs[source])

    @property
    def couples(self) -> set[str]:
        found = {str(step.couples) for step in self.steps.values()} - {""}
        return found | {"whole"} if self.whole else found


def find_segment(
    traced: Traced,
    exits: Mapping[fx.Node, Demand],
    masks: Iterable[fx.Node],
    policy: Statistics,
    *,
    everything: bool = False,
) -> Segment:
    """Walk back from what masks take, as far as rules reach; also beyond what wants a gradient, if `everything` is to
    run in tiles."""
    exits, refused = dict(exits), dict[fx.Node, tuple[str, str]]()
    while True:
        try:
            segment = _Walk(traced, exits, set(masks), policy, refused, everything).segment
        except MisalignedError as error:
            exits = {node: _larger(demand, error) for node, demand in exits.items()}
            continue
        # Several tensors in one value cannot be an entry: what takes them apart is left out too.
        several = {node for node in segment.entries if node in segment.demands and not traced.is_tensor(node)}
        taking = [node for node in segment.steps if several & set(node.all_input_nodes)]
        torn = [node for node in segment.steps if not traced.sharing.get(node, set()) <= segment.steps.keys()]
        if not taking and not torn:
            return segment
        refused.update({node: (name_of(node), TORN) for node in torn})
        reasons = dict(segment.kept)
        for node in taking:
            name = next(name_of(source) for source in node.all_input_nodes if source in several)
            refused[node] = name, reasons.get(name, "it returns several tensors")


def _larger(demand: Demand, error: MisalignedError) -> Demand:
    step = tuple(n * (error.factor if i == error.axis else 1) for i, n in enumerate(demand.step))
    size = tuple(n * (error.factor if i == error.axis else 1) for i, n in enumerate(demand.size))
    return demand._replace(step=step, size=size)


class _Walk:
    def __init__(
        self,
        traced: Traced,
        exits: dict[fx.Node, Demand],
        masks: set[fx.Node],
        policy: Statistics,
        refused: dict[fx.Node, tuple[str, str]],
        everything: bool,
    ) -> None:
        self.traced, self.masks, self.policy, self.refused = traced, masks, policy, refused
        self.unit = next(iter(exits.values())).step
        self.segment = Segment(traced, exits)
        self.demands = self.segment.demands = dict(exits)
        self.context = {traced.contexts[mask] for mask in masks}
        self.order = list(traced.graph.nodes)
        self.everything = everything
        self.reached = set(self.order) if everything else self._reached()
        self.looked_up: set[fx.Node] = set()  # values of which a position reads all, as keys and values of attention
        # The list grows the demands that it looks at.
        members = [node for node in reversed(self.order) if node in self.demands and self._take(node)][::-1]
        segment = self.segment
        segment.steps = {node: segment.steps[node] for node in members}
        self._find_whole()
        read = {source for step in segment.steps.values() for source in step.inputs}
        read |= {source for node in members for source in node.all_input_nodes} | set(exits)
        segment.entries = [node for node in traced.graph.nodes if node in read and node not in segment.steps]
        behind = self._of_samples(self._before(exits))
        segment.before = total([traced.costs[node] for node in behind if node in traced.differentiable])

    def _reached(self) -> set[fx.Node]:
        """Values that depend on something with a gradient."""
        found = set(self.traced.differentiable)
        for node in self.order:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def _find_whole(self) -> None:
        """Which values pooled ones read all of; means over all positions need no more than their own value."""
        segment, whole = self.segment, set[fx.Node]()
        for node in segment.pooled:
            step = segment.steps[node]
            found = [s for s in step.inputs if s in self.demands and self.demands[s].full and step.couples != "pool"]
            mean = self._mean(node, self.demands[node]) if found else None
            if mean is not None:
                segment.steps[node] = mean
            else:
                whole.update(found)
        segment.whole = [node for node in self.order if node in whole]

    def _before(self, exits: Iterable[fx.Node]) -> set[fx.Node]:
        found, waiting = set[fx.Node](), list(exits)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(node.all_input_nodes)
        return found

    def _of_samples(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """Without what is made of weights and constants alone: for all samples at once, so that no mask blocks it."""
        known = [entry for entry in self.segment.entries if entry in self.demands]
        rows = [entry for entry in known if self.demands[entry].axes[0] is not None]
        data = {node for node in self._before(rows) if node.op == "placeholder"} | set(rows)
        data -= {node for node in data if isinstance(node.meta.get("example_value"), nn.Parameter)}
        of_data = set[fx.Node]()
        for node in self.order:
            if node in data or any(source in of_data for source in node.all_input_nodes):
                of_data.add(node)
        return nodes & of_data

    def _take(self, node: fx.Node) -> bool:
        """Make a call part of the segment, if it can be."""
        demand, traced = self.demands[node], self.traced
        if node.op in ("placeholder", "get_attr") or node not in self.reached or node in self.masks:
            return False
        if node in self.refused and self.refused[node] not in self.segment.kept:
            self.segment.kept.append(self.refused[node])
        if node in traced.spelled or node in self.refused:
            return False
        pooled = not demand.full
        if pooled and not (self.policy != "exact" and demand.per_sample):
            if demand.per_sample and node in traced.differentiable:
                self.segment.kept.append((name_of(node), "what follows reads all positions of it"))
            return False
        reason = self._reason(node)
        if not reason:
            try:
                step = self._pooled(node, demand) if pooled else self._spelled_out(node, self._step(node, demand))
                joined = {source: self._join(source, node, step, tap) for source, tap in step.inputs.items()}
            except MisalignedError:
                raise
            except UnsupportedError as error:
                reason = str(error)
        if reason:
            if not pooled and (self.everything or node in traced.differentiable):
                self.segment.kept.append((name_of(node), reason))
            return False
        self.segment.steps[node] = step
        if pooled:
            self.segment.pooled.add(node)
        if self._looks_up(node, step):
            self.looked_up |= {source for source in joined if _input(demand, step.inputs[source]).per_sample}
        self.demands.update(joined)
        return True

    def _reason(self, node: fx.Node) -> str:
        traced = self.traced
        if node in traced.pinned:
            return traced.pinned[node]
        if traced.contexts[node] not in self.context or len(self.context) > 1:
            return self._other_mode(node)
        others = [user for user in node.users if user not in self.segment.steps and user not in self.masks]
        if others:
            used = "the model returns it" if others[0].op == "output" else f"{name_of(others[0])} uses it"
            return f"its result goes elsewhere too: {used}"
        if self.unit and node in traced.draws and not traced.draw_ahead(node):
            called = getattr(node.target, "__name__", str(node.target)).strip("_")
            return f"{called} would draw new numbers when windows are computed again; move it behind the mask"
        if node in traced.sharing and node.target is running_batch_norm:
            return TORN
        return ""

    def _other_mode(self, node: fx.Node) -> str:
        """What a call and the mask do not have in common."""
        own = self.traced.contexts[node]
        of_mask = next(iter(self.context - {own}))
        mode = next((mode for mode in own if mode not in of_mask), None)
        who = "it" if mode is not None else "the mask"
        mode = mode if mode is not None else next(mode for mode in of_mask if mode not in own)
        called = str(getattr(getattr(mode, "target", mode), "__name__", mode)).removeprefix("_enter_").strip("_")
        return f"{who} runs under {MODES.get(called, called)} of its own"

    def _call(self, node: fx.Node, axes: tuple[int, ...], inner: int) -> Call:
        traced = self.traced
        shapes = {source: traced.shape(source) for source in node.all_input_nodes if _has_shape(traced, source)}
        tuples = frozenset(source for source in shapes if not traced.is_tensor(source))
        return Call(node, traced.shape(node), axes, shapes, self.policy, inner, tuples, again=bool(self.unit))

    def _step(self, node: fx.Node, demand: Demand) -> Step:
        if not _has_shape(self.traced, node):
            raise UnsupportedError("it returns something that is no tensor")
        axes = tuple(axis for axis in demand.axes if axis is not None)
        call = self._call(node, axes, demand.inner)
        if table.rule_of(node) is None and axes == (0,) and demand.inner == 1:
            return verified(call, self.traced)
        return table.find(call)

    def _spelled_out(self, node: fx.Node, step: Step) -> Step:
        """With inputs that differ between positions, but are broadcast along others or along samples, in full."""
        traced, axes = self.traced, self.demands[node].axes
        for source, tap in list(step.inputs.items()):
            if None not in tap.axes or all(axis is None for axis in tap.axes[1:]):
                continue
            if not step.broadcasts and not tap.broadcast:
                raise UnsupportedError("it mixes positions along a masked axis")
            shape, before = traced.shape(node), traced.shape(source)
            more = len(shape) - len(before)
            target = [shape[i] if i in axes else before[i - more] if i >= more else 1 for i in range(len(shape))]
            with traced.graph.inserting_before(node):
                spelled = traced.graph.call_function(torch.broadcast_to, (source, target))
            node.replace_input_with(source, spelled)
            traced.in_place.pop(node, None)
            traced.values[spelled] = traced.values[source].expand(target)
            traced.costs[spelled], traced.contexts[spelled] = Cost(0, 0, 0), traced.contexts[node]
            traced.storages[spelled] = traced.storages.get(source, set())
            traced.spelled.add(spelled)
            if source in traced.differentiable:
                traced.differentiable.add(spelled)
            step.inputs[spelled] = Tap(axes, inner=tap.inner)
            del step.inputs[source]
        return step

    def _pooled(self, node: fx.Node, demand: Demand) -> Step:
        """One value per sample: the mean over all positions, or something computed from such values."""
        assert demand.axes[0] is not None
        mean = self._mean(node, demand)
        if mean is not None:
            return mean
        call = self._call(node, (demand.axes[0],), demand.inner)
        blank = (None,) * (len(demand.axes) - 1)
        step = table.find(call)
        if step.couples == "batch":  # over the samples, all of which are there
            step.couples, step.run = "", statistics_of_all
        elif step.couples:
            raise UnsupportedError("it takes statistics over samples")
        step.inputs = {source: tap._replace(axes=(*tap.axes, *blank)) for source, tap in step.inputs.items()}
        return step

    def _mean(self, node: fx.Node, demand: Demand) -> Step | None:
        """The mean over all positions of a value, of which the same cells are there as without it."""
        assert demand.axes[0] is not None
        call = self._call(node, (demand.axes[0],), demand.inner)
        if call.name not in POOLS:
            return None
        source, positions = call.source, _pooled_axes(call)
        wanted = self.demands.get(source) or self._like_inputs(source, positions)
        whole = wanted is not None and wanted.full and wanted.inner == 1 and wanted.axes[0] == 0
        if wanted is None or not whole or set(wanted.positions) != set(positions):
            return None
        self.demands.setdefault(source, wanted)
        return Step({source: Tap(wanted.axes, inner=wanted.inner)}, couples="pool")

    def _looks_up(self, node: fx.Node, step: Step) -> bool:
        """Whether values without positions that it reads may hold something else for each position that reads them."""
        return not step.broadcasts if self.demands[node].full else node in self.looked_up

    def _like_inputs(self, node: fx.Node, axes: tuple[int, ...]) -> Demand | None:
        """The demand of a value that only its mean needs: the cells that are there of what it is computed from."""
        if not axes or not _has_shape(self.traced, node) or node.op in ("placeholder", "get_attr"):
            return None
        try:
            step = table.find(self._call(node, (0, *axes), 1))
        except UnsupportedError:
            return None
        for source, tap in step.inputs.items():
            known = self.demands.get(source)
            if known is not None and known.full and known.axes == tap.axes and not any(tap.slides):
                return known._replace(axes=(0, *axes))
        return None

    def _may_be_both(self, source: fx.Node, node: fx.Node, step: Step, known: Demand, new: Demand) -> bool:
        """Whether windows of a value may be computed, although a pooled value reads all of it."""
        window, pooled = (known, new) if known.full else (new, known)
        if self.policy == "exact" or not pooled.per_sample or not self.traced.is_tensor(source):
            return False
        if source in self.looked_up or (known.full and self._looks_up(node, step)):
            return False
        return pooled.axes[0] == window.axes[0] == 0 and pooled.inner == window.inner == 1

    def _join(self, source: fx.Node, node: fx.Node, step: Step, tap: Tap) -> Demand:
        if step.couples == "pool":
            return self.demands[source]
        new, known = _input(self.demands[node], tap), self.demands.get(source)
        if self.unit and new.inner != 1 and new.axes[0] is not None:
            raise UnsupportedError("samples share an axis with something else")
        if not new.full:
            new = new._replace(step=(), start=(), size=())
        if known is None or known == new:
            return new
        if known.full != new.full and self._may_be_both(source, node, step, known, new):
            return known if known.full else new
        if (known.axes, known.inner, known.step) != (new.axes, new.inner, new.step):
            raise UnsupportedError("its input also goes another way with another stride, order of axes or size")
        start = tuple(map(min, known.start, new.start))
        ends = [max(a + m, b + n) for a, m, b, n in zip(known.start, known.size, new.start, new.size, strict=True)]
        return new._replace(start=start, size=tuple(end - first for end, first in zip(ends, start, strict=True)))


def _has_shape(traced: Traced, node: fx.Node) -> bool:
    try:
        traced.shape(node)
    except KeyError:
        return False
    return True


def statistics_of_all(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
    """batch_norm on one value per sample: the running statistics have seen it in the forward pass."""
    given = named(
        args, kwargs, ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    )
    return F.batch_norm(**{**given, "running_mean": None, "running_var": None, "training": True})


def _pooled_axes(call: Call) -> tuple[int, ...]:
    """The axes over which a call takes the mean, if it does nothing else."""
    ndim = len(call.before)
    if call.name != "mean":
        return tuple(range(2, ndim)) if all(size == 1 for size in call.shape[2:]) else ()
    dims = call.argument(1, "dim")
    if dims is None or call.node.kwargs.get("dtype") is not None:
        return ()
    return tuple(sorted(axis % ndim for axis in (dims if isinstance(dims, (tuple, list)) else [dims])))


def _input(demand: Demand, tap: Tap) -> Demand:
    """What is needed of an input, from what is needed of the result."""
    if not demand.step or None in tap.axes:
        return Demand(tap.axes, tap.inner, demand.step, demand.start, demand.size)
    slides = tap.slides or (None,) * len(demand.step)
    cells = []
    for i, (a, b, n, slide) in enumerate(zip(demand.step, demand.start, demand.size, slides, strict=True)):
        slide = slide or Slide()
        if a * slide.down % slide.up:
            factor = slide.up // math.gcd(a * slide.down, slide.up)
            if factor > LARGEST_UNIT or a * factor > 4096:
                raise UnsupportedError("it would need units that are too large")
            raise MisalignedError(i, factor)
        first = (b * slide.down + slide.low) // slide.up
        last = ((b + n - 1) * slide.down + slide.high) // slide.up
        cells.append((a * slide.down // slide.up, first, last - first + 1))
    step, start, size = zip(*cells, strict=True)
    return Demand(tap.axes, tap.inner, step, start, size)
