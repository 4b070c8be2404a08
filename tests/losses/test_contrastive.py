"""Contrastive losses against a matrix of all pairs and pytorch-metric-learning; memory; edges; many processes."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import processes
from backdrop.losses import ContrastiveLoss, contrastive, contrastive_loss
from memory import Peak

FORMS = ["softmax", "sigmoid"]


@pytest.fixture(autouse=True)
def _in_tiles(monkeypatch):
    """Batches as small as these, too."""
    monkeypatch.setattr(contrastive, "SMALL", 0)


def pairs(n=30, d=5, dtype=torch.float64):
    return [torch.randn(n, d, dtype=dtype).requires_grad_() for _ in range(2)]


def with_a_matrix(a, b, temperature, labels=None, form="softmax", bias=0.0, weight=None):
    """The equations of the module, word by word, in float64; with weights, which may be 0."""
    n = len(a)
    w = torch.ones(n).double() if weight is None else weight.double()
    labels = torch.arange(n) if labels is None else labels
    here = w > 0
    a, b, w, labels = a.double()[here], b.double()[here], w[here], labels[here]
    s, own = a @ b.T / temperature, labels[:, None] == labels
    if form == "sigmoid":
        z = 2 * own.double() - 1
        return -(w[:, None] * w * F.logsigmoid(z * (s + bias))).sum() / w.sum()

    def one_way(s):
        positive = (own * w * s).sum(1) / (own * w).sum(1)
        return (w * ((s + w.log()).logsumexp(1) - positive)).sum() / w.sum()

    return (one_way(s) + one_way(s.T)) / 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("tile", [None, 97])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_a_matrix_of_all_pairs(form, labelled, weighted, safe, tile, dtype, monkeypatch):
    if tile:
        monkeypatch.setitem(contrastive.TILE, "cpu", tile)
    if not safe:
        monkeypatch.setattr(contrastive, "SAFE", -1.0)
    for n in (2, 3, 40):
        a, b = pairs(n, dtype=dtype)
        temperature, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.6, -0.4))
        more = {"labels": torch.arange(n) % 4 if n > 4 else torch.arange(n) // 2} if labelled else {}
        if labelled and n == 2:
            more["labels"] = torch.tensor([10**15, -2])
        if weighted:
            more["weight"] = (0.1 + torch.rand(n)) * (torch.arange(n) % 5 != 2 if n > 3 else 1)
        settings = {"form": form, "bias": bias} if form == "sigmoid" else {}
        expected = with_a_matrix(a, b, temperature, **more, **settings)
        actual = contrastive_loss(a, b, temperature=temperature, **more, **settings)
        assert actual.dtype == dtype
        close = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close)
        inputs = [a, b, temperature, *([bias] if settings else [])]
        gradients = [torch.autograd.grad(value, inputs) for value in (actual, expected)]
        for found, right in zip(*gradients, strict=True):
            torch.testing.assert_close(found, right, rtol=close, atol=close * max(1, right.abs().max().item()))


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("size", [30.0, 39.9, 40.1, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cold_softmaxes(labelled, size, dtype, monkeypatch):
    """Similarities of +-size, on both sides of the bound up to which they are not shifted."""
    monkeypatch.setitem(contrastive.TILE, "cpu", 97)
    a, b = (F.normalize(x, dim=1).detach().requires_grad_() for x in pairs(40, dtype=dtype))
    with torch.no_grad():
        b[::2] = -a[::2]  # as far from their own as can be
        b[1::4] = a[1::4]
    labels = torch.arange(40) % 7 if labelled else None
    actual = contrastive_loss(a, b, temperature=1 / size, labels=labels)
    expected = with_a_matrix(a, b, 1 / size, labels)
    close = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close * size)
    for found, right in zip(*(torch.autograd.grad(value, (a, b)) for value in (actual, expected)), strict=True):
        torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=size * close * right.abs().max().item())


@pytest.mark.parametrize("temperature", [0.05, 0.01])
def test_a_loss_near_zero_keeps_its_digits(temperature):
    """In float32: what is left of similarities of 20 or 100 is not the rounding of these."""
    a = F.normalize(torch.randn(16, 64), dim=1)
    expected = with_a_matrix(a, a, temperature)
    assert 0 <= expected < 2e-4
    assert contrastive_loss(a, a, temperature=temperature).item() == pytest.approx(expected.item(), rel=0, abs=2e-7)


def test_by_hand():
    a, b = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    s = [[6.0, 2.0], [0.0, 4.0]]  # a @ b.T / 0.5
    rows = math.log(1 + math.exp(-4)) + math.log(1 + math.exp(-4))
    columns = math.log(1 + math.exp(-6)) + math.log(1 + math.exp(-2))
    assert contrastive_loss(a, b, temperature=0.5).item() == pytest.approx((rows + columns) / 4, rel=1e-6)
    signs = [[1, -1], [-1, 1]]
    terms = [math.log(1 + math.exp(-signs[i][j] * (s[i][j] - 1))) for i in range(2) for j in range(2)]
    loss = contrastive_loss(a, b, temperature=0.5, form="sigmoid", bias=-1)
    assert loss.item() == pytest.approx(sum(terms) / 2, rel=1e-6)


@pytest.mark.parametrize("labelled", [False, True])
def test_pytorch_metric_learning_computes_the_same(labelled):
    """One direction each, with the other side as reference embeddings."""
    metric = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    from pytorch_metric_learning.distances import DotProductSimilarity

    kind = metric.SupConLoss if labelled else metric.NTXentLoss
    judge = kind(temperature=0.7, distance=DotProductSimilarity(normalize_embeddings=False))
    a, b = pairs(40)
    labels = torch.arange(40) % 6 if labelled else torch.arange(40)
    ways = [judge(x, labels, ref_emb=y, ref_labels=labels.clone()) for x, y in ((a, b), (b, a))]
    actual = contrastive_loss(a, b, temperature=0.7, labels=labels if labelled else None)
    torch.testing.assert_close(actual, sum(ways) / 2, rtol=1e-7, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_no_labels_are_labels_that_all_differ(form):
    a, b = pairs()
    values = [contrastive_loss(a, b, temperature=0.7, form=form, labels=y) for y in (None, torch.randperm(30) - 7)]
    torch.testing.assert_close(*values, rtol=1e-14, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, (a, b)) for value in values))


@pytest.mark.parametrize("form", FORMS)
def test_weights_say_how_often_a_pair_is_there(form):
    a, b = pairs()
    labels, often = torch.arange(30) % 4, torch.randint(4, (30,))
    repeated = [x.repeat_interleave(often, 0) for x in (a, b)]
    expected = contrastive_loss(*repeated, temperature=0.7, form=form, labels=labels.repeat_interleave(often))
    actual = contrastive_loss(a, b, temperature=0.7, form=form, labels=labels, weight=often)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, (a, b)) for value in (actual, expected)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_small_and_large_weights(form, size):
    a, b = pairs(dtype=torch.float32)
    losses = [contrastive_loss(a, b, temperature=0.7, form=form, weight=torch.full((30,), w)) for w in (1.0, size)]
    expected = losses[0] + math.log(size) if form == "softmax" else losses[0] * size
    torch.testing.assert_close(losses[1], expected)
    rare = torch.ones(30)
    rare[3] = 1e-37
    for x, y in zip(
        *(
            torch.autograd.grad(loss, (a, b))
            for loss in (
                contrastive_loss(a, b, temperature=0.7, form=form, weight=rare),
                contrastive_loss(a, b, temperature=0.7, form=form, weight=rare > 0.5),
            )
        ),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labelled", [False, True])
def test_padding_has_no_effect(form, labelled):
    """Whatever it holds."""
    a, b = pairs()
    weight = (torch.arange(30) % 3 != 1) * (0.5 + torch.rand(30))
    labels = torch.arange(30) % 4 if labelled else None
    expected = contrastive_loss(a, b, temperature=0.7, form=form, labels=labels, weight=weight)
    junk = [x.detach().masked_fill(weight[:, None] == 0, math.nan).requires_grad_() for x in (a, b)]
    actual = contrastive_loss(*junk, temperature=0.7, form=form, labels=labels, weight=weight)
    assert torch.equal(actual, expected)
    for x, y in zip(torch.autograd.grad(actual, junk), torch.autograd.grad(expected, (a, b)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_nothing_to_compare(n):
    a, b = pairs(n)
    labels, scale = torch.zeros(n, dtype=torch.long), torch.tensor(0.5, requires_grad=True)
    message = rf"the batch of {n} pairs has one class only.*single_class='zero'"
    with pytest.raises(ValueError, match=message):
        contrastive_loss(a, b, temperature=scale, labels=labels)
    loss = contrastive_loss(a, b, temperature=scale, labels=labels, single_class="zero")
    assert loss == 0
    loss.backward()
    for x in (a, b, scale):
        assert x.grad is not None
        assert not x.grad.any()
    if n == 1:
        with pytest.raises(ValueError, match=message):
            contrastive_loss(a, b, temperature=1.0)
        torch.testing.assert_close(contrastive_loss(a, b, temperature=1.0, form="sigmoid"), F.softplus(-(a * b).sum()))


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    a, b = pairs(6, 3)
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.tensor([1.0, 0.3, 0.0, 2.0, 1.0, 0.7]), torch.tensor([0, 1, 1, 0, 2, 1])
    for more in ({}, {"labels": labels, "weight": weight}):
        assert torch.autograd.gradcheck(
            lambda a, b, t, more=more: contrastive_loss(a, b, temperature=t, form=form, **more), (a, b, scale)
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", ["a", "b", "temperature", "bias"])
def test_gradients_of_some_alone(form, wanted):
    a, b = pairs()
    given = {"a": a, "b": b, "temperature": torch.tensor(0.7).double(), "bias": torch.tensor(0.1).double()}
    if form == "softmax":
        del given["bias"]
    if wanted not in given:
        return
    given = {name: x.detach().requires_grad_(name == wanted) for name, x in given.items()}
    values = contrastive_loss(form=form, **given), with_a_matrix(form=form, **given)
    torch.testing.assert_close(*(torch.autograd.grad(value, given[wanted])[0] for value in values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_and_autocast(form, dtype, autocast):
    halves = [x.detach().to(dtype).requires_grad_() for x in pairs()]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    expected = contrastive_loss(*doubles, temperature=0.7, form=form)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = contrastive_loss(*halves, temperature=0.7, form=form)
        gradients = torch.autograd.grad(loss, halves)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for x, y in zip(gradients, torch.autograd.grad(expected, doubles), strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("temperature", [0.07, 0.01])
def test_memory_grows_with_the_features_not_the_pairs(form, labelled, temperature):
    """9 million pairs of float32 would take 36 MB; ten copies of the features and a few tiles are all there is."""
    a, b = (F.normalize(x, dim=1).detach().requires_grad_() for x in pairs(3000, 16, torch.float32))
    labels = torch.arange(3000) % 500 if labelled else None
    with Peak() as peak:
        contrastive_loss(a, b, temperature=temperature, labels=labels, form=form).backward()
    assert peak.bytes < 12 * 3000 * 16 * 4 + 5 * contrastive.TILE["cpu"] * 4
    with Peak() as peak:
        F.cross_entropy(a @ b.T, torch.arange(3000)).backward()
    assert peak.bytes > 4 * 3000**2  # so what is counted would be seen


@pytest.mark.parametrize("form", FORMS)
def test_nan_is_not_hidden(form):
    a, b = pairs()
    with torch.no_grad():
        a[3, 1] = math.nan
    loss = contrastive_loss(a, b, temperature=0.7, form=form)
    assert loss.isnan()
    loss.backward()
    assert a.grad.isnan().any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.6, 0.01])
def test_small_batches(form, dtype, temperature, monkeypatch):
    """The whole matrix, up to a number of pairs, gives what tiles give."""
    a, b = pairs(20, dtype=dtype)
    scale = torch.tensor(temperature, requires_grad=True)
    more = {"bias": torch.tensor(-0.4, requires_grad=True)} if form == "sigmoid" else {}
    values = []
    for small in (400, 399):
        monkeypatch.setattr(contrastive, "SMALL", small)
        values.append(contrastive_loss(a, b, temperature=scale, form=form, **more))
        assert values[-1].dtype == dtype
    close = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(*values, rtol=close, atol=0)
    for x, y in zip(*(torch.autograd.grad(value, (a, b, scale, *more.values())) for value in values), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=max(close, 1e-6 * (x.dtype != dtype)) * y.abs().max().item())
    monkeypatch.setattr(contrastive, "SMALL", 400)
    halves = contrastive_loss(a.half(), b.half(), temperature=scale, form=form, **more)
    assert halves.dtype == torch.float32


def test_second_derivatives_are_refused():
    for form in FORMS:
        a, b = pairs()
        loss = contrastive_loss(a, b, temperature=0.7, form=form)
        for x in (a, b):
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(RuntimeError, match="no second derivatives"):
                gradient.sum().backward()


def test_the_backward_pass_can_be_repeated():
    a, b = pairs()
    for form in FORMS:
        loss = contrastive_loss(a, b, temperature=0.7, form=form)
        twice = [torch.autograd.grad(loss, (a, b), retain_graph=True) for _ in range(2)]
        for x, y in zip(*twice, strict=True):
            assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_compiled():
    """A graph break, and the same loss."""
    model, x = nn.Linear(5, 4).double(), torch.randn(30, 5, dtype=torch.float64)
    gradients = []

    def call():
        return contrastive_loss(model(x), model(x.flip(1)), temperature=0.5)

    for step in (call, torch.compile(call, backend="aot_eager")):
        model.zero_grad()
        step().backward()
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


WRONG = {
    "form has to be 'softmax' or 'sigmoid', but got 'hinge'": {"form": "hinge"},
    "bias is for form='sigmoid' only": {"bias": 1.0},
    "bias has to be finite, but got inf": {"bias": math.inf, "form": "sigmoid"},
    "temperature has to be a finite number of at least 1e-30, but got 0": {"temperature": 0.0},
    "temperature has to be a finite number of at least 1e-30, but got -1": {"temperature": torch.tensor(-1.0)},
    "temperature has to be a finite number of at least 1e-30, but got nan": {"temperature": torch.tensor(math.nan)},
    r"a and b have to have the same shape \(n, d\).*\(4, 2\)": {"b": torch.zeros(4, 2)},
    r"labels has to be one integer per pair, shape \(3,\)": {"labels": torch.zeros(4, dtype=torch.long)},
    "weight has to hold finite numbers of at least 0": {"weight": torch.tensor([1.0, -1.0, 1.0])},
    "single_class has to be": {"single_class": "skip"},
}
WRONG_KINDS = {
    "a has to be a floating-point tensor, but got torch.int64": {"a": torch.zeros(3, 2, dtype=torch.long)},
    "b has to be a floating-point tensor, but got list": {"b": [[1.0, 2.0]] * 3},
    "labels has to be a tensor of integers, but got torch.float32": {"labels": torch.zeros(3)},
    "temperature has to be a number, but got '1'": {"temperature": "1"},
    "temperature has to be a number or a floating-point tensor of one": {"temperature": torch.ones(2)},
    "group has to be": {"group": "all"},
}


@pytest.mark.parametrize("message", [*WRONG, *WRONG_KINDS])
def test_what_is_refused(message):
    right = {"a": torch.eye(3, 2), "b": torch.eye(3, 2), "temperature": 1.0}
    contrastive_loss(**right)
    with pytest.raises(ValueError if message in WRONG else TypeError, match=message):
        contrastive_loss(**{**right, **{**WRONG, **WRONG_KINDS}[message]})


def test_module():
    a, b = pairs()
    labels, weight = torch.arange(30) % 4, torch.rand(30)
    loss = copy.deepcopy(ContrastiveLoss(0.5))
    expected = contrastive_loss(a, b, temperature=0.5, labels=labels, weight=weight)
    assert torch.equal(loss(a, b, labels, weight), expected)
    assert repr(loss) == "ContrastiveLoss(temperature=0.5)"
    assert not list(loss.parameters())
    loss = ContrastiveLoss(nn.Parameter(torch.tensor(0.25)), form="sigmoid", bias=nn.Parameter(torch.tensor(-2.0)))
    assert [name for name, _ in loss.named_parameters()] == ["temperature", "bias"]
    loss(a, b).backward()
    assert all(p.grad.abs() > 0 for p in loss.parameters())
    assert repr(loss) == "ContrastiveLoss(temperature=0.25, bias=-2, form='sigmoid')"
    with pytest.raises(ValueError, match="temperature has to be"):
        ContrastiveLoss(-1.0)


SIZES = [[5, 9, 4], [7, 0, 11], [0, 0, 6]]
SETTINGS = [
    {"form": form, "labelled": labelled, "weighted": labelled, "cold": cold}
    for form, labelled, cold in itertools.product(FORMS, [False, True], [False, True])
]


class Both(nn.Module):
    """Two networks and a temperature."""

    def __init__(self, temperature):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(3, 4).double(), nn.Linear(3, 4).double()
        self.temperature = nn.Parameter(torch.tensor(temperature, dtype=torch.float64))

    def forward(self, x, y):
        return self.one(x), self.other(y), self.temperature.abs()


def step(model, share, form, labelled, weighted, **more):
    x, y, labels, weight = share
    a, b, temperature = model(x, y)
    more |= {"labels": labels} if labelled else {}
    more |= {"weight": weight} if weighted else {}
    loss = contrastive_loss(a, b, temperature=temperature, form=form, **more)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def shares(sizes):
    generator = torch.Generator().manual_seed(3)
    n = sum(sizes)
    x, y = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([3, -(2**62), 2**62 + 1])[torch.randint(3, (n,), generator=generator)]
    weight = torch.rand(n, generator=generator, dtype=torch.float64) * (torch.arange(n) % 4 > 0)
    return [each.split(sizes) for each in (x, y, labels, weight)]


def temperature_of(cold):
    return 0.004 if cold else 0.9  # the cold one is beyond what is not shifted


def _train(rank):
    found = []
    contrastive.TILE["cpu"] = 15
    for setting in SETTINGS:
        setting = dict(setting)
        model = nn.parallel.DistributedDataParallel(Both(temperature_of(setting.pop("cold"))))
        for sizes in SIZES:
            model.zero_grad()
            found.append(step(model, [x[rank] for x in shares(sizes)], group="world", **setting))
    with pytest.raises(ValueError, match="the batch of 1 pairs has one class only"):
        contrastive_loss(*torch.zeros(2, int(rank == 1), 2), temperature=1, group="world")
    return found


def test_many_processes_train_like_one():
    everywhere = processes.run(_train, 3)
    expected = []
    for setting in SETTINGS:
        setting = dict(setting)
        temperature = temperature_of(setting.pop("cold"))
        expected += [step(Both(temperature), [torch.cat(x) for x in shares(sizes)], **setting) for sizes in SIZES]
    for found in everywhere:
        for values, right in zip(found, expected, strict=True):
            torch.testing.assert_close(values, right, rtol=1e-9, atol=1e-9 * max(1.0, right[1].abs().max().item()))
