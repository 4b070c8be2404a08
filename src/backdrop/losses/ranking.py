"""Soft ranks, and losses on ranks: average precision, NDCG, Spearman's correlation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backdrop.distributed import Group, all_gather, not_compiled, resolve
from backdrop.losses._batches import (
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
from backdrop.losses._loss import Loss, nothing_to_compare, once
from backdrop.losses._pairs import Means, mean_over_problems, with_gradient
from backdrop.losses._soft_ranks import (
    PAIRS,
    Scores,
    SoftSums,
    bounds_of,
    centred_sums,
    comparable,
    full_precision,
    in_parts,
    soft_sums,
    sorted_sums,
    terms_for,
)

WHOLE = 900  # relevance, up to which no sum of gains overflows
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
    given = None
    if weight is not None:
        given = make_weights(weight, scores)
        check_weights(bool(normalise(given)[0]))
        scores = scores.masked_fill((given == 0).view(-1, *[1] * (scores.ndim - 1)), 0)
        given = given.double()
    if torch._C._are_functorch_transforms_active():
        columns = -_columns(scores).T
        counts = torch.ones_like(columns, dtype=torch.float64) if given is None else given.expand_as(columns)
        below = SoftSums.apply(columns, counts, temperature)[0]  # type: ignore[no-untyped-call]
        return (below + 0.5).to(wide(scores)).T.reshape(scores.shape)  # type: ignore[no-any-return]
    ranks: Tensor = _Ranks.apply(scores, given, temperature)  # type: ignore[no-untyped-call]
    return ranks


def _columns(x: Tensor) -> Tensor:
    return x[:, None] if x.ndim == 1 else x


class _Ranks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor | None, temperature: float) -> Tensor:
        ctx.save_for_backward(scores)
        x = scores.mT if scores.ndim == 2 else scores
        counts = None if weight is None else weight.expand_as(x)
        with full_precision(scores):
            below, ctx.back = soft_sums(x.neg(), counts, temperature)
        ranks = below.add_(0.5).to(wide(scores))
        return ranks.mT.contiguous() if scores.ndim == 2 else ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        with torch.no_grad(), full_precision(scores):
            up = gradient.double().neg()
            found = ctx.back(up.mT).mT if scores.ndim == 2 else ctx.back(up)
            found = found.to(scores.dtype)
        return once(found, scores, gradient) if torch.is_grad_enabled() else found, None, None


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
        n = len(inputs)
        if batch.sides is not None and len(batch.sides[0]) * n <= max(PAIRS, FEW * n):
            value, gradient = _precision_of_few(inputs.detach().reshape(-1), *batch.sides, batch.weight, temperature)
            return value, gradient.view(inputs.shape)
        x, u, v = batch._replace(inputs=inputs).columns()
        x = x.detach()
        value, gradient = in_parts(partial(_precision, temperature=temperature), x, u, v)
        return mean_over_problems(x, value, gradient, batch)

    return with_gradient(compute, batch.inputs)


def _precision(x: Tensor, u: Tensor, v: Tensor, temperature: float) -> Means:
    """L and dL/dx of each problem, for weights of positives and negatives."""
    ordered, order = comparable(x).sort()
    u, v = u.gather(1, order), v.gather(1, order)
    weights, terms = torch.stack([u, v], 1), terms_for(x)
    value, slope = sorted_sums(ordered, weights, temperature, terms, 2)
    hits, wrong = value[:, 0] + u / 2, value[:, 1]
    everything = (hits + wrong).masked_fill_(u == 0, 1)
    loss, *towards = _shares_wrong(u / u.sum(1, keepdim=True), hits, wrong, everything)
    to = torch.stack(towards, 1)
    other = sorted_sums(ordered, to, temperature, terms, 0)[1]
    gradient = (weights * other).sub_(to * slope).sum(1).div_(temperature)
    return loss, torch.empty_like(gradient).scatter_(1, order, gradient)


def _shares_wrong(share: Tensor | float, hits: Tensor, wrong: Tensor, everything: Tensor) -> tuple[Tensor, ...]:
    """L, and its derivatives by the weights of positives and of negatives above each positive, which are given.

    As the share of negatives, 1 - P_i = wrong / (hits + wrong): where it is small, 1 - hits / all has no digits. Of
    itself each positive has y_ii w_i = w_i / 2 in the sum over positives, and the other half is added before.
    """
    share = share / everything
    missed = share * wrong
    return missed.sum(-1), -missed / everything, share * hits / everything


def _precision_of_few(
    x: Tensor, i: Tensor, j: Tensor, weight: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same for few positives i in one problem, by the matrices of these and themselves, and of these and all j."""
    scores = Scores(x, temperature)
    own, others = scores.matrix(i, i), scores.matrix(i, j)
    u, v = (None if weight is None else weight[side].double() for side in (i, j))
    hits, wrong = own.above(u), others.above(v)
    hits = hits.add_(0.5) if u is None else hits.add_(u, alpha=0.5)
    share = 1 / len(i) if u is None else u / u.sum()
    loss, to_hits, to_wrong = _shares_wrong(share, hits, wrong, hits + wrong)
    down, up, to_others = own.slopes(u), own.slopes_to(to_hits), others.slopes_to(to_wrong)
    if u is not None and v is not None:
        up, to_others = up.mul_(u), to_others.mul_(v)
    up.addcmul_(down, to_hits, value=-1).addcmul_(others.slopes(v), to_wrong, value=-1)
    gradient = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    gradient.index_copy_(0, i, up).index_copy_(0, j, to_others).div_(temperature)
    loss, gradient = scores.mark(loss, gradient)
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
    columns, processes = scores, resolve(group)
    relevance = relevance.detach().reshape(columns.shape)
    weights = None
    if weight is not None or processes is not None:
        columns, relevance = _columns(columns), _columns(relevance)
        weights = _weights_like(weight, columns)
    if processes is not None and weights is not None:
        rows = [columns, relevance, weights]
        together = all_gather(torch.cat([each.double() for each in rows], 1), processes, same_loss=True)
        parts = torch.split(together, columns.shape[1], 1)
        columns, relevance, weights = (part.to(each.dtype) for part, each in zip(parts, rows, strict=True))
        relevance, weights = relevance.detach(), weights.detach()
    single = columns.ndim == 1 or columns.shape[1] == 1
    counted = None
    if weights is not None:
        weights = weights.reshape(-1).double() if single else weights.T.double()
        counted = weights != 0
        relevance = relevance.reshape(-1) if single else relevance.T
        relevance = relevance.masked_fill(~counted, 0)
        columns = columns.masked_fill(~counted.view(columns.shape) if single else ~counted.T, 0)
    else:
        relevance = relevance.reshape(-1) if single else relevance.T
    if not relevance.numel():
        return nothing_to_compare(columns, single_class, "no relevant item")
    gain, present = _gains(relevance, weights, gains)
    if not any(present):
        return nothing_to_compare(columns, single_class, "no relevant item")
    some = None if all(present) else torch.tensor(present, device=columns.device)
    best = gain.sort(descending=True)[0]
    ideal = (best / torch.arange(2, best.shape[-1] + 2, device=best.device, dtype=torch.float64).log2_()).sum(-1)
    places = None if counted is None else counted.double()
    if some is not None:
        gain, ideal, places = gain[some], ideal[some], None if places is None else places[some]

    def compute(scores: Tensor) -> Means:
        x = scores.detach()
        x = x.reshape(-1) if single else x.T if some is None else x.T[some]
        above, back = soft_sums(x, places, temperature)
        rank = above.add_(1.5)  # and one more
        discount = rank.log2()
        part = gain / discount
        value, lists = 1 - part.sum(-1) / ideal, 1 if single else len(x)
        part.div_(discount).div_(rank).div_(ideal[..., None] * (math.log(2) * lists))
        gradient = back(part)
        if some is not None:
            gradient = gradient.new_zeros(scores.T.shape).masked_scatter_(some[:, None], gradient)
        return value if single else value.mean(), gradient.view(scores.shape) if single else gradient.T

    return with_gradient(compute, columns).to(wide(scores))


def _gains(relevance: Tensor, weights: Tensor | None, gains: Gains) -> tuple[Tensor, list[bool]]:
    """The gains of (lists, n) or (n,), over a constant of each that cancels, and which lists have some."""
    r, tiny = relevance.double(), torch.finfo(torch.float64).tiny
    right: bool | None = None
    present: list[bool] = []
    most: Tensor | float
    if weights is None and r.ndim == 1:
        low, high = bounds_of(r)
        right, present, most = low >= 0 and high < math.inf, [high > 0], max(high, tiny)
        if gains == "exponential" and high < WHOLE and not relevance.is_floating_point() and right:
            return r.exp2_().sub_(1), present  # to the last digit, as there are no tiny ones
    else:
        most = r.amax(-1, keepdim=True).clamp(min=tiny)
    # So that nothing overflows; 2^r - 1 = 2^r (1 - 2^-r).
    gain = (r - most).exp2_().mul_((-math.log(2) * r).expm1_()).neg_() if gains == "exponential" else r / most
    if weights is not None:
        gain = gain * weights / weights.amax(-1, keepdim=True).clamp(min=tiny)
    if right is None:
        found = [(r >= 0).logical_and_(r.isfinite()).all()[None], (gain > 0).any(-1).view(-1)]
        found += [] if weights is None else [((weights >= 0) & weights.isfinite()).all()[None]]
        right, *present = on_host(torch.cat(found))
        if weights is not None:
            check_weights(present.pop())
    if not right:
        raise ValueError("relevance has to hold finite numbers of at least 0, but got others")
    return gain, present


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
    a, b = (each if each.is_floating_point() else each.double() for each in (a, b.reshape(a.shape)))
    processes, kind, weights = resolve(group), wide(a), None
    if weight is not None or processes is not None:
        weights = make_weights(weight, a)
    if processes is not None and weights is not None:
        a, b = _columns(a), _columns(b)
        both = torch.cat([a.double(), b.double(), weights[:, None].double()], 1)
        parts = torch.split(all_gather(both, processes, same_loss=True), [a.shape[1]] * 2 + [1], 1)
        a, b = parts[0].to(a.dtype), parts[1].to(b.dtype)
        weights = parts[2][:, 0].detach().to(weights.dtype)
    if weights is not None:
        legal, weights = normalise(weights)
        check_weights(bool(legal))
        counted = weights > 0
        a, b, weights = a[counted], b[counted], weights[counted].double()
        weights = weights / weights.sum()
    return with_gradient(partial(_correlation, weights, temperature, single_class), a, b).to(kind)


def _correlation(
    share: Tensor | None, temperature: float, single_class: SingleClass, *given: Tensor
) -> tuple[Tensor | None, ...]:
    """1 - the correlation of soft ranks, the mean over columns, and its gradients by both."""
    wanted = [x.requires_grad for x in given]
    wanted = wanted if any(wanted) else [True, True]  # under torch.func nobody knows
    single = given[0].ndim == 1 or given[0].shape[1] == 1
    sides = [x.detach().reshape(-1) if single else x.detach().T for x in given]
    bounds, some = [(0.0, 0.0)] * 2, None
    if single:
        if sides[0].numel():
            bounds = [bounds_of(x) for x in sides]
        present = [all(low != high for low, high in bounds)]
    else:
        present = torch.stack([(x != x[:, :1]).any(1) for x in sides]).all(0).tolist()
    if not any(present):
        return nothing_to_compare(given[0], single_class, "the same value of a or b in all samples"), *map(
            torch.zeros_like, given
        )
    if not all(present):
        some = torch.tensor(present, device=given[0].device)
        sides = [x[some] for x in sides]
    (ra, back_a), (rb, back_b) = (
        centred_sums(x, share, temperature, bound if single else None) for x, bound in zip(sides, bounds, strict=True)
    )
    weighted = (ra, rb) if share is None else (share * ra, share * rb)
    covariance, *variances = ((x * y).sum(-1) for x, y in ((weighted[0], rb), (weighted[0], ra), (weighted[1], rb)))
    product = variances[0] * variances[1]  # 0 for temperatures at which no rank differs in floating point
    nothing = product == 0
    root = product.masked_fill(nothing, 1).sqrt_()
    value = 1 - covariance / root
    columns = 1 if single else len(value)

    def towards(own: Tensor, other: Tensor, variance: Tensor, back: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        slope = (covariance / variance.masked_fill(nothing, 1))[..., None]
        gradient = back((own * slope).sub_(other).div_((root * columns)[..., None]))
        if some is not None:
            gradient = gradient.new_zeros(like.T.shape).masked_scatter_(some[:, None], gradient)
        return gradient.view(like.shape) if single else gradient.T

    to_a = towards(weighted[0], weighted[1], variances[0], back_a, given[0]) if wanted[0] else None
    to_b = towards(weighted[1], weighted[0], variances[1], back_b, given[1]) if wanted[1] else None
    return value if single else value.mean(), to_a, to_b


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
