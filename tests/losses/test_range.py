"""All losses on pairs over the whole range of temperatures, against brute force in float64: values and gradients.

Temperatures of 1e-3 to 100 spreads; scores that lie evenly, tie, cluster, or have the tails of Cauchy; numbers of
scores on both sides of where pairs are no longer taken all at once; and one positive in a million.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backdrop.losses import (
    _pairs,
    _soft_ranks,
    average_precision_loss,
    concordance,
    partial_auc_loss,
    rank_statistic_loss,
    ranking,
    squared_hinge_auc_loss,
)
from tests.losses.test_pairs import AUC_LOSSES, over_all_pairs
from tests.losses.test_ranking import CLOSE, LOSSES, SPREADS, times_of
from tests.losses.test_soft_ranks import Largest

PAIRS = {
    "rank statistic": (
        lambda x, y, temperature, weight: rank_statistic_loss(x, y, temperature=temperature, weight=weight),
        lambda x, y, w, t: over_all_pairs(x, y, w, AUC_LOSSES["rank statistic"][3], t),
        lambda n: torch.arange(n) % 5 == 0,
    ),
    "squared hinge": (
        lambda x, y, temperature, weight: squared_hinge_auc_loss(x, y, margin=temperature, weight=weight),
        lambda x, y, w, t: over_all_pairs(x, y, w, AUC_LOSSES["squared hinge"][3], t),
        lambda n: torch.arange(n) % 5 == 0,
    ),
}


def average_precision(s, y, w, temperature):
    above, i = torch.sigmoid((s - s[y][:, None]) / temperature), y.nonzero()[:, 0]
    half = w[i] / 2
    return 1 - (w[i] * (half + above[:, y] @ w[y]) / (half + above @ w)).sum() / w[i].sum()


EVERY = {**LOSSES, **PAIRS}
EVERY["average precision"] = (LOSSES["average precision"][0], average_precision, LOSSES["average precision"][2])


def check(name, scores, second, weight, temperature):
    loss, plain, _ = EVERY[name]
    x, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
    ones = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.double()
    actual = loss(x, second, temperature=temperature, weight=weight)
    expected = plain(wide, second.double() if second.is_floating_point() else second, ones, temperature)
    close = CLOSE[scores.dtype]
    assert actual.item() == pytest.approx(expected.item(), rel=close, abs=close)
    found, right = torch.autograd.grad(actual, x)[0].double(), torch.autograd.grad(expected, wide)[0]
    assert (found - right).norm() <= close * right.norm() + 1e-300


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["matrix", "sorted"])
def test_temperatures_from_a_thousandth_of_the_spread_to_a_hundred(name, spread, dtype, way, monkeypatch):
    if way == "sorted":
        for module in (_pairs, _soft_ranks, ranking):
            monkeypatch.setattr(module, "PAIRS", 0)
        for module in (_pairs, ranking, concordance):
            monkeypatch.setattr(module, "FEW", 0)
    scores, second = SPREADS[spread](300).to(dtype), EVERY[name][2](300)
    low, high = scores.double().quantile(torch.tensor([0.16, 0.84]).double())
    for share in (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0):
        for weight in (None, torch.rand(300, dtype=dtype)):
            check(name, scores, second, weight, share * (high - low).item() / 2)


NEAR = {  # numbers of samples on both sides of where a loss no longer takes all pairs at once, and these pairs
    "rank statistic": (1280, 1285, lambda n: n // 5 * (n - n // 5)),
    "squared hinge": (1280, 1285, lambda n: n // 5 * (n - n // 5)),
    "partial AUC": (2335, 2340, lambda n: n // 5 * math.ceil(0.3 * (n - n // 5))),
    "average precision": (2285, 2290, lambda n: n // 5 * n),
    "NDCG": (1024, 1025, lambda n: n * n),
    "Spearman": (1024, 1025, lambda n: n * n),
    "concordance": (1536, 1537, lambda n: times_of(torch.zeros(n))[1].sum().item() * n),
}


class Sorted(TorchDispatchMode):
    """Whether anything was sorted while this is open."""

    sorted = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sorted = self.sorted or func.overloadpacket is torch.ops.aten.sort
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("loss", "few", "n"),
    [(rank_statistic_loss, 32, 50_000), (squared_hinge_auc_loss, 32, 50_000), (average_precision_loss, 4, 300_000)],
)
def test_a_few_against_many_are_not_sorted(loss, few, n):
    for count in (few, few + 1):
        settings = {} if loss is squared_hinge_auc_loss else {"temperature": 0.4}
        with Sorted() as mode:
            loss(torch.randn(n, requires_grad=True), torch.arange(n) < count, **settings)
        assert mode.sorted == (count > few)


def second_of(name, n):
    second = EVERY[name][2](n)
    return torch.arange(n) % 5 == 0 if second.dtype == torch.bool else second


@pytest.mark.parametrize("name", NEAR)
def test_where_pairs_are_no_longer_taken_all_at_once(name):
    *sizes, pairs = NEAR[name]
    for n, together in zip(sizes, (True, False), strict=True):
        scores = torch.randn(n, requires_grad=True)
        with Largest() as largest:
            EVERY[name][0](scores, second_of(name, n), temperature=0.4, weight=None)
        least = pairs(n) * (4 / 5 if name == "average precision" else 1)  # two matrices
        assert (largest.numel >= least) == together


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_both_sides_of_a_threshold(name, dtype, side, weighted):
    n = NEAR[name][side]
    check(name, torch.randn(n).to(dtype), second_of(name, n), torch.rand(n, dtype=dtype) if weighted else None, 0.4)


@pytest.mark.parametrize("name", ["rank statistic", "squared hinge", "partial AUC", "average precision"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-3, 0.3, 100.0])
def test_one_positive_in_a_million(name, dtype, temperature):
    n = 1_000_001
    scores, labels = torch.randn(n, dtype=dtype), torch.zeros(n, dtype=torch.bool)
    labels[777] = True
    x, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
    apart = wide[~labels] - wide[777]
    if name == "squared hinge":
        actual, expected = squared_hinge_auc_loss(x, labels, margin=temperature), (temperature + apart).clamp(min=0)
        expected = expected.square().mean()
    elif name == "rank statistic":
        actual, expected = (
            rank_statistic_loss(x, labels, temperature=temperature),
            (apart / temperature).sigmoid().mean(),
        )
    elif name == "partial AUC":
        actual = partial_auc_loss(x, labels, max_fpr=0.1, temperature=temperature)
        expected = (apart.topk(100_000)[0] / temperature).sigmoid().mean()
    else:
        actual = average_precision_loss(x, labels, temperature=temperature)
        wrong = (apart / temperature).sigmoid().sum()
        expected = 1 - 1 / (1 + wrong)
    assert actual.item() == pytest.approx(expected.item(), rel=CLOSE[dtype])
    found, right = torch.autograd.grad(actual, x)[0], torch.autograd.grad(expected, wide)[0]
    assert (found - right).norm() <= CLOSE[dtype] * right.norm()
