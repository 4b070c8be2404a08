"""Tiles: a map in parts, each with the cells around it that are needed to compute it.

NOTE [how tiles give the exact values]
1. Along each axis of positions a map is cut into intervals. Walking back from one, each call needs the interval of its
   input that its rule tells (`backdrop.graph.table.Slide`): the geometry of windows, for a unit as large as a tile. An
   interval ends where its map does, so that a tile at the border has no halo there.
2. Where a call reads over the border of its input's map, cells with the call's padding value are put there. Between
   tiles nothing is padded: the cells there are computed again. So every cell is made of the same numbers as in the
   whole map.
3. Axes do not know of each other: a tile is a product of intervals, and so is all that it needs. Of one call, the cells
   of all tiles together are the product over axes of the summed intervals.
4. What goes over all of a map (statistics, means, the map itself) takes from each tile its own share of that map,
   without halos: every cell once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from backdrop.graph.table import Slide, Tap
from backdrop.skip.segments import Segment

Interval: TypeAlias = tuple[int, int]  # from the first cell to before the second
Box: TypeAlias = tuple[Interval, ...]  # along each axis of positions


class Tile(NamedTuple):
    """A part of a map: the samples that it takes, which tile it is along each axis, and the cells of every value."""

    samples: Interval
    place: tuple[int, ...]
    boxes: Mapping[fx.Node, Box]


@dataclass
class Pass:
    """One run over all tiles: the calls that are made, what they begin with, and the values that are wanted of them."""

    members: list[fx.Node]
    targets: list[fx.Node]
    sources: list[fx.Node]  # values with positions that are there already
    drops: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # what nobody needs after each call


def positions_of(segment: Segment, node: fx.Node) -> tuple[int, ...]:
    """The sizes of a value along the axes of positions."""
    shape = segment.traced.shape(node)
    return tuple(shape[axis] for axis in segment.demands[node].positions)


def has_positions(segment: Segment, node: fx.Node) -> bool:
    return node in segment.demands and segment.demands[node].full and node not in segment.pooled


def share(place: int, number: int, cells: int) -> Interval:
    """Of so many cells, those of one of so many tiles."""
    return place * cells // number, (place + 1) * cells // number


def needed(own: Interval, tap: Tap, axis: int) -> Interval:
    """The cells of an input that an interval of the result needs, also beyond the input's border."""
    slide = (tap.slides[axis] if tap.slides else None) or Slide()
    first = (own[0] * slide.down + slide.low) // slide.up
    return first, ((own[1] - 1) * slide.down + slide.high) // slide.up + 1


def inside(cells: Interval, size: int) -> Interval:
    """What of an interval lies inside a map, and at least one cell of it."""
    first = min(max(cells[0], 0), size - 1)
    return first, max(first + 1, min(cells[1], size))


class Grid:
    """The tiles of one pass: so many along each axis."""

    def __init__(self, segment: Segment, one: Pass, counts: Sequence[int]) -> None:
        self.segment, self.one, self.counts = segment, one, tuple(counts)
        self.taps = {
            node: [(s, tap) for s, tap in segment.steps[node].inputs.items() if has_positions(segment, s)]
            for node in one.members
        }

    @cached_property
    def along(self) -> list[list[dict[fx.Node, Interval]]]:
        """The intervals of all values, for each axis and each place along it."""
        return [[self.intervals(axis, place, n) for place in range(n)] for axis, n in enumerate(self.counts)]

    def intervals(self, axis: int, place: int, number: int) -> dict[fx.Node, Interval]:
        """Of every value, the cells that one tile needs along one axis."""
        segment, found = self.segment, dict[fx.Node, Interval]()
        for target in self.one.targets:
            own = share(place, number, positions_of(segment, target)[axis])
            if own[0] < own[1]:
                found[target] = own
        for node in reversed(self.one.members):
            for source, tap in self.taps[node] if node in found else ():
                new = inside(needed(found[node], tap, axis), positions_of(segment, source)[axis])
                old = found.get(source, new)
                found[source] = min(old[0], new[0]), max(old[1], new[1])
        return found

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], dict[fx.Node, Box]]]:
        for place in product(*map(range, self.counts)):
            first, *others = (along[at] for along, at in zip(self.along, place, strict=True))
            known = [node for node in first if all(node in other for other in others)]
            yield place, {node: (first[node], *(other[node] for other in others)) for node in known}

    def kind(self, tile: Tile) -> tuple[object, ...]:
        """The same for tiles whose calls do the same with the same cells: sizes, padding, and where they begin."""
        found: list[object] = []
        for node, taps in self.taps.items():
            for source, tap in taps if node in tile.boxes else ():
                for axis, (own, have) in enumerate(zip(tile.boxes[node], tile.boxes[source], strict=True)):
                    need, slide = needed(own, tap, axis), (tap.slides[axis] if tap.slides else None) or Slide()
                    phase = own[0] * slide.down % slide.up
                    found.append((own[1] - own[0], have[1] - have[0], need[0] - have[0], need[1] - have[1], phase))
        for target in self.one.targets:
            sizes = positions_of(self.segment, target)
            for at, number, size, have in zip(tile.place, self.counts, sizes, tile.boxes.get(target, ()), strict=False):
                own = share(at, number, size)
                found.append((own[0] - have[0], own[1] - own[0]))
        return tuple(found)


def taken(x: Tensor, have: Box, need: Box, axes: Sequence[int]) -> Tensor:
    """The cells `need` of a value of which the cells `have`, and so these, are there."""
    for axis, (start, _), (first, last) in zip(axes, have, need, strict=True):
        x = x if (first - start, last - first) == (0, x.shape[axis]) else x.narrow(axis, first - start, last - first)
    return x


def read(
    x: Tensor, have: Box, need: Box, sizes: Sequence[int], axes: Sequence[int], fill: float | str | None
) -> Tensor:
    """The cells `need` of a value of which the cells `have` are there; those outside its map are padded."""
    pads = [0] * (2 * x.ndim)
    for axis, (start, _), (first, last), size in zip(axes, have, need, sizes, strict=True):
        if isinstance(fill, str) and (first < 0 or last > size):
            x = x.index_select(axis, _mirrored(torch.arange(first, last, device=x.device), size, fill) - start)
            continue
        low, high = min(max(first, 0), size), max(min(last, size), 0)
        count = max(0, high - low)
        if (low - start, count) != (0, x.shape[axis]):
            x = x.narrow(axis, min(max(low - start, 0), x.shape[axis]), count)
        if count < last - first:
            ahead = min(max(-first, 0), last - first)
            pads[2 * (x.ndim - 1 - axis)], pads[2 * (x.ndim - 1 - axis) + 1] = ahead, last - first - count - ahead
    if any(pads):
        if fill is None:
            raise RuntimeError("it reads cells outside the map, but its rule says no padding")
        x = torch.constant_pad_nd(x, pads, float(fill))
    return x


def _mirrored(cell: Tensor, size: int, how: str) -> Tensor:
    """The cells of a map that those outside stand for."""
    if how == "reflect":
        cell = cell.abs()
        cell = torch.where(cell >= size, 2 * (size - 1) - cell, cell)
    return cell.clamp(0, size - 1)
