"""Losses against brute force over all pairs, finite differences and scikit-learn; what they do at the edges."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import fbeta_score, roc_auc_score
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backdrop import Backdrop
from backdrop.losses import (
    ClassDistanceLoss,
    RankStatisticLoss,
    SoftFBetaLoss,
    SquaredHingeAUCLoss,
    _pairs,
    _soft_ranks,
    class_distance_loss,
    rank_statistic_loss,
    soft_f_beta_loss,
    squared_hinge_auc_loss,
)

AUC_LOSSES = {
    "rank statistic": (rank_statistic_loss, "temperature", 0.7, lambda x, t: torch.sigmoid(x / t)),
    "squared hinge": (squared_hinge_auc_loss, "margin", 0.7, lambda x, m: (m + x).clamp(min=0).square()),
}


WAYS = {  # pairs up to which all are taken at once, negatives or positives up to which they are, scores in a chunk
    "as it comes": None,
    "pairs": (2**40, 0, 64),
    "tiles": (50, 1000, 64),
    "sorted": (0, 0, 64),
}


def take(way, monkeypatch):
    if WAYS[way]:
        pairs, few, chunk = WAYS[way]
        monkeypatch.setattr(_pairs, "PAIRS", pairs)
        monkeypatch.setattr(_pairs, "FEW", few)
        monkeypatch.setitem(_soft_ranks.CHUNK, "cpu", chunk)


def over_all_pairs(scores, labels, weight, function, setting):
    """The mean over a matrix of pairs, for one column of scores."""
    positive = labels.bool()
    pairs = weight[positive][:, None] * weight[~positive]
    return (function(scores[~positive] - scores[positive][:, None], setting) * pairs).sum() / pairs.sum()


def batch(n=60, dtype=torch.float64):
    scores = torch.randn(n, dtype=dtype, requires_grad=True)
    return scores, torch.rand(n) < 0.3, torch.rand(n, dtype=dtype)


@pytest.mark.parametrize("kind", AUC_LOSSES)
@pytest.mark.parametrize("setting", [0.7, 1.0, 0.01])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("few", [False, True])
def test_auc_losses_against_all_pairs(kind, setting, weighted, way, few, monkeypatch):
    take(way, monkeypatch)
    loss, name, _, function = AUC_LOSSES[kind]
    scores, labels, weight = batch(300)
    if few:
        labels[20:] = False
    expected = over_all_pairs(scores, labels, weight if weighted else torch.ones_like(weight), function, setting)
    actual = loss(scores, labels, weight=weight if weighted else None, **{name: setting})
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", AUC_LOSSES)
@pytest.mark.parametrize("spread", [1e-3, 30, 1e3])
@pytest.mark.parametrize("way", WAYS)
def test_auc_losses_far_from_and_near_each_other(kind, spread, way, monkeypatch):
    """Where exponentials vanish, and sums of squares could cancel."""
    take(way, monkeypatch)
    loss, _, _, function = AUC_LOSSES[kind]
    scores, labels, weight = batch(400)
    scores = (1e4 * scores.sign() + spread * scores).detach().requires_grad_()  # two heaps, far apart
    expected, actual = over_all_pairs(scores, labels, weight, function, 1.0), loss(scores, labels, weight=weight)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("order", [1, -1])
def test_scores_in_perfect_and_in_wrong_order(order):
    labels = torch.arange(200) % 2
    scores = (order * 1e4 * labels + torch.randn(200)).requires_grad_()
    loss = rank_statistic_loss(scores, labels)
    loss.backward()
    assert loss == (0 if order > 0 else 1)
    assert not scores.grad.any()


@pytest.mark.parametrize("name", ["rank statistic", "squared hinge", "class distance", "soft F-beta"])
@pytest.mark.parametrize("size", [3e38, 1e-38])
def test_the_size_of_weights_does_not_matter(name, size):
    scores, labels, _ = batch(dtype=torch.float32)
    expected, actual = (CALLS[name](scores, labels, weight=torch.full((60,), w)) for w in (1.0, size))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", AUC_LOSSES)
@pytest.mark.parametrize("labels", ["classes", "several"])
def test_each_class_against_the_rest(kind, labels):
    loss, name, setting, function = AUC_LOSSES[kind]
    scores = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(3, (50,))  # nobody has the last one
    member = nn.functional.one_hot(classes, 4) if labels == "classes" else (torch.rand(50, 4) < 0.4).long()
    if labels == "several":
        member[:, 3] = 0
    ones = torch.ones(50, dtype=torch.float64)
    expected = sum(over_all_pairs(scores[:, c], member[:, c], ones, function, setting) for c in range(3)) / 3
    actual = loss(scores, classes if labels == "classes" else member, **{name: setting})
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def brute_class_distance(features, labels, distance, weight):
    means = [
        (features[labels == c] * weight[labels == c, None]).sum(0) / weight[labels == c].sum()
        for c in labels.unique()
        if weight[labels == c].sum() > 0
    ]
    pairs = [(a - b).square().sum() for i, a in enumerate(means) for b in means[:i]]
    return sum((square - distance**2) ** 2 for square in pairs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(30, 5), (30, 2, 3), (30,)])
def test_class_distance(weighted, shape):
    features = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([-3, 7, 7, 10**12, 5, 10**13])[torch.arange(30) % 6]
    weight = torch.rand(30, dtype=torch.float64)
    weight[(labels == 5) | (labels == 10**13)] = 0  # so these classes are not there
    if not weighted:
        weight = torch.ones_like(weight)
    expected = brute_class_distance(features.reshape(30, -1), labels, 1.3, weight)
    actual = class_distance_loss(features, labels, distance=1.3, weight=weight if weighted else None)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, features)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


def test_class_distance_of_means_that_coincide():
    """The gradient of a distance has no limit at zero; that of its square does."""
    features = torch.zeros(4, 3, requires_grad=True)
    class_distance_loss(features, torch.tensor([0, 1, 0, 1]), distance=1).backward()
    assert not features.grad.any()


@pytest.mark.parametrize("beta", [0.5, 1, 2])
def test_soft_f_beta(beta):
    p, y, w = torch.rand(40, dtype=torch.float64, requires_grad=True), torch.rand(40) < 0.4, torch.rand(40).double()
    hits, missed, wrong = (w * y * p).sum(), (w * y * (1 - p)).sum(), (w * ~y * p).sum()
    expected = 1 - (1 + beta**2) * hits / ((1 + beta**2) * hits + beta**2 * missed + wrong)
    actual = soft_f_beta_loss(p, y, beta=beta, weight=w)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, p)[0] for value in (actual, expected)))


@pytest.mark.parametrize("beta", [0.5, 1, 2])
def test_hard_f_beta_is_that_of_scikit_learn(beta):
    decisions, y, w = torch.rand(200) < 0.4, torch.rand(200) < 0.4, torch.rand(200)
    expected = 1 - fbeta_score(y, decisions, beta=beta, sample_weight=w)
    assert soft_f_beta_loss(decisions.float(), y, beta=beta, weight=w).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_cold_rank_statistic_is_roc_auc(weighted):
    """With ties, which count half."""
    scores, labels = torch.randint(20, (500,)).double(), torch.rand(500) < 0.3
    weight = torch.rand(500) if weighted else None
    expected = 1 - roc_auc_score(labels, scores, sample_weight=weight)
    assert rank_statistic_loss(scores, labels, temperature=1e-6, weight=weight).item() == pytest.approx(expected)


def test_a_cold_rank_statistic_is_roc_auc_for_many_classes():
    scores, classes = torch.randint(9, (300, 3)).float(), torch.randint(3, (300,))
    expected = 1 - roc_auc_score(nn.functional.one_hot(classes), scores, average="macro")
    assert rank_statistic_loss(scores, classes, temperature=1e-6).item() == pytest.approx(expected, rel=1e-5)


def test_gradcheck():
    scores, labels, weight = batch(12)
    labels[:2], labels[2:4] = True, False
    features, classes = torch.randn(9, 3, dtype=torch.float64, requires_grad=True), torch.arange(9) % 3
    for loss in (rank_statistic_loss, squared_hinge_auc_loss):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, labels, weight=weight), scores)
    assert torch.autograd.gradcheck(lambda x: class_distance_loss(x, classes, distance=1), features)
    assert torch.autograd.gradcheck(lambda x: soft_f_beta_loss(x.sigmoid(), labels, weight=weight), scores)


CALLS = {
    "rank statistic": lambda x, y, **more: rank_statistic_loss(x, y, **more),
    "squared hinge": lambda x, y, **more: squared_hinge_auc_loss(x, y, **more),
    "class distance": lambda x, y, **more: class_distance_loss(x, y, distance=1, **more),
    "soft F-beta": lambda x, y, **more: soft_f_beta_loss(x.sigmoid(), y, **more),
}
BINARY = [name for name in CALLS if name != "class distance"]


@pytest.mark.parametrize("name", BINARY)
def test_kinds_of_labels_and_shapes(name):
    scores, labels, weight = batch()
    expected = CALLS[name](scores, labels, weight=weight)
    for dtype in (torch.uint8, torch.int64, torch.float32, torch.float16):
        assert torch.equal(CALLS[name](scores, labels.to(dtype), weight=weight), expected)
    for x in (scores, scores[:, None]):
        for y in (labels, labels[:, None]):
            if x.ndim >= y.ndim:
                assert torch.equal(CALLS[name](x, y, weight=weight[:, None]), expected)
    scores.grad = None
    CALLS[name](scores[:, None], labels[:, None]).backward()
    assert scores.grad.shape == (60,)


@pytest.mark.parametrize("name", CALLS)
def test_weights_say_how_often_a_sample_is_there(name):
    scores, labels, _ = batch()
    times = torch.randint(3, (60,))
    repeated = [x.repeat_interleave(times) for x in (scores, labels)]
    torch.testing.assert_close(CALLS[name](scores, labels, weight=times), CALLS[name](*repeated), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(name, dtype):
    scores, labels, weight = batch(200, torch.float32)
    rounded = scores.detach().to(dtype)
    reference = rounded.double().requires_grad_()
    expected = CALLS[name](reference, labels, weight=weight.double())
    expected.backward()
    for autocast in (False, True):
        x = rounded.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = CALLS[name](x, labels, weight=weight)
        loss.backward()
        assert loss.dtype == torch.float32
        exact = name != "soft F-beta"  # there the sigmoid outside is rounded
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if exact else 1e-2)
        assert x.grad.dtype == dtype
        assert (x.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores(name, dtype):
    scores = torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    loss = CALLS[name](scores, torch.tensor([1, 1, 0, 0, 0]))
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.isfinite().all()


def test_one_positive_against_a_million_negatives():
    scores = torch.randn(1_000_001, requires_grad=True)
    labels = torch.zeros(1_000_001)
    labels[123] = 1
    apart = (scores.detach().double() - scores[123].detach().double())[labels == 0]
    assert rank_statistic_loss(scores, labels).item() == pytest.approx(apart.sigmoid().mean().item(), rel=1e-6)
    loss = squared_hinge_auc_loss(scores, labels)
    assert loss.item() == pytest.approx((1 + apart).clamp(min=0).square().mean().item(), rel=1e-6)
    loss.backward()
    assert scores.grad[123].item() == pytest.approx(-2 * (1 + apart).clamp(min=0).mean().item(), rel=1e-5)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
samples = st.lists(st.tuples(finite, st.booleans(), st.one_of(st.just(1.0), finite.map(abs))), min_size=1, max_size=9)


@pytest.mark.parametrize("name", CALLS)
@given(samples=samples, double=st.booleans())
def test_no_finite_input_gives_nan(name, samples, double):
    dtype = torch.float64 if double else torch.float32
    x, y, w = (torch.tensor(each) for each in zip(*samples, strict=True))
    x = x.to(dtype)
    x = (x * 1e268 if double else x).requires_grad_()  # about as large as numbers get
    loss = CALLS[name](x, y, weight=w, single_class="zero")
    assert not loss.isnan()
    if loss.isfinite():
        loss.backward()
        assert not x.grad.isnan().any()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [4, 400])
def test_nan_is_not_hidden(name, n):
    scores = torch.randn(n)
    scores[2] = math.nan
    scores.requires_grad_()
    loss = CALLS[name](scores, torch.arange(n) % 2)
    assert loss.isnan()
    loss.backward()
    assert scores.grad.isnan().any()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("labels", [[], [1, 1, 1], [0, 0, 0]])
def test_a_single_class(name, labels):
    scores, labels = torch.randn(len(labels), requires_grad=True), torch.tensor(labels, dtype=torch.long)
    with pytest.raises(ValueError, match=r"one class only.*single_class='zero'"):
        CALLS[name](scores, labels)
    loss = CALLS[name](scores, labels, single_class="zero")
    assert loss == 0
    loss.backward()
    assert scores.grad is not None
    assert not scores.grad.any()


@pytest.mark.parametrize("name", CALLS)
def test_samples_without_weight_make_no_class(name):
    scores, labels = torch.randn(4), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="one class only"):
        CALLS[name](scores, labels, weight=torch.tensor([1, 1, 0, 0]))


class _Largest(TorchDispatchMode):
    """The largest tensor made while this is open."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if hasattr(leaf, "numel")
        ]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("kind", AUC_LOSSES)
def test_memory_grows_with_the_samples_not_the_pairs(kind):
    scores, labels = torch.randn(4000, requires_grad=True), torch.arange(4000) % 2
    with _Largest() as largest:
        AUC_LOSSES[kind][0](scores, labels).backward()
    assert largest.numel <= max(_pairs.PAIRS, 40 * 4000)  # of 4 million pairs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_computes_the_same(name, dtype):
    for n in (40, 9000):
        scores, labels, weight = batch(n)
        scores = scores.detach().to(dtype)
        found = []
        for device in ("cpu", "cuda"):
            x = scores.to(device, copy=True).requires_grad_()
            with torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2):
                loss = CALLS[name](x, labels.to(device), weight=weight.to(device))
            loss.backward()
            found.append((loss.item(), x.grad.double().cpu()))
        (expected, gradient), (actual, other) = found
        close = {8: 1e-10, 4: 1e-5, 2: 1e-2}[dtype.itemsize]
        assert actual == pytest.approx(expected, rel=close)
        assert (gradient - other).norm() <= close * gradient.norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    """A graph break, and the same loss."""
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    x, labels = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 2
    gradients = []
    for call in (
        lambda: CALLS[name](model(x), labels),
        torch.compile(lambda: CALLS[name](model(x), labels), backend="aot_eager"),
    ):
        model.zero_grad()
        call().backward()
        gradients.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_second_derivatives_are_refused():
    scores, labels, _ = batch()
    for loss in (rank_statistic_loss, squared_hinge_auc_loss):
        (gradient,) = torch.autograd.grad(loss(scores, labels), scores, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            gradient.sum().backward()


MODULES = [
    (RankStatisticLoss(0.5), "temperature", lambda x, y, **more: rank_statistic_loss(x, y, **more)),
    (SquaredHingeAUCLoss(0.5), "margin", lambda x, y, **more: squared_hinge_auc_loss(x, y, **more)),
    (ClassDistanceLoss(0.5), "distance", lambda x, y, **more: class_distance_loss(x, y, **more)),
    (SoftFBetaLoss(0.5), "beta", lambda x, y, **more: soft_f_beta_loss(x, y, **more)),
]


@pytest.mark.parametrize(("module", "setting", "function"), MODULES)
def test_modules(module, setting, function):
    x, y, w = torch.rand(30), torch.rand(30) < 0.5, torch.rand(30)
    module = copy.deepcopy(module)
    assert torch.equal(module(x, y, w), function(x, y, weight=w, **{setting: 0.5}))
    setattr(module, setting, 0.9)
    assert torch.equal(module(x, y), function(x, y, **{setting: 0.9}))
    assert repr(module) == f"{type(module).__name__}({setting}=0.9)"
    module.single_class = "zero"
    assert module(x, torch.ones(30).bool()) == 0
    assert "single_class='zero'" in repr(module)


def test_two_masks_on_two_terms():
    """Eq. 4: the cross-entropy and the class distances have effective batch sizes of their own."""
    body, head = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
    x, labels = torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 3
    masks = [Backdrop(p, generator=torch.Generator().manual_seed(seed)) for seed, p in enumerate((0.8, 0.4))]
    weights = [copy.deepcopy(mask).draw_weight(x) for mask in masks]
    hidden = body(x)
    entropy = nn.functional.cross_entropy(masks[0](head(hidden)), labels)
    (entropy + class_distance_loss(masks[1](hidden), labels, distance=2)).backward()

    # By hand: the gradient of each term at the place of its mask, times the mask's weights.
    v = hidden.detach().requires_grad_()
    f = head(v).detach().requires_grad_()
    (to_f,) = torch.autograd.grad(nn.functional.cross_entropy(f, labels), f)
    (to_v,) = torch.autograd.grad(class_distance_loss(v, labels, distance=2), v)
    to_f, to_v = to_f * weights[0], to_v * weights[1]
    torch.testing.assert_close(head.weight.grad, to_f.T @ v)
    torch.testing.assert_close(body.weight.grad, (to_f @ head.weight + to_v).T @ x)
    assert (weights[0] != 0).sum() < (weights[1] != 0).sum()


# What the first version got wrong.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.5, 321.0])
@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 1e-6, 1.0])
def test_ties_count_half_at_any_temperature(way, dtype, score, temperature, monkeypatch):
    take(way, monkeypatch)
    scores, labels = torch.full((1000,), score, dtype=dtype, requires_grad=True), torch.arange(1000) % 4 == 0
    loss = rank_statistic_loss(scores, labels, temperature=temperature)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss.item() == pytest.approx(0.5, rel=1e-7)
    expected = torch.where(labels, -1 / 250, 1 / 750) / 4 / temperature
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [-60.0, -20.0, -15.0, 8.0, 15.0, 20.0, 60.0])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_gradients_of_far_pairs(way, dtype, apart, temperature, monkeypatch):
    """In float32, 1 - sigmoid(20) is 0; and beyond some distance only one of the two directions has any digits."""
    take(way, monkeypatch)
    labels = torch.arange(400) % 2 == 0
    scores = (labels * apart * temperature + 0.01 * temperature * torch.randn(400)).to(dtype).requires_grad_()
    wide = scores.detach().double()
    between = (wide[~labels] - wide[labels][:, None]) / temperature
    slope = torch.exp(-between.abs()) / (1 + torch.exp(-between.abs())) ** 2 / temperature / 200**2
    expected = torch.zeros_like(wide)
    expected[labels], expected[~labels] = -slope.sum(1), slope.sum(0)
    (gradient,) = torch.autograd.grad(rank_statistic_loss(scores, labels, temperature=temperature), scores)
    close = 3e-7 if dtype == torch.float32 else 1e-11
    assert (gradient.double() - expected).norm() <= close * expected.norm()


@pytest.mark.parametrize("kind", AUC_LOSSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", [1e-3, 0.3, 5.0, 100.0])
@pytest.mark.parametrize("spread", ["normal", "ties", "clusters", "Cauchy"])
def test_single_precision_against_double(kind, way, setting, spread, monkeypatch):
    take(way, monkeypatch)
    loss, name, _, function = AUC_LOSSES[kind]
    scores = {
        "normal": torch.randn(300),
        "ties": torch.randint(7, (300,)).float(),
        "clusters": torch.randint(4, (300,)) * 10 + 1e-3 * torch.randn(300),
        "Cauchy": torch.distributions.Cauchy(0.0, 1.0).sample((300,)),
    }[spread].requires_grad_()
    labels, weight = torch.rand(300) < 0.3, torch.rand(300)
    wide = scores.detach().double().requires_grad_()
    expected = over_all_pairs(wide, labels, weight.double(), function, setting)
    actual = loss(scores, labels, weight=weight, **{name: setting})
    assert actual.item() == pytest.approx(expected.item(), rel=3e-7)
    right, gradient = torch.autograd.grad(expected, wide)[0], torch.autograd.grad(actual, scores)[0]
    assert (gradient - right).norm() <= 3e-7 * right.norm()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [40, 1500])
@pytest.mark.parametrize("classes", [False, True])
def test_samples_of_weight_zero_are_padding(name, n, classes):
    """Whatever they hold: NaN, infinite scores, labels that are none."""
    if classes and name != "class distance":
        scores, labels = torch.randn(n, 3), torch.randint(3, (n,))
    else:
        scores, labels = torch.randn(n), torch.randint(2, (n,))
    call = soft_f_beta_loss if name == "soft F-beta" else CALLS[name]  # the sigmoid of NaN has no gradient
    scores = (scores.sigmoid() if name == "soft F-beta" else scores).requires_grad_()
    expected = call(scores, labels)
    expected.backward()
    rubbish = torch.tensor([math.nan, math.inf, -math.inf, 1e30, math.nan])
    rubbish = rubbish[:, None].expand(5, 3) if scores.ndim == 2 else rubbish
    x = torch.cat([scores.detach(), rubbish]).requires_grad_()
    weight = torch.cat([torch.full((n,), 3.0), torch.zeros(5)])
    actual = call(x, torch.cat([labels, torch.full((5,), -100)]), weight=weight)
    actual.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(x.grad[:n], scores.grad, rtol=1e-5, atol=1e-8)
    assert not x.grad[n:].any()


@pytest.mark.parametrize("way", WAYS)
def test_infinite_scores_in_the_hinge(way, monkeypatch):
    """In the right order they are free, as ties they cost the margin, in the wrong order without limit."""
    take(way, monkeypatch)
    inf = math.inf

    def found(positives, negatives):
        scores = torch.tensor([*positives, *negatives], dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([True] * len(positives) + [False] * len(negatives))
        loss = squared_hinge_auc_loss(scores, labels, margin=0.5)
        (gradient,) = torch.autograd.grad(loss, scores)
        return loss.item(), gradient.tolist()

    assert found([inf, 1.0], [0.0, 0.75]) == (0.0625 / 4, [0, -0.125, 0, 0.125])
    assert found([0.0], [-inf, 0.0]) == (0.125, [-0.5, 0, 0.5])
    assert found([inf], [-inf]) == (0, [0, 0])
    assert found([inf, 5.0], [inf, 0.0])[1] == [-0.25, -inf, inf, 0]
    assert found([inf], [inf, 0.0]) == (0.125, [-0.5, 0.5, 0])
    assert found([-inf], [-inf, -inf]) == (0.25, [-1, 0.5, 0.5])
    assert found([-inf, 3.0], [0.0, -inf]) == (inf, [-inf, 0, inf, 0.25])
    assert found([0.0], [inf]) == (inf, [-inf, inf])


@pytest.mark.parametrize("kind", AUC_LOSSES)
def test_many_classes_at_once(kind):
    """Without a loop over classes: as many operations for 60 as for 3."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    found = []
    for classes in (3, 60):
        scores, labels = torch.randn(4000, classes, requires_grad=True), torch.randint(classes, (4000,))
        with Count() as count:
            AUC_LOSSES[kind][0](scores, labels).backward()
        found.append(count.calls)
    assert found[1] < 4 * found[0]


@pytest.mark.parametrize("temperature", [0.3, 20.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_few_against_many_in_tiles(temperature, weighted):
    scores, labels = torch.randn(50_000, requires_grad=True), torch.zeros(50_000, dtype=torch.bool)
    labels[[5, 100, 49_999]] = True
    weight = torch.rand(50_000) if weighted else None
    actual = rank_statistic_loss(scores, labels, temperature=temperature, weight=weight)
    wide = scores.detach().double().requires_grad_()
    ones = torch.ones(50_000, dtype=torch.float64) if weight is None else weight.double()
    expected = over_all_pairs(wide, labels, ones, lambda x, t: torch.sigmoid(x / t), temperature)
    assert actual.item() == pytest.approx(expected.item(), rel=3e-7)
    right, gradient = torch.autograd.grad(expected, wide)[0], torch.autograd.grad(actual, scores)[0]
    assert (gradient - right).norm() <= 3e-7 * right.norm()


@pytest.mark.parametrize(("size", "margin"), [(1e18, 1.0), (1.0, 1e18)])
def test_the_hinge_of_far_scores_does_not_overflow_on_its_way(size, margin):
    """The sum of the squares would, in float32; the mean does not."""
    scores, labels = size * torch.linspace(-1, 1, 100), torch.arange(100) % 2 == 0
    expected = over_all_pairs(scores.double(), labels, torch.ones(100).double(), AUC_LOSSES["squared hinge"][3], margin)
    assert squared_hinge_auc_loss(scores, labels, margin=margin).item() == pytest.approx(expected.item(), rel=3e-7)


@pytest.mark.parametrize("kind", AUC_LOSSES)
def test_tiles_of_a_few_against_many_are_small(kind):
    scores, labels = torch.randn(50_000, requires_grad=True), torch.arange(50_000) < 30
    with _Largest() as largest:
        AUC_LOSSES[kind][0](scores, labels).backward()
    assert largest.numel <= _pairs.PAIRS  # of 1.5 million pairs


def test_no_classes_are_an_error():
    with pytest.raises(ValueError, match="at least one class, but got the shape"):
        rank_statistic_loss(torch.zeros(4, 0), torch.zeros(4, dtype=torch.long))
