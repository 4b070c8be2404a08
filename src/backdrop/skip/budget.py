"""How large tiles are, and how many windows run at a time: what is asked for, or what a number of bytes allows.

What a step holds of a segment is what is kept from forward to backward (the value at the mask, its gradient and the
weights of the mask) and beside that one thing at a time: a tile of the forward pass, windows with their gradients, or a
tile with its gradients. The sizes of all maps are known before anything is computed, so all of this is counted and not
tried out. Parameters, their gradients, the input, and what the kernels of a device take for themselves are not counted.
"""

from __future__ import annotations

import itertools
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, fx

from backdrop._core.product import multiply
from backdrop._source import ReadAhead, Source, moved
from backdrop.graph.table import Statistics
from backdrop.skip.segments import Segment
from backdrop.skip.sources import read_tile
from backdrop.skip.statistics import keeps_running
from backdrop.skip.stream import Stream
from backdrop.skip.tiles import Grid, Pass, Tile, has_positions, positions_of

TileSize: TypeAlias = int | tuple[int, ...] | Literal["auto"] | None
Memory: TypeAlias = int | str | None

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
FOR_MAPS = 0.25  # of what is left, the most that maps between passes may take
LOOKED_AT = 32  # tiles along an axis, to tell what all of them take
FINER = 1.3  # from one number of tiles along an axis to the next that is looked at


def check_tile(tile: Any, memory: Any) -> TileSize:
    if tile is None:
        return None
    if isinstance(tile, str):
        if tile != "auto":
            raise ValueError(f"tile has to be a number of cells, one for each axis, 'auto' or None, but got {tile!r}")
        if memory is None:
            raise ValueError("tile='auto' chooses tiles by a budget: give memory='4GB' or so beside it")
        return "auto"
    sizes = tile if isinstance(tile, (tuple, list)) else (tile,)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, numbers.Integral) for size in sizes):
        raise TypeError(f"tile has to be a whole number of cells, one for each axis, 'auto' or None, but got {tile!r}")
    if min(sizes) < 1:
        raise ValueError(f"tile has to be at least 1, cells of the input along each axis, but got {tile!r}")
    return tuple(map(int, sizes)) if isinstance(tile, (tuple, list)) else int(sizes[0])


def check_memory(memory: Any) -> int | None:
    """In bytes."""
    if memory is None:
        return None
    wanted = "memory has to be bytes as a whole number, a text such as '4GB' or '800MiB', or None"
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", memory)
        if found is None or found[2].lower() not in UNITS:
            raise ValueError(f"{wanted}, but got {memory!r}")
        memory = int(float(found[1]) * UNITS[found[2].lower()])
    if isinstance(memory, bool) or not isinstance(memory, numbers.Integral):
        raise TypeError(f"{wanted}, but got {memory!r}")
    if memory < 1:
        raise ValueError(f"memory has to be at least one byte, but got {memory!r}")
    return int(memory)


def in_words(size: float) -> str:
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= of:
            return f"{size / of:.3g} {unit}"
    return f"{size:.0f} bytes"


class Choice(NamedTuple):
    """Tiles of one kind of pass."""

    counts: tuple[int, ...]  # along each axis
    samples: int  # in a tile
    work: float  # cells that are computed, weighted by what they cost, over those of the map
    bytes: float  # the most that it takes


class Back(NamedTuple):
    """A tile of the backward pass."""

    tile: Tile
    found: dict[fx.Node, Tensor]  # of the entries with positions
    seeds: Tensor  # the gradient that arrives, masked


class Tiling:
    """The tiles of a segment."""

    def __init__(self, segment: Segment, exit: fx.Node, policy: Statistics, tile: TileSize, memory: int | None) -> None:  # noqa: A002
        self.segment, self.exit, self.policy = segment, exit, policy
        self.tile, self.memory = tile, memory
        traced = segment.traced
        self.known: dict[Any, dict[fx.Node, tuple[int, float]]] = {}
        self.fixed = 0.0
        self.samples = traced.shape(exit)[segment.demands[exit].axes[0] or 0]
        self.sizes = positions_of(segment, exit)
        self.per_cell = {node: self._per_cell(node) for node in (*segment.entries, *segment.steps)}
        value = traced.values[exit]
        cells = self.samples * math.prod(self.sizes)
        # The value, its gradient, where that is zero; the weights of the mask, and which units they keep.
        self.fixed += value.numel() * (2 * value.itemsize + 1) + cells * 6.0
        for node in segment.entries:
            if node in traced.differentiable:
                self.fixed += 2 * _bytes(traced.values[node])  # its gradient, and what adds to that
        self.kept = 2.0 * value.numel() * value.itemsize
        self.plan()

    def leave(self, kept: float) -> None:
        """So many bytes are kept elsewhere."""
        if self.memory is not None:
            self.fixed += kept
            self.plan()

    def plan(self) -> None:
        """Choose tiles."""
        left = math.inf if self.memory is None else self.memory - self.fixed
        rooms = [self.kept / 2] if self.memory is None else [max(0.0, FOR_MAPS * left), 0.0]
        for room in rooms:
            self.left = left
            try:
                self._plan(room)
                break
            except ValueError:  # with less room for maps there is more for tiles
                if room == rooms[-1]:
                    raise

    def _plan(self, room: float) -> None:
        self.stream, self.known = Stream(self.segment, self.exit, self.policy, room), {}
        self.maps = max((self._kept_after(level) for level in range(len(self.stream.passes))), default=0.0)
        self.left -= self.maps
        self.forward = self._choose(self._forward_bytes, self.stream.passes)
        self.backward = self._choose(self._backward_bytes, [self.stream.whole], again=True)
        self.windows = self.forward.bytes if self.memory is None else self.left
        if self.window_bytes() > self.left and not self.in_tiles:
            self._refuse(f"a window takes {in_words(self._all(self.window_bytes()))}")

    def _per_cell(self, node: fx.Node) -> float:
        """Bytes of a value for each cell of each sample."""
        if not has_positions(self.segment, node):
            return 0.0
        return _bytes(self.segment.traced.values[node]) / (self.samples * math.prod(positions_of(self.segment, node)))

    def _kept_after(self, level: int) -> float:
        stream = self.stream
        return sum(stream.bytes(node) for node, until in stream.kept.items() if stream.levels[node] <= level <= until)

    def describe(self) -> str:
        """How many tiles there are and what they take, in words."""
        forward, counts = self.forward, " x ".join(map(str, self.forward.counts))
        samples = f" of {forward.samples} samples" if forward.samples > 1 else ""
        passes = f" in {len(self.stream.passes)} passes" if len(self.stream.passes) > 1 else ""
        return (
            f"{counts}{samples}{passes}, {forward.work:.2f} times the work of the whole; about "
            f"{in_words(forward.bytes)} at a time, {in_words(self.fixed + self.maps)} kept"
        )

    # What a tile takes.

    def _forward_bytes(self, one: Pass, most: Callable[[fx.Node], int]) -> float:
        """The most that is there at once in the forward pass of one tile of one sample."""
        steps = self.segment.steps
        sizes = {node: most(node) * self.per_cell[node] for node in (*one.members, *one.sources)}
        alive = sum(sizes[node] for node in one.sources)
        peak = alive
        for node in one.members:
            copied = max((sizes[s] for s, tap in steps[node].inputs.items() if s in sizes and tap.slides), default=0.0)
            peak = max(peak, alive + sizes[node] + copied)
            alive += sizes[node] - sum(sizes.get(source, 0.0) for source in one.drops.get(node, ()))
        return peak

    def _backward_bytes(self, one: Pass, most: Callable[[fx.Node], int]) -> float:
        """The same with all that is kept for its gradients."""
        sizes = [most(node) * self.per_cell[node] for node in (*one.members, *one.sources)]
        return sum(sizes) + 2 * max(sizes)

    def window_bytes(self) -> float:
        """What one window takes, with its gradients."""
        segment = self.segment
        sizes = [
            math.prod(segment.demands[node].size) * self.per_cell[node]
            for node in (*segment.entries, *segment.steps)
            if has_positions(segment, node)
        ]
        return sum(sizes) + 2 * max(sizes)

    # Running.

    def run(self, values: Sequence[Any]) -> tuple[Tensor, dict[Any, Any]]:
        """The forward pass: the exit's value, and what was seen on the way."""
        return self.stream(values, self.forward.counts, self.forward.samples)

    @property
    def in_tiles(self) -> bool:
        """Whether the backward pass may run in tiles: nothing in it is estimated from the windows of a step."""
        steps = self.segment.steps
        held = all(
            step.couples == "" or (step.couples == "batch" and (self.policy == "frozen" or keeps_running(node)))
            for node, step in steps.items()
        )
        return held and not self.segment.pooled

    def backward_tiles(self, leaves: Mapping[fx.Node, Any], grad: Tensor, weight: Tensor) -> tuple[int, Iterator[Back]]:
        """How many tiles there are, and those with a gradient, each with what is cut of the entries."""
        stream, tiles = self.stream, list(self.stream.tiles(self.back_grid, self.backward.samples))
        alive = [tile for tile in tiles if bool(((self._of(grad, tile) != 0) & (self._of(weight, tile) != 0)).any())]
        inputs = stream.whole.sources

        def load(tile: Tile) -> dict[fx.Node, Tensor]:
            there = [n for n in inputs if isinstance(leaves[n], Source)]
            return {n: read_tile(leaves[n], tile.samples, tile.boxes[n], self.segment.demands[n]) for n in there}

        def each() -> Iterator[Back]:
            with ReadAhead(load, alive if any(isinstance(leaves[n], Source) for n in inputs) else []) as ahead:
                for tile in alive:
                    found = {n: stream.cut(leaves[n], n, tile) for n in inputs if isinstance(leaves[n], Tensor)}
                    if len(found) < len(inputs):
                        found |= {node: moved(x, grad.device) for node, x in next(ahead).items()}
                    yield Back(tile, found, multiply(self._of(grad, tile), self._of(weight, tile)))

        return len(tiles), each()

    @cached_property
    def back_grid(self) -> Grid:
        return Grid(self.segment, self.stream.whole, self.backward.counts)

    def compute(
        self, back: Back, leaves: Mapping[fx.Node, Any], seen: Mapping[Any, Any], cuts: Mapping[fx.Node, Tensor]
    ) -> Tensor:
        """The exit's value on one tile of the backward pass."""
        found: list[Tensor] = []
        stream = self.stream
        stream.compute(stream.whole, self.back_grid, back.tile, leaves, seen, cuts, lambda *seen: found.append(seen[2]))
        return found[0]

    def _of(self, x: Tensor, tile: Tile) -> Tensor:
        """What of a map at the mask belongs to a tile of the backward pass."""
        demand = self.segment.demands[self.exit]
        assert demand.axes[0] is not None
        along = zip((demand.axes[0], *demand.positions), (tile.samples, *tile.boxes[self.exit]), strict=True)
        for axis, (a, b) in along:
            x = x if x.shape[axis] == 1 else x.narrow(axis, a, b - a)
        return x

    # Choosing.

    def _choose(self, takes: Callable[..., float], passes: Sequence[Pass], again: bool = False) -> Choice:
        """The tiles that are asked for; in the backward pass, which keeps more of each, only where nothing else is."""
        if self.tile is not None and self.tile != "auto" and not (again and self.memory is not None):
            counts = self._counts(self.tile)
            found = self._look(takes, passes, counts)
            if found.bytes > self.left:
                self._refuse(f"with tile={self.tile!r} a step takes {in_words(self._all(found.bytes))}")
            return found
        whole = self._look(takes, passes, (1,) * len(self.sizes))
        if self.memory is None:
            return whole
        if whole.bytes <= self.left:
            together = max(1, min(self.samples, int(self.left // whole.bytes)))
            return whole._replace(samples=together, bytes=whole.bytes * together)
        along = [list(self._numbers(size)) for size in self.sizes]
        looked = [self._look(takes, passes, counts) for counts in itertools.product(*along)]
        fitting = [each for each in looked if each.bytes <= self.left]
        if not fitting:
            self._refuse(f"memory is {in_words(self.memory or 0)}")
        return min(fitting, key=lambda each: (each.work, math.prod(each.counts)))

    def _numbers(self, size: int) -> Iterator[int]:
        """Numbers of tiles along an axis to look at."""
        number = 1.0
        while number < size:
            yield int(number)
            number = max(number + 1, number * (FINER if len(self.sizes) < 3 else 1.5))
        yield size

    def _counts(self, tile: int | tuple[int, ...]) -> tuple[int, ...]:
        sizes = (tile,) * len(self.sizes) if isinstance(tile, int) else tile
        if len(sizes) != len(self.sizes):
            raise ValueError(
                f"tile has to be one number or one for each of {len(self.sizes)} axes of positions, but got {tile!r}"
            )
        counts = []
        for cells, size, stride in zip(self.sizes, sizes, self.strides(), strict=True):
            if size < stride:
                raise ValueError(
                    f"tile has to be at least {math.ceil(stride)} along each axis, the cells of the input for each "
                    f"position at the mask, but got {tile!r}"
                )
            counts.append(max(1, min(cells, math.ceil(cells / max(1, int(size / stride))))))
        return tuple(counts)

    def strides(self) -> list[float]:
        """Cells of the input for each position at the mask."""
        inputs = [node for node in self.segment.entries if has_positions(self.segment, node)]
        return [
            max(
                (self.segment.demands[node].step[axis] / self.segment.demands[self.exit].step[axis] for node in inputs),
                default=1.0,
            )
            for axis in range(len(self.sizes))
        ]

    def _look(self, takes: Callable[..., float], passes: Sequence[Pass], counts: tuple[int, ...]) -> Choice:
        work = whole = most = 0.0
        costs = self.segment.traced.costs
        for one in passes:
            grids = [self._sampled(one, axis, number) for axis, number in enumerate(counts)]
            most = max(most, takes(one, lambda node, grids=grids: math.prod(each[node][0] for each in grids)))
            for node in one.members:
                cost = costs[node].multiplications + costs[node].numbers
                cells = math.prod(positions_of(self.segment, node))
                work += cost * math.prod(each[node][1] for each in grids) / cells
                whole += cost
        return Choice(counts, 1, work / whole if whole else 1.0, most)

    def _sampled(self, one: Pass, axis: int, number: int) -> dict[fx.Node, tuple[int, float]]:
        """Of each value, the largest interval along one axis, and about how many cells all of them have together."""
        key = (id(one), axis, number)
        if key not in self.known:
            grid = Grid(self.segment, one, ())
            step = max(1, number // LOOKED_AT)  # of many, both ends and some in between
            places = sorted({0, number - 1, *range(1, number - 1, step)})
            along = [grid.intervals(axis, place, number) for place in places]
            found = {}
            for node in (*one.members, *one.sources):
                sizes = [each[node][1] - each[node][0] if node in each else 0 for each in along]
                ends, inner = sizes[:1] + sizes[1:][-1:], sizes[1:-1]
                total = sum(ends) + (number - 2) * sum(inner) / len(inner) if inner else sum(ends)
                found[node] = max(sizes), max(total, float(positions_of(self.segment, node)[axis]))
            self.known[key] = found
        return self.known[key]

    def _all(self, working: float) -> float:
        return self.fixed + self.maps + working

    @property
    def most(self) -> float:
        """What a step takes at the peak, with what is kept."""
        return self._all(max(self.forward.bytes, self.backward.bytes if self.in_tiles else self.window_bytes()))

    def least(self) -> float:
        """The smallest budget with which a step could be made."""
        single = self.sizes
        forward = self._look(self._forward_bytes, self.stream.passes, single).bytes
        backward = self._look(self._backward_bytes, [self.stream.whole], single).bytes
        return self.fixed + self.maps + max(forward, backward if self.in_tiles else self.window_bytes())

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"memory={self.memory} is too little for what lies before the mask on {self.samples} x {self.sizes} "
            f"positions: {what}; the least that would do, with tile='auto', is {math.ceil(self.least() * 1.05)} bytes "
            f"({in_words(self.least() * 1.05)})"
        )


def _bytes(value: Any) -> float:
    values = value if isinstance(value, (tuple, list)) else [value]
    return float(sum(x.numel() * x.itemsize for x in values if isinstance(x, Tensor)))
