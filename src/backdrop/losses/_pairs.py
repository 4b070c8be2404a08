"""Means over all pairs of a positive and a negative score, with their gradient, in memory that grows with n alone.

For scores x, weights u of the positives and v of the negatives, the others zero, all compute

    L = sum_ij u_i v_j f(x_j - x_i) / (sum_i u_i * sum_j v_j)

and dL/dx along with it, because one walk over the scores gives both. All is (problems, n), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backdrop._batches import Batch, wide
from backdrop.losses._soft_ranks import NO_SECOND, comparable, sums, terms_for

PAIRS = 2**18  # in work at a time, and up to which all at once are faster than sorting
FEW = 32  # scores of a kind: then sorting the others takes longer than it saves
Means: TypeAlias = tuple[Tensor, Tensor]  # L (problems,), dL/dx (problems, n)
Compare: TypeAlias = Callable[[Tensor, Tensor, Tensor], Means]


def mean_over_pairs(batch: Batch, compare: Compare) -> Tensor:
    """The mean over problems, in the dtype of their weights."""
    scores, u, v = batch.columns()
    losses: Tensor = PairLoss.apply(scores, u, v, compare)  # type: ignore[no-untyped-call]
    return (losses.mean() if len(losses) > 1 else losses[0]).to(wide(scores))


class PairLoss(torch.autograd.Function):
    """L of each problem as a function of its scores; `compare` computes it, with the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, u: Tensor, v: Tensor, compare: Compare) -> Tensor:
        value, gradient = compare(scores.detach(), u, v)
        broken = scores.isnan().any(1)  # sorting would hide it
        ctx.save_for_backward(gradient.masked_fill_(broken[:, None], math.nan), scores)
        return value.masked_fill_(broken, math.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, scores = ctx.saved_tensors
        product: Tensor = Once.apply((grad[:, None] * gradient).to(scores.dtype), scores)  # type: ignore[no-untyped-call]
        return product, None, None, None


class Once(torch.autograd.Function):
    """A gradient that depends on the scores too, in a way that is not known here."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, scores: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(NO_SECOND)


def rank_statistic(scores: Tensor, u: Tensor, v: Tensor, temperature: float) -> Means:
    """f(x) = sigmoid(x / temperature)."""
    x = comparable(scores)
    total = u.sum(1) * v.sum(1)
    if tiles := _tiles(u, v):
        value, gradient = torch.zeros_like(total), torch.zeros_like(x)
        for i, j in tiles:
            a, b = u[0, i], v[0, j]
            y = (x[0, j] - x[0, i, None]).div_(temperature / 4)
            slope = y.neg().sigmoid_()
            value += a @ (y.sigmoid_() @ b)
            slope.mul_(y)
            gradient[0].index_add_(0, i, a * (slope @ b), alpha=-1)
            gradient[0].index_add_(0, j, b * (a @ slope))
    else:
        above, slope = sums(x, torch.stack([v, u], 1), temperature, terms_for(scores), 1)
        value = torch.linalg.vecdot(u, above[:, 0])
        gradient = (v * slope[:, 1]).sub_(u * slope[:, 0])
    return value / total, gradient.div_(temperature).div_(total[:, None])


def _tiles(u: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The positives and the negatives, tile by tile, where there are so few that all pairs at once are faster."""
    if len(u) > 1:
        return []
    i, j = (each[0].nonzero()[:, 0] for each in (u, v))
    few, many = sorted((len(i), len(j)))
    if few > FEW and few * many > PAIRS:
        return []
    step = max(1, PAIRS // max(few, 1))
    parts = torch.split(j if len(i) < len(j) else i, step)
    return [(i, part) if len(i) < len(j) else (part, j) for part in parts]


def squared_hinge(scores: Tensor, u: Tensor, v: Tensor, margin: float) -> Means:
    """f(x) = max(0, margin + x)^2.

    A positive counts as `score - margin`. The negatives that count for it are those above, so those before it where all
    are in descending order. The sum of squares of the distances to them follows from their weight, mean and spread,
    which are accumulated along the order. Every term is positive, so nothing cancels. Scores are measured in units of
    the largest, so nothing overflows.
    """
    x, total = scores.double(), u.sum(1) * v.sum(1)
    infinite = x.isinf()
    some = bool(infinite.any())
    finite_u, finite_v, x = (u, v, x) if not some else (*(w * ~infinite for w in (u, v)), x.masked_fill(infinite, 0))
    if tiles := _tiles(finite_u, finite_v):
        value, gradient = torch.zeros_like(total), torch.zeros_like(x)
        for i, j in tiles:
            a, b = finite_u[0, i], finite_v[0, j]
            y = (x[0, j] - x[0, i, None]).add_(margin).clamp_(min=0)
            gradient[0].index_add_(0, i, a * (y @ b), alpha=-2)
            gradient[0].index_add_(0, j, b * (a @ y), alpha=2)
            value += a @ (y.square_() @ b)
    else:
        value, gradient = _sorted_hinge(x, finite_u, finite_v, margin)
    value, gradient = value / total, gradient.div_(total[:, None])
    return _with_infinite(scores, u, v, margin, value, gradient) if some else (value, gradient)


def _sorted_hinge(x: Tensor, u: Tensor, v: Tensor, margin: float) -> Means:
    counted = (u + v) > 0
    unit = x.masked_fill(~counted, 0).abs().amax(1, keepdim=True).clamp(min=max(margin, 1.0))
    shift = (u > 0).double() * margin
    key, order = (x / unit - shift / unit).masked_fill(~counted, 0).sort(descending=True)
    u, v = u.gather(1, order), v.gather(1, order)
    above, below = _accumulate(v, key), tuple(each.flip(1) for each in _accumulate(u.flip(1), key.flip(1)))
    apart = above[1] - key
    value = (u * (above[0] * apart.square() + above[2])).sum(1)
    value = value * unit[:, 0] * unit[:, 0]  # in this order, so that 0 stays 0
    gradient = (v * below[0] * (key - below[1])).sub_(u * above[0] * apart).mul_(2 * unit)
    return value, torch.empty_like(gradient).scatter_(1, order, gradient)


def _accumulate(weight: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, mean and squares about the mean of the first 1, 2, 3, ... items: for pairs first, then those between."""

    def run(items: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        n = items[0].shape[1]
        if n == 1:
            return items
        even, odd = tuple(x[:, 0::2] for x in items), tuple(x[:, 1::2] for x in items)
        pairs = run(_merge(tuple(x[:, : n // 2] for x in even), odd))
        between = _merge(tuple(x[:, : (n - 1) // 2] for x in pairs), tuple(x[:, 1:] for x in even))
        result = tuple(torch.empty_like(x) for x in items)
        for whole, first, middle, pair in zip(result, items, between, pairs, strict=True):
            whole[:, 0], whole[:, 2::2], whole[:, 1::2] = first[:, 0], middle, pair
        return result

    weight, mean, spread = run((weight, mean, torch.zeros_like(mean)))
    return weight, mean, spread


def _merge(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    weight = one[0] + two[0]
    share = (two[0] / weight).nan_to_num_(0.0)  # without weight on either side
    apart = two[1] - one[1]
    return weight, one[1] + apart * share, one[2] + two[2] + apart.square() * one[0] * share


def _with_infinite(scores: Tensor, u: Tensor, v: Tensor, margin: float, value: Tensor, gradient: Tensor) -> Means:
    """With pairs that have an infinite score: a tie costs margin^2, the wrong order is infinite, the right one free."""
    total = (u.sum(1) * v.sum(1))[:, None]
    high, low = scores == math.inf, scores == -math.inf
    ties = torch.zeros_like(gradient)
    for same in (high, low):
        sums_u, sums_v = ((w * same).sum(1, keepdim=True) for w in (u, v))
        ties += same * (v * sums_u - u * sums_v)
        value = value + margin * margin * (sums_u * sums_v / total)[:, 0]
    gradient = gradient + 2 * margin * ties / total
    u, v = u > 0, v > 0
    worst_u, worst_v = (u & low).any(1, keepdim=True), (v & high).any(1, keepdim=True)
    wrong_u = u & ((low & (v & ~low).any(1, keepdim=True)) | (~high & worst_v))
    wrong_v = v & ((high & (u & ~high).any(1, keepdim=True)) | (~low & worst_u))
    value = value.masked_fill(wrong_u.any(1), math.inf)
    return value, gradient.masked_fill(wrong_u, -math.inf).masked_fill(wrong_v, math.inf)
