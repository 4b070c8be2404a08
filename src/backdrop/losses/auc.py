"""Areas under the ROC curve: losses over pairs of a positive and a negative sample."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from backdrop.distributed import Group, not_compiled
from backdrop.losses import _pairs
from backdrop.losses._batches import Batch, SingleClass, check_number, gather_batch
from backdrop.losses._loss import Loss, nothing_to_compare


@not_compiled
def rank_statistic_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - the mean over pairs of a positive and a negative sample of sigmoid((s+ - s-) / temperature).

    A smooth form of 1 - ROC AUC, which it becomes as the temperature goes to 0 (paper, section 3.1.1). All pairs are
    taken, in O(n log n) time and O(n) memory. Ties count half.

    Args:
        scores: (n,) or (n, 1). With (n, classes) the mean of the losses of each class against the rest, over the
            classes for which there are both.
        labels: (n,) or (n, 1) of 0 and 1, bool, integer or float. With scores (n, classes): the class of each sample as
            an integer, or (n, classes) of 0 and 1 where a sample may belong to several.
        temperature: how far apart scores have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0: a pair counts as much as the product of both weights. Samples of weight 0 are padding:
            they have no effect whatever their scores and labels are.
        single_class: what to do with a batch that has positives only or negatives only: "error", or "zero" for a zero
            that still carries a graph.
        group: processes over whose samples the loss is taken; every one gets the same value.

    Examples:
        >>> rank_statistic_loss(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([1, 0, 0]))
        tensor(0.0833)
    """
    kernel = _pairs.rank_statistic(check_number("temperature", temperature))
    return _loss(gather_batch("scores", scores, labels, weight, single_class, group), single_class, kernel)


@not_compiled
def squared_hinge_auc_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    margin: float = 1.0,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """The mean over pairs of a positive and a negative sample of max(0, margin - (s+ - s-))^2, in O(n log n).

    A convex loss whose minimum orders the samples. Arguments as for `rank_statistic_loss`.

    Args:
        scores: (n,), (n, 1) or (n, classes).
        labels: (n,), (n, 1) or (n, classes).
        margin: by how much a positive score has to be larger than a negative one to cost nothing, at least 0.
        weight: (n,) at least 0.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.

    Examples:
        >>> squared_hinge_auc_loss(torch.tensor([2.0, 0.5, -1.0]), torch.tensor([1, 0, 1]))
        tensor(3.1250)
    """
    kernel = _pairs.squared_hinge(check_number("margin", margin))
    return _loss(gather_batch("scores", scores, labels, weight, single_class, group), single_class, kernel)


@not_compiled
def partial_auc_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    max_fpr: float,
    temperature: float,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """The rank statistic against the share `max_fpr` of the negatives that have the highest scores.

    A smooth form of 1 - the area under the ROC curve up to a false positive rate of `max_fpr`, over `max_fpr`: what it
    becomes as the temperature goes to 0. With u the weights of positives and v those of negatives, q are those of the
    highest negatives up to a total of `max_fpr` of all, the one at the border in part (several of one score in equal
    parts), and

        L = sum_ij u_i q_j sigmoid((x_j - x_i) / temperature) / (sum_i u_i * sum_j q_j).

    Sigmoids rise with x_j, so these q are those for which L is largest: L is continuous in the scores, also where two
    negatives change places at the border, and its gradient is that with q held. Other arguments as for
    `rank_statistic_loss`, which it is with `max_fpr=1`.

    Args:
        scores: (n,), (n, 1) or (n, classes).
        labels: (n,), (n, 1) or (n, classes).
        max_fpr: up to which false positive rate, in (0, 1].
        temperature: how far apart scores have to be to count as ordered.
        weight: (n,) at least 0.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.

    Examples:
        >>> scores, labels = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]), torch.tensor([1, 0, 0, 0, 0])
        >>> partial_auc_loss(scores, labels, max_fpr=0.25, temperature=1)
        tensor(0.2689)
    """
    share = check_number("max_fpr", max_fpr)
    choose = (partial(highest, share=share), partial(highest_of, share=share)) if share < 1 else ()
    kernel = _pairs.rank_statistic(check_number("temperature", temperature), *choose)
    return _loss(gather_batch("scores", scores, labels, weight, single_class, group), single_class, kernel)


def highest(x: Tensor, weight: Tensor, share: float) -> Tensor:
    """The weights of the highest scores of each problem up to a share of their total, those at the border in part."""
    ordered, order = x.masked_fill(weight == 0, -torch.inf).sort(descending=True)
    upto = weight.gather(1, order).cumsum(1)
    wanted = share * upto[:, -1:]
    border = ordered.gather(1, (upto < wanted).sum(1, keepdim=True).clamp(max=x.shape[1] - 1))
    above, at = (weight * (x > border)), (weight * (x == border))
    part = (wanted - above.sum(1, keepdim=True)) / at.sum(1, keepdim=True)
    return above.addcmul_(at, part.clamp(0, 1))


def highest_of(x: Tensor, share: float) -> tuple[Tensor, Tensor] | None:
    """The same where each counts the same, and no two at the border tie: which these are, and their weights."""
    wanted = share * len(x)
    count = math.ceil(wanted)
    values, index = x.topk(min(count + 1, len(x)))
    edge = values[max(count - 2, 0) :].tolist()
    if len(set(edge)) < len(edge):
        return None
    weight = torch.ones(count, dtype=torch.float64, device=x.device)
    weight[-1] = wanted - (count - 1)
    return index[:count], weight


def _loss(batch: Batch, single_class: SingleClass, kernel: _pairs.Kernel) -> Tensor:
    if not batch.present:
        return nothing_to_compare(batch.inputs, single_class)
    return _pairs.mean_over_pairs(batch, kernel)


class RankStatisticLoss(Loss):
    """`rank_statistic_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        temperature: how far apart scores have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(rank_statistic_loss)

    def __init__(self, temperature: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, temperature=temperature)


class SquaredHingeAUCLoss(Loss):
    """`squared_hinge_auc_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        margin: by how much a positive score has to be larger than a negative one; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(squared_hinge_auc_loss)

    def __init__(self, margin: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, margin=margin)


class PartialAUCLoss(Loss):
    """`partial_auc_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        max_fpr: up to which false positive rate; an attribute that may be changed.
        temperature: how far apart scores have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(partial_auc_loss)

    def __init__(
        self,
        max_fpr: float,
        temperature: float,
        *,
        single_class: SingleClass = "error",
        group: Group = None,
    ) -> None:
        super().__init__(single_class, group, max_fpr=max_fpr, temperature=temperature)
