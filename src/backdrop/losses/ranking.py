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
    wide,
)
from backdrop.losses._loss import Loss, nothing_to_compare
from backdrop.losses._pairs import Means, WithGradient, dot, mean_over_problems, sigmoids, times
from backdrop.losses._soft_ranks import PAIRS, SoftSums, comparable, in_parts, scaled, sorted_sums, terms_for

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
        x, u, v = batch.columns()
        value, gradient = in_parts(partial(_precision, temperature=temperature), x.detach(), u, u + v)
        return mean_over_problems(x, value, gradient, batch)

    loss: Tensor = WithGradient.apply(batch.inputs, compute)  # type: ignore[no-untyped-call]
    return loss


def _precision(x: Tensor, u: Tensor, w: Tensor, temperature: float) -> Means:
    """L and dL/dx of each problem; of itself each positive has y_ii w_i = w_i / 2 in both sums."""
    ordered, order = comparable(x).sort()
    u, w = u.gather(1, order), w.gather(1, order)
    weights, terms = torch.stack([u, w], 1), terms_for(x)
    value, slope = sorted_sums(ordered, weights, temperature, terms, 2)
    hits, all_ = (value + u[:, None] / 2).unbind(1)
    share, all_ = u / u.sum(1, keepdim=True), all_.masked_fill(u == 0, 1)
    to = torch.stack([-share / all_, share * hits / all_.square()], 1)  # of L to both sums
    other = sorted_sums(ordered, to, temperature, terms, 0)[1]
    gradient = (weights * other).sub_(to * slope).sum(1).div_(temperature)
    return 1 - (share * hits / all_).sum(1), torch.empty_like(gradient).scatter_(1, order, gradient)


def _precision_of_few(given: Tensor, i: Tensor, batch: Batch, temperature: float) -> Means:
    """The same for few positives in one problem, by the matrix of these and all."""
    x, divisor = scaled(given, temperature)
    column = batch.present[0]
    u, w = batch.positive[:, column].to(x.dtype), None if batch.weight is None else batch.weight.to(x.dtype)
    u = times(u, w)
    own = u[i]
    slope, y = sigmoids(x - x[i, None], divisor)
    hits, all_ = y @ u + own / 2, dot(y, w) + own / 2
    share = own / own.sum()
    to_hits, to_all = -share / all_, share * hits / all_.square()
    slope.mul_(y)
    gradient = x.new_zeros(batch.inputs.shape)
    at = gradient[:, column]
    at += u * (to_hits @ slope) + times(to_all @ slope, w)
    at.index_add_(0, i, to_hits * (slope @ u) + to_all * dot(slope, w), alpha=-1)
    broken = given.isnan().any()
    return (1 - (share * hits / all_).sum()).masked_fill(broken, math.nan), gradient.div_(temperature).masked_fill_(
        broken, math.nan
    )


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
    lists = columns.shape[1]
    rows = [columns, relevance.detach().reshape(columns.shape), _weights_like(weight, columns)]
    processes = resolve(group)
    if processes is not None:
        together = all_gather(torch.cat([each.double() for each in rows], 1), processes, same_loss=True)
        rows = [part.to(each.dtype) for part, each in zip(torch.split(together, lists, 1), rows, strict=True)]
    x, r, w = rows[0].T, rows[1].detach().T.double(), rows[2].detach().T.double()
    padding = w == 0
    x, r = x.masked_fill(padding, 0), r.masked_fill(padding, 0)
    if not r.numel():
        return nothing_to_compare(rows[0], single_class, "no relevant item")
    most, tiny = r.amax(1, keepdim=True), torch.finfo(torch.float64).tiny
    # Over a constant that cancels, so that nothing overflows; 2^r - 1 = 2^r (1 - 2^-r).
    gain = (r - most).exp2() * -(-math.log(2) * r).expm1() if gains == "exponential" else r / most.clamp(min=tiny)
    gain = gain * w / w.amax(1, keepdim=True).clamp(min=tiny)
    legal, right, *present = torch.stack(
        [((w >= 0) & w.isfinite()).all(), ((r >= 0) & r.isfinite()).all(), *(gain > 0).any(1)]
    ).tolist()
    check_weights(legal)
    if not right:
        raise ValueError("relevance has to hold finite numbers of at least 0, but got others")
    if not any(present):
        return nothing_to_compare(rows[0], single_class, "no relevant item")
    if not all(present):
        x, gain, padding = x[present], gain[present], padding[present]
    rank = soft_sums(x, (~padding).double()[:, None], temperature)[:, 0] + 0.5
    best = gain.sort(descending=True)[0]
    ideal = (best / torch.arange(2, best.shape[1] + 2, device=best.device, dtype=torch.float64).log2()).sum(1)
    found = (gain / (1 + rank).log2()).masked_fill(gain == 0, 0).sum(1)
    return (1 - found / ideal).mean().to(wide(scores))


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
    weights = make_weights(weight, columns[0])
    processes = resolve(group)
    kind = wide(a)
    if processes is not None:
        both = torch.cat([*(each.double() for each in columns), weights[:, None].double()], 1)
        parts = torch.split(all_gather(both, processes, same_loss=True), [columns[0].shape[1]] * 2 + [1], 1)
        columns = [part.to(each.dtype) for part, each in zip(parts[:2], columns, strict=True)]
        weights = parts[2][:, 0].detach().to(weights.dtype)
    legal, weights = normalise(weights)
    padding = weights == 0
    sides = [each.T.masked_fill(padding, 0) for each in columns]
    low, high = (
        torch.stack([x.detach().double().masked_fill(padding, bound) for x in sides]) for bound in (math.inf, -math.inf)
    )
    differ = (low.amin(2) != high.amax(2)).all(0) if weights.numel() else weights.new_zeros(0, dtype=torch.bool)
    legal, *present = torch.cat([legal[None], differ]).tolist()
    check_weights(legal)
    if not any(present) or int((~padding).sum()) < 2:
        return nothing_to_compare(columns[0], single_class, "the same value of a or b in all samples")
    if not all(present):
        sides = [x[present] for x in sides]
    share = weights.double() / weights.double().sum()
    ranks = [soft_sums(-x, share.expand(len(x), 1, -1), temperature, exact=True)[:, 0] for x in sides]
    ra, rb = (rank - (share * rank).sum(1, keepdim=True) for rank in ranks)
    covariance, *variances = ((share * x * y).sum(1) for x, y in ((ra, rb), (ra, ra), (rb, rb)))
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
