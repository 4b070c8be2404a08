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
from backdrop.losses._soft_ranks import Scores, comparable, full_precision, in_parts, signed, spread_of, sums, terms_for

PAIRS = 2**18  # in work at a time, and up to which all at once are faster than sorting
FEW = 32  # scores of a kind: then sorting the others takes longer than it saves
FAR = 1e150  # up to which sums of squares do not overflow
Means: TypeAlias = tuple[Tensor, Tensor]  # L, dL/dx


def with_gradient(compute: Callable[..., tuple[Tensor | None, ...]], *inputs: Tensor) -> Tensor:
    """A loss that is computed along with its gradients: `compute` gives the loss of its inputs, and one of each."""
    if torch._C._are_functorch_transforms_active():
        return _Transformed.apply(compute, *inputs)[0]  # type: ignore[no-any-return, no-untyped-call]
    return WithGradient.apply(compute, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        with full_precision(inputs[0]):
            value, *gradients = compute(*inputs)
        kind = wide(inputs[0])
        ctx.save_for_backward(*inputs, *(each if each is None else each.to(kind) for each in gradients))
        return value.to(kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_products(grad, ctx.saved_tensors, torch.is_grad_enabled())


def _products(grad: Tensor, saved: tuple[Tensor, ...], guarded: bool) -> list[Tensor | None]:
    inputs, gradients = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    found: list[Tensor | None] = []
    for x, gradient in zip(inputs, gradients, strict=True):
        product = None if gradient is None else (grad * gradient).to(x.dtype)
        found.append(once(product, *inputs) if guarded and product is not None else product)
    return found


class _Transformed(torch.autograd.Function):
    """The same under `torch.func`: a little slower. vmap goes over inputs; labels decide what is computed."""

    @staticmethod
    @signed
    def forward(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        with full_precision(inputs[0]):
            value, *gradients = compute(*(x.detach() for x in inputs))
        return value.to(wide(inputs[0])), *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[1:], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return None, *_products(grad, ctx.saved_tensors, True)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Any:
        rows = [
            [x if dim is None else x.select(dim, k) for x, dim in zip(inputs, dims[1:], strict=True)]
            for k in range(info.batch_size)
        ]
        found = [_Transformed.apply(compute, *row) for row in rows]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0,) * (1 + len(inputs))


# For positives i and negatives j, by their numbers, and their weights (None: all 1): sum_ij u_i v_j f(x_j - x_i), and
# over `factor` its derivatives by x_j, and by -x_i.
Tile: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]


class Kernel(NamedTuple):
    """f, as two ways to sum it up: over all pairs, and over sorted scores."""

    # For scores (n,), and whether one of them is NaN, if that is known; no tile where only `ordered` will do.
    prepare: Callable[[Tensor], tuple[Tile | None, Tensor | None]]
    # L and dL/dx of each problem for x, u and v, (problems, n), the weights in float64.
    ordered: Callable[[Tensor, Tensor, Tensor], Means]
    factor: float
    # Of the weights of negatives those that count.
    choose: Callable[[Tensor, Tensor], Tensor] | None = None
    # The same for scores (m,) that all have the weight 1: which count, and their weights; None if it is not simple.
    choose_few: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None


def mean_over_pairs(batch: Batch, kernel: Kernel) -> Tensor:
    """The mean over problems."""

    def compute(inputs: Tensor) -> Means:
        if batch.sides is not None:
            given = inputs.detach().view(-1)
            pairs = _Pairs(given, batch.sides, batch.weight, kernel)
            few, many = sorted((len(pairs.i), len(pairs.j)))
            tile, broken = kernel.prepare(given) if few <= FEW or few * many <= PAIRS else (None, None)
            if tile is not None:
                value, gradient = _all_pairs(given, pairs, tile, kernel.factor)
                if broken is not None:
                    value, gradient = value.masked_fill(broken, math.nan), gradient.masked_fill_(broken, math.nan)
                return value, gradient.view(inputs.shape)
        x, u, v = batch._replace(inputs=inputs).columns()
        x = x.detach()
        value, gradient = kernel.ordered(x, u, v if kernel.choose is None else kernel.choose(x, v))
        return mean_over_problems(x, value, gradient, batch)

    return with_gradient(compute, batch.inputs)


def mean_over_problems(x: Tensor, value: Tensor, gradient: Tensor, batch: Batch) -> Means:
    broken = x.isnan().any(1)  # sorting would hide it
    value = value.masked_fill(broken, math.nan).mean()
    gradient = (gradient.masked_fill(broken[:, None], math.nan) / len(x)).T
    if batch.inputs.ndim == 2 and len(batch.present) < batch.inputs.shape[1]:
        where = torch.tensor(batch.present, device=x.device)
        gradient = gradient.new_zeros(batch.inputs.shape).index_copy_(1, where, gradient)
    return value, gradient.reshape(batch.inputs.shape)


class _Pairs:
    """Positives i and negatives j of one problem, with their weights (None: all 1), those that count alone."""

    def __init__(self, x: Tensor, sides: tuple[Tensor, Tensor], weight: Tensor | None, kernel: Kernel) -> None:
        self.i, self.j = sides
        self.u = None if weight is None else weight[self.i].double()
        self.v = None if weight is None else weight[self.j].double()
        if kernel.choose is None:
            return
        x = x[self.j]
        if weight is None and kernel.choose_few is not None and (found := kernel.choose_few(x)) is not None:
            self.j, self.v = self.j[found[0]], found[1]
            return
        v = torch.ones_like(self.j, dtype=torch.float64) if self.v is None else self.v
        v = kernel.choose(x[None], v[None])[0]
        counted = v != 0
        self.j, self.v = self.j[counted], v[counted]


def _all_pairs(x: Tensor, pairs: _Pairs, tile: Tile, factor: float) -> Means:
    i, j, u, v = pairs.i, pairs.j, pairs.u, pairs.v
    gradient = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    total = (len(i) if u is None else u.sum()) * (len(j) if v is None else v.sum())
    alone = len(i) * len(j) <= PAIRS
    if alone and not isinstance(total, Tensor):
        value, to_a, to_b = tile(i, j, u, v)
        gradient.index_add_(0, i, to_a, alpha=-factor / total).index_add_(0, j, to_b, alpha=factor / total)
        return value / total, gradient
    value = gradient.new_zeros(())
    step, longer = max(1, PAIRS // min(len(i), len(j))), max(len(i), len(j))
    for part in (slice(k, k + step) for k in range(0, longer, step)):  # tiles along the longer side
        r, c = (slice(None), part) if len(j) == longer else (part, slice(None))
        found, to_a, to_b = tile(i[r], j[c], None if u is None else u[r], None if v is None else v[c])
        value = value + found
        gradient.index_add_(0, i[r], to_a, alpha=-1).index_add_(0, j[c], to_b)
    return value / total, gradient.mul_(factor / total)


def rank_statistic(
    temperature: float,
    choose: Callable[[Tensor, Tensor], Tensor] | None = None,
    choose_few: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None,
) -> Kernel:
    """f(x) = sigmoid(x / temperature)."""

    def prepare(x: Tensor) -> tuple[Tile, Tensor | None]:
        scores = Scores(x, temperature)

        def tile(i: Tensor, j: Tensor, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            matrix = scores.matrix(i, j)
            above = matrix.above(v)
            value = above.sum() if u is None else u @ above
            to_a, to_b = matrix.slopes(v), matrix.slopes_to(u)
            return value, to_a if u is None else to_a.mul_(u), to_b if v is None else to_b.mul_(v)

        return tile, scores.broken

    def ordered(x: Tensor, u: Tensor, v: Tensor) -> Means:
        above, slope = sums(comparable(x), torch.stack([v, u], 1), temperature, terms_for(x), 1)
        total = u.sum(1) * v.sum(1)
        gradient = (v * slope[:, 1]).sub_(u * slope[:, 0])
        return (u * above[:, 0]).sum(1) / total, gradient.div_(temperature * total[:, None])

    return Kernel(prepare, ordered, 1 / temperature, choose, choose_few)


def squared_hinge(margin: float) -> Kernel:
    """f(x) = max(0, margin + x)^2."""

    def prepare(x: Tensor) -> tuple[Tile | None, Tensor | None]:
        if not spread_of(x) + margin < FAR:
            return None, None
        wide = x.double()

        def tile(i: Tensor, j: Tensor, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            y = (wide[j] - wide[i, None]).add_(margin).clamp_(min=0)
            to_a, to_b = (y.sum(1), y.sum(0)) if u is None or v is None else ((y @ v).mul_(u), (u @ y).mul_(v))
            y.square_()
            return y.sum() if u is None or v is None else u @ (y @ v), to_a, to_b

        return tile, None

    def ordered(x: Tensor, u: Tensor, v: Tensor) -> Means:
        value, gradient = in_parts(partial(sorted_hinge, margin=margin), x.double(), u, v)
        return value, gradient

    return Kernel(prepare, ordered, 2.0)


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
