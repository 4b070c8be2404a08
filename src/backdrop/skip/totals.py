"""What goes over all of a map while it is computed in tiles: the map itself, statistics of it, means of it.

Each takes in a tile in two steps: `measure` finds what a part contributes, which is small but for a map, and `add` adds
that up. So a part that is known to be the same as an earlier one need not be measured again. Means and variances are
merged pairwise (Chan, Golub and LeVeque, 1983) in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backdrop.skip.epilogue import Moments
from backdrop.skip.tiles import Box, Interval


class Assembled:
    """The map itself."""

    def __init__(self, like: Tensor, batch: int, axes: Sequence[int]) -> None:
        self.shape, self.stride, self.batch, self.axes = tuple(like.shape), like.stride(), batch, axes
        self.found: Tensor | None = None

    def measure(self, x: Tensor) -> Tensor:
        return x.detach()

    def add(self, samples: Interval, box: Box, x: Tensor) -> None:
        if self.found is None:
            dense = math.prod(self.shape) == 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            kind: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
            self.found = torch.empty_strided(self.shape, self.stride, **kind) if dense else x.new_empty(self.shape)
        part = self.found.narrow(self.batch, samples[0], samples[1] - samples[0])
        for axis, (a, b) in zip(self.axes, box, strict=True):
            part = part.narrow(axis, a, b - a)
        part.copy_(x)

    def result(self) -> Tensor:
        assert self.found is not None
        return self.found


class Spread:
    """Mean and variance of groups of numbers: of each channel, or of groups of channels of each sample."""

    def __init__(self, samples: int, groups: int | None) -> None:
        self.samples, self.groups = samples, groups
        self.count: Tensor | None = None
        self.mean, self.squares = torch.empty(0), torch.empty(0)

    def measure(self, x: Tensor) -> tuple[int, Tensor, Tensor]:
        """How many numbers, their mean, and their squared distances from it added up."""
        x = x.detach()
        x = x.float() if x.dtype.itemsize < 4 else x
        if self.groups is None:
            variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != 1], correction=0)
            count = x.numel() // x.shape[1]
        else:
            x = x.reshape(len(x), self.groups, -1)
            variance, mean = torch.var_mean(x, 2, correction=0)
            count = x.shape[2]
        return count, mean.double(), variance.double() * count

    def add(self, samples: Interval, box: Box, part: tuple[int, Tensor, Tensor]) -> None:
        number, mean, squares = part
        if self.count is None:
            shape = mean.shape if self.groups is None else (self.samples, *mean.shape[1:])
            self.count = mean.new_zeros(shape)
            self.mean, self.squares = mean.new_zeros(shape), mean.new_zeros(shape)
        here = slice(None) if self.groups is None else slice(*samples)
        count = self.count[here]
        distance, total = mean - self.mean[here], count + number
        self.mean[here] += distance * (number / total)
        self.squares[here] += squares + distance.square() * (count * number / total)
        self.count[here] = total

    @property
    def number(self) -> int:
        """Of numbers in each group."""
        return 0 if self.count is None else int(self.count.max())

    def variance(self, *, unbiased: bool = False) -> Tensor:
        assert self.count is not None
        return self.squares / (self.count - 1 if unbiased else self.count)

    def moments(self, eps: float, dtype: torch.dtype) -> Moments:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        return Moments(self.mean.to(kind), (self.variance() + eps).rsqrt().to(kind))


class Mean:
    """The mean over all positions of each sample, in the shape of the call that takes it."""

    def __init__(self, shape: Sequence[int], axes: Sequence[int], cells: int, keeps: bool) -> None:
        self.shape, self.axes, self.cells, self.keeps = tuple(shape), list(axes), cells, keeps
        self.sum: Tensor | None = None
        self.dtype = torch.float32

    def measure(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        return x.detach().sum(self.axes, keepdim=self.keeps, dtype=torch.float64), x.dtype

    def add(self, samples: Interval, box: Box, part: tuple[Tensor, torch.dtype]) -> None:
        total, self.dtype = part
        if self.sum is None:
            self.sum = total.new_zeros(self.shape)
        self.sum[slice(*samples)] += total

    def result(self) -> Tensor:
        assert self.sum is not None
        return (self.sum / self.cells).to(self.dtype)
