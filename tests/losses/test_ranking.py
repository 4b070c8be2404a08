"""Losses on ranks against brute force over all pairs in float64, and cold ones against independent libraries."""

import copy
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score
from torch import nn

from backdrop.losses import (
    AveragePrecisionLoss,
    ConcordanceLoss,
    NDCGLoss,
    PartialAUCLoss,
    SpearmanLoss,
    _pairs,
    _soft_ranks,
    average_precision_loss,
    concordance,
    concordance_loss,
    cox_loss,
    ndcg_loss,
    partial_auc_loss,
    rank_statistic_loss,
    ranking,
    spearman_loss,
    squared_hinge_auc_loss,
)
from tests.losses.test_soft_ranks import Largest


def sigmoids(x, temperature):
    """y[i, j] = sigmoid((x_j - x_i) / T), with a gradient and without cancellation."""
    return torch.sigmoid((x[None] - x[:, None]) / temperature)


def plain_average_precision(s, y, w, temperature):
    y, above = y.bool(), sigmoids(s, temperature)
    precision = []
    for i in y.nonzero()[:, 0]:
        others = torch.arange(len(s)) != i
        hits = w[i] + (w * above[i])[others & y].sum()
        precision.append(w[i] * hits / (w[i] + (w * above[i])[others].sum()))
    return 1 - sum(precision) / w[y].sum()


def plain_ndcg(s, relevance, w, temperature):
    s, relevance, w = s[w > 0], relevance[w > 0].double(), w[w > 0]
    gain = w * (2**relevance - 1)
    rank = 1 + sigmoids(s, temperature).sum(1) - 0.5
    ideal = gain.sort(descending=True)[0] / torch.log2(torch.arange(2.0, len(s) + 2, dtype=torch.float64))
    return 1 - (gain / torch.log2(1 + rank)).sum() / ideal.sum()


def plain_spearman(a, b, w, temperature):
    ranks = torch.stack([0.5 + (w * sigmoids(-x, temperature)).sum(1) for x in (a, b)])
    ranks = ranks - (w * ranks).sum(1, keepdim=True) / w.sum()
    cov = (w * ranks) @ ranks.T
    return 1 - cov[0, 1] / (cov[0, 0] * cov[1, 1]).sqrt()


def plain_partial_auc(s, y, w, temperature, share=0.3):
    y = y.bool()
    positive, negative = s[y], s[~y]
    order = negative.detach().argsort(descending=True)
    left, q = share * w[~y].sum(), torch.zeros_like(w[~y])
    for j in order:
        q[j] = min(w[~y][j], left)
        left = left - q[j]
    for value in negative.detach().unique():  # those of one score share
        same = negative == value
        q[same] = w[~y][same] * q[same].sum() / w[~y][same].sum()
    pairs = torch.sigmoid((negative[None] - positive[:, None]) / temperature) * w[y][:, None] * q
    return pairs.sum() / (w[y].sum() * q.sum())


def times_of(s):
    """Times and events that go with these scores: with ties in time, and censored samples among them."""
    numbers = torch.arange(1, len(s) + 1, device=s.device)  # without a generator, which torch 2.6 cannot compile
    return (numbers * 7919 % 104729 % max(2, len(s) // 3)).double(), numbers * 31 % 101 < 60


def plain_concordance(s, y, w, temperature):
    times, events = times_of(s) if y is None or y.ndim == 1 else y.unbind(1)
    events = events.bool()
    later = (times[None] > times[:, None]) | ((times[None] == times[:, None]) & ~events[None])
    pairs = (later & events[:, None]) * w[:, None] * w[None]
    return (pairs * sigmoids(s, temperature)).sum() / pairs.sum()


LOSSES = {  # the loss, its brute force, what goes with n scores
    "average precision": (average_precision_loss, plain_average_precision, lambda n: torch.rand(n) < 0.2),
    "NDCG": (ndcg_loss, plain_ndcg, lambda n: torch.randint(5, (n,))),
    "Spearman": (spearman_loss, plain_spearman, lambda n: torch.randn(n, dtype=torch.float64)),
    "partial AUC": (
        lambda *args, **more: partial_auc_loss(*args, max_fpr=0.3, **more),
        plain_partial_auc,
        lambda n: torch.rand(n) < 0.2,
    ),
    "concordance": (
        lambda s, y, **more: concordance_loss(s, *(times_of(s) if y.ndim == 1 else y.unbind(1)), **more),
        plain_concordance,
        lambda n: torch.zeros(n),
    ),
}
SPREADS = {
    "normal": torch.randn,
    "ties": lambda n: torch.randint(7, (n,)) * 1.0,
    "clusters": lambda n: torch.randint(4, (n,)) * 10 + 1e-3 * torch.randn(n),
    "Cauchy": lambda n: torch.distributions.Cauchy(0.0, 1.0).sample((n,)),
}
CLOSE = {torch.float32: 3e-7, torch.float64: 1e-11}
WAYS = ["as it comes", "sorted"]


def take(way, monkeypatch):
    if way == "sorted":  # concordance by digits
        monkeypatch.setattr(concordance, "CELLS", -1)
        for module in (_pairs, _soft_ranks, ranking):
            monkeypatch.setattr(module, "PAIRS", 0)
        for module in (_pairs, ranking, concordance):
            monkeypatch.setattr(module, "FEW", 0)
        monkeypatch.setitem(_soft_ranks.CHUNK, "cpu", 64)


def compare(name, scores, second, weight, temperature):
    """The loss and its gradient against brute force in float64, relative to their sizes."""
    loss, plain, _ = LOSSES[name]
    x = scores.clone().requires_grad_()
    wide = scores.double().requires_grad_()
    second_wide = second.double() if second.is_floating_point() else second
    actual = loss(x, second, temperature=temperature, weight=weight)
    whole = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.double()
    expected = plain(wide, second_wide, whole, temperature)
    assert actual.dtype == scores.dtype
    assert actual.item() == pytest.approx(expected.item(), rel=CLOSE[scores.dtype], abs=CLOSE[scores.dtype])
    gradients = [torch.autograd.grad(value, at)[0].double() for value, at in ((actual, x), (expected, wide))]
    assert (gradients[0] - gradients[1]).norm() <= CLOSE[scores.dtype] * gradients[1].norm() + 1e-15
    return actual


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("weighted", [False, True])
def test_against_all_pairs(name, way, dtype, spread, weighted, monkeypatch):
    take(way, monkeypatch)
    for temperature in (1e-3, 0.3, 100.0):
        scores, second = SPREADS[spread](130).to(dtype), LOSSES[name][2](130)
        compare(name, scores, second, torch.rand(130, dtype=dtype) if weighted else None, temperature)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [2, 3, 5, 16, 33, 1700])
def test_sizes(name, n):
    scores, second = torch.randn(n, dtype=torch.float64), LOSSES[name][2](n)
    if name in ("average precision", "partial AUC"):
        second[:2] = torch.tensor([True, False])
    if name == "NDCG":
        second[0] = 1
    if name == "concordance":
        second = torch.stack([torch.arange(n).double(), torch.ones(n)], 1)
    compare(name, scores, second, None, 0.5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [60, 2500])
def test_padding_has_no_effect(name, n):
    """Whatever is in samples of weight 0: NaN, infinite scores, labels that are none."""
    scores, second = torch.randn(n, dtype=torch.float64), LOSSES[name][2](n)
    if name == "concordance":
        second = torch.stack([torch.rand(n).double(), (torch.rand(n) < 0.5).double()], 1)
    expected_at = scores.clone().requires_grad_()
    loss = LOSSES[name][0]
    expected = loss(expected_at, second, temperature=0.3)
    expected.backward()
    rubbish = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 0.0, math.nan], dtype=torch.float64)
    x = torch.cat([scores, rubbish]).requires_grad_()
    fill = torch.full((6, *second.shape[1:]), -100.0 if name != "Spearman" else math.nan).to(
        torch.float64 if second.is_floating_point() else torch.long
    )
    weight = torch.cat([torch.full((n,), 2.0), torch.zeros(6)])
    actual = loss(x, torch.cat([second.to(fill.dtype), fill]), temperature=0.3, weight=weight)
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad[:n], expected_at.grad, rtol=1e-9, atol=1e-15)
    assert not x.grad[n:].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [40, 3000])
def test_nan_is_not_hidden(name, n):
    scores, second = torch.randn(n), LOSSES[name][2](n)
    scores[:2] = torch.tensor([math.nan, 1.0])
    scores.requires_grad_()
    loss = LOSSES[name][0](scores, second, temperature=1.0)
    assert loss.isnan()
    loss.backward()
    assert scores.grad.isnan().all()


@pytest.mark.parametrize("name", LOSSES)
def test_infinite_scores_are_the_limit_of_large_ones(name):
    scores, second = torch.randn(50, dtype=torch.float64), LOSSES[name][2](50)
    scores[:3], scores[5:7] = math.inf, -math.inf
    loss = LOSSES[name][0]
    infinite, large = (loss(scores.clamp(-bound, bound), second, temperature=0.3).item() for bound in (math.inf, 1e9))
    assert infinite == pytest.approx(large, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(name, dtype):
    scores, second = torch.randn(900).to(dtype), LOSSES[name][2](900)
    reference = scores.double().requires_grad_()
    expected = LOSSES[name][0](reference, second, temperature=0.5)
    expected.backward()
    for autocast in (False, True):
        x = scores.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = LOSSES[name][0](x, second, temperature=0.5)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert x.grad.dtype == dtype
        assert (x.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name):
    scores, second = torch.randn(14, dtype=torch.float64, requires_grad=True), LOSSES[name][2](14)
    if second.dtype == torch.bool:
        second[:3] = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda x: LOSSES[name][0](x, second, temperature=0.7), scores)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_are_refused(name, way, monkeypatch):
    take(way, monkeypatch)
    scores, second = torch.randn(40, requires_grad=True), LOSSES[name][2](40)
    loss = LOSSES[name][0](scores, second, temperature=1.0)
    (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
@pytest.mark.parametrize("name", LOSSES)
def test_compiled(name):
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    x, second = torch.randn(30, 5, dtype=torch.float64), LOSSES[name][2](30)
    gradients = []
    for call in (
        lambda: LOSSES[name][0](model(x), second, temperature=0.5),
        torch.compile(lambda: LOSSES[name][0](model(x), second, temperature=0.5), backend="aot_eager"),
    ):
        model.zero_grad()
        call().backward()
        gradients.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1e37, 1e-38])
def test_the_size_of_weights_does_not_matter(name, size):
    scores, second = torch.randn(60), LOSSES[name][2](60)
    found = (LOSSES[name][0](scores, second, temperature=0.5, weight=torch.full((60,), w)) for w in (1.0, size))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", LOSSES)
def test_memory_grows_with_the_samples_not_the_pairs(name):
    scores, second = torch.randn(8000, requires_grad=True), LOSSES[name][2](8000)
    with Largest() as largest:
        LOSSES[name][0](scores, second, temperature=0.1).backward()
    assert largest.numel <= 2 * 2**20  # of 64 million pairs


NOTHING = {
    "average precision": ("one class only", lambda n: torch.ones(n)),
    "NDCG": ("no relevant item", lambda n: torch.zeros(n)),
    "Spearman": ("the same value of a or b", lambda n: torch.full((n,), 3.5)),
    "partial AUC": ("one class only", lambda n: torch.zeros(n)),
    "concordance": ("no two samples that can be compared", lambda n: torch.zeros(n, 2)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_nothing_to_compare(name, n):
    message, second = NOTHING[name]
    for fill in (0.5, math.nan):
        scores = torch.full((n,), fill, requires_grad=True)
        with pytest.raises(ValueError, match=rf"{message}.*single_class='zero'"):
            LOSSES[name][0](scores, second(n), temperature=1.0)
        loss = LOSSES[name][0](scores, second(n), temperature=1.0, single_class="zero")
        assert loss == 0
        loss.backward()
        assert scores.grad is not None
        assert not scores.grad.any()


WEIGHTS = st.one_of(st.just(1.0), st.floats(0, 2.0**100, width=32))
samples = st.lists(
    st.tuples(st.floats(width=32, allow_nan=False), st.integers(0, 1), WEIGHTS),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("name", LOSSES)
@given(samples=samples, double=st.booleans(), temperature=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_no_input_but_nan_gives_nan(name, samples, double, temperature):
    dtype = torch.float64 if double else torch.float32
    x, y, w = (torch.tensor(each) for each in zip(*samples, strict=True))
    x = x.to(dtype)
    x = (x * 1e268 if double else x).requires_grad_()  # about as large as numbers get
    y = torch.stack([x.detach().flip(0).double(), y.double()], 1) if name == "concordance" else y
    loss = LOSSES[name][0](x, y, weight=w, temperature=temperature, single_class="zero")
    assert -1e-6 <= loss <= (2 + 1e-6 if name == "Spearman" else 1 + 1e-6)
    loss.backward()
    assert not x.grad.isnan().any()


# Cold losses are the metrics of other libraries.


def batch(n=400):
    scores = torch.randperm(n).double()
    return scores, torch.rand(n) < 0.3, torch.rand(n, dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True])
def test_cold_average_precision_is_that_of_scikit_learn(weighted):
    scores, labels, weight = batch()
    weight = weight if weighted else None
    expected = 1 - average_precision_score(labels, scores, sample_weight=weight)
    actual = average_precision_loss(scores, labels, temperature=1e-3, weight=weight)
    assert actual.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("gains", ["exponential", "linear"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cold_ndcg_is_that_of_scikit_learn(gains, weighted):
    scores, _, weight = batch()
    relevance = torch.randint(4, (400,))
    weight = weight if weighted else torch.ones(400).double()
    gain = weight * (2.0**relevance - 1 if gains == "exponential" else relevance)
    expected = 1 - ndcg_score(gain[None].numpy(), scores[None].numpy())
    actual = ndcg_loss(scores, relevance, temperature=1e-3, gains=gains, weight=weight)
    assert actual.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_cold_spearman_is_that_of_scipy(ties):
    a, b = (torch.randint(20, (300,)).double() if ties else torch.randperm(300).double() for _ in range(2))
    b = b + a / 2
    expected = 1 - spearmanr(a, b).statistic
    assert spearman_loss(a, b, temperature=1e-3).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_fpr", [0.013, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("weighted", [False, True])
def test_cold_partial_auc_is_that_of_scikit_learn(max_fpr, weighted):
    scores, labels, weight = batch()
    weight = weight if weighted else None
    standard = roc_auc_score(labels, scores, max_fpr=max_fpr, sample_weight=weight)
    lowest = max_fpr**2 / 2  # scikit-learn gives it on McClish's scale
    area = (2 * standard - 1) * (max_fpr - lowest) + lowest
    actual = partial_auc_loss(scores, labels, max_fpr=max_fpr, temperature=1e-3, weight=weight)
    assert actual.item() == pytest.approx(1 - area / max_fpr, rel=1e-10)


def test_partial_auc_up_to_one_is_the_rank_statistic():
    scores, labels, weight = batch()
    found = partial_auc_loss(scores, labels, max_fpr=1, temperature=3.0, weight=weight)
    assert torch.equal(found, rank_statistic_loss(scores, labels, temperature=3.0, weight=weight))


def test_partial_auc_shares_ties_at_the_border():
    scores = torch.tensor([0.0, 1, 1, 1, 1, -5], requires_grad=True)
    partial_auc_loss(scores, torch.tensor([1, 0, 0, 0, 0, 0]), max_fpr=0.2, temperature=1.0).backward()
    assert torch.equal(scores.grad[1:5], scores.grad[1].expand(4))
    torch.testing.assert_close(scores.grad[0], -4 * scores.grad[1])
    assert scores.grad[5] == 0


def test_partial_auc_is_continuous_where_negatives_change_places():
    labels = torch.tensor([1, 1, 0, 0, 0])
    found = [
        partial_auc_loss(torch.tensor([0.3, 2.0, 1.0, 1 + step, -1.0]).double(), labels, max_fpr=0.5, temperature=0.5)
        for step in (-1e-9, 1e-9)
    ]
    assert found[0].item() == pytest.approx(found[1].item(), abs=1e-8)


def test_cold_concordance_is_that_of_torchmetrics_style_counting():
    """Harrell's C, counted pair by pair."""
    hazards, times, events = torch.randn(200), torch.randint(40, (200,)), torch.rand(200) < 0.5
    right = total = 0
    for i in range(200):
        for j in range(200):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                total += 1
                right += (hazards[i] > hazards[j]).item()
    loss = concordance_loss(hazards, times, events, temperature=1e-9)
    assert loss.item() == pytest.approx(1 - right / total, rel=1e-6)


def test_cold_concordance_is_that_of_lifelines():
    utils = pytest.importorskip("lifelines.utils", reason="lifelines is not installed")
    hazards = torch.randint(50, (300,)).double()
    times, events = torch.randint(60, (300,)), torch.rand(300) < 0.5
    expected = 1 - utils.concordance_index(times.numpy(), -hazards.numpy(), events.numpy())
    assert concordance_loss(hazards, times, events, temperature=1e-9).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("way", ["grid", "digits"])
@pytest.mark.parametrize("ties", ["none", "few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.05, 0.5, 30.0])
def test_concordance_of_many_samples(way, ties, dtype, temperature, monkeypatch):
    if way == "digits":
        monkeypatch.setattr(concordance, "CELLS", -1)
    n = 2100
    times = torch.randperm(n) if ties == "none" else torch.randint(n if ties == "few" else 7, (n,))
    events = torch.rand(n) < 0.5
    scores = torch.randn(n, dtype=dtype)
    compare("concordance", scores, torch.stack([times.double(), events.double()], 1), torch.rand(n), temperature)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 41])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("times", [1, 2, 5, 1000])
def test_concordance_in_small_blocks(n, block, times, monkeypatch):
    """Samples of one time in several blocks, blocks that are not full, and tables in parts."""
    for name, value in {"FEW": 0, "BLOCK": block, "WORK": {"cpu": 100}}.items():
        monkeypatch.setattr(concordance, name, value)
    second = torch.stack([torch.randint(times, (n,)).double(), (torch.arange(n) % 3 < 2).double()], 1)
    second[:2] = torch.tensor([[-1.0, 1.0], [1e9, 0.0]])  # two that can be compared
    for weight in (None, torch.rand(n).clamp(min=0.1)):
        compare("concordance", 3 * torch.randn(n, dtype=torch.float64), second, weight, 0.5)


@pytest.mark.parametrize(("terms", "error"), [(12, 4e-8), (21, 1e-12)])
def test_the_grid_of_concordance(terms, error):
    nodes, cells = concordance.NODES[terms], 20
    grid, to_series = concordance._grid(nodes, cells, torch.zeros(0, dtype=torch.float64))
    x, others = (torch.linspace(0, 39.999, count, dtype=torch.float64) for count in (1001, 81))
    cell = (x / concordance.CELL).long()
    series = concordance._series((x / concordance.CELL - cell) * 2 - 1, nodes)
    for function in (torch.sigmoid, lambda apart: torch.sigmoid(apart) * torch.sigmoid(-apart)):
        table = function(others[:, None] - grid).view(len(others), cells, nodes) @ to_series
        right = function(others[:, None] - x)
        assert ((table[:, cell] * series).sum(-1) / right - 1).abs().max() < error


def test_a_small_concordance_loss_keeps_its_digits():
    """On the grid too, where all pairs are far apart and in the right order."""
    n = 2000
    times = torch.arange(n)
    hazards = torch.where(times < 1000, 40.0, 0.0).double() + torch.rand(n).double()
    hazards, events = hazards.requires_grad_(), (times < 1000) & (times % 1000 == 0)
    expected = torch.sigmoid(hazards[1:] - hazards[0])
    expected = torch.where(times[1:] < 1000, 0 * expected, expected).sum() / (n - 1)
    loss = concordance_loss(hazards, times, events, temperature=1.0)
    near = torch.sigmoid(hazards[1:1000] - hazards[0]).sum() / (n - 1)
    assert loss.item() == pytest.approx((expected + near).item(), rel=1e-12)
    gradient, right = (torch.autograd.grad(each, hazards)[0][1000:] for each in (loss, expected))
    torch.testing.assert_close(gradient, right, rtol=1e-11, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 10.0), (torch.float64, 25.0)])
def test_a_small_average_precision_loss_keeps_its_digits(way, dtype, apart, monkeypatch):
    """The share of negatives above each positive, where 1 minus that of positives has none left."""
    take(way, monkeypatch)
    labels = torch.arange(100) < 30
    scores = (torch.where(labels, apart, 0.0) + torch.rand(100)).to(dtype).requires_grad_()
    wide = scores.detach().double().requires_grad_()
    wrong, hits = (torch.sigmoid(wide[group] - wide[labels][:, None]).sum(1) for group in (~labels, labels))
    expected = (wrong / (wrong + hits + 0.5)).mean()
    loss = average_precision_loss(scores, labels, temperature=1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=CLOSE[dtype])
    found, right = torch.autograd.grad(loss, scores)[0], torch.autograd.grad(expected, wide)[0]
    assert (found - right).norm() <= CLOSE[dtype] * right.norm()


@pytest.mark.parametrize("name", ["NDCG", "average precision"])
@pytest.mark.parametrize(("n", "temperature"), [(2, 0.3), (2, 100.0), (3, 0.3), (3, 100.0), (700, 7.0), (700, 100.0)])
def test_single_precision_where_errors_do_not_cancel(name, n, temperature):
    """Few scores, or many that are the same: then all sums err to one side."""
    second = torch.arange(n) % (2 if name == "average precision" else 5)
    for scores in (torch.arange(n).float().sin(), torch.arange(n) * 7 % 5 * 1.0, torch.zeros(n)):
        compare(name, scores, second, None, temperature)


def test_times_of_one_sample_after_the_other_may_be_infinite(monkeypatch):
    """Whichever way the pairs are taken."""
    times = torch.tensor([math.inf, math.inf, -math.inf, -math.inf, 1.0, 1.0, 2.0]).repeat(9)
    hazards, events = torch.randn(63).double(), torch.rand(63) < 0.5
    found = [concordance_loss(hazards, times, events, temperature=0.3)]
    monkeypatch.setattr(concordance, "FEW", 0)
    found.append(concordance_loss(hazards, times, events, temperature=0.3))
    monkeypatch.setattr(concordance, "CELLS", -1)
    found.append(concordance_loss(hazards, times, events, temperature=0.3))
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-12, atol=0)
    compare("concordance", hazards, torch.stack([times.double(), events.double()], 1), None, 0.3)


# Several columns.


@pytest.mark.parametrize("name", ["average precision", "partial AUC"])
@pytest.mark.parametrize("labels", ["classes", "several"])
@pytest.mark.parametrize("n", [50, 900])
def test_each_class_against_the_rest(name, labels, n):
    loss, plain, _ = LOSSES[name]
    scores = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(3, (n,))  # nobody has the last one
    member = nn.functional.one_hot(classes, 4) if labels == "classes" else (torch.rand(n, 4) < 0.4).long()
    member[:, 3] = 0
    ones = torch.ones(n, dtype=torch.float64)
    expected = sum(plain(scores[:, c], member[:, c], ones, 0.4) for c in range(3)) / 3
    actual = loss(scores, classes if labels == "classes" else member, temperature=0.4)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-16)


@pytest.mark.parametrize("name", ["NDCG", "Spearman"])
@pytest.mark.parametrize("n", [30, 1200])
def test_columns(name, n):
    loss, plain, second = LOSSES[name]
    scores, others = torch.randn(n, 3, dtype=torch.float64), torch.stack([second(n) for _ in range(3)], 1)
    others[:, 1] = 0
    ones = torch.ones(n, dtype=torch.float64)
    expected = (plain(scores[:, 0], others[:, 0], ones, 0.4) + plain(scores[:, 2], others[:, 2], ones, 0.4)) / 2
    torch.testing.assert_close(loss(scores, others, temperature=0.4), expected, rtol=1e-12, atol=0)


def test_lists_of_different_lengths():
    lengths = [9, 4, 7]
    lists = [(torch.randn(n, dtype=torch.float64), torch.randint(1, 4, (n,))) for n in lengths]
    scores, relevance = (
        torch.stack([nn.functional.pad(each[part], (0, 9 - len(each[part])), value=5) for each in lists], 1)
        for part in range(2)
    )
    weight = (torch.arange(9)[:, None] < torch.tensor(lengths)).float()
    expected = sum(ndcg_loss(*each, temperature=0.5) for each in lists) / 3
    actual = ndcg_loss(scores, relevance, temperature=0.5, weight=weight)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


def test_large_relevances_do_not_overflow():
    relevance = torch.tensor([3000, 2999, 0])
    loss = ndcg_loss(torch.tensor([1.0, 2.0, 3.0]), relevance, temperature=1e-3)
    gain = numpy.array([2.0, 1.0])
    expected = 1 - (gain / numpy.log2([4, 3])).sum() / (gain / numpy.log2([2, 3])).sum()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_one_positive_in_a_million():
    scores, labels = torch.randn(1_000_001), torch.zeros(1_000_001)
    labels[77] = 1
    scores.requires_grad_()
    above = ((scores.double() - scores[77].double()) / 0.1).sigmoid().sum() + 0.5
    expected = 1 - 1 / above
    (right,) = torch.autograd.grad(expected, scores)
    loss = average_precision_loss(scores, labels, temperature=0.1)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss.item() == pytest.approx(expected.item(), rel=3e-7)
    assert (gradient - right).norm() < 1e-6 * right.norm()


MODULES = [
    (AveragePrecisionLoss(0.5), {"temperature": 0.9}, average_precision_loss),
    (NDCGLoss(0.5, gains="linear"), {"temperature": 0.9, "gains": "linear"}, ndcg_loss),
    (SpearmanLoss(0.5), {"temperature": 0.9}, spearman_loss),
    (PartialAUCLoss(0.3, 0.5), {"max_fpr": 0.3, "temperature": 0.9}, partial_auc_loss),
]


@pytest.mark.parametrize(("module", "settings", "function"), MODULES, ids=lambda each: getattr(each, "__name__", ""))
def test_modules(module, settings, function):
    x, y, w = torch.rand(30), torch.arange(30) % 2, torch.rand(30)
    module = copy.deepcopy(module)
    assert torch.equal(module(x, y, w), function(x, y, weight=w, **{**settings, "temperature": 0.5}))
    module.temperature = 0.9
    assert torch.equal(module(x, y), function(x, y, **settings))
    shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    assert repr(module) == f"{type(module).__name__}({shown})"
    module.single_class = "zero"
    assert module(x, torch.zeros(30, dtype=torch.long)) == 0
    assert "single_class='zero'" in repr(module)


def test_module_of_concordance():
    hazards, times, events, w = torch.randn(30), torch.rand(30), torch.rand(30) < 0.5, torch.rand(30)
    module = ConcordanceLoss(0.5)
    expected = concordance_loss(hazards, times, events, temperature=0.5, weight=w)
    assert torch.equal(module(hazards, times, events, w), expected)
    assert torch.equal(module(hazards[:, None], times[:, None], events[:, None], w[:, None]), expected)
    assert repr(module) == "ConcordanceLoss(temperature=0.5)"
    assert ConcordanceLoss(0.5, single_class="zero")(hazards, times, torch.zeros(30)) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", LOSSES)
def test_a_gpu_computes_the_same(name):
    for n in (60, 9000):
        scores, second = torch.randn(n), LOSSES[name][2](n)
        found = []
        for device in ("cpu", "cuda"):
            x = scores.to(device, copy=True).requires_grad_()
            loss = LOSSES[name][0](x, second.to(device), temperature=0.3)
            loss.backward()
            found.append((loss.item(), x.grad.cpu()))
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
        assert (found[0][1] - found[1][1]).norm() <= 1e-6 * found[0][1].norm()


@pytest.mark.parametrize(
    "name",
    ["rank statistic", "squared hinge", "partial AUC", "average precision", "concordance", "NDCG", "Spearman", "Cox"],
)
@pytest.mark.parametrize("n", [12, 1700])
def test_under_torch_func(name, n):
    """Of scores, for labels that all have in common."""
    labels = torch.arange(n) % 3 == 0
    loss = {
        "rank statistic": lambda s: rank_statistic_loss(s, labels, temperature=0.3),
        "squared hinge": lambda s: squared_hinge_auc_loss(s, labels),
        "partial AUC": lambda s: partial_auc_loss(s, labels, max_fpr=0.3, temperature=0.3),
        "average precision": lambda s: average_precision_loss(s, labels, temperature=0.3),
        "concordance": lambda s: concordance_loss(s, torch.arange(n), labels, temperature=0.3),
        "NDCG": lambda s: ndcg_loss(s, labels, temperature=0.3),
        "Spearman": lambda s: spearman_loss(s, torch.arange(n).sin(), temperature=0.3),
        "Cox": lambda s: cox_loss(s, torch.arange(n), labels),
    }[name]
    scores = torch.randn(3, n)
    expected = []
    for each in scores:
        x = each.clone().requires_grad_()
        value = loss(x)
        expected.append((value.detach(), torch.autograd.grad(value, x)[0]))
    values, gradients = (torch.stack(each) for each in zip(*expected, strict=True))
    torch.testing.assert_close(torch.func.vmap(loss)(scores), values)
    torch.testing.assert_close(torch.func.grad(loss)(scores[1]), gradients[1])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(scores), gradients)
    torch.testing.assert_close(torch.func.vmap(loss, 1)(scores.T), values)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.func.grad(lambda s: torch.func.grad(loss)(s).square().sum())(scores[0])
