"""Samples from sources: the gradients of the plain model on all of them, and never more than a part is read."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Backdrop, Skip, Source, skip_blocked
from backdrop.losses import contrastive_loss, rank_statistic_loss


class Table(Source):
    """Rows of a tensor; `asked` has how many were read at a time."""

    def __init__(self, values):
        self.values, self.asked = values, []
        self.shape, self.dtype = tuple(values.shape), values.dtype

    def read(self, sample, low, high):
        return self.values[(sample, slice(None), *(slice(a, b) for a, b in zip(low, high, strict=True)))]

    def rows(self, indices):
        self.asked.append(len(indices))
        return self.values[indices]


def network(p=0.9, **mask):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), Backdrop(p, exact=True, **mask)).double()


X = torch.randn(300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(300) % 7 == 0


def step(model, *inputs, loss=lambda scores: rank_statistic_loss(scores.flatten(), Y)):
    """The output and the gradients of a step from the same random numbers."""
    torch.manual_seed(2)
    out = model(*inputs)
    loss(out).backward()
    return out.detach(), [p.grad for p in model.parameters()]


def assert_same(plain, skipping, tensors, sources, loss=None, **tolerances):
    more = {} if loss is None else {"loss": loss}
    expected, grads = step(plain, *tensors, **more)
    found, own = step(skipping, *sources, **more)
    torch.testing.assert_close(found, expected, **tolerances)
    for a, b in zip(own, grads, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


@pytest.mark.parametrize("p", [0, 0.5, 0.99])
@pytest.mark.parametrize("at_once", [None, 64, 7])
@pytest.mark.parametrize("choose", ["uniform", "gradient"])
def test_the_gradients_are_those_of_the_whole_batch(p, at_once, choose):
    plain, source = network(p, choose=choose), Table(X)
    model = skip_blocked(plain, at_once=at_once)
    assert_same(plain, model, [X], [source])
    assert max(source.asked) <= (at_once or 300)
    assert "plain" not in str(model.skip_report)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference", "frozen"])
def test_where_no_gradient_is_wanted_it_is_read_in_parts_too(mode):
    plain, source = network(), Table(X)
    model = skip_blocked(plain, at_once=32)
    if mode == "eval":
        plain.eval(), model.eval()
    if mode == "frozen":
        model.requires_grad_(False)
    with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "frozen"):
        out = model(source)
        torch.testing.assert_close(out, plain(X).detach())
    assert not out.requires_grad
    assert max(source.asked) == 32
    assert "300 samples ran without gradients" in str(model.skip_report)


def test_in_eval_mode_gradients_are_those_of_all_samples():
    plain, source = network().eval(), Table(X)
    assert_same(plain, skip_blocked(plain, at_once=50), [X], [source])
    assert max(source.asked) == 50


def test_float32_too():
    plain = network().float()
    assert_same(plain, skip_blocked(plain, at_once=64), [X.float()], [Table(X.float())], rtol=1e-4, atol=1e-6)


def test_skip_takes_sources():
    plain, source = network(), Table(X)
    skip = Skip(copy.deepcopy(plain[:3]), copy.deepcopy(plain[3]), at_once=64)
    assert_same(plain, skip, [X], [source])
    assert max(source.asked) <= 64


class Images(nn.Module):
    """What a stranger's model does with its input before the first layer."""

    def __init__(self, p=0.8):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.mask, self.head = Backdrop(p, exact=True), nn.Linear(4, 1)

    def forward(self, images):
        assert images.ndim == 4
        assert images.shape[1] == 3
        x = images.float().div(255) - self.mean
        return self.head(self.mask(self.body(x)))


def test_whole_numbers_that_the_model_scales():
    torch.manual_seed(0)
    images = torch.randint(256, (40, 3, 9, 11), dtype=torch.uint8)
    plain, source = Images(), Table(images)
    model = skip_blocked(plain, at_once=8, when="always")
    assert_same(plain, model, [images], [source], loss=lambda y: (y**2).sum())
    assert max(source.asked) <= 8
    with torch.no_grad():
        torch.testing.assert_close(model(source), plain(images))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)
        self.dropout, self.mask = nn.Dropout(0.3), Backdrop(0.75, exact=True)

    def forward(self, batch):
        return self.mask(self.head(self.dropout(self.words(batch["ids"])).mean(1)))


def test_tokens_in_a_dictionary():
    torch.manual_seed(0)
    ids = torch.randint(50, (64, 12))
    plain, source = Tokens().eval(), Table(ids)  # of dropout the random numbers differ, as without a source
    plain.mask.train()
    model = skip_blocked(plain, at_once=8)
    assert_same(plain, model, [{"ids": ids}], [{"ids": source}], loss=lambda y: (y**2).sum(), rtol=1e-4, atol=1e-6)
    assert max(source.asked) <= 8


def test_dropout_is_the_same_in_both_passes():
    """The outputs say which units of the hidden layer it dropped, and so does the gradient of the last layer."""
    torch.manual_seed(0)
    ids = torch.randint(50, (64, 12))
    model = skip_blocked(Tokens(), at_once=8)
    model.mask.p = 0.0
    out = model({"ids": Table(ids)})
    expected = torch.autograd.grad(out.pow(2).sum() / 2, model.head.weight, retain_graph=True)[0]
    (again,) = torch.autograd.grad(out.pow(2).sum() / 2, model.head.weight)
    torch.testing.assert_close(again, expected)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(4, 5)
        self.mask_a, self.mask_b = Backdrop(0.9, exact=True), Backdrop(0.8, exact=True)

    def forward(self, a, b, scale=1.0):
        return torch.cat([self.mask_a(self.a(a) * scale), self.mask_b(self.b(b))], 1)


@pytest.mark.parametrize("second", ["source", "tensor"])
def test_pairs_and_sources_beside_tensors(second):
    a, b = X, torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain, one, two = Pairs().double(), Table(a), Table(b)
    model = skip_blocked(plain, at_once=30, when="always")

    def loss(both):
        return contrastive_loss(*(F.normalize(half, dim=1) for half in both.split(5, 1)), temperature=0.1)

    assert_same(plain, model, [a, b], [one, two if second == "source" else b], loss=loss)
    assert max(one.asked) <= 30
    assert max(two.asked, default=0) <= 30


def test_a_second_mask_has_a_tensor():
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Linear(6, 8), nn.Tanh(), Backdrop(0.5, exact=True)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), Backdrop(0.9, exact=True)),
    ).double()
    source = Table(X)
    assert_same(plain, skip_blocked(plain, at_once=32), [X], [source])
    assert max(source.asked) <= 32


def test_new_sizes_and_steps():
    plain, at_once = network(), 16
    model = skip_blocked(plain, at_once=at_once)
    for n in (300, 100, 17, 300):
        plain.zero_grad(), model.zero_grad()
        rows = X[:n]
        assert_same(plain, model, [rows], [Table(rows)], loss=lambda y: (y**2).sum())


def test_one_sample():
    plain = network()
    model = skip_blocked(plain, at_once=16)
    assert_same(plain, model, [X[:1]], [Table(X[:1])], loss=lambda y: (y**2).sum())


def test_gradients_add_up_over_calls():
    plain = network()
    model = skip_blocked(plain, at_once=16)
    for half in X.split(150):
        assert_same(plain, model, [half], [Table(half)], loss=lambda y: (y**2).sum())


def test_autocast():
    plain = network().float()
    model = skip_blocked(plain, at_once=64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(plain, model, [X.float()], [Table(X.float())], rtol=0.05, atol=1e-3)
        assert model(Table(X.float())).dtype == torch.bfloat16


def test_a_tensor_stays_a_tensor():
    plain = network()
    model = skip_blocked(plain)
    assert_same(plain, model, [X], [X])
    plain.zero_grad(), model.zero_grad()
    assert_same(plain, model, [X], [Table(X)])


class Huge(Source):
    """More rows than memory holds, made of their numbers."""

    shape, dtype = (10**6, 4), torch.float32

    def __init__(self):
        self.most = 0

    def read(self, sample, low, high):
        return self.rows([sample])[0]

    def rows(self, indices):
        self.most = max(self.most, len(indices))
        index = torch.as_tensor(indices, dtype=torch.float64)
        return torch.stack([torch.sin(index * k / 1e4) for k in range(1, 5)], 1).float()


def test_a_million_rows():
    torch.manual_seed(0)
    model = skip_blocked(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), Backdrop(0.999)), at_once=20_000)
    source, labels = Huge(), torch.arange(10**6) % 100 == 0
    scores = model(source).flatten()
    rank_statistic_loss(scores, labels).backward()
    assert source.most <= 20_000
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


class Failing(Table):
    """Reads go wrong after some."""

    def __init__(self, values, after, how):
        super().__init__(values)
        self.after, self.how = after, how

    def rows(self, indices):
        found = super().rows(indices)
        return found if len(self.asked) <= self.after else self.how(found)


def gone(found):
    raise OSError("the disk is gone")


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("backdrop-read-ahead")]


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (gone, RuntimeError, r"reading samples \d+, .* of Failing\(.*OSError: the disk is gone"),
        (lambda found: found[:-1], ValueError, r"reading samples .* of Failing\(.*has to give the shape"),
        (torch.Tensor.float, TypeError, r"reading samples .* of Failing\(.*torch.float64.*torch.float32"),
    ],
)
@pytest.mark.parametrize("after", [0, 3, 6])  # in the forward pass, and in the backward pass
def test_a_read_that_fails_in_the_middle_leaves_the_model_as_it_was(how, kind, said, after):
    plain = network(0.5)
    model = skip_blocked(plain, at_once=64)
    source = Failing(X, after, how)
    before = copy.deepcopy(model.state_dict())

    def whole_step():
        model(source).sum().backward()

    with pytest.raises(kind, match=said):
        whole_step()
    assert (len(source.asked) > 5) == (after == 6)  # two parts with and three without gradients, then backward
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert readers() == []
    assert_same(plain, model, [X], [Table(X)])  # and goes on


class Tail(nn.Module):
    def __init__(self, body, reads):
        super().__init__()
        self.body, self.reads = body, reads

    def forward(self, x):
        return self.reads(self.body(x), x)


def broken(out, x):
    torch._dynamo.graph_break()
    return out + x.sum(1, keepdim=True)


def test_a_source_that_the_model_returns_comes_back():
    plain, source = network(), Table(X)
    out, again = skip_blocked(Tail(plain, lambda out, x: (out, x)), at_once=64)(source)
    assert again is source
    torch.testing.assert_close(out, plain(X))


def layers(*given):
    return nn.Sequential(*given).double()


REFUSED = [
    (lambda: Tail(network(), lambda out, x: out + x.sum(1, keepdim=True)), "sum needs all of it at once"),
    (lambda: Tail(network(), broken), "sum wants all of it"),
    (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), Backdrop(0.5)).double(),
        "1: its batch statistics couple all samples",
    ),
    (lambda: nn.Sequential(nn.BatchNorm1d(6), Backdrop(0.5)).double(), "0 needs all of it at once"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_what_would_read_all_of_it_is_refused_by_name(make, said):
    model = skip_blocked(make(), at_once=64)
    with pytest.raises(RuntimeError, match=r"Table\(shape=\(300, 6\), dtype=torch.float64\) was given") as caught:
        model(Table(X))
    assert said in str(caught.value)
    assert "skip_report" in str(caught.value)


def test_masks_of_positions_want_tiles():
    with pytest.raises(ValueError, match=r"a Source is read in tiles: give tile="):
        skip_blocked(layers(nn.Conv1d(1, 2, 3), Backdrop(0.5, dims=(0, 2))))(Table(X[:, None]))


def test_samples_on_another_axis_are_refused():
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(300, 4).double(), Backdrop(0.5)

        def forward(self, x):
            return self.mask(self.layer(x.t()))

    with pytest.raises(RuntimeError, match="was given in place of a tensor"):
        skip_blocked(Across(), at_once=64)(Table(X))


def test_a_source_that_says_nonsense_is_refused():
    source = Table(X)
    source.dtype = "float64"
    with pytest.raises(TypeError, match=r"Table.dtype has to be a torch.dtype"):
        skip_blocked(network())(source)


def test_where_torch_cannot_look_it_says_so():
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode(), pytest.raises(RuntimeError, match="mode that changes what torch functions do"):
        skip_blocked(network())(Table(X))
