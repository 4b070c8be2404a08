"""A segment in tiles: the values that the whole map would have, with no more of it in memory than is asked for.

What a pass over the tiles computes is cut off where a call needs to know about all of the map: batch statistics under
"sampled" and "frozen", group normalisation, means over all positions. The first pass computes what these need, the next
one goes on behind them, and so on: one pass for each such call behind another. Maps at which a later pass can begin are
kept if there is room for them; otherwise that pass begins at the input again. Running statistics change when all passes
are done.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from backdrop._source import ReadAhead, Source, moved
from backdrop.graph.table import Statistics, Where
from backdrop.graph.trace import input_of, name_of
from backdrop.skip import statistics
from backdrop.skip.epilogue import Epilogue, finish
from backdrop.skip.programs import called, drops
from backdrop.skip.samples import turned
from backdrop.skip.segments import Segment
from backdrop.skip.sources import one_value, read_tile
from backdrop.skip.tiles import Box, Grid, Pass, Tile, has_positions, needed, positions_of, read, share, taken
from backdrop.skip.totals import Assembled, Mean, Spread

ALIKE = 8  # kinds of tiles of one value each that are remembered in a pass


class Stream:
    """A segment, in passes over tiles.

    Args:
        exit: the value that is wanted.
        policy: for statistics.
        room: bytes for maps that are kept between passes.
    """

    def __init__(self, segment: Segment, exit: fx.Node, policy: Statistics, room: float = 0.0) -> None:  # noqa: A002
        self.segment, self.exit, self.policy = segment, exit, policy
        self.levels = self._find_levels()
        self.passes, self.kept = self._find_passes(room)
        self.whole = self._pass([exit], set())  # from the entries to the exit
        batch = segment.demands[exit].axes[0]
        assert batch is not None
        self.samples = segment.traced.shape(exit)[batch]

    def _over_all(self, node: fx.Node) -> bool:
        """Whether all of the map has to be known before a call can be made."""
        return self.segment.steps[node].couples != "" and not statistics.keeps_running(node)

    def _find_levels(self) -> dict[fx.Node, int]:
        """After how many passes each value can be computed."""
        segment, levels = self.segment, dict[fx.Node, int]()
        for node in segment.steps:
            level = max((levels.get(source, 0) for source in node.all_input_nodes), default=0)
            if node in segment.pooled and segment.steps[node].couples != "pool":
                wholes = [s for s in node.all_input_nodes if s in segment.whole]
                level = max([level, *(levels.get(source, 0) + 1 for source in wholes)])
            levels[node] = level + 1 if node not in segment.pooled and self._over_all(node) else level
            if segment.steps[node].couples == "pool":
                levels[node] = level + 1
        return levels

    def _find_passes(self, room: float) -> tuple[list[Pass], dict[fx.Node, int]]:
        segment, levels = self.segment, self.levels
        last: dict[fx.Node, int] = {}  # the last pass that reads a value
        for node in segment.steps:
            for source in node.all_input_nodes:
                last[source] = max(last.get(source, 0), levels[node])
        passes: list[Pass] = []
        kept: dict[fx.Node, int] = {}  # and after which pass it goes
        for level in range(levels[self.exit] + 1):
            kept_now = {node: until for node, until in kept.items() if until >= level}
            targets = [
                input_of(node)
                for node in segment.steps
                if segment.steps[node].couples and node not in segment.pooled and self._before(node) == level
            ]
            targets += [input_of(n) for n in segment.pooled if self._pools(n) and self._before(n) == level]
            targets += [node for node in segment.whole if levels.get(node) == level]
            targets += [self.exit] if level == levels[self.exit] else []
            used = sum(self.bytes(node) for node in kept_now)
            for node in segment.steps:
                later = last.get(node, 0) > level >= levels[node] and node not in kept and node is not self.exit
                if later and has_positions(segment, node) and segment.traced.is_tensor(node):
                    size = self.bytes(node)
                    if used + size <= room or node in segment.whole:
                        used, kept[node] = used + size, last[node]
                        targets.append(node)
            passes.append(self._pass(list(dict.fromkeys(targets)), set(kept_now)))
        return passes, kept

    def _before(self, node: fx.Node) -> int:
        """The pass that computes what a call over all of a map needs."""
        return self.levels[node] - (1 if self._over_all(node) else 0)

    def _pools(self, node: fx.Node) -> bool:
        return self.segment.steps[node].couples == "pool"

    def _pass(self, targets: list[fx.Node], there: set[fx.Node]) -> Pass:
        segment = self.segment
        found, waiting, sources = set[fx.Node](), list(targets), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in found or not has_positions(segment, node):
                continue
            if node in there or node not in segment.steps:
                sources.add(node)
                continue
            found.add(node)
            waiting.extend(segment.steps[node].inputs)
        members = [node for node in segment.steps if node in found]
        reads = {node: [s for s in segment.steps[node].inputs if has_positions(segment, s)] for node in members}
        order = [node for node in (*segment.entries, *segment.steps) if node in sources]
        return Pass(members, targets, order, drops(reads, set()))

    def bytes(self, node: fx.Node) -> int:
        value = self.segment.traced.values[node]
        return value.numel() * value.itemsize if isinstance(value, Tensor) else 0

    # Running.

    def __call__(self, values: Sequence[Any], counts: Sequence[int], samples: int) -> tuple[Tensor, dict[Any, Any]]:
        """The exit's value, and what was seen on the way."""
        segment = self.segment
        known: dict[fx.Node, Any] = dict(zip(segment.entries, values, strict=True))
        seen: dict[Any, Any] = {}
        changes: dict[fx.Node, Callable[[], None]] = {}
        self._pooled(known, seen, 0)
        for level, one in enumerate(self.passes):
            totals = self._totals(level, one)
            grid = Grid(segment, one, counts)
            self._run(one, grid, known, seen, totals, samples)
            self._take_in(level, totals, known, seen, changes)
            for node in [node for node, until in self.kept.items() if until <= level and node not in segment.whole]:
                known.pop(node, None)
            self._pooled(known, seen, level + 1)
        for node in segment.whole:
            if node in segment.steps:
                seen[node, "whole"] = known[node]
        for node in segment.steps:  # as the calls themselves would have made them
            if node in changes:
                changes[node]()
        return known[self.exit], seen

    def _totals(self, level: int, one: Pass) -> dict[fx.Node, list[tuple[Any, Any]]]:
        """What is to be found of the targets of a pass: pairs of who asks for it and how it is added up."""
        segment, traced = self.segment, self.segment.traced
        found: dict[fx.Node, list[tuple[Any, Any]]] = {target: [] for target in one.targets}
        for node, step in segment.steps.items():
            if not step.couples or self._before(node) != level:
                continue
            source = input_of(node)
            if step.couples == "pool":
                axes, shape = segment.demands[source].positions, traced.shape(node)
                cells = math.prod(traced.shape(source)[axis] for axis in axes)
                found[source].append((node, Mean(shape, axes, cells, len(shape) == len(traced.shape(source)))))
            elif node not in segment.pooled:
                groups = None if step.couples == "batch" else statistics.groups_of(node, traced.shape(source)[1])
                found[source].append((node, Spread(traced.shape(source)[0], groups)))
        for target in one.targets:
            if target is self.exit or self.kept.get(target, -1) > level or target in segment.whole:
                demand = segment.demands[target]
                found[target].append((target, Assembled(traced.values[target], demand.axes[0] or 0, demand.positions)))
        return found

    def _take_in(
        self,
        level: int,
        totals: Mapping[fx.Node, list[tuple[Any, Any]]],
        known: dict[fx.Node, Any],
        seen: dict[Any, Any],
        changes: dict[fx.Node, Callable[[], None]],
    ) -> None:
        for target, each in totals.items():
            for node, total in each:
                if isinstance(total, Assembled):
                    known[node] = total.result()
                elif isinstance(total, Mean):
                    seen[node] = known[node] = total.result()
                elif self.segment.steps[node].couples == "batch":
                    dtype = self.segment.traced.values[target].dtype
                    moments, changes[node] = statistics.from_tiles(node, known, total, dtype)
                    seen.setdefault(node, moments)
                else:
                    seen[node] = total.moments(statistics.eps_of(node), self.segment.traced.values[target].dtype)

    def _pooled(self, known: dict[fx.Node, Any], seen: dict[Any, Any], level: int) -> None:
        """Values without positions, once all they are made of is there."""
        for node in self.segment.steps:
            ready = node in self.segment.pooled and node not in known and self.levels[node] <= level
            if ready and all(source in known for source in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = called(node, args, kwargs)

    def tiles(self, grid: Grid, samples: int) -> Iterator[Tile]:
        for first in range(0, self.samples, samples):
            for place, boxes in grid:
                yield Tile((first, min(first + samples, self.samples)), place, boxes)

    def _run(
        self,
        one: Pass,
        grid: Grid,
        known: Mapping[fx.Node, Any],
        seen: dict[Any, Any],
        totals: Mapping[fx.Node, list[tuple[Any, Any]]],
        samples: int,
    ) -> None:
        for node in one.members:
            if statistics.keeps_running(node) and node not in seen:
                seen[node] = statistics.running_before(node, known)
        alike: OrderedDict[Any, dict[Any, Any]] = OrderedDict()
        tiles = list(self.tiles(grid, samples))
        sources = [node for node in one.sources if isinstance(known[node], Source)]
        plain = len(sources) == len(one.sources) and not self._per_sample(one)

        def load(tile: Tile) -> dict[fx.Node, Tensor]:
            there = [node for node in sources if node in tile.boxes]
            demands = self.segment.demands
            return {node: read_tile(known[node], tile.samples, tile.boxes[node], demands[node]) for node in there}

        device = next((x.device for x in known.values() if isinstance(x, Tensor)), torch.device("cpu"))
        with ReadAhead(load, tiles if sources else [], ahead=1) as ahead:
            for tile in tiles:
                found = next(ahead) if sources else {}
                key = None
                if plain:
                    key = one_value(found)
                    key = None if key is None else (key, grid.kind(tile), tile.samples[1] - tile.samples[0])
                if key is not None and key in alike:
                    alike.move_to_end(key)
                    self._add(one, grid, tile, totals, alike[key])
                    continue
                measured: dict[Any, Any] = {}
                found = {node: moved(x, device) for node, x in found.items()}
                self.compute(one, grid, tile, known, seen, found, partial(self._measure, grid, totals, measured))
                if key is not None:
                    alike[key] = measured
                    if len(alike) > ALIKE:
                        alike.popitem(last=False)
                self._add(one, grid, tile, totals, measured)

    def _per_sample(self, one: Pass) -> bool:
        """Whether calls read something that is another for each sample."""
        steps, pooled = self.segment.steps, self.segment.pooled
        for node in one.members:
            for source, tap in steps[node].inputs.items():
                if source in pooled or (tap.axes[0] is not None and None in tap.axes):
                    return True
            if steps[node].couples == "sample":
                return True
        return False

    def own(self, grid: Grid, tile: Tile, node: fx.Node) -> Box:
        """A tile's share of a map."""
        sizes = positions_of(self.segment, node)
        return tuple(share(*each) for each in zip(tile.place, grid.counts, sizes, strict=True))

    def _measure(
        self,
        grid: Grid,
        totals: Mapping[fx.Node, list[tuple[Any, Any]]],
        measured: dict[Any, Any],
        tile: Tile,
        node: fx.Node,
        x: Tensor,
    ) -> None:
        box = self.own(grid, tile, node)
        if all(a < b for a, b in box):
            part = taken(x, tile.boxes[node], box, self.segment.demands[node].positions)
            for i, (_, total) in enumerate(totals[node]):
                measured[node, i] = total.measure(part)

    def _add(
        self,
        one: Pass,
        grid: Grid,
        tile: Tile,
        totals: Mapping[fx.Node, list[tuple[Any, Any]]],
        measured: Mapping[Any, Any],
    ) -> None:
        for (node, i), part in measured.items():
            totals[node][i][1].add(tile.samples, self.own(grid, tile, node), part)

    def compute(
        self,
        one: Pass,
        grid: Grid,
        tile: Tile,
        known: Mapping[fx.Node, Any],
        seen: Mapping[Any, Any],
        found: Mapping[fx.Node, Tensor],
        see: Callable[[Tile, fx.Node, Tensor], None],
    ) -> None:
        """The calls of one pass on one tile. `found` holds what was cut of the sources already; `see` is given the
        values of the targets."""
        local: dict[fx.Node, Any] = dict(found)
        for source in one.sources:
            if source in tile.boxes and source not in local:
                local[source] = self.cut(known[source], source, tile)
            if source in one.targets and source in tile.boxes:
                see(tile, source, local[source])
        for node in one.members:
            if node not in tile.boxes:
                continue
            local[node] = self._call(grid, node, tile, known, seen, local, one)
            if node in one.targets:
                see(tile, node, local[node])
            for source in one.drops.get(node, ()):
                local.pop(source, None)

    def cut(self, x: Tensor, node: fx.Node, tile: Tile) -> Tensor:
        demand = self.segment.demands[node]
        first, last = tile.samples
        batch = demand.axes[0]
        assert batch is not None
        x = x if last - first == x.shape[batch] else x.narrow(batch, first, last - first)
        whole = tuple((0, size) for size in positions_of(self.segment, node))
        return taken(x, whole, tile.boxes[node], demand.positions)

    def _call(
        self,
        grid: Grid,
        node: fx.Node,
        tile: Tile,
        known: Mapping[fx.Node, Any],
        seen: Mapping[Any, Any],
        local: Mapping[fx.Node, Any],
        one: Pass,
    ) -> Any:
        segment = self.segment
        step, rows = segment.steps[node], tile.samples[1] - tile.samples[0]
        given: dict[fx.Node, Any] = {}
        whole, same, first = self._is_whole(node, tile), True, None
        sizes: tuple[int, ...] = ()
        starts = tuple((own[0], own[0]) for own in tile.boxes[node])
        for source in node.all_input_nodes:
            tap = step.inputs.get(source)
            if tap is None or tap.axes[0] is None:
                given[source] = known[source]
            elif not has_positions(segment, source) or None in tap.axes:
                x, axis = known[source], tap.axes[0]
                given[source] = x.narrow(axis, tile.samples[0], rows) if rows != x.shape[axis] else x
            else:
                box, axes = tile.boxes[source], segment.demands[source].positions
                need = tuple(needed(own, tap, axis) for axis, own in enumerate(tile.boxes[node]))
                cells = positions_of(segment, source)
                if first is None:
                    first, sizes = source, cells
                    starts = tuple((n[0], own[0]) for n, own in zip(need, tile.boxes[node], strict=True))
                same = same and need == box
                x = local[source]
                if whole:
                    given[source] = x
                elif isinstance(x, Tensor):
                    given[source] = read(x, box, need, cells, axes, tap.fill)
                else:  # several tensors, which are taken apart next
                    given[source] = type(x)(read(each, box, need, cells, axes, None) for each in x)
        if step.couples == "batch":
            weight, bias = map(known.get, statistics.weights(node))
            x = given[input_of(node)]
            return finish(x, weight, bias, Epilogue(moments=seen[node]))
        if _is_convolution(node):
            first = input_of(node)
            given[first] = turned(given[first])
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        if step.couples == "sample":
            mean, inverse_std = seen[node]
            index = torch.arange(*tile.samples, device=mean.device)
            axes = segment.demands[node].positions
            how = statistics.SampleNorm(mean, inverse_std, index, None, axes, "frozen")
            return statistics.normalise_windows(node, args, kwargs, how)
        if step.run is not None and not whole:
            size = tuple(b - a for a, b in tile.boxes[node])
            positions = partial(_cells, tile.boxes[node], next(iter(given.values())))
            out = step.run(args, kwargs, Where(positions, sizes, starts, size, rows))
        else:
            out = self._in_place(node, args, same, one, local)
            out = called(node, args, kwargs) if out is None else out
        self._check_size(node, out, tile)
        return out

    def _is_whole(self, node: fx.Node, tile: Tile) -> bool:
        """Whether a call is given all of its maps and makes all of its own, so that it runs as it stands."""
        segment = self.segment
        nodes = (node, *(s for s in node.all_input_nodes if has_positions(segment, s)))
        whole = all(
            (a, b) == (0, size)
            for each in nodes
            for (a, b), size in zip(tile.boxes[each], positions_of(segment, each), strict=True)
        )
        return whole and tile.samples == (0, self.samples)

    def _in_place(self, node: fx.Node, args: Sequence[Any], same: bool, one: Pass, local: Mapping[fx.Node, Any]) -> Any:
        """A rectifier over what nobody else needs any more, which saves a map."""
        first = input_of(node) if self.segment.steps[node].epilogue == "relu" else None
        if first is None or not same or torch.is_grad_enabled() or first not in one.drops.get(node, ()):
            return None
        fresh = (first in one.members and self.segment.steps[first].run is not None) or _is_norm(first)
        if not fresh or first in one.targets or first not in one.members:
            return None
        x = args[0] if args else None
        return torch.relu_(x) if isinstance(x, Tensor) and x is local[first] else None

    def _check_size(self, node: fx.Node, out: Any, tile: Tile) -> None:
        axes = self.segment.demands[node].positions
        for x in out if isinstance(out, (tuple, list)) else [out]:
            sizes = [x.shape[axis] for axis in axes]
            wanted = [b - a for a, b in tile.boxes[node]]
            if sizes != wanted:
                raise RuntimeError(
                    f"the rule for {name_of(node)} is wrong: on a tile it gives shape {tuple(x.shape)}, but along axes "
                    f"{list(axes)} it should have the sizes {wanted}"
                )


def _is_convolution(node: fx.Node) -> bool:
    return node.target in (torch.conv2d, torch.conv3d)


def _is_norm(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in ("batch_norm", "group_norm", "instance_norm")


def _cells(box: Box, like: Any) -> list[Tensor]:
    """(1, cells) along each axis."""
    device = like.device if isinstance(like, Tensor) else None
    return [torch.arange(a, b, device=device)[None] for a, b in box]
