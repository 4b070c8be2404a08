"""Means over all pairs of a positive and a negative score, with their gradient, in memory that grows with n alone.

For scores x, weights u of the positives and v of the negatives, all compute

    L = sum_ij u_i v_j f(x_j - x_i) / (sum_i u_i * sum_j v_j)

and dL/dx along with it, because one walk over the scores gives both. Few pairs are taken all at once, many by way of
the order of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from backdrop.losses._batches import Batch, wide
from backdrop.losses._loss import once
from backdrop.losses._soft_ranks import (
    comparable,
    full_precision,
    in_parts,
    scaled,
    sigmoids,
    signed,
    spread_of,
    sums,
    terms_for,
)

PAIRS = 2**18  # in work at a time, and up to which all at once are faster than sorting
FEW = 32  # scores of a kind: then sorting the others takes longer than it saves
Means: TypeAlias = tuple[Tensor, Tensor]  # L, dL/dx


def with_gradient(scores: Tensor, compute: Callable[[Tensor], Means]) -> Tensor:
    """A loss that is computed along with its gradient: `compute` gives both for the scores."""
    if torch._C._are_functorch_transforms_active():
        return _Transformed.apply(scores, compute)[0]  # type: ignore[no-any-return, no-untyped-call]
    return WithGradient.apply(scores, compute)  # type: ignore[no-any-return, no-untyped-call]


class WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, compute: Callable[[Tensor], Means]) -> Tensor:
        with full_precision(scores):
            value, gradient = compute(scores.detach())
        ctx.save_for_backward(gradient, scores)
        return value.to(wide(scores))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient, scores = ctx.saved_tensors
        product = (grad * gradient).to(scores.dtype)
        if torch.is_grad_enabled():
            product = once(product, scores)
        return product, None


class _Transformed(torch.autograd.Function):
    """The same under `torch.func`: a little slower. vmap goes over scores; labels decide what is computed."""

    @staticmethod
    @signed
    def forward(scores: Tensor, compute: Callable[[Tensor], Means]) -> Means:
        with full_precision(scores):
            value, gradient = compute(scores.detach())
        return value.to(wide(scores)), gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Means) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        gradient, scores = ctx.saved_tensors
        return once((grad * gradient).to(scores.dtype), scores), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], scores: Tensor, compute: Callable[[Tensor], Means]) -> Any:
        found = [_Transformed.apply(each, compute) for each in scores.movedim(dims[0], 0)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0, 0)


class Kernel(NamedTuple):
    """f, as two ways to sum it up: over all pairs, and over sorted scores."""

    # Scores in the dtype to compute in, and what f(x) shall be divided by; None where only `ordered` will do.
    prepare: Callable[[Tensor], tuple[Tensor, float] | None]
    # For positives a, negatives b, their weights (None: all 1) and that divisor: sum_ij u_i v_j f(b_j - a_i), and over
    # `factor` its derivatives by b, and by -a.
    tile: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]
    # L and dL/dx of each problem for x, u and v, (problems, n), the weights in float64.
    ordered: Callable[[Tensor, Tensor, Tensor], Means]
    factor: float
    # Of the weights of negatives those that count.
    choose: Callable[[Tensor, Tensor], Tensor] | None = None


def mean_over_pairs(batch: Batch, kernel: Kernel) -> Tensor:
    """The mean over problems."""

    def compute(inputs: Tensor) -> Means:
        if batch.sides is not None:
            given = inputs[:, batch.present[0]]
            pairs = _Pairs(given, batch.sides, batch.weight, kernel)
            few, many = sorted((len(pairs.i), len(pairs.j)))
            if (few <= FEW or few * many <= PAIRS) and (prepared := kernel.prepare(given)) is not None:
                return _all_pairs(pairs, *prepared, batch, kernel)
        x, u, v = batch._replace(inputs=inputs).columns()
        x = x.detach()
        value, gradient = kernel.ordered(x, u, v if kernel.choose is None else kernel.choose(x, v))
        return mean_over_problems(x, value, gradient, batch)

    return with_gradient(batch.inputs, compute)


def mean_over_problems(x: Tensor, value: Tensor, gradient: Tensor, batch: Batch) -> Means:
    broken = x.isnan().any(1)  # sorting would hide it
    value = value.masked_fill(broken, math.nan).mean()
    gradient = (gradient.masked_fill(broken[:, None], math.nan) / len(x)).T
    if len(batch.present) < batch.inputs.shape[1]:
        where = torch.tensor(batch.present, device=x.device)
        gradient = gradient.new_zeros(batch.inputs.shape).index_copy_(1, where, gradient)
    return value, gradient


class _Pairs:
    """Positives i and negatives j of one problem, with their weights (None: all 1), those that count alone."""

    def __init__(self, x: Tensor, sides: tuple[Tensor, Tensor], weight: Tensor | None, kernel: Kernel) -> None:
        self.given, (self.i, self.j) = x, sides
        self.u = None if weight is None else weight[self.i]
        self.v = None if weight is None else weight[self.j]
        if kernel.choose is not None:
            v = torch.ones_like(self.j, dtype=torch.float64) if self.v is None else self.v.double()
            v = kernel.choose(x[self.j][None], v[None])[0]
            counted = v != 0
            self.j, self.v = self.j[counted], v[counted]


def _all_pairs(pairs: _Pairs, x: Tensor, divisor: float, batch: Batch, kernel: Kernel) -> Means:
    given, i, j = pairs.given, pairs.i, pairs.j
    u, v = (None if each is None else each.to(x.dtype) for each in (pairs.u, pairs.v))
    a, b = x[i], x[j]
    alone = len(i) * len(j) <= PAIRS
    gradient = torch.zeros(batch.inputs.shape, dtype=x.dtype if alone else torch.float64, device=x.device)
    column = gradient[:, batch.present[0]]
    if alone:
        value, to_a, to_b = kernel.tile(a, b, u, v, divisor)
        column.index_add_(0, i, to_a, alpha=-1).index_add_(0, j, to_b)
    else:  # tiles along the longer side
        value = gradient.new_zeros(())
        step, longer = max(1, PAIRS // min(len(i), len(j))), max(len(i), len(j))
        for part in (slice(k, k + step) for k in range(0, longer, step)):
            r, c = (slice(None), part) if len(j) == longer else (part, slice(None))
            found, to_a, to_b = kernel.tile(
                a[r], b[c], None if u is None else u[r], None if v is None else v[c], divisor
            )
            value = value + found
            column.index_add_(0, i[r], to_a.double(), alpha=-1).index_add_(0, j[c], to_b.double())
    total = (len(i) if u is None else u.sum()) * (len(j) if v is None else v.sum())
    value, gradient = value / total, gradient.mul_(kernel.factor / total)
    if x.dtype == torch.float64:  # else no score is NaN
        broken = given.isnan().any()
        value, gradient = value.masked_fill(broken, math.nan), gradient.masked_fill_(broken, math.nan)
    return value, gradient


def dot(x: Tensor, weight: Tensor | None) -> Tensor:
    """Sums over the last axis. In float32 torch's sums are more exact than its products."""
    return x.sum(-1) if weight is None else x @ weight if x.dtype == torch.float64 else (x * weight).sum(-1)


def times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def rank_statistic(temperature: float, choose: Callable[[Tensor, Tensor], Tensor] | None = None) -> Kernel:
    """f(x) = sigmoid(x / temperature)."""

    def prepare(x: Tensor) -> tuple[Tensor, float]:
        return scaled(x, temperature)

    def tile(a: Tensor, b: Tensor, u: Tensor | None, v: Tensor | None, divisor: float) -> tuple[Tensor, Tensor, Tensor]:
        slope, y = sigmoids(b - a[:, None], divisor)
        value = y.sum() if u is None and v is None else dot(dot(y, v), u)
        slope.mul_(y)
        to_a, to_b = dot(slope, v), dot(slope.T, u)
        return value, times(to_a, u), times(to_b, v)

    def ordered(x: Tensor, u: Tensor, v: Tensor) -> Means:
        above, slope = sums(comparable(x), torch.stack([v, u], 1), temperature, terms_for(x), 1)
        total = u.sum(1) * v.sum(1)
        gradient = (v * slope[:, 1]).sub_(u * slope[:, 0])
        return (u * above[:, 0]).sum(1) / total, gradient.div_(temperature * total[:, None])

    return Kernel(prepare, tile, ordered, 1 / temperature, choose)


def squared_hinge(margin: float) -> Kernel:
    """f(x) = max(0, margin + x)^2."""

    def prepare(x: Tensor) -> tuple[Tensor, float] | None:
        spread = spread_of(x) + margin
        if x.dtype != torch.float64 and spread < 1e15:  # sums of squares do not overflow
            return x.float(), 1.0
        return (x.double(), 1.0) if spread < math.inf else None

    def tile(a: Tensor, b: Tensor, u: Tensor | None, v: Tensor | None, divisor: float) -> tuple[Tensor, Tensor, Tensor]:
        y = (b - a[:, None]).add_(margin).clamp_(min=0)
        to_a, to_b = dot(y, v), dot(y.T, u)
        return dot(dot(y.square_(), v), u), times(to_a, u), times(to_b, v)

    def ordered(x: Tensor, u: Tensor, v: Tensor) -> Means:
        value, gradient = in_parts(partial(sorted_hinge, margin=margin), x.double(), u, v)
        return value, gradient

    return Kernel(prepare, tile, ordered, 2.0)


def sorted_hinge(x: Tensor, u: Tensor, v: Tensor, margin: float) -> Means:
    """The squared hinge by way of the order of the scores.

    A positive counts as `score - margin`. The negatives that count for it are those above, so those before it where all
    are in descending order. The sum of squares of the distances to them follows from their weight, mean and spread,
    which are accumulated along the order. Every term is positive, so nothing cancels. Scores are measured in units of
    the largest, so nothing overflows.
    """
    total, infinite = u.sum(1) * v.sum(1), x.isinf()
    if some := bool(infinite.any()):
        given, x, u_all, v_all = x, x.masked_fill(infinite, 0), u, v
        u, v = (w.masked_fill(infinite, 0) for w in (u, v))
    value, gradient = _sorted_hinge(x, u, v, margin)
    value, gradient = value / total, gradient / total[:, None]
    return _with_infinite(given, u_all, v_all, margin, value, gradient) if some else (value, gradient)


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
