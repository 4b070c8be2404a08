"""Which cells of the input a position depends on, along one axis.

Two things are known for every position of a map. The *exact* reach: the first and the last cell inside the input, with
borders and padding as they are. The *ideal* reach: the same if no map had an end, so that it repeats itself: after
`period` positions everything lies `shift` cells further on. Both follow from the taps of each layer, the cells that it
reads of its own input, taken one layer after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Outside: TypeAlias = Literal["constant", "reflect", "replicate", "circular"]

NOTHING = 2**60  # the first cell of a position that depends on none; its last cell is minus that


class Taps(NamedTuple):
    """Which cells of its input a layer reads for each position of its output, along one axis."""

    at: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]  # (positions, which tap) -> cells, whether they are read
    number: int = 1  # of taps
    period: int = 1  # after so many positions,
    shift: int = 1  # the same cells are read, so many further on
    outside: Outside = "constant"  # what stands for cells before the first and after the last


def window(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, outside: Outside = "constant") -> Taps:
    """Convolution, pooling; with a kernel of 1 also padding, and cropping where `padding` is negative."""
    return Taps(lambda o, k: (o * stride - padding + k * dilation, None), kernel, 1, stride, outside)


def transposed(kernel: int, stride: int, padding: int, dilation: int) -> Taps:
    """A transposed convolution: cell i adds to the positions i * stride - padding + k * dilation."""

    def at(o: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        steps = o + padding - k * dilation
        return steps // stride, steps % stride == 0

    return Taps(at, kernel, stride, 1)


def between(down: int, low: int, high: int, up: int) -> Taps:
    """All cells from floor((position * down + low) / up) to floor((position * down + high) / up)."""

    def at(o: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        index = (o * down + low) // up + k
        return index, index <= (o * down + high) // up

    common = math.gcd(down, up)
    return Taps(at, (high - low) // up + 2, up // common, down // common)


def adaptive(cells: int, positions: int) -> Taps:
    """Adaptive pooling: from the cell in which a position's share begins to the one in which it ends."""

    def at(o: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        index = o * cells // positions + k
        return index, index * positions < (o + 1) * cells

    common = math.gcd(cells, positions)
    return Taps(at, -(-cells // positions) + 1, positions // common, cells // common)


def sampled(slope: Fraction, start: Fraction, before: int, after: int) -> Taps:
    """Interpolation at start + slope * position: from `before` cells ahead of it to `after` behind.

    Where that is a cell itself, only this cell is read.
    """
    divisor = math.lcm(slope.denominator, start.denominator)
    step, offset = int(slope * divisor), int(start * divisor)

    def at(o: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        place = o * step + offset
        return place // divisor + (k - before), None if k == before else place % divisor != 0

    return Taps(at, before + 1 + after, slope.denominator, slope.numerator)


@dataclass(frozen=True)
class Reach:
    """The cells of the input that each position of a map depends on, along one axis."""

    cells: int  # of the input
    first: Tensor  # (positions,), inside the input
    last: Tensor
    ideal_first: Tensor  # (period,), wherever that is
    ideal_last: Tensor
    shift: int  # cells per period

    @staticmethod
    def of_input(cells: int) -> Reach:
        own, zero = torch.arange(cells), torch.zeros(1, dtype=torch.int64)
        return Reach(cells, own, own, zero, zero, 1)

    @property
    def period(self) -> int:
        return len(self.ideal_first)

    @property
    def size(self) -> int:
        """Of the ideal reach, where it is largest."""
        return max(0, int((self.ideal_last - self.ideal_first).max()) + 1)

    @property
    def stride(self) -> Fraction:
        return Fraction(self.shift, self.period)

    @property
    def start(self) -> int:
        """The first cell of position 0, or of all in a period where position 0 depends on nothing."""
        own = int(self.ideal_first[0])
        return own if own < NOTHING else int(self.ideal_first.min())

    def through(self, taps: Taps, positions: int) -> Reach:
        """The reach behind a layer with so many positions in its output."""
        at_end = len(self.first) - 1

        def inside(cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            cells = _back_inside(cells, at_end + 1, taps.outside)
            there = (cells >= 0) & (cells <= at_end)
            cells = cells.clamp(0, at_end)
            return self.first[cells], self.last[cells], there

        def anywhere(cells: Tensor) -> tuple[Tensor, Tensor, None]:
            return *self.ideal(cells), None

        turns = self.period // math.gcd(self.period, taps.shift)
        shift = taps.shift * turns // self.period * self.shift
        first, last = _over(taps, positions, inside)
        return Reach(self.cells, first, last, *_shortest(*_over(taps, taps.period * turns, anywhere), shift))

    def ideal(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last cell of the ideal reach of any positions, also negative ones."""
        phase, moved = positions % self.period, positions // self.period * self.shift
        first, last = self.ideal_first[phase], self.ideal_last[phase]
        empty = first > last
        return torch.where(empty, first, first + moved), torch.where(empty, last, last + moved)

    def spacing(self) -> int:
        """The smallest number of positions between two whose ideal reaches never overlap."""
        phases = torch.arange(self.period)
        seen = self.ideal_first <= self.ideal_last
        if not seen.any():
            return 1
        lag = (self.ideal_first * self.period - phases * self.shift)[seen]
        enough = (self.size * self.period + int(lag.max() - lag.min())) // self.shift + 1
        firsts = self.ideal(torch.arange(2 * self.period + enough))[0]
        from_here_on = firsts.flip(0).cummin(0).values.flip(0)
        free = torch.searchsorted(from_here_on, self.ideal_last[seen], right=True)
        return int((free - phases[seen]).max())


def hull(reaches: Sequence[Reach]) -> Reach:
    """The smallest reach that holds all of these, which belong to maps with the same positions.

    Maps of the same size may still differ in stride, where sizes were rounded on the way. There is no period then, and
    the whole map counts as one, which stands for the whole input.
    """
    if len(reaches) == 1:
        return reaches[0]
    cells, positions = reaches[0].cells, len(reaches[0].first)
    period, shift = positions, cells
    if len({reach.stride for reach in reaches}) == 1:
        period = math.lcm(*(reach.period for reach in reaches))
        shift = int(period * reaches[0].stride)
    ideal = [reach.ideal(torch.arange(period)) for reach in reaches]
    return Reach(
        cells,
        _smallest([reach.first for reach in reaches]),
        -_smallest([-reach.last for reach in reaches]),
        *_shortest(_smallest([first for first, _ in ideal]), -_smallest([-last for _, last in ideal]), shift),
    )


def _over(
    taps: Taps, positions: int, look: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """The first and the last over all taps of each position; one tap at a time, as a series may be long."""
    where = torch.arange(positions)
    first, last = torch.full_like(where, NOTHING), torch.full_like(where, -NOTHING)
    for k in range(taps.number):
        cells, read = taps.at(where, k)
        tap_first, tap_last, there = look(cells)
        for condition in (read, there):
            if condition is not None:
                tap_first = tap_first.where(condition, NOTHING)
                tap_last = tap_last.where(condition, -NOTHING)
        first, last = torch.minimum(first, tap_first), torch.maximum(last, tap_last)
    return first, last


def _back_inside(cells: Tensor, size: int, outside: Outside) -> Tensor:
    if outside == "reflect":
        cells = cells.abs()
        return torch.where(cells < size, cells, 2 * (size - 1) - cells)
    if outside == "replicate":
        return cells.clamp(0, size - 1)
    return cells % size if outside == "circular" else cells


def _shortest(first: Tensor, last: Tensor, shift: int) -> tuple[Tensor, Tensor, int]:
    """The same ideal reach with the shortest period."""
    period = len(first)
    for length in range(1, period):
        if period % length or shift * length % period:
            continue
        moved = shift * length // period
        empty = (first > last)[:-length]
        if all(
            torch.equal(torch.where(empty, ends[:-length], ends[:-length] + moved), ends[length:])
            for ends in (first, last)
        ):
            return first[:length], last[:length], moved
    return first, last, shift


def _smallest(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).min(0).values
