"""Sums over all pairs in O(n log n) against the matrix of all pairs, score by score; soft ranks on them."""

import math

import numpy
import pytest
import torch
from scipy.stats import rankdata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backdrop.losses import _soft_ranks, soft_rank
from backdrop.losses._soft_ranks import (
    SoftSums,
    centred_sums,
    coefficients,
    comparable,
    soft_sums,
    sorted_sums,
    sums,
    terms_for,
)

EXACT = {torch.float32: 6e-8, torch.float64: 2e-13}  # of each sum by itself, tails included
SCORES = {
    "normal": lambda n: torch.randn(2, n),
    "ties": lambda n: torch.randint(9, (2, n)).float(),
    "equal": lambda n: torch.full((2, n), 321.5),
    "clusters": lambda n: torch.randint(5, (2, n)) * 10 + 1e-3 * torch.randn(2, n),
    "Cauchy": lambda n: torch.distributions.Cauchy(0.0, 1.0).sample((2, n)),
    "far": lambda n: 1e4 + torch.randn(2, n),
    "sorted": lambda n: torch.linspace(-3, 3, n).expand(2, n),
}
TEMPERATURES = [1e-30, 1e-9, 1e-3, 0.03, 1.0, 10.0, 100.0]


def all_pairs(x, weight, temperature):
    """F and D from the matrix, in float64: differences of scores as they are, and no cancellation."""
    apart = (x[:, :, None].double() - x[:, None].double()) / temperature  # of j and i
    z = torch.exp(-apart.abs())
    return weight @ torch.where(apart < 0, z / (1 + z), 1 / (1 + z)), weight @ (z / (1 + z) ** 2)


@pytest.fixture(params=["many chunks", "one problem at a time"])
def small(request, monkeypatch):
    """Rows and problems in many parts, and nothing by the matrix."""
    monkeypatch.setattr(_soft_ranks, "PAIRS", 0)
    monkeypatch.setitem(_soft_ranks.CHUNK, "cpu", 48)
    if request.param == "one problem at a time":
        monkeypatch.setattr(_soft_ranks, "AT_ONCE", 1)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_sum_is_exact(small, kind, temperature, dtype):
    x = SCORES[kind](300).to(dtype)
    weight = torch.rand(2, 3, 300, dtype=torch.float64)
    weight[:, 1] *= torch.rand(2, 300) < 0.05  # few positives
    weight[:, 2] = 0
    weight[:, 2, 17] = 1  # one
    expected = all_pairs(x, weight, temperature)
    found = sums(comparable(x), weight, temperature, terms_for(x), 3)
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=EXACT[dtype], atol=1e-290)


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 95, 96, 97, 257])
def test_every_size(small, n):
    x, weight = torch.randn(3, n, dtype=torch.float64), torch.rand(3, 2, n, dtype=torch.float64)
    found = sums(comparable(x), weight, 0.5, 21, 1)
    expected = all_pairs(x, weight, 0.5)
    torch.testing.assert_close(found[0], expected[0][:, :1], rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-13, atol=0)


SEGMENTS = {  # where they begin and end in rows of 16: anywhere; with the last, first, second, last but one of a row
    "anywhere": [1, 40, 3, 16, 100, 2, 16, 60],
    "at borders": [15, 1, 16, 15, 2, 15, 1, 30, 17, 31, 33, 1, 14, 20],
}


@pytest.mark.parametrize("sizes", SEGMENTS.values(), ids=list(SEGMENTS))
@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_segments_do_not_see_each_other(small, sizes, temperature):
    segment = torch.repeat_interleave(2 * torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.cat([torch.randn(size, dtype=torch.float64).sort()[0] for size in sizes])[None]
    weight = torch.rand(1, 2, sum(sizes), dtype=torch.float64)
    found = sorted_sums(comparable(x), weight, temperature, 21, 2, segment)
    parts = [all_pairs(a, w, temperature) for a, w in zip(x.split(sizes, 1), weight.split(sizes, 2), strict=True)]
    for actual, right in zip(found, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.cat(right, 2), rtol=2e-13, atol=1e-13)  # weights above are differences


@pytest.mark.parametrize(("terms", "value", "slope"), [(12, 2e-9, 3e-8), (21, 2e-15, 3e-14)])
def test_coefficients(terms, value, slope):
    z = torch.linspace(0, 1, 2001, dtype=torch.float64)[1:]
    powers = z ** torch.arange(1, terms + 1)[:, None]
    first, second = (torch.tensor(each, dtype=torch.float64) @ powers for each in coefficients(terms))
    assert ((first * (1 + z) / z) - 1).abs().max() < value
    assert ((second * (1 + z) ** 2 / z) - 1).abs().max() < slope
    fewer = torch.tensor(coefficients(terms - 2)[1], dtype=torch.float64) @ powers[:-2]
    if terms == 12:  # not one term too many
        assert ((fewer * (1 + z) ** 2 / z) - 1).abs().max() > slope


def test_infinite_scores_are_farthest_and_tie_with_each_other(small):
    x = torch.cat([torch.randn(60), torch.full((5,), math.inf), torch.full((7,), -math.inf)])[torch.randperm(72)]
    weight = torch.rand(1, 1, 72, dtype=torch.float64)
    stand_in = x.clamp(-1e30, 1e30)[None]
    for actual, right in zip(
        sums(comparable(x[None]), weight, 0.3, 12, 1), all_pairs(stand_in, weight, 0.3), strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=6e-8, atol=0)


def test_the_largest_numbers_do_not_overflow(small):
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)[None] * torch.finfo(torch.float64).max
    value, slope = sums(comparable(x), torch.ones(1, 1, 100, dtype=torch.float64), 1.0, 21, 1)
    assert torch.equal(value[0, 0], torch.arange(99.5, 0, -1, dtype=torch.float64))
    assert torch.equal(slope, torch.full_like(slope, 0.25))


@pytest.mark.parametrize("way", ["matrix", "sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-3, 0.2, 5.0])  # the first by sigmoids of differences
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("problems", [None, 2])
def test_gradients_of_the_sums(way, dtype, temperature, weighted, problems, monkeypatch):
    monkeypatch.setattr(_soft_ranks, "PAIRS", 2**40 if way == "matrix" else 0)
    shape = (90,) if problems is None else (problems, 90)
    x = torch.randn(shape, dtype=dtype)
    weight = torch.rand(shape, dtype=torch.float64) if weighted else None
    found, back = soft_sums(x, weight, temperature)
    factor = torch.randn(shape, dtype=torch.float64)
    wide = x.double().requires_grad_()
    y = torch.sigmoid((wide[..., None, :] - wide[..., None]) / temperature)
    expected = (y if weight is None else y * weight[..., None, :]).sum(-1)
    (right,) = torch.autograd.grad((expected * factor).sum(), wide)
    close = 3e-7 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=close, atol=0)
    gradient = back(factor)
    assert (gradient - right).norm() <= close * right.norm()
    centred, back = centred_sums(x, weight, temperature)
    half = 45 if weight is None else weight.sum(-1, keepdim=True) / 2
    assert (centred - (expected - half)).norm() <= close * centred.norm()
    assert torch.equal(back(factor), gradient)


@pytest.mark.parametrize("temperature", [1e2, 1e5, 1e9, 1e15])
@pytest.mark.parametrize("offset", [0.0, 4096.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_centred_sums_keep_their_digits_at_any_temperature(temperature, offset, weighted):
    """Where sums themselves differ in their last digits only: sigmoid(x) - 1/2 is x / 4 - x^3 / 48 + ..."""
    x = (torch.randint(2**20, (2, 80)) / 2**20).double() + offset
    weight = torch.rand(2, 80, dtype=torch.float64) if weighted else None
    found, _ = centred_sums(x, weight, temperature)
    apart = (x[:, None] - x[:, :, None]) / temperature
    terms = apart / 4 - apart**3 / 48 + apart**5 / 480
    expected = (terms if weight is None else terms * weight[:, None]).sum(-1)
    assert (found - expected).norm() <= 1e-14 * expected.norm()


@pytest.mark.parametrize("n", [50, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_soft_ranks_become_ranks(n, dtype):
    scores = torch.randint(n // 3, (n, 2)).to(dtype)
    found = soft_rank(scores, temperature=1e-6)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for column in range(2):
        expected = rankdata(scores[:, column].double().numpy())
        numpy.testing.assert_allclose(found[:, column].numpy(), expected, rtol=1e-6)
    assert torch.equal(soft_rank(scores[:, 0], temperature=1e-6), found[:, 0])
    assert torch.equal(soft_rank(scores[:, :1], temperature=1e-6), found[:, :1])


def test_weights_of_soft_ranks_say_how_often_a_score_is_there():
    scores, times = torch.randn(40, dtype=torch.float64), torch.randint(3, (40,))
    ranks = soft_rank(scores.masked_fill(times == 0, math.nan), temperature=0.3, weight=times)
    repeated = soft_rank(scores.repeat_interleave(times), temperature=0.3)
    torch.testing.assert_close(ranks.repeat_interleave(times), repeated, rtol=1e-13, atol=0)


def test_gradcheck_of_soft_ranks(monkeypatch):
    scores = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: soft_rank(x, temperature=0.5), scores)
    monkeypatch.setattr(_soft_ranks, "PAIRS", 0)
    assert torch.autograd.gradcheck(lambda x: soft_rank(x, temperature=0.5), scores)


@pytest.mark.parametrize("way", ["matrix", "sorted"])
def test_second_derivatives_are_refused(way, monkeypatch):
    monkeypatch.setattr(_soft_ranks, "PAIRS", 2**40 if way == "matrix" else 0)
    scores = torch.randn(30, dtype=torch.float64, requires_grad=True)
    ranks = soft_rank(scores, temperature=1)
    (gradient,) = torch.autograd.grad((ranks**2).sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gradient.sum(), scores)


@pytest.mark.parametrize("way", ["matrix", "sorted"])
def test_vmap_and_functional_gradients(way, monkeypatch):
    monkeypatch.setattr(_soft_ranks, "PAIRS", 2**40 if way == "matrix" else 0)
    scores = torch.randn(4, 30, dtype=torch.float64)

    def ranks(x):
        return soft_rank(x, temperature=0.5)

    def total(x):
        return (ranks(x) * torch.arange(30)).sum()

    torch.testing.assert_close(torch.func.vmap(ranks)(scores), torch.stack(list(map(ranks, scores))))
    torch.testing.assert_close(torch.func.vmap(ranks, in_dims=1, out_dims=1)(scores), ranks(scores))
    expected = []
    for row in scores:
        row = row.clone().requires_grad_()
        expected.append(torch.autograd.grad(total(row), row)[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(scores), torch.stack(expected))
    jacobian = torch.func.jacrev(ranks)(scores[0])
    torch.testing.assert_close((torch.arange(30, dtype=torch.float64) @ jacobian), expected[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_compiled_soft_ranks():
    scores = torch.randn(30, dtype=torch.float64)
    found = []
    for call in (soft_rank, torch.compile(soft_rank, backend="aot_eager")):
        x = scores.clone().requires_grad_()
        (call(x.tanh(), temperature=0.5) ** 2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_autocast_changes_nothing():
    scores = torch.randn(1000)
    expected = soft_rank(scores, temperature=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(soft_rank(scores, temperature=0.5), expected)


@pytest.mark.parametrize("n", [20, 2000])
def test_nan_is_not_hidden(n):
    scores = torch.randn(n, 2)
    scores[3, 0] = math.nan
    scores.requires_grad_()
    ranks = soft_rank(scores, temperature=1)
    assert ranks[:, 0].isnan().all()
    assert not ranks[:, 1].isnan().any()
    (ranks**2).sum().backward()
    assert scores.grad[:, 0].isnan().all()
    assert not scores.grad[:, 1].isnan().any()


def test_no_scores_at_all():
    for shape in ((0,), (0, 3), (5, 0)):
        scores = torch.zeros(shape, requires_grad=True)
        ranks = soft_rank(scores, temperature=1)
        assert ranks.shape == shape
        ranks.sum().backward()


class Largest(TorchDispatchMode):
    """The most numbers of a tensor made while this is open."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if hasattr(leaf, "numel")
        ]
        self.numel = max([self.numel, *sizes])
        return out


def test_memory_grows_with_the_scores_not_the_pairs():
    scores = torch.randn(20_000, requires_grad=True)
    with Largest() as largest:
        soft_rank(scores, temperature=0.1).sum().backward()
    assert largest.numel <= 4 * 20_000  # of 400 million pairs
    kept = SoftSums.apply(scores[None], torch.ones(1, 20_000, dtype=torch.float64), 0.1)[1]
    assert kept.numel() == 20_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 2000])
def test_the_gradient_that_arrives_stays_as_it_is(dtype, n):
    """Also where it is one number for all, as of a sum."""
    x = torch.randn(n, dtype=dtype, requires_grad=True)
    gradient = torch.randn(n, dtype=dtype)
    before = gradient.clone()
    ranks = soft_rank(x, temperature=0.5)
    (found,) = torch.autograd.grad(ranks, x, gradient, retain_graph=True)
    assert torch.equal(gradient, before)
    torch.testing.assert_close(torch.autograd.grad(ranks, x, gradient, retain_graph=True)[0], found)
    torch.testing.assert_close(torch.autograd.grad(ranks.sum(), x)[0], torch.zeros_like(x), rtol=0, atol=1e-3)
