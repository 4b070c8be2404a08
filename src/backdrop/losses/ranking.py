"""Soft ranks, and losses on ranks: average precision, NDCG, Spearman's correlation."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backdrop.distributed import Group, all_gather, not_compiled, resolve
from backdrop.losses._batches import (
    Batch,
    SingleClass,
    check_inputs,
    check_number,
    check_weights,
    gather_batch,
    make_weights,
    normalise,
    on_host,
    wide,
)
from backdrop.losses._loss import Loss, nothing_to_compare
from backdrop.losses._pairs import Means, mean_over_problems, with_gradient
from backdrop.losses._soft_ranks import PAIRS, SoftSums, comparable, in_parts, scaled, sigmoids, sorted_sums, terms_for

FEW = 4  # positives whose precision is taken from all pairs at once, however many samples there are

Gains: TypeAlias = Literal["exponential", "linear"]


@not_compiled
def soft_rank(scores: Tensor, *, temperature: float, weight: Tensor | None = None) -> Tensor:
    """Ranks that have a gradient: 1/2 + sum_j w_j sigmoid((s_i - s_j) / temperature), from 1 for the lowest score on.

    As the temperature goes to 0 they become ranks, with the mean rank for ties. All pairs count, in O(n log n) time and
    O(n) memory.

    Args:
        scores: (n,), or (n, columns) to rank each column by itself.
        temperature: how far apart scores have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0: a score with weight 2 counts like two of it, one with weight 0 takes no place.

    Returns:
        The ranks, of the shape of scores, float64 for float64 and float32 for all others.

    Examples:
        >>> soft_rank(torch.tensor([0.3, -1.0, 5.0]), temperature=0.01)
        tensor([2., 1., 3.])
    """
    temperature = check_number("temperature", temperature)
    check_inputs("scores", scores, scores, "error", None)
    if scores.ndim not in (1, 2):
        raise ValueError(f"scores has to have the shape (n,) or (n, columns), but got {tuple(scores.shape)}")
    columns = _columns(scores).T
    counts = torch.ones_like(columns, dtype=torch.float64)
    if weight is not None:
        given = make_weights(weight, scores)
        check_weights(bool(normalise(given)[0]))
        counts = counts * given
        columns = columns.masked_fill(given == 0, 0)
    below = soft_sums(-columns, counts[:, None], temperature)[:, 0]
    return (below + 0.5).to(wide(scores)).T.reshape(scores.shape)


def _columns(x: Tensor) -> Tensor:
    return x[:, None] if x.ndim == 1 else x


def soft_sums(x: Tensor, weight: Tensor, temperature: float, exact: bool = False) -> Tensor:
    """sum_j w_j sigmoid((x_j - x_i) / T) for scores (problems, n) and weights (problems, kinds, n), in float64.

    To `exact` places: in float64 also where there are few, for what takes differences of sums.
    """
    value: Tensor = SoftSums.apply(x, weight, temperature, exact)[0]  # type: ignore[no-untyped-call]
    return value


@not_compiled
def average_precision_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - smooth average precision: the area under the curve of precision over recall.

        L = 1 - sum_i u_i P_i / sum_i u_i,    P_i = (w_i + sum_(j != i) u_j y_ij) / (w_i + sum_(j != i) w_j y_ij)

    over positives i, with y_ij = sigmoid((s_j - s_i) / temperature), weights w, and u those of the positives, 0 for
    negatives. As the temperature goes to 0 without ties it becomes 1 - average precision. O(n log n) time, O(n) memory.

    Args:
        scores: (n,) or (n, 1). With (n, classes) the mean over the classes that have both, each against the rest.
        labels: (n,), (n, 1) or (n, classes) as for `rank_statistic_loss`.
        temperature: how far apart scores have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0, as in scikit-learn's `average_precision_score`; 0 is padding.
        single_class: "error" or "zero" for a batch that has positives only or negatives only.
        group: processes over whose samples the loss is taken.

    Examples:
        >>> average_precision_loss(torch.tensor([2.0, 0.5, -1.0]), torch.tensor([1, 0, 1]), temperature=0.01)
        tensor(0.1667)
    """
    temperature = check_number("temperature", temperature)
    batch = gather_batch("scores", scores, labels, weight, single_class, group)
    if not batch.present:
        return nothing_to_compare(batch.inputs, single_class)

    def compute(inputs: Tensor) -> Means:
        (positives, _), n = batch.counts[0], len(inputs)
        if batch.sides is not None and positives * n <= max(PAIRS, FEW * n):
            return _precision_of_few(inputs[:, batch.present[0]], batch.sides[0], batch, temperature)
        x, u, v = batch._replace(inputs=inputs).columns()
        value, gradient = in_parts(partial(_precision, temperature=temperature), x.detach(), u, v)
        return mean_over_problems(x, value, gradient, batch)

    return with_gradient(batch.inputs, compute)


def _precision(x: Tensor, u: Tensor, v: Tensor, temperature: float) -> Means:
    """L and dL/dx of each problem, for weights of positives and negatives."""
    ordered, order = comparable(x).sort()
    u, v = u.gather(1, order), v.gather(1, order)
    weights, terms = torch.stack([u, v], 1), terms_for(x)
    value, slope = sorted_sums(ordered, weights, temperature, terms, 2)
    loss, to = _shares_wrong(u, value.unbind(1), 1)
    other = sorted_sums(ordered, to, temperature, terms, 0)[1]
    gradient = (weights * other).sub_(to * slope).sum(1).div_(temperature)
    return loss, torch.empty_like(gradient).scatter_(1, order, gradient)


def _shares_wrong(own: Tensor, above: tuple[Tensor, ...], dim: int) -> tuple[Tensor, Tensor]:
    """L, and its derivatives by the weights of positives and of negatives above each positive, which are given.

    As the share of negatives, 1 - P_i = wrong / (hits + wrong): where it is small, 1 - hits / all has no digits. Of
    itself each positive has y_ii w_i = w_i / 2 in the sum over positives.
    """
    hits, wrong = above[0] + own / 2, above[1]
    everything = (hits + wrong).masked_fill_(own == 0, 1)
    share = own / own.sum(dim, keepdim=True) / everything
    missed = wrong / everything
    return (share * wrong).sum(dim), torch.stack([-share * missed, share * (hits / everything)], dim)


def _precision_of_few(given: Tensor, i: Tensor, batch: Batch, temperature: float) -> Means:
    """The same for few positives in one problem, by the matrix of these and all."""
    x, divisor = scaled(given, temperature)
    column = batch.present[0]
    weights = torch.stack([batch.positive[:, column], batch.negative[:, column]]).double()
    if batch.weight is not None:
        weights *= batch.weight
    slope, y = sigmoids(x - x[i, None], divisor)
    slope = slope.mul_(y).double()  # in float32 products of matrices are less exact than sums
    loss, to = _shares_wrong(weights[0, i], (y.double() @ weights.T).unbind(1), 0)
    gradient = slope.new_zeros(batch.inputs.shape)
    at = gradient[:, column]
    torch.sum(weights * (to @ slope), 0, out=at)
    at.index_add_(0, i, (to * (weights @ slope.T)).sum(0), alpha=-1)
    gradient.div_(temperature)
    if x.dtype == torch.float64:  # else no score is NaN
        broken = given.isnan().any()
        loss, gradient = loss.masked_fill(broken, math.nan), gradient.masked_fill_(broken, math.nan)
    return loss, gradient


@not_compiled
def ndcg_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    temperature: float,
    gains: Gains = "exponential",
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - smooth NDCG, the discounted cumulative gain over that of the best order.

        DCG = sum_i w_i g_i / log2(1 + r_i),    r_i = 1 + sum_(j != i) sigmoid((s_j - s_i) / temperature)

    with gains g = 2^relevance - 1. The best order is that of falling w_i g_i, with ranks 1, 2, 3, ... As the
    temperature goes to 0 it becomes 1 - NDCG, where ties have their mean rank. O(n log n) time, O(n) memory.

    Args:
        scores: (n,) or (n, 1), of the items of one list. With (n, lists) the mean over the lists that have an item of
            some relevance.
        relevance: of the shape of scores, at least 0, integer or float.
        temperature: how far apart scores have to be to count as ordered, at least 1e-30.
        gains: "exponential" for 2^relevance - 1, "linear" for the relevance itself.
        weight: (n,), or of the shape of scores, at least 0: how much the gain of an item counts. Items of weight 0 are
            padding, of a list that is shorter than others: they take no rank.
        single_class: "error" or "zero" for a batch without any relevance.
        group: processes over whose items the lists go: each holds some of the items of every list.

    Examples:
        >>> ndcg_loss(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 2]), temperature=0.01)
        tensor(0.4131)
    """
    temperature = check_number("temperature", temperature)
    check_gains(gains)
    check_inputs("scores", scores, relevance, single_class, group, "relevance")
    if scores.ndim not in (1, 2) or relevance.numel() != scores.numel() or len(relevance) != len(scores):
        raise ValueError(
            "scores has to have the shape (n,), (n, 1) or (n, lists), and relevance the same, but got "
            f"{tuple(scores.shape)} and {tuple(relevance.shape)}"
        )
    columns = _columns(scores)
    lists, processes = columns.shape[1], resolve(group)
    rows = [columns, relevance.detach().reshape(columns.shape)]
    if weight is not None or processes is not None:
        rows.append(_weights_like(weight, columns))
    if processes is not None:
        together = all_gather(torch.cat([each.double() for each in rows], 1), processes, same_loss=True)
        rows = [part.to(each.dtype) for part, each in zip(torch.split(together, lists, 1), rows, strict=True)]
    x, r, *weights = rows[0].T, *(row.detach().T.double() for row in rows[1:])
    counted = None
    if weights:
        counted = weights[0] != 0
        x, r = x.masked_fill(~counted, 0), r.masked_fill(~counted, 0)
    if not r.numel():
        return nothing_to_compare(rows[0], single_class, "no relevant item")
    most, tiny = r.amax(1, keepdim=True), torch.finfo(torch.float64).tiny
    # Over a constant that cancels, so that nothing overflows; 2^r - 1 = 2^r (1 - 2^-r).
    gain = (r - most).exp2_().mul_((-math.log(2) * r).expm1_()).neg_() if gains == "exponential" else None
    gain = r / most.clamp(min=tiny) if gain is None else gain
    if weights:
        gain = gain * weights[0] / weights[0].amax(1, keepdim=True).clamp(min=tiny)
    found = [(r >= 0).logical_and_(r.isfinite()).all()[None], (gain > 0).any(1)]
    found += [((w >= 0) & w.isfinite()).all()[None] for w in weights]
    right, *present = on_host(torch.cat(found))
    if weights:
        check_weights(present.pop())
    if not right:
        raise ValueError("relevance has to hold finite numbers of at least 0, but got others")
    if not any(present):
        return nothing_to_compare(rows[0], single_class, "no relevant item")
    if not all(present):
        x, gain = x[present], gain[present]
        counted = None if counted is None else counted[present]
    ones = torch.ones_like(gain) if counted is None else counted.double()
    discount = (soft_sums(x, ones[:, None], temperature)[:, 0] + 1.5).log2()
    best = gain.sort(descending=True)[0]
    ideal = (best / torch.arange(2, best.shape[1] + 2, device=best.device, dtype=torch.float64).log2_()).sum(1)
    return (1 - (gain / discount).sum(1) / ideal).mean().to(wide(scores))


def check_gains(gains: str) -> None:
    if gains not in get_args(Gains):
        raise ValueError(f"gains has to be 'exponential' or 'linear', but got {gains!r}")


def _weights_like(weight: Tensor | None, columns: Tensor) -> Tensor:
    if isinstance(weight, Tensor) and weight.shape == columns.shape and columns.shape[1] > 1:
        return make_weights(weight.reshape(-1), columns.reshape(-1)).view(columns.shape)
    return make_weights(weight, columns)[:, None].expand(columns.shape)


@not_compiled
def spearman_loss(
    a: Tensor,
    b: Tensor,
    *,
    temperature: float,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - the correlation of the soft ranks of a and b: a smooth form of 1 - Spearman's rho.

        L = 1 - cov(R(a), R(b)) / sqrt(var(R(a)) var(R(b))),    R = `soft_rank` with the same temperature

    As the temperature goes to 0 it becomes 1 - rho, with mean ranks for ties. Both get a gradient. Scale the two alike
    before, or give targets by their ranks. O(n log n) time, O(n) memory.

    Args:
        a: (n,) or (n, 1), or (n, columns) for the mean over columns.
        b: of the shape of a.
        temperature: how far apart values have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0: a sample with weight 2 counts like two of it, one with weight 0 is padding.
        single_class: "error" or "zero" for a batch in which a or b is the same for all samples. Of several columns only
            those count that have a correlation.
        group: processes over whose samples the loss is taken.

    Examples:
        >>> spearman_loss(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]), temperature=0.01)
        tensor(0.5000)
    """
    temperature = check_number("temperature", temperature)
    check_inputs("a", a, b, single_class, group, "b")
    if a.ndim not in (1, 2) or b.numel() != a.numel() or len(a) != len(b):
        raise ValueError(
            "a has to have the shape (n,), (n, 1) or (n, columns), and b the same, but got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    columns = [_columns(each if each.is_floating_point() else each.double()) for each in (a, b)]
    processes, kind, weights = resolve(group), wide(a), None
    if weight is not None or processes is not None:
        weights = make_weights(weight, columns[0])
    if processes is not None and weights is not None:
        both = torch.cat([*(each.double() for each in columns), weights[:, None].double()], 1)
        parts = torch.split(all_gather(both, processes, same_loss=True), [columns[0].shape[1]] * 2 + [1], 1)
        columns = [part.to(each.dtype) for part, each in zip(parts[:2], columns, strict=True)]
        weights = parts[2][:, 0].detach().to(weights.dtype)
    if weights is not None:
        legal, weights = normalise(weights)
        check_weights(bool(legal))
        counted = weights > 0
        weights = weights[counted].double()
        sides = [each[counted].T for each in columns]
    else:
        sides = [each.T for each in columns]
    several = sides[0].shape[1] > 1
    present = torch.stack([(x != x[:, :1]).any(1) for x in sides]).all(0).tolist() if several else []
    if not any(present):
        return nothing_to_compare(columns[0], single_class, "the same value of a or b in all samples")
    if not all(present):
        sides = [x[present] for x in sides]
    share = torch.ones_like(sides[0][0], dtype=torch.float64) if weights is None else weights
    share = (share / share.sum()).expand(len(sides[0]), 1, -1)
    ranks = [soft_sums(-x, share, temperature, exact=True) for x in sides]
    ra, rb = (rank - (share * rank).sum(2, keepdim=True) for rank in ranks)
    weighted = share * ra
    covariance, *variances = ((x * y).sum((1, 2)) for x, y in ((weighted, rb), (weighted, ra), (share * rb, rb)))
    product = variances[0] * variances[1]  # 0 for temperatures at which no rank differs in floating point
    return (1 - covariance / product.masked_fill(product == 0, 1).sqrt()).mean().to(kind)


class AveragePrecisionLoss(Loss):
    """`average_precision_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        temperature: how far apart scores have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(average_precision_loss)

    def __init__(self, temperature: float, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, temperature=temperature)


class NDCGLoss(Loss):
    """`ndcg_loss` as a module: `loss(scores, relevance, weight=None)`.

    Args:
        temperature: how far apart scores have to be to count as ordered; an attribute that may be changed.
        gains: "exponential" or "linear".
        single_class: "error" or "zero".
        group: processes over whose items the lists go.
    """

    _function = staticmethod(ndcg_loss)

    def __init__(
        self,
        temperature: float,
        *,
        gains: Gains = "exponential",
        single_class: SingleClass = "error",
        group: Group = None,
    ) -> None:
        check_gains(gains)
        super().__init__(single_class, group, temperature=temperature, gains=gains)


class SpearmanLoss(Loss):
    """`spearman_loss` as a module: `loss(a, b, weight=None)`.

    Args:
        temperature: how far apart values have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(spearman_loss)

    def __init__(self, temperature: float, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, temperature=temperature)
