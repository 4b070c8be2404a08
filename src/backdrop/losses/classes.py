"""Losses on statistics of classes: distances between their means, and F-measures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backdrop.distributed import Group, gather, not_compiled, resolve, sum_over
from backdrop.losses._batches import (
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


@not_compiled
def class_distance_loss(
    features: Tensor,
    labels: Tensor,
    *,
    distance: float,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """The sum over pairs of classes of (|m - m'|^2 - distance^2)^2, where m are the means of each class (Eq. 3).

    Over the classes that are present in the batch.

    Args:
        features: (n, ...); everything but axis 0 is flattened.
        labels: (n,) integers or bool, any number of different ones.
        distance: how far the class means shall lie from each other, at least 0.
        weight: (n,) at least 0: how much each sample counts in the mean of its class.
        single_class: "error" or "zero" for a batch of one class.
        group: processes over whose samples the means are taken. Their sums are exchanged, not the features.

    Examples:
        >>> features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
        >>> class_distance_loss(features, torch.tensor([7, 1, 1]), distance=5)
        tensor(0.)
    """
    distance = check_number("distance", distance)
    check_inputs("features", features, labels, single_class, group)
    if features.ndim == 0 or labels.shape != features.shape[:1] or labels.is_floating_point():
        raise ValueError(
            "labels has to be one integer per sample of features, but got shape "
            f"{tuple(labels.shape)} and dtype {labels.dtype} for features of shape {tuple(features.shape)}"
        )
    weights, labels, own = make_weights(weight, features), labels.long(), slice(None)
    processes = resolve(group)
    if processes is not None:
        packed, own = gather(torch.stack([labels, weights.double().view(torch.int64)], 1), processes)  # to the last bit
        packed = packed.t().contiguous()
        labels, weights = packed[0], packed[1].view(torch.float64).to(weights.dtype)
    legal, weights = normalise(weights)
    check_weights(bool(legal))
    classes = torch.unique(labels[weights > 0])
    if len(classes) < 2:
        return nothing_to_compare(features, single_class)
    index = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)  # those without weight may have no class
    share = weights / _sums(weights.double(), index, len(classes)).to(weights.dtype)[index]
    index, share = index[own], share[own, None]
    features = features[:, None].flatten(1).masked_fill(share == 0, 0)
    quarters = share / 4 * features.to(share.dtype)  # so that no sum overflows on its way
    means = 4 * sum_over(_sums(quarters, index, len(classes)), processes).double()
    squares = nn.functional.pdist(means).square()
    return (squares - distance * distance).square().sum().to(weights.dtype)


@not_compiled
def soft_f_beta_loss(
    probabilities: Tensor,
    labels: Tensor,
    *,
    beta: float = 1.0,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - F_beta with soft counts: a sample with probability 0.8 counts as 0.8 of a predicted positive.

    F_beta = (1 + beta^2) TP / (beta^2 (TP + FN) + TP + FP).

    Args:
        probabilities: (n,) or (n, 1) in [0, 1]. With (n, classes) the mean over the classes.
        labels: (n,) or (n, 1) of 0 and 1; with classes as for `rank_statistic_loss`.
        beta: how many times recall counts more than precision, at least 1e-6.
        weight: (n,) at least 0.
        single_class: "error" or "zero".
        group: processes over whose samples the counts are taken.

    Examples:
        >>> soft_f_beta_loss(torch.tensor([0.9, 0.2, 0.1]), torch.tensor([1, 0, 1]))
        tensor(0.3750)
    """
    beta = check_number("beta", beta)
    batch = gather_batch("probabilities", probabilities, labels, weight, single_class, group)
    low, high = _range(batch.inputs)
    if low < 0 or high > 1:
        raise ValueError(
            f"probabilities has to be in [0, 1], but got values from {low:g} to {high:g}; use torch.sigmoid on scores"
        )
    if not batch.present:
        return nothing_to_compare(batch.inputs, single_class)
    p, hits, others = batch.columns()
    share = (hits + others) / (hits + others).sum(1, keepdim=True)
    true, total = (hits > 0) * share * p, (share * p).sum(1)
    recall = 1 / (1 + 1 / beta / beta)  # how much it counts, beta^2 / (1 + beta^2)
    f_beta = true.sum(1) / (recall * ((hits > 0) * share).sum(1) + (1 - recall) * total)
    return (1 - f_beta.mean()).to(wide(batch.inputs))


def _range(x: Tensor) -> list[float]:
    return torch.stack([bound.double() for bound in x.detach().aminmax()]).tolist() if x.numel() else [0.0, 1.0]


def _sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The sums of the rows with each index."""
    return x.new_zeros(count, *x.shape[1:]).index_add(0, index, x)


class ClassDistanceLoss(Loss):
    """`class_distance_loss` as a module: `loss(features, labels, weight=None)`.

    Args:
        distance: how far the class means shall lie from each other; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the means are taken.
    """

    _function = staticmethod(class_distance_loss)

    def __init__(self, distance: float, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, distance=distance)


class SoftFBetaLoss(Loss):
    """`soft_f_beta_loss` as a module: `loss(probabilities, labels, weight=None)`.

    Args:
        beta: how many times recall counts more than precision; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the counts are taken.
    """

    _function = staticmethod(soft_f_beta_loss)

    def __init__(self, beta: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, beta=beta)
