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

Each is a function and a module. Labels are bool, integers or floats. Losses are computed in float64, and returned in
float32 for half precision; under autocast too. Samples of weight 0 are padding: whatever they hold has no effect.
`group=` makes them losses over the batches of many processes (see `backdrop.distributed`). They read the labels, so on
a GPU they wait for it.
"""

from backdrop.losses.auc import (
    PartialAUCLoss,
    RankStatisticLoss,
    SquaredHingeAUCLoss,
    partial_auc_loss,
    rank_statistic_loss,
    squared_hinge_auc_loss,
)
from backdrop.losses.classes import ClassDistanceLoss, SoftFBetaLoss, class_distance_loss, soft_f_beta_loss
from backdrop.losses.concordance import ConcordanceLoss, concordance_loss
from backdrop.losses.contrastive import ContrastiveLoss, contrastive_loss
from backdrop.losses.ranking import (
    AveragePrecisionLoss,
    NDCGLoss,
    SpearmanLoss,
    average_precision_loss,
    ndcg_loss,
    soft_rank,
    spearman_loss,
)
from backdrop.losses.survival import CoxLoss, cox_loss

__all__ = [
    "AveragePrecisionLoss",
    "ClassDistanceLoss",
    "ConcordanceLoss",
    "ContrastiveLoss",
    "CoxLoss",
    "NDCGLoss",
    "PartialAUCLoss",
    "RankStatisticLoss",
    "SoftFBetaLoss",
    "SpearmanLoss",
    "SquaredHingeAUCLoss",
    "average_precision_loss",
    "class_distance_loss",
    "concordance_loss",
    "contrastive_loss",
    "cox_loss",
    "ndcg_loss",
    "partial_auc_loss",
    "rank_statistic_loss",
    "soft_f_beta_loss",
    "soft_rank",
    "spearman_loss",
    "squared_hinge_auc_loss",
]
