"""Positions dropped: run the segment without gradients, and in backward compute only the windows that matter.

NOTE [how windows give the exact gradient]
1. The mask is drawn once. Forward runs the segment on the whole map under no_grad and keeps its entries alone.
2. Backward looks for *units* (a position, or a patch) that the mask kept and whose incoming gradient is not zero.
   All others contribute exactly nothing to any gradient of the segment, because the chain rule is linear in them.
3. Walking back from one unit, each call needs a box of cells: cells [s*i - P, s*i - P + d*(k-1)] for output cell i. A
   union of boxes is a box again, of the same size for every unit, and it starts at step*u + start for unit u. Where a
   call has more cells than its input (upsampling), units are made so large that this holds there too.
4. The entries' boxes are cut out, one window per unit, and the segment runs on them with gradients. Where a call pads,
   cells outside its input map get its padding value instead; elsewhere such cells are computed from nonsense, but no
   cell inside the map ever reads them, and their gradient is zero.
5. Gradients of weights are the sums over windows; those of maps are added back where the windows were cut.
6. A call with batch statistics normalises its windows with those of the forward pass (see statistics.py), and a mean
over
   all positions is that of the forward pass. Where something else is made of all positions of a sample, and of no
   position more than of another behind it, it is made again from the values of the forward pass, which are kept.
   Under "sampled" its gradient needs sums over all windows. Where these run in parts, a pass over all parts for each
   normalisation behind another finds the sums first, from the one next to the mask downwards.
7. The number of windows is rounded up on a GPU, so that few shapes occur; the ones added carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from backdrop._core.product import multiply
from backdrop._shared import Draw
from backdrop._source import Source
from backdrop.graph import cost
from backdrop.graph.rules import is_tame
from backdrop.graph.table import Statistics, Tap, Where
from backdrop.graph.trace import input_of, name_of
from backdrop.graph.unread import Unread
from backdrop.layers import Backdrop
from backdrop.skip import statistics
from backdrop.skip.budget import TileSize, Tiling
from backdrop.skip.epilogue import Epilogue, Sums, cells_inside, finish
from backdrop.skip.programs import Program, called, drops
from backdrop.skip.report import Entry
from backdrop.skip.saved import load, save
from backdrop.skip.segments import Segment, statistics_of_all
from backdrop.skip.sources import Snapshot, read_windows, snapshot, source_of
from backdrop.skip.windows import Demand, Inside, Kept, Lattice, Map, Windows, cut, find_windows, paste

HARMLESS = 0.5  # where all that has poles is finite
CHAINS = (["relu", "norm"], ["norm", "relu"], ["relu", "norm", "relu"])


Compute: TypeAlias = "Callable[[Run, Windows, dict[Any, Any]], Any]"  # a call, from the values that there are so far


class Positions:
    """A segment on inputs of known sizes, and the mask behind it."""

    def __init__(
        self, segment: Segment, mask: Backdrop, policy: Statistics, tile: TileSize = None, memory: int | None = None
    ) -> None:
        self.segment, self.mask, self.policy = segment, mask, policy
        ((self.exit, self.demand),) = segment.exits.items()
        self.shape = segment.traced.shape(self.exit)
        batch = self.demand.axes[0]
        assert batch is not None
        self.chains = self._find_chains()
        inner = {node for chain in self.chains.values() for node in chain[:-1]}
        self.inner = inner
        self.fills = self._find_fills()
        firsts = {chain[0]: node for node, chain in self.chains.items()}
        reads = {node: node.all_input_nodes for node in segment.steps}
        done: dict[fx.Node, list[fx.Node]] = {}
        for node, sources in drops(reads, {self.exit}).items():
            if node not in inner or node in firsts:
                done[firsts.get(node, node)] = sources
        nodes = [node for node in segment.steps if node not in inner]
        self.calls = [(node, self._planned(node), done.get(node, [])) for node in nodes]
        self.full = {node for node in segment.entries if node in segment.demands and segment.demands[node].full}
        self.clear = {node: self._filler(node, segment.demands[node], 0.0) for node in self.full if node in self.fills}
        self.padded = {node: self.map(node, segment.demands[node]) for node in self.full if node in self.fills}
        self.clear[self.exit] = self._filler(self.exit, self.demand, 0.0)
        self.windows_in_whole = self._windows_in_whole()
        self.lattice = Lattice(self.shape, self.demand, self.shape[batch], list(dict.fromkeys(self._maps())))
        self.forward = Program(segment, keep_statistics=True)
        self.read = {source for node in segment.steps for source in node.all_input_nodes}
        unread = {source for node in segment.steps for source in self._running(node)}
        self.saved = [node in self.read and node not in unread for node in segment.entries]
        leaves = [node for node, keep in zip(segment.entries, self.saved, strict=True) if keep]
        leaves = [node for node in leaves if node.op == "placeholder" and segment.traced.is_tensor(node)]
        self.watched = sum(math.prod(segment.traced.shape(node)) for node in leaves)  # numbers, see saved.py
        self.tiling: Tiling | None = None
        self.always = False  # whether windows are asked for, whatever they cost
        self.lean = False  # whether memory counts more than time
        if tile is not None or memory is not None:
            self.tiling = Tiling(segment, self.exit, policy, tile, memory)

    def compile(self) -> None:
        """From now on, the forward pass as Inductor makes it."""
        self.forward.compile()

    @property
    def coupled(self) -> bool:
        """Whether windows have to be computed all at once."""
        return self.policy == "sampled" and bool(self.segment.couples)

    @property
    def at_a_time(self) -> int:
        """How many times the largest map windows in work may take."""
        return 1 if self.lean else 2

    @property
    def in_parts(self) -> bool:
        """Whether windows under "sampled" may run in parts, which takes a pass over all for each normalisation behind
        another, to find sums over all of them first."""
        few = self.tiling is not None or self.lean
        return few and self.segment.couples == {"batch"}

    @property
    def norms_from_exit(self) -> list[list[fx.Node]]:
        """Normalisations with batch statistics: those whose gradients depend on no others of them come first."""
        behind: dict[fx.Node, int] = {}
        for node in reversed(list(self.segment.steps)):
            for source in node.all_input_nodes:
                more = 1 if self.segment.steps[node].couples else 0
                behind[source] = max(behind.get(source, 0), behind.get(node, 0) + more)
        norms = [node for node, step in self.segment.steps.items() if step.couples]
        levels = sorted({behind.get(node, 0) for node in norms})
        return [[node for node in norms if behind.get(node, 0) == level] for level in levels]

    def _running(self, node: fx.Node) -> list[fx.Node]:
        """Running statistics that a call with batch statistics changes: windows have no use for them."""
        if self.segment.steps[node].couples != "batch":
            return []
        return [source for source in statistics.running(node) if isinstance(source, fx.Node)]

    def share(self, node: fx.Node, windows: float) -> float:
        """The numbers in so many windows of a value over those of the whole map."""
        shape, demand = self.segment.traced.shape(node), self.segment.demands[node]
        if node in self.segment.pooled or not demand.full:
            return 1.0
        batch = demand.axes[0]
        assert batch is not None
        return windows * math.prod(demand.size) / (shape[batch] * math.prod(shape[a] for a in demand.positions))

    def _windows_in_whole(self) -> float:
        """How many windows take as much as the largest map."""
        sizes = {node: math.prod(self.segment.traced.shape(node)) for node in self.segment.steps}
        each = sum(size * self.share(node, 1) for node, size in sizes.items() if node not in self.segment.pooled)
        return max(sizes.values()) / each

    def windows_cost(self, windows: float) -> cost.Cost:
        """Of one forward pass on so many windows."""
        costs = self.segment.traced.costs
        scaled = []
        for node in self.segment.steps:
            share = self.share(node, windows)
            scaled.append(
                cost.Cost(costs[node].calls, costs[node].multiplications * share, costs[node].numbers * share)
            )
        return cost.total(scaled)

    def kept_units(self, p: float) -> float:
        """Windows of a step, on average: a unit of ours may hold several of the mask's."""
        units = self.lattice.units()
        patch = self.mask.patch
        own = (patch,) * len(self.demand.step) if isinstance(patch, int) else tuple(patch)
        times = math.prod(max(1.0, step / size) for step, size in zip(self.demand.step, own, strict=True))
        return max(1.0, units * (1 - p**times))

    def tiles_pay(self, device: torch.device) -> bool:
        """Whether the backward pass takes less time in tiles than in the windows of kept units."""
        if self.tiling is None or not self.tiling.in_tiles or self.always:
            return False
        if self.tiling.window_bytes() > self.tiling.left:
            return True
        windows = self.windows_cost(1).windows(device, self.kept_units(float(self.mask.p)))
        return self.tiles_time(device) < windows

    def tiles_time(self, device: torch.device) -> float:
        """Seconds of the backward pass in tiles."""
        assert self.tiling is not None
        back, known = self.tiling.backward, self.segment.cost
        calls = known.calls * math.prod(back.counts) * math.ceil(self.tiling.samples / back.samples)
        tiles = cost.Cost(calls, known.multiplications * back.work, known.numbers * back.work)
        return tiles.windows(device, 1)

    def memory(self, p: float) -> tuple[float, float]:
        """Numbers that a plain pass keeps, and those that windows need at most at a time."""
        traced, steps = self.segment.traced, self.segment.steps
        sizes = {node: math.prod(traced.shape(node)) for node in steps}
        windows = self.kept_units(p) * sum(sizes[node] * self.share(node, 1) for node in steps)
        if not self.coupled or self.in_parts:
            windows = min(windows, self.at_a_time * max(sizes.values()))
        whole = sum(math.prod(traced.shape(node)) for node in self.segment.whole)
        return sum(sizes.values()), windows + whole

    def _find_chains(self) -> dict[fx.Node, list[fx.Node]]:
        """Calls that follow each other and run as one, see epilogue.py: a normalisation, and rectifiers around it."""
        chains: dict[fx.Node, list[fx.Node]] = {}
        segment = self.segment

        for node, step in segment.steps.items():
            if step.epilogue is None or node in segment.pooled:
                continue
            if self.segment.demands[node].axes[0] != 0 or not _is_channelwise(segment, node):
                continue
            source = input_of(node)
            before = chains.get(source)
            if before is not None and len(source.users) == 1 and [*self._kinds(before), step.epilogue] in CHAINS:
                chains[node] = [*chains.pop(source), node]
            else:
                chains[node] = [node]
        return chains

    def _kinds(self, nodes: Sequence[fx.Node]) -> list[str | None]:
        return [self.segment.steps[node].epilogue for node in nodes]

    def _find_fills(self) -> dict[fx.Node, float]:
        """What values are to hold outside the map.

        The padding, where all that read a value slide over the same cells and pad alike, so that it is done once. And
        something finite on both sides of a call that could make infinities of what lies there, and behind one that
        pads with infinity: such cells may hold anything, but zero times it, or its slope, has to be zero.
        """
        segment, fills = self.segment, dict[fx.Node, float]()
        for value in (*segment.entries, *segment.steps):
            demand = segment.demands.get(value)
            if value in self.inner or demand is None or not demand.full:
                continue
            readers = [(node, step.inputs[value]) for node, step in segment.steps.items() if value in step.inputs]
            wanted = {tap.fill if segment.steps[node].couples != "pool" else None for node, tap in readers}
            fill = wanted.pop() if len(wanted) == 1 else None
            wild = any(not is_tame(node) for node in (value, *(node for node, _ in readers)) if node in segment.steps)
            if isinstance(fill, (int, float)) and all(segment.need(node, value) == demand for node, _ in readers):
                fills[value] = float(fill)
            elif wild and segment.traced.is_tensor(value) and segment.traced.values[value].is_floating_point():
                fills[value] = HARMLESS
            elif value in segment.steps and any(
                isinstance(tap.fill, float) and math.isinf(tap.fill) for tap in segment.steps[value].inputs.values()
            ):
                fills[value] = 0.0
        return fills

    def _planned(self, node: fx.Node) -> Compute:
        """A call on windows, with all that can be known of it before there are any."""
        segment, step, demand = self.segment, self.segment.steps[node], self.segment.demands[node]
        if step.couples == "pool":
            return lambda run, windows, values: run.pool(node, windows, values)
        if node in segment.pooled:
            return lambda run, windows, values: run.pooled(node, windows, values)
        if node in self.chains:
            return self._planned_chain(self.chains[node])
        assert step.couples != "batch", "a normalisation over the batch is always part of an epilogue"
        readers = {source: self._reader(node, source, step.inputs.get(source)) for source in node.all_input_nodes}
        where, along = self._where(node), list(zip(demand.positions, demand.size, strict=True))
        fill = self._filler(node, demand, self.fills[node]) if node in self.fills else None

        def compute(run: Run, windows: Windows, values: dict[Any, Any]) -> Any:
            read = {source: reader(windows, values) for source, reader in readers.items()}
            args, kwargs = fx.map_arg((node.args, node.kwargs), read.__getitem__)
            if step.couples == "sample":
                out: Any = run.sample_norm(node, args, kwargs, windows)
            elif step.run is not None:
                out = step.run(args, kwargs, where(windows))
            else:
                out = called(node, args, kwargs)
            _check_size(node, out, [(demand.axes[0], len(windows)), *along])
            return out if fill is None else fill(out, windows)

        return compute

    def _planned_chain(self, chain: list[fx.Node]) -> Compute:
        """The same for calls that are one epilogue."""
        segment, node, first = self.segment, chain[-1], chain[0]
        demand, shape, kinds = segment.demands[node], segment.traced.shape(node), self._kinds(chain)
        norm = chain[kinds.index("norm")] if "norm" in kinds else None
        of_batch = norm is not None and segment.steps[norm].couples == "batch"
        sampled = of_batch and self.policy == "sampled"
        weights = (None, None) if norm is None else statistics.weights(norm)
        read = self._reader(first, input_of(first), segment.steps[first].inputs[input_of(first)])
        key = self.map(node, demand) if sampled or node in self.fills else None
        each = math.prod(n for i, n in enumerate(shape) if i > 1 and i not in demand.positions)
        how = Epilogue(
            relu_first=kinds[0] == "relu",
            relu_last=norm is not None and kinds[-1] == "relu",
            axes=demand.positions,
            fill=self.fills.get(node, 0.0),
        )

        def compute(run: Run, windows: Windows, values: dict[Any, Any]) -> Tensor:
            x, moments, cells, inside, total = read(windows, values), None, None, None, None
            if norm is not None:
                moments = run.seen[norm] if of_batch else statistics.running_moments(norm, values)
            if key is not None:
                found = windows.inside[key]
                inside = None if found.complete else found.ranges
                cells = found.number * each if sampled else None  # numbers of a channel that are computed again
            if cells is not None and norm is not None and run.totals is not None:
                total = partial(run.total, norm)
                if norm in run.summing:
                    run.summing[norm] = x
            gamma, beta = map(values.get, weights)
            return finish(x, gamma, beta, how._replace(moments=moments, cells=cells, inside=inside, total=total))

        return compute

    def _where(self, node: fx.Node) -> Callable[[Windows], Where]:
        segment = self.segment
        demand, step = segment.demands[node], segment.steps[node]
        sources = [(source, tap) for source, tap in step.inputs.items() if None not in tap.axes]
        sizes: tuple[int, ...] = ()
        first: tuple[tuple[int, int], ...] = tuple((start, start) for start in demand.start)
        if sources:
            source, tap = sources[0]
            shape, need = segment.traced.shape(source), segment.need(node, source)
            sizes = tuple(shape[axis] for axis in tap.axes[1:] if axis is not None)
            first = tuple(zip(need.start, demand.start, strict=True))
        return lambda windows: Where(partial(windows.cells, demand), sizes, first, demand.size, len(windows))

    def _reader(self, node: fx.Node, source: fx.Node, tap: Tap | None) -> Callable[[Windows, dict[Any, Any]], Any]:
        """What gives a call one of its inputs: the cells it reads, padded where they lie outside the map."""
        segment = self.segment
        if tap is None or tap.axes[0] is None:
            return lambda windows, values: values[source]
        have, need = segment.demands[source], segment.need(node, source)
        cuts = [] if None in tap.axes else _cuts(have, need)
        if not segment.traced.is_tensor(source):  # several tensors, which are taken apart next
            return lambda windows, values: type(values[source])(_narrowed(each, cuts) for each in values[source])
        if None in tap.axes:
            batch = tap.axes[0]

            def spread(windows: Windows, values: dict[Any, Any]) -> Any:
                if (source, "spread") not in values:
                    values[source, "spread"] = values[source].index_select(batch, windows.sample)
                return values[source, "spread"]

            return spread
        if tap.fill is None or self.fills.get(source) == tap.fill:
            return lambda windows, values: _narrowed(values[source], cuts)
        if isinstance(tap.fill, str):
            key, border = self.map(source, need), tap.fill

            def from_inside(windows: Windows, values: dict[Any, Any]) -> Tensor:
                x, inside = _narrowed(values[source], cuts), windows.inside[key]
                return x if inside.complete else _from_inside(x, inside, need, border)

            return from_inside
        fill = self._filler(source, need, tap.fill)
        return lambda windows, values: fill(_narrowed(values[source], cuts), windows)

    def _filler(self, value: fx.Node, demand: Demand, number: float) -> Callable[[Tensor, Windows], Tensor]:
        """What sets the cells of windows of a value outside the map to a number."""
        key, batch, axes = self.map(value, demand), demand.axes[0], demand.positions
        assert batch is not None
        return lambda x, windows: _fill(x, windows.inside[key], batch, axes, number)

    def map(self, value: fx.Node, demand: Demand) -> Map:
        shape = self.segment.traced.shape(value)
        return demand.step, demand.start, demand.size, tuple(shape[axis] for axis in demand.positions)

    def _maps(self) -> Iterator[Map]:
        """Wherever it matters which cells of a window lie inside the map."""
        segment = self.segment
        for node, step in segment.steps.items():
            for source, tap in step.inputs.items():
                if tap.fill is not None and segment.demands[source].full:
                    yield self.map(source, segment.need(node, source))
                if step.couples == "pool":
                    yield self.map(source, segment.demands[source])
            if node not in segment.pooled and (step.couples or node in self.fills):
                yield self.map(node, segment.demands[node])
        for entry in segment.entries:
            if entry in self.fills:
                yield self.map(entry, segment.demands[entry])
        for value in segment.whole:
            yield self.map(value, segment.demands[value])
        yield self.map(self.exit, self.demand)

    def run(self, values: Sequence[Any], entry: Entry, *, active: bool = True) -> Tensor:
        """The exit's value, with the mask behind it if that is active."""
        one = Run(self, entry, active=active)
        if any(isinstance(value, Unread) for value in values):
            values = [value if (source := source_of(value)) is None else source for value in values]
            one.snapshot = snapshot()
        tensors = [value for value in values if isinstance(value, Tensor)]
        one.others = [None if isinstance(value, Tensor) else value for value in values]
        out: Tensor = Skipped.apply(one, *tensors)  # type: ignore[no-untyped-call]
        return out


def _is_channelwise(segment: Segment, node: fx.Node) -> bool:
    return len(segment.traced.shape(node)) >= 2


@dataclass
class Run:
    """One forward and backward pass of a segment."""

    plan: Positions
    entry: Entry
    others: list[Any] = field(default_factory=list)  # entries that are no tensors
    weight: Tensor | None = None
    chooser: Draw | Backdrop | None = None  # by gradients, in the backward pass
    kept: Kept | None = None
    seen: dict[Any, Any] = field(default_factory=dict)  # statistics, means and whole values of the forward pass
    autocast: list[dict[str, Any]] = field(default_factory=list)
    used: bool = False
    active: bool = True  # whether the mask drops anything
    totals: dict[fx.Node, Sums] | None = None  # where windows run in parts: sums of normalisations over all of them
    summing: dict[fx.Node, Tensor | None] = field(
        default_factory=dict
    )  # what those take in whose sums are being added up
    snapshot: Snapshot | None = None  # of buffers, where an input is read from a source

    def entries(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        given = iter(tensors)
        return [next(given) if other is None else other for other in self.others]

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """The segment on the whole map, without gradients. The mask is drawn first, unless gradients choose it."""
        plan = self.plan
        widest = max(tensors, key=lambda tensor: tensor.dtype.itemsize if tensor.is_floating_point() else 0)
        like = widest.new_empty(()).expand(plan.shape)
        if not self.active:
            self.weight = torch.ones([1] * len(plan.shape), device=tensors[0].device)
        elif plan.mask.choose == "gradient":
            self.chooser = plan.mask.chooser(like)
        else:
            self.weight = plan.mask.draw_weight(like)
            self.kept = Kept(plan.lattice, self.weight)
        if plan.tiling is not None:
            out, self.seen = plan.tiling.run(self.entries(tensors))
        else:
            (out,), self.seen = plan.forward(self.entries(tensors))
        if torch.is_autocast_enabled(out.device.type):
            torch.clear_autocast_cache()  # of weights that were cast without gradients
        if tuple(out.shape) != plan.shape:
            raise RuntimeError(f"{plan.exit} has shape {tuple(out.shape)}, but was planned to have {plan.shape}")
        masked: Tensor = out
        return masked

    def replay(self, windows: Windows, entries: dict[fx.Node, Any]) -> Tensor:
        """The segment on windows."""
        values: dict[Any, Any] = dict(entries)
        for node, compute, done in self.plan.calls:
            values[node] = compute(self, windows, values)
            for source in done:
                values.pop(source, None)
        out: Tensor = values[self.plan.exit]
        return out

    def pooled(self, node: fx.Node, windows: Windows, values: dict[Any, Any]) -> Any:
        """One value for all positions of a sample; of values with positions it reads all."""
        segment, read = self.plan.segment, dict(values)
        for source in node.all_input_nodes:
            if source in segment.whole:
                if (source, "whole") not in values:
                    values[source, "whole"] = self._whole(source, windows, values)
                read[source] = values[source, "whole"]
        args, kwargs = fx.map_arg((node.args, node.kwargs), read.__getitem__)
        run = segment.steps[node].run
        return run(args, kwargs, None) if run is statistics_of_all else called(node, args, kwargs)

    def total(self, norm: fx.Node, sums: Sums) -> Sums:
        """Sums over the cells of all windows, or those of one part added up."""
        assert self.totals is not None
        if norm in self.summing:
            known = self.totals.get(norm)
            self.totals[norm] = sums if known is None else (known[0] + sums[0], known[1] + sums[1])
            return sums
        return self.totals[norm]

    def sample_norm(self, node: fx.Node, args: Any, kwargs: Any, windows: Windows) -> Tensor:
        plan, demand = self.plan, self.plan.segment.demands[node]
        inside = windows.inside[plan.map(node, demand)]
        mean, inverse_std = self.seen[node]
        how = statistics.SampleNorm(
            mean, inverse_std, windows.sample, None if inside.complete else inside.ranges, demand.positions, plan.policy
        )
        return statistics.normalise_windows(node, args, kwargs, how)

    def pool(self, node: fx.Node, windows: Windows, values: dict[Any, Any]) -> Tensor:
        """The mean of the forward pass; its gradient falls on the cells of the windows, or nowhere."""
        plan, segment, source = self.plan, self.plan.segment, input_of(node)
        demand = segment.demands[source]
        inside = windows.inside[plan.map(source, demand)]
        return statistics.pool_windows(
            values[source],
            self.seen[node],
            windows.sample,
            None if inside.complete else inside.ranges,
            demand,
            plan.policy,
        )

    def _whole(self, source: fx.Node, windows: Windows, values: dict[Any, Any]) -> Tensor:
        """All of a value, of the forward pass; its gradient falls on the cells of the windows, or nowhere."""
        plan, demand, whole = self.plan, self.plan.segment.demands[source], self.seen[source, "whole"]
        if plan.policy == "frozen":
            frozen: Tensor = whole.detach()
            return frozen
        return statistics.read_whole(values[source], whole, windows, windows.inside[plan.map(source, demand)], demand)

    def backward(self, grad: Tensor, tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the entries that are tensors, from windows alone."""
        plan, segment, worth = self.plan, self.plan.segment, ""
        if self.weight is None:
            assert self.chooser is not None
            self.weight, effective = self.chooser.choose_weight_and_count(grad)
            self.kept = Kept(plan.lattice, self.weight)
            worth = f", chosen by gradients worth {effective:.3g} equal ones"
        weight = self.weight
        if not self.used and self.active:
            self.used = True
            plan.mask.weight_is_used()
        if plan.tiling is not None and ((plan.tiling.in_tiles and not self.active) or plan.tiles_pay(grad.device)):
            return self._backward_in_tiles(plan.tiling, grad, tensors, wanted, worth)
        self.kept = self.kept or Kept(plan.lattice, weight.expand(plan.shape))
        windows = find_windows(plan.lattice, self.kept, weight, grad)
        self.entry.last = f"{windows.real} of {plan.lattice.units()} units were computed again{worth}"
        values = self.entries(tensors)
        nodes = [node for node, other in zip(segment.entries, self.others, strict=True) if other is None]
        if not len(windows):
            return [
                torch.zeros_like(t) if want and t is not None else None for t, want in zip(tensors, wanted, strict=True)
            ]
        result: list[Tensor | None] = [None] * len(tensors)
        size = len(windows) if plan.coupled and not plan.in_parts else self._chunk(len(windows))
        leaves, full = self._leaves(values, nodes, wanted)
        self.seen |= {(node, "whole"): leaves[node] for node in segment.whole if node in leaves}
        spelled = weight.expand([grad.shape[a] if a in plan.demand.axes else n for a, n in enumerate(weight.shape)])
        parts = [windows.part(first, first + size) for first in range(0, len(windows), size)]

        def computed(part: Windows) -> tuple[Tensor, Tensor, dict[fx.Node, Any]]:
            """The exit's value on some windows, the gradient that arrives at it, and the windows of the entries."""
            seeds = multiply(cut(grad, part, plan.demand), cut(spelled, part, plan.demand))
            seeds = plan.clear[plan.exit](seeds, part)
            cuts = {node: self._read_windows(node, leaf, part, grad.device) for node, leaf in leaves.items()}
            for node, want in zip(nodes, wanted, strict=True):
                if node in full and isinstance(leaves[node], Tensor):
                    cuts[node] = self._cut(node, leaves[node], part).requires_grad_(want)
            with torch.enable_grad(), self._as_in_forward():
                return self.replay(part, cuts), seeds, cuts

        self.totals = {} if plan.coupled and len(parts) > 1 else None
        for norms in plan.norms_from_exit if self.totals is not None else ():
            for part in parts:
                self.summing = dict.fromkeys(norms)
                out, seeds, _ = computed(part)
                taken = [x for x in self.summing.values() if x is not None and x.requires_grad]
                if taken and out.requires_grad:
                    torch.autograd.grad(out, taken, seeds, allow_unused=True)
                del out, seeds, taken
            self.summing = {}
        for part in parts:
            out, seeds, cuts = computed(part)
            inputs = [cuts[node] for node, want in zip(nodes, wanted, strict=True) if want]
            grads = iter(torch.autograd.grad(out, inputs, seeds, allow_unused=True)) if out.requires_grad else iter(())
            del out, seeds
            for i, (node, want) in enumerate(zip(nodes, wanted, strict=True)):
                new = next(grads, None) if want else None
                if new is None:
                    continue
                if node in full:
                    new = self._paste(node, new, leaves[node], part)
                result[i] = new if result[i] is None else result[i].add_(new)  # type: ignore[union-attr]
        return result

    def _leaves(
        self, values: Sequence[Any], nodes: Sequence[fx.Node], wanted: Sequence[bool]
    ) -> tuple[dict[fx.Node, Any], set[fx.Node]]:
        """The entries, with a gradient of their own where it is wanted, but for those that are cut: which are these."""
        leaves: dict[fx.Node, Any] = dict(zip(self.plan.segment.entries, values, strict=True))
        full = {node for node in nodes if node in self.plan.full}
        for node, want in zip(nodes, wanted, strict=True):
            if node not in full and isinstance(leaves[node], Tensor):
                leaves[node] = leaves[node].detach().requires_grad_(want)
        return leaves, full

    def _backward_in_tiles(
        self,
        tiling: Tiling,
        grad: Tensor,
        tensors: Sequence[Tensor | None],
        wanted: Sequence[bool],
        worth: str,
    ) -> list[Tensor | None]:
        """The gradients of the entries that are tensors, from tiles in which something is kept."""
        segment = self.plan.segment
        assert self.weight is not None
        nodes = [node for node, other in zip(segment.entries, self.others, strict=True) if other is None]
        leaves, full = self._leaves(self.entries(tensors), nodes, wanted)
        wants = [node for node, want in zip(nodes, wanted, strict=True) if want]
        result: dict[fx.Node, Tensor] = {
            node: torch.zeros_like(leaves[node]) for node in wants if isinstance(leaves[node], Tensor)
        }
        ran, (total, tiles) = 0, tiling.backward_tiles(leaves, grad, self.weight)
        for ran, back in enumerate(tiles, start=1):  # noqa: B007
            cuts = {node: x.detach().requires_grad_(node in wants) for node, x in back.found.items()}
            with torch.enable_grad(), self._as_in_forward():
                out = tiling.compute(back, leaves, self.seen, cuts)
            inputs = [cuts[node] if node in full else leaves[node] for node in wants]
            grads = torch.autograd.grad(out, inputs, back.seeds, allow_unused=True) if out.requires_grad else ()
            del out
            for node, new in zip(wants, grads, strict=False):
                if new is not None:
                    part = tiling.stream.cut(result[node], node, back.tile) if node in full else result[node]
                    part.add_(new)
        self.entry.last = f"{ran} of {total} tiles were computed again{worth}"
        return [result.get(node) for node in nodes]

    def _read_windows(self, node: fx.Node, leaf: Any, windows: Windows, device: torch.device) -> Any:
        """An entry, or its windows where it is a source."""
        if not isinstance(leaf, Source):
            return leaf
        demand = self.plan.segment.demands[node]
        return self._padded(node, read_windows(leaf, windows, demand, device), windows)

    def _cut(self, node: fx.Node, x: Tensor, windows: Windows) -> Tensor:
        """The windows of an entry, padded already where all that reads them agrees."""
        return self._padded(node, cut(x.detach(), windows, self.plan.segment.demands[node]), windows)

    def _padded(self, node: fx.Node, taken: Tensor, windows: Windows) -> Tensor:
        demand = self.plan.segment.demands[node]
        if node not in self.plan.fills:
            return taken
        inside = windows.inside[self.plan.padded[node]]
        if inside.complete:
            return taken
        outside = ~cells_inside(taken, Epilogue(inside=inside.ranges, axes=demand.positions))
        return taken.masked_fill_(outside, self.plan.fills[node])  # in place, which keeps the order in memory

    def _paste(self, node: fx.Node, grad: Tensor, x: Tensor, windows: Windows) -> Tensor:
        demand = self.plan.segment.demands[node]
        if node in self.plan.fills:
            grad = self.plan.clear[node](grad, windows)
        return paste(grad, x, windows, demand)

    def _chunk(self, windows: int) -> int:
        """How many windows at a time, so that they need no more memory than the forward pass did."""
        plan = self.plan
        chunks = max(1, math.ceil(windows / (plan.at_a_time * plan.windows_in_whole)))
        if plan.tiling is not None:
            chunks = max(1, math.ceil(windows * plan.tiling.window_bytes() / plan.tiling.windows))
        return -(-windows // min(chunks, windows))

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


def _check_size(node: fx.Node, value: Any, along: Sequence[tuple[int | None, int]]) -> None:
    """A rule that is wrong about sizes is an error with its name."""
    for x in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(x, Tensor) and any(axis is not None and x.shape[axis] != size for axis, size in along):
            sizes = dict(along)
            raise RuntimeError(
                f"the rule for {name_of(node)} is wrong: on windows it gives shape {tuple(x.shape)}, but along axes "
                f"{list(sizes)} it should have the sizes {list(sizes.values())}"
            )


def _cuts(have: Demand, need: Demand) -> list[tuple[int, int, int]]:
    """Which cells are needed, of those that there are: axis, first cell and number, where these are fewer."""
    along = zip(need.positions, have.start, need.start, have.size, need.size, strict=True)
    return [(axis, b - a, n) for axis, a, b, m, n in along if m != n]


def _narrowed(x: Tensor, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    for axis, first, number in cuts:
        x = x.narrow(axis, first, number)
    return x


def _fill(x: Tensor, inside: Inside, batch: int, axes: tuple[int, ...], value: float) -> Tensor:
    """Set the cells of windows outside the map to `value`."""
    if inside.complete:
        return x
    if batch == 0:
        return finish(x, None, None, Epilogue(inside=inside.ranges, axes=axes, fill=value))
    moved = tuple(axis + (axis < batch) for axis in axes)
    return finish(x.movedim(batch, 0), None, None, Epilogue(inside=inside.ranges, axes=moved, fill=value)).movedim(
        0, batch
    )


def _from_inside(x: Tensor, inside: Inside, demand: Demand, how: str) -> Tensor:
    """Let the cells of windows outside the map hold those inside that they stand for."""
    batch = demand.axes[0]
    assert batch is not None
    for i, axis in enumerate(demand.positions):
        first, last = inside.ranges[:, i, :1].long(), inside.ranges[:, i, 1:].long() - 1
        cell = torch.arange(x.shape[axis], device=x.device).expand(len(first), -1)
        if how == "reflect":
            cell = torch.where(cell < first, 2 * first - cell, cell)
            cell = torch.where(cell > last, 2 * last - cell, cell)
        index = torch.minimum(torch.maximum(cell, first), last.clamp(min=0)).clamp(0, x.shape[axis] - 1)
        shape = [1] * x.ndim
        shape[batch], shape[axis] = index.shape
        x = x.gather(axis, (index if batch < axis else index.T).reshape(shape).expand_as(x))
    return x


class Skipped(torch.autograd.Function):
    """A segment and its mask, differentiated through windows."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Tensor:
        ctx.run = run
        save(ctx, tensors, [keep for keep, other in zip(run.plan.saved, run.others, strict=True) if other is None])
        run.autocast = [
            {"device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
            for kind in {"cpu", tensors[0].device.type}
        ]
        return run.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        try:
            return None, *ctx.run.backward(grad, load(ctx), ctx.needs_input_grad[1:])
        except Exception:
            if ctx.run.snapshot is not None:
                ctx.run.snapshot.restore()
            raise
