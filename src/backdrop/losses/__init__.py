"""Losses that need the whole batch: they compare samples with each other, so small batches estimate them badly.

The first problem class of the paper (section 3.1). Give such a loss a large batch and put `Backdrop(p)` before it: the
loss sees every sample, the gradient comes from a few.

>>> import torch
>>> from torch import nn
>>> from backdrop import Backdrop
>>> from backdrop.losses import RankStatisticLoss
>>> model, loss = nn.Sequential(nn.Linear(8, 1), Backdrop(0.9)), RankStatisticLoss()
>>> scores, labels = model(torch.randn(2048, 8)), torch.rand(2048) < 0.2
>>> loss(scores, labels).backward()

Each is a function and a module. Labels are bool, integers or floats. Losses are computed in float32 for half precision,
and returned so; under autocast too. `group=` makes them losses over the batches of many processes (see
`backdrop.distributed`). They read the labels, so on a GPU they wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from backdrop import _pairs
from backdrop._batches import (
    Batch,
    SingleClass,
    check_inputs,
    check_number,
    check_settings,
    check_weights,
    gather_batch,
    make_weights,
    normalise,
    wide,
)
from backdrop.distributed import Group, gather, not_compiled, resolve, sum_over
from backdrop.losses.contrastive import ContrastiveLoss, contrastive_loss
from backdrop.losses.survival import CoxLoss, cox_loss

__all__ = [
    "ClassDistanceLoss",
    "ContrastiveLoss",
    "CoxLoss",
    "RankStatisticLoss",
    "SoftFBetaLoss",
    "SquaredHingeAUCLoss",
    "class_distance_loss",
    "contrastive_loss",
    "cox_loss",
    "rank_statistic_loss",
    "soft_f_beta_loss",
    "squared_hinge_auc_loss",
]


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
    taken, in memory that grows with the number of samples alone.

    Args:
        scores: (n,) or (n, 1). With (n, classes) the mean of the losses of each class against the rest, over the
            classes for which there are both.
        labels: (n,) or (n, 1) of 0 and 1, bool, integer or float. With scores (n, classes): the class of each sample as
            an integer, or (n, classes) of 0 and 1 where a sample may belong to several.
        temperature: how far apart scores have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0: a pair counts as much as the product of both weights.
        single_class: what to do with a batch that has positives only or negatives only: "error", or "zero" for a zero
            that still carries a graph.
        group: processes over whose samples the loss is taken; every one gets the same value.

    Examples:
        >>> rank_statistic_loss(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([1, 0, 0]))
        tensor(0.0833)
    """
    compare = partial(_pairs.rank_statistic, temperature=check_number("temperature", temperature))
    return _mean_over_pairs(gather_batch("scores", scores, labels, weight, single_class, group), single_class, compare)


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
    compare = partial(_pairs.squared_hinge, margin=check_number("margin", margin))
    return _mean_over_pairs(gather_batch("scores", scores, labels, weight, single_class, group), single_class, compare)


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
        labels, weights = packed[:, 0], packed[:, 1].contiguous().view(torch.float64).to(weights.dtype)
    legal, weights = normalise(weights)
    check_weights(bool(legal))
    classes = torch.unique(labels[weights > 0])
    if len(classes) < 2:
        return _nothing_to_compare(features, single_class)
    index = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)  # those without weight may have no class
    share = weights / _sums(weights.double(), index, len(classes)).to(weights.dtype)[index]
    index, share = index[own], share[own, None]
    quarters = share / 4 * features[:, None].flatten(1).to(share.dtype)  # so that no sum overflows on its way
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
        return _nothing_to_compare(batch.inputs, single_class)
    p, y = (x[:, batch.present].to(batch.weight.dtype) for x in (batch.inputs, batch.positive))
    share = (batch.weight / batch.weight.sum())[:, None]
    recall = 1 / (1 + 1 / beta / beta)  # how much it counts, beta^2 / (1 + beta^2)
    f_beta = (share * y * p).sum(0) / (recall * (share * y).sum(0) + (1 - recall) * (share * p).sum(0))
    return 1 - f_beta.mean()


def _mean_over_pairs(batch: Batch, single_class: SingleClass, compare: _pairs.Compare) -> Tensor:
    if not batch.present:
        return _nothing_to_compare(batch.inputs, single_class)
    losses = [
        _pairs.PairLoss.apply(batch.inputs[:, i], batch.positive[:, i], batch.weight, compare)  # type: ignore[no-untyped-call]
        for i in batch.present
    ]
    return torch.stack(losses).mean()


def _nothing_to_compare(inputs: Tensor, single_class: SingleClass) -> Tensor:
    if single_class == "zero":
        return (inputs * 0).sum(dtype=wide(inputs))
    raise ValueError(
        f"the batch of {len(inputs)} samples has one class only, so there is nothing to compare; take a larger batch, "
        "or sample by class, or let such a batch count as zero with single_class='zero'"
    )


def _range(x: Tensor) -> list[float]:
    return torch.stack([bound.double() for bound in x.detach().aminmax()]).tolist() if x.numel() else [0.0, 1.0]


def _sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The sums of the rows with each index."""
    return x.new_zeros(count, *x.shape[1:]).index_add(0, index, x)


class _Loss(nn.Module):
    """A loss with its settings as attributes: `loss(inputs, labels, weight=None)`."""

    _function: ClassVar[Callable[..., Tensor]]

    def __init__(self, single_class: SingleClass, group: Group, **setting: float) -> None:
        super().__init__()
        check_settings(single_class, group)
        (self._name, value), *_ = setting.items()
        setattr(self, self._name, check_number(self._name, value))
        self.single_class, self.group = single_class, group

    def forward(self, inputs: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        setting = {self._name: getattr(self, self._name)}
        return type(self)._function(
            inputs, labels, weight=weight, single_class=self.single_class, group=self.group, **setting
        )

    def extra_repr(self) -> str:
        shown = [f"{self._name}={getattr(self, self._name)}"]
        shown += [] if self.single_class == "error" else [f"single_class={self.single_class!r}"]
        shown += [] if self.group is None else [f"group={self.group if isinstance(self.group, str) else '...'}"]
        return ", ".join(shown)


class RankStatisticLoss(_Loss):
    """`rank_statistic_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        temperature: how far apart scores have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(rank_statistic_loss)

    def __init__(self, temperature: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, temperature=temperature)


class SquaredHingeAUCLoss(_Loss):
    """`squared_hinge_auc_loss` as a module: `loss(scores, labels, weight=None)`.

    Args:
        margin: by how much a positive score has to be larger than a negative one; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(squared_hinge_auc_loss)

    def __init__(self, margin: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, margin=margin)


class ClassDistanceLoss(_Loss):
    """`class_distance_loss` as a module: `loss(features, labels, weight=None)`.

    Args:
        distance: how far the class means shall lie from each other; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the means are taken.
    """

    _function = staticmethod(class_distance_loss)

    def __init__(self, distance: float, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, distance=distance)


class SoftFBetaLoss(_Loss):
    """`soft_f_beta_loss` as a module: `loss(probabilities, labels, weight=None)`.

    Args:
        beta: how many times recall counts more than precision; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the counts are taken.
    """

    _function = staticmethod(soft_f_beta_loss)

    def __init__(self, beta: float = 1.0, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, beta=beta)
