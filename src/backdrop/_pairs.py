"""Means over all pairs of a positive and a negative score, with their gradient, in memory that grows with n alone.

For positive scores a_i and negative scores b_j with weights u_i and v_j, both compute

    L = sum_ij u_i v_j f(b_j - a_i) / (sum_i u_i * sum_j v_j)

and dL/da, dL/db along with it, because one walk over the pairs gives both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# Pairs in a tile: what stays in a core's cache, and what fills a GPU.
TILE = {"cpu": 2**17, "cuda": 2**24}
MOST = {"cpu": 2**13, "cuda": 2**17}  # negatives in a tile, whose sum is rounded as a whole
FEW = 32  # scores of a kind: then sorting the others takes longer than it saves
# Beyond these, sigmoid(x) is exactly 0, and exactly 1.
ZERO = {torch.float32: -104.0, torch.float64: -746.0}
ONE = {torch.float32: 17.5, torch.float64: 37.5}


class Side(NamedTuple):
    """The scores of one kind, and their weights."""

    scores: Tensor
    weight: Tensor


Means: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]  # L, dL/da, dL/db
Compare: TypeAlias = Callable[[Side, Side, bool], Means]


class PairLoss(torch.autograd.Function):
    """A mean over pairs as a function of all scores; `compare` computes it, with the gradient if that is wanted.

    It is computed in the dtype of the weights.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, positive: Tensor, weight: Tensor, compare: Compare) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        wide = scores.detach().to(weight.dtype)
        sides = [Side(wide[which], weight[which]) for which in (positive, ~positive)]
        with torch.autocast(scores.device.type, enabled=False):
            value, *gradients = compare(sides[0], sides[1], wanted)
        broken = wide.isnan().any()  # sorting would hide it
        value = value.masked_fill(broken, torch.nan)
        if wanted:
            gradient = torch.empty_like(wide)
            for which, part in zip((positive, ~positive), gradients, strict=True):
                assert part is not None
                gradient[which] = part.to(wide.dtype)
            ctx.save_for_backward(gradient.masked_fill_(broken, torch.nan), scores)
        return value.to(wide.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, scores = ctx.saved_tensors
        product: Tensor = _Once.apply((grad * gradient).to(scores.dtype), scores)  # type: ignore[no-untyped-call]
        return product, None, None, None


class _Once(torch.autograd.Function):
    """A gradient that depends on the scores too, in a way that is not known here."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, scores: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError("losses over pairs have no second derivatives here; they are computed along with the first")


def rank_statistic(positive: Side, negative: Side, gradient: bool, temperature: float) -> Means:
    """f(x) = sigmoid(x / temperature), tile by tile over sorted scores, but for tiles where it is exactly 0 or 1."""
    many = min(len(positive.scores), len(negative.scores)) > FEW
    (a, u, a_order), (b, v, b_order) = (_sorted(side) if many else (*side, None) for side in (positive, negative))
    weight_of_all = v.sum(dtype=torch.float64)
    total = u.sum(dtype=torch.float64) * weight_of_all
    device = "cpu" if a.is_cpu else "cuda"
    budget = TILE[device]
    rows = min(len(a), max(32, budget // len(b)))
    columns = max(1, min(budget // rows, MOST[device]))
    firsts = range(0, len(a), rows)
    begins, ends = [0] * len(firsts), [len(b)] * len(firsts)
    if many:
        lows, highs = a[::rows], a[[min(first + rows, len(a)) - 1 for first in firsts]]
        begins = torch.searchsorted(b, lows + ZERO[a.dtype] * temperature).tolist()
        ends = torch.searchsorted(b, highs + ONE[a.dtype] * temperature).tolist()
    above = weight_of_all - v.cumsum(0, dtype=torch.float64)  # the weight of negatives above each
    value = a.new_zeros((), dtype=torch.float64)
    to_a, to_b = torch.zeros_like(a), torch.zeros_like(b)
    scratch = a.new_empty(rows * columns)
    for first, begin, end in zip(firsts, begins, ends, strict=True):
        r = slice(first, min(first + rows, len(a)))
        if end < len(b):
            value += u[r].sum(dtype=torch.float64) * (above[end - 1] if end else weight_of_all)
        for column in range(begin, end, columns):
            c = slice(column, min(column + columns, end))
            y = scratch[: (r.stop - r.start) * (c.stop - c.start)].view(r.stop - r.start, -1)
            torch.sub(b[c], a[r, None], out=y)
            if temperature != 1:
                y.div_(temperature)
            y.sigmoid_()
            value += u[r] @ (y @ v[c])
            if gradient:
                y.addcmul_(y, y, value=-1)  # the derivative, sigmoid - sigmoid^2
                to_a[r].sub_(y @ v[c])
                to_b[c].add_(u[r] @ y)
    if not gradient:
        return value / total, None, None
    for sums, weight in ((to_a, u), (to_b, v)):
        sums.mul_(weight).div_(temperature).div_(total)
    return value / total, _unsorted(to_a, a_order), _unsorted(to_b, b_order)


def squared_hinge(positive: Side, negative: Side, gradient: bool, margin: float) -> Means:
    """f(x) = max(0, margin + x)^2, in O(n log n).

    The negatives that count for a_i are those above a_i - margin, so the first ones in descending order. The sum of
    (margin - a_i + b_j)^2 over them follows from their weight, mean and spread, which are accumulated along the order.
    Every term is positive, so nothing cancels. Scores are measured in units of the largest, so nothing overflows.
    """
    scores = [side.scores.double() for side in (positive, negative)]
    u, v = positive.weight.double(), negative.weight.double()
    unit = torch.cat([*scores, u.new_tensor([margin, 1.0])]).abs().amax()
    a, b = margin / unit - scores[0] / unit, scores[1] / unit
    u, v = u / u.sum(), v / v.sum()
    weight, shifted, spread = _sums_above(a, b, v)
    value = (u * (weight * shifted.square() + spread)).sum() * unit * unit
    if not gradient:
        return value, None, None
    to_a = -2 * u * weight * shifted * unit
    weight, shifted, _ = _sums_above(b, a, u)
    return value, to_a, 2 * v * weight * shifted * unit


def _sums_above(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each x, over all y with x + y > 0: their weight, the mean of x + y, and the weighted squares about it.

    Where there is none, the mean and the squares are zero.
    """
    y, order = y.sort(descending=True)
    count = torch.searchsorted(-y, x)
    none = count == 0
    last = (count - 1).clamp(min=0)
    total, mean, spread = (each[last] for each in _accumulate(weight[order], y, torch.zeros_like(y)))
    zero = x.new_zeros(())
    return total, torch.where(none, zero, mean + x), torch.where(none, zero, spread)


def _accumulate(weight: Tensor, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, mean and squares about the mean of the first 1, 2, 3, ... items: for pairs first, then those between."""
    items = (weight, mean, spread)
    if len(weight) == 1:
        return items
    even, odd = tuple(x[0::2] for x in items), tuple(x[1::2] for x in items)
    pairs = _accumulate(*_merge(tuple(x[: len(odd[0])] for x in even), odd))
    between = _merge(tuple(x[: len(even[0]) - 1] for x in pairs), tuple(x[1:] for x in even))
    result = tuple(torch.empty_like(x) for x in items)
    for whole, first, middle, pair in zip(result, items, between, pairs, strict=True):
        whole[0], whole[2::2], whole[1::2] = first[0], middle, pair
    return result[0], result[1], result[2]


def _merge(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    weight = one[0] + two[0]
    share = torch.where(weight > 0, two[0] / weight, 0.0)
    apart = two[1] - one[1]
    return weight, one[1] + apart * share, one[2] + two[2] + apart.square() * one[0] * share


def _sorted(side: Side) -> tuple[Tensor, Tensor, Tensor]:
    scores, order = side.scores.sort()
    return scores, side.weight[order], order


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else torch.empty_like(x).index_copy_(0, order, x)
