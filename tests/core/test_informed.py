"""Units chosen by the gradient that arrives: inclusion probabilities, unbiasedness, and what layers make of it."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, Skip, functional, insert, skip_blocked
from backdrop._core import informed
from backdrop._core.draw import make_lattice
from skipping import captures

SIGMAS = 6.5  # a normal number lies beyond once in 1.2e10 times: below 1e-6 for all comparisons of a test together


def by_bisection(norms, number):
    """pi = min(1, n / tau) with the tau for which they add up to the number."""
    some = [n for n in norms if n > 0]
    if number == 0:
        return [0.0] * len(norms)
    if len(some) <= number:
        others = len(norms) - len(some)
        return [1.0 if n > 0 else (number - len(some)) / others for n in norms]
    low, high = 0.0, 2 * sum(some) / number
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if sum(min(1, n / tau) for n in norms) > number else (low, tau)
    return [min(1.0, n / high) for n in norms]


sizes = st.one_of(st.floats(1e-6, 1e6), st.just(0.0), st.just(1.0))


@settings(max_examples=200)
@given(norms=st.lists(sizes, min_size=1, max_size=12), share=st.floats(0.01, 1), floor=st.sampled_from([0, 0.1, 1]))
def test_inclusion_probabilities(norms, share, floor):
    number = max(0.05, share * len(norms))
    found = informed.inclusion_probabilities(torch.tensor([norms], dtype=torch.float64), number, floor)[0]
    uniform = number / len(norms)
    base = floor * uniform
    left = (number - base * len(norms)) / (1 - base) if base < 1 else 0.0
    expected = by_bisection(norms, left)
    expected = [base + (1 - base) * pi for pi in expected]
    assert min(expected) >= base - 1e-12
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert found.sum().item() == pytest.approx(number)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_what_is_not_finite_comes_first(odd):
    norms = torch.tensor([[1.0, odd, 5.0, 0.0], [1.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    first, second = informed.inclusion_probabilities(norms, 2, 0.0)
    torch.testing.assert_close(first, torch.tensor([1, 1, 1, 1]).double() / 3 + torch.tensor([0, 2, 0, 0]) / 3)
    torch.testing.assert_close(second, torch.tensor([0.5, 0.5, 1.0, 0.0]).double())


@pytest.mark.parametrize("norms", [[1, 1, 1, 1], [9, 1, 2, 0], [5, 4, 1, 0.1], [1, 0, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_systematic_choices_by_enumeration(norms, floor):
    """All orders, and for each all offsets: units are kept as often as they should be, and just as many."""
    pi = informed.inclusion_probabilities(torch.tensor([norms], dtype=torch.float64), 2, floor)
    size, found = len(norms), torch.zeros(len(norms), dtype=torch.float64)
    for order in itertools.permutations(range(size)):
        u = torch.tensor([order]).argsort(1) / size
        edges = pi[0][torch.where(pi[0] >= 1, -1.0, u[0]).argsort()].cumsum(0).frac()
        edges = torch.cat([torch.tensor([0.0, 1.0]), edges]).double().sort().values
        for low, high in itertools.pairwise(edges.tolist()):
            if high - low > 1e-9:
                kept = informed._systematic(pi, 2, u.argsort(1), torch.tensor([[(low + high) / 2]]).double())
                assert kept.sum() == 2
                found += (high - low) * kept[0].double()
    torch.testing.assert_close(found / math.factorial(size), pi[0], atol=1e-9, rtol=0)


def test_independent_choices_by_enumeration():
    """All sets of units: the one that stands in for an empty set makes no bias."""
    pi = torch.tensor([[0.5, 0.25, 0.0, 0.05]], dtype=torch.float64)
    found, expected = torch.zeros(4, dtype=torch.float64), None
    for kept in itertools.product([True, False], repeat=4):
        chance = math.prod(q if keep else 1 - q for keep, q in zip(kept, pi[0].tolist(), strict=True))
        u = torch.tensor([[0.0 if keep else 1.0 for keep in kept]], dtype=torch.float64)
        choices = [0.3, 0.7, 0.99] if not any(kept) else [0.5]  # one in the part of each unit that may stand in
        shares = (pi[0][pi[0] > 0] / pi.sum()).tolist() if not any(kept) else [1.0]
        for choice, share in zip(choices, shares, strict=True):
            chosen, expected = informed._independent(pi, u, torch.tensor([[choice]]).double())
            assert chosen.any()
            found += chance * share * chosen[0].double()
    torch.testing.assert_close(found, expected[0])


def dims_of(dims):
    return (dims,) if isinstance(dims, int) else dims


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    ("shape", "dims", "patch"),
    [
        ((5, 3), 0, 1),
        ((2, 3, 7), (0, 2), 3),
        ((2, 3, 5, 4), (2, 3), (2, 3)),
        ((4,), 0, 1),
        ((3, 2, 6), (-1, 0), 4),
        ((3, 1, 6), (0, 2), 1),
    ],
)
def test_sizes_of_the_gradients_of_units(dtype, shape, dims, patch):
    torch.manual_seed(0)
    grad, lattice = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype), None
    lattice = make_lattice(shape, dims, patch)
    found = informed.unit_norms((grad, lattice))
    expected = torch.zeros(lattice.shape, dtype=torch.float64)
    sides = dict(zip(lattice.axes, lattice.patch, strict=True))
    for index in itertools.product(*map(range, shape)):
        unit = tuple(i // sides[axis] if axis in sides else 0 for axis, i in enumerate(index))
        expected[unit] += abs(grad[index].item()) ** 2
    torch.testing.assert_close(found.abs().flatten(), expected.sqrt().flatten(), rtol=1e-5, atol=1e-6)
    one_number_each = 0 in dims_of(dims) and lattice.shape == shape and not dtype.is_complex
    assert (found.sign() == (grad.reshape(found.shape).sign() if one_number_each else 1)).all()


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e300, 1.7e308])
@pytest.mark.parametrize("exact", [True, False])
def test_gradients_whose_sums_leave_float64(scale, exact):
    generator = torch.Generator().manual_seed(0)
    grad = torch.full((50,), scale, dtype=torch.float64)
    weight = functional.choose_weight(grad, 0.5, exact=exact, generator=generator)
    assert weight[weight > 0].tolist() == pytest.approx([2.0] * int((weight > 0).sum()))
    assert 10 < (weight > 0).sum() < 40


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_sizes_whose_squares_leave_float32(scale):
    grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]]) * scale
    found = informed.unit_norms((grad, make_lattice((2, 2), 0, 1)))
    torch.testing.assert_close(found, torch.tensor([[5.0, 1.0]]).double() * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "others"), [((5, 3, 7, 6), [1]), ((5, 3, 7, 6), [0, 1]), ((3, 700, 30, 20), [1]), ((2, 900, 800), [0])]
)
def test_the_fast_way_to_sizes(dtype, shape, others):
    """On a CPU, a part of the squares at a time; all parts but one in one of the cases."""
    torch.manual_seed(0)
    grad = torch.randn(shape).to(dtype)
    plain = torch.linalg.vector_norm(grad.double(), dim=others, keepdim=True)
    torch.testing.assert_close(informed._norms_of_columns(grad, others).double(), plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("power", [0, 1, 4, 20])
def test_the_fast_way_to_probabilities(power, monkeypatch):
    """On a CPU, without sorting: the same, or none where it would take long."""
    torch.manual_seed(0)
    norms, found = torch.rand(30, 100, dtype=torch.float64) ** power, []
    norms[norms < 1e-3] = 0
    for number in (1, 10, 33.3, 60):
        fast = informed._by_rounds(norms, number)
        with monkeypatch.context() as patch:
            patch.setattr(informed, "_is_readable", lambda x: False)
            plain = informed.inclusion_probabilities(norms, number, 0.0)
            assert fast is None or torch.allclose(fast, plain, rtol=1e-9, atol=1e-12)
        found.append(fast is not None)
        torch.testing.assert_close(informed.inclusion_probabilities(norms, number, 0.0), plain, rtol=1e-9, atol=1e-12)
    assert any(found)


@pytest.mark.parametrize("size", [3, informed.LARGE])
def test_orders_are_permutations(size):
    """Every unit is first in 1 of so many; by Hoeffding off by so much less than once in 1e9."""
    torch.manual_seed(0)
    orders = informed._orders(4000, size, torch.empty(0, dtype=torch.float64), None)
    assert (orders.sort(1).values == torch.arange(size)).all()
    firsts = torch.bincount(orders[:, 0], minlength=size) / 4000
    assert ((firsts - 1 / size).abs() <= math.sqrt(math.log(2e9 * size) / 8000)).all()


@pytest.mark.parametrize("dead", [0.0, 1e-30])
def test_sizes_beside_units_without_a_gradient(dead):
    """In single precision too, which cannot square what is nothing beside the others."""
    grad = torch.full((6, 3, 5), 2.0)
    grad[::2] = dead
    found = informed.unit_norms((grad, make_lattice(grad.shape, (0, 2), 1)))
    expected = torch.linalg.vector_norm(grad.double(), dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


CASES = [
    ((7, 3), {"dims": 0}),
    ((2, 3, 8), {"dims": (0, 2), "patch": 3}),
    ((2, 2, 5, 6), {"dims": (2, 3), "patch": 2}),
    ((3, 2, 4, 4), {"dims": (0, 2, 3)}),
]


@pytest.mark.parametrize(("shape", "settings"), CASES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_gradient_is_unbiased(shape, settings, exact, floor):
    """The mean weight over many draws is 1, by Bernstein's inequality for numbers between 0 and 1 / pi.

    It fails by chance for one unit in 7e8, for any of all units here in less than 1e-6.
    """
    torch.manual_seed(1)
    grad, draws = torch.randn(shape).pow(3), 4000
    lattice = make_lattice(shape, settings["dims"], settings.get("patch", 1))
    norms = informed.unit_norms((grad, lattice))
    number = lattice.size * 0.4
    pi = informed.inclusion_probabilities(norms, max(1, round(number)) if exact else number, floor)
    weights = informed.weigh_norms(norms.repeat(draws, 1), 0.6, exact, "count", floor, None)
    error = (weights.view(draws, *norms.shape).mean(0) - 1).abs()
    allowed = SIGMAS * ((1 / pi - 1).clamp(min=0) / draws).sqrt() + SIGMAS**2 / (3 * draws * pi)
    assert (error <= allowed + 1e-9).all()
    whole = functional.choose_weight(grad, 0.6, exact=exact, floor=floor, **settings)
    assert torch.broadcast_shapes(whole.shape, grad.shape) == grad.shape


@pytest.mark.parametrize(("shape", "settings"), CASES)
def test_exact_keeps_as_many_units_of_each_group_as_p_says(shape, settings):
    torch.manual_seed(2)
    grad = torch.randn(shape)
    lattice = make_lattice(shape, settings["dims"], settings.get("patch", 1))
    for p in (0.3, 0.75, 0.999):
        weight = informed.weigh(grad, lattice, p, True, "count", 0.1, None)
        assert ((weight > 0).sum(1) == max(1, round(lattice.size * (1 - p)))).all()


def test_less_variance_than_uniform_masks_where_gradients_differ_and_no_more_where_not():
    torch.manual_seed(3)

    def spread(grad):
        weights = informed.weigh_norms(grad.double().repeat(3000, 1), 0.9, True, "count", 0.1, None)
        return (weights * grad).sum(1).var().item()

    def uniform(grad):
        draws = [(grad * functional.draw_weight(grad.shape, 0.9, exact=True)).sum() for _ in range(3000)]
        return torch.stack(draws).var().item()

    skewed = torch.exp(2 * torch.randn(200))
    assert uniform(skewed) > 3 * spread(skewed)
    alike = 1 + 0.01 * torch.randn(200)
    assert spread(alike) < 2 * uniform(alike)


def test_a_layer_draws_in_backward_and_the_same_for_all_passes_through_one_call():
    layer, x = Backdrop(0.5, exact=True, choose="gradient"), torch.randn(8, 3, requires_grad=True)
    state = torch.get_rng_state()
    y = layer(x)
    assert torch.equal(state, torch.get_rng_state())
    assert y.data_ptr() == x.data_ptr()
    (first,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)
    assert not torch.equal(state, torch.get_rng_state())
    (second,) = torch.autograd.grad(y.exp().sum(), x)
    assert torch.equal(first != 0, second != 0)
    assert ((first != 0).any(1)).sum() == 4


def test_second_derivatives_are_those_of_the_mask_that_was_drawn():
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = functional.backdrop(x, 0.5, choose="gradient", exact=True)
    (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    weight = (grad / (3 * x**2)).detach()
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, weight * weight * 6 * x.detach())


@pytest.mark.parametrize("layer", [Backdrop1d, Backdrop2d, Backdrop3d])
@pytest.mark.parametrize("shared", [True, False])
def test_layers_of_positions(layer, shared):
    spatial = len(layer._spatial)
    x = torch.randn(2, 3, *[6] * spatial, requires_grad=True)
    mask = layer(0.9, exact=True, choose="gradient", patch=2, shared=shared)
    (mask(x) * torch.randn_like(x)).sum().backward()
    units = (x.grad != 0).any(1).any(0) if shared else (x.grad != 0).any(1)[0]
    assert units.sum() == max(1, round(3**spatial * 0.1)) * 2**spatial


def test_settings():
    assert "choose='gradient', floor=0.2" in repr(Backdrop2d(0.5, choose="gradient", floor=0.2))
    assert "choose" not in repr(Backdrop(0.5))
    for wrong, error in (
        ({"choose": "largest"}, ValueError),
        ({"floor": 2.0}, ValueError),
        ({"floor": "a"}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            Backdrop(0.5, **wrong)
        with pytest.raises(error, match=next(iter(wrong))):
            functional.backdrop(torch.ones(3), 0.5, **wrong)
    with pytest.raises(RuntimeError, match="choose_weight"):
        Backdrop(0.5, choose="gradient").draw_weight(torch.ones(3))
    with pytest.raises(RuntimeError, match="transforms"):
        torch.func.grad(lambda x: functional.backdrop(x, 0.5, choose="gradient").sum())(torch.ones(4))


@pytest.mark.parametrize("scale", ["count", "eq1", "probability", None])
def test_scales(scale):
    grad = torch.ones(10, requires_grad=True)
    weight = functional.choose_weight(grad, 0.8, exact=True, scale=scale)
    assert weight[weight > 0].tolist() == pytest.approx([{"eq1": 1.0, None: 1.0}.get(scale, 5.0)] * 2)


def test_zero_infinite_and_no_gradients():
    weight = functional.choose_weight(torch.zeros(6, 2), 0.5, exact=True)
    assert sorted(weight.flatten().tolist()) == [0, 0, 0, 2, 2, 2]
    grad = torch.ones(6)
    grad[4] = math.nan
    x = torch.zeros(6, requires_grad=True)
    functional.backdrop(x, 0.9, choose="gradient", exact=True).backward(grad)
    assert x.grad[4].isnan()
    assert functional.choose_weight(torch.ones(1, 4), 0.9, exact=True).tolist() == [[1.0]]
    assert functional.choose_weight(torch.ones(0, 4), 0.9).shape == (0, 1)
    assert functional.choose_weight(torch.ones(0, 2, 7), 0.9, (0, 2), patch=3).shape == (0, 1, 7)


@pytest.mark.parametrize("p", [0.75, torch.tensor(0.75)])
@pytest.mark.parametrize("exact", [True, False])
def test_compiled(p, exact):
    """Eager and compiled code keep the same numbers of units, with the same weights where gradients are alike."""
    torch.manual_seed(0)
    x = torch.randn(400, 2, requires_grad=True)
    compiled = torch.compile(
        lambda x: functional.backdrop(x, p, choose="gradient", exact=exact).sum(), backend="aot_eager"
    )
    compiled(x).backward()
    kept = (x.grad[:, 0] != 0).sum().item()
    assert kept == 100 if exact else 40 < kept < 180
    assert x.grad[x.grad != 0].tolist() == pytest.approx([4.0] * (2 * kept), rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    layer = nn.Sequential(nn.Linear(3, 3), Backdrop(0.5, exact=True, choose="gradient"))
    x = torch.randn(8, 3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert (x.grad != 0).any(1).sum() == 4


def test_a_generator_and_half_precision():
    grad = torch.randn(64, 4)
    a, b = (functional.choose_weight(grad, 0.9, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(a, b)
    x = torch.randn(64, 4, dtype=torch.float16, requires_grad=True)
    functional.backdrop(x, 0.9, choose="gradient", exact=True).float().sum().backward()
    assert x.grad.dtype == torch.float16
    assert (x.grad != 0).any(1).sum() == 6


# In the engine


def one_step(model, x, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(seed + 1)
    rows = torch.arange(1.0, 1 + len(x), dtype=x.dtype)
    sum((out.square().flatten(1).sum(1) * rows**i).sum() for i, out in enumerate(outputs, 1)).backward()
    return [out.detach() for out in outputs], [x.grad, *(p.grad for p in model.parameters())]


def check(plain, x, said, tolerance=1e-10, **how):
    fast = skip_blocked(plain, when="always", **how)
    plain = copy.deepcopy(plain)
    for seed in range(3):
        (a, grads), (b, others) = one_step(plain, x, seed), one_step(fast, x, seed)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        largest = max(grad.abs().max() for grad in grads)
        for grad, other in zip(grads, others, strict=True):
            assert (grad - other).abs().max() <= tolerance * largest
    assert said in fast.skip_report[0].last, fast.skip_report
    return fast


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(6, 12), nn.Tanh()), nn.Linear(12, 3)
        self.a, self.b = Backdrop(0.9, exact=True, choose="gradient"), Backdrop(0.8, exact=True)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.a(self.head(hidden)), self.b(hidden)


@captures
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("at_once", [None, 7])
def test_samples_are_chosen_and_run_again(exact, at_once):
    layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    mask = Backdrop(0.8, exact=exact, choose="gradient")
    x = torch.randn(50, 6, dtype=torch.float64)
    check(nn.Sequential(layers, mask), x, "chosen by gradients worth", at_once=at_once)
    skip = Skip(layers, mask, when="always")
    skip(x).square().sum().backward()
    if exact:
        assert "10 of 50 samples ran with gradients" in skip.report[0].last


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        return {"hidden": hidden, "out": self.second(hidden.tanh())}


@captures
def test_one_choice_for_all_outputs_of_a_module():
    x = torch.randn(30, 6, dtype=torch.float64)
    plain = insert(nn.Sequential(Nested()).double(), {"0": Backdrop(0.8, exact=True, choose="gradient")})
    fast, found = skip_blocked(plain, when="always"), []
    for model in (plain, fast):
        out = model(x)
        torch.manual_seed(0)
        ((out["hidden"] ** 2).sum() + (out["out"] ** 4).sum()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)
    assert "6 of 30 samples ran with gradients, chosen" in fast.skip_report[0].last


@captures
def test_samples_chosen_beside_others_that_are_drawn():
    check(TwoHeads().double(), torch.randn(60, 6, dtype=torch.float64), "samples ran with gradients, chosen")


class TwoChoices(TwoHeads):
    """With a generator for each mask: the order in which they choose is the backward pass's own."""

    def __init__(self):
        super().__init__()
        a, b = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        self.a = Backdrop(0.9, exact=True, choose="gradient", generator=a)
        self.b = Backdrop(0.8, exact=True, choose="gradient", generator=b)


@captures
@pytest.mark.parametrize("off", ["neither", "in eval()", "p = 0"])
def test_samples_chosen_by_two_masks_of_which_one_may_be_off(off):
    plain, x, found = TwoChoices().double(), torch.randn(60, 6, dtype=torch.float64), []
    fast = skip_blocked(plain, when="always")
    for model in (plain, fast):
        model.b.train(off != "in eval()")
        model.b.p = 0.0 if off == "p = 0" else 0.8
        for mask, seed in ((model.a, 1), (model.b, 2)):
            mask.generator.manual_seed(seed)
        a, b = model(x)
        (a.pow(3).sum() + b.exp().sum()).backward()
        found.append([p.grad for p in model.parameters()])
    for grad, other in zip(*found, strict=True):
        torch.testing.assert_close(grad, other)
    assert "chosen by gradients worth" in fast.skip_report[0].last


@captures
@pytest.mark.parametrize("patch", [1, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_positions_are_chosen_before_windows_are_cut(patch, exact):
    mask = Backdrop2d(0.95, exact=exact, patch=patch, choose="gradient")
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), mask]
    check(
        nn.Sequential(*layers, nn.Conv2d(4, 3, 3)).double(), torch.randn(2, 2, 31, 26).double(), "chosen by gradients"
    )


@captures
def test_batch_statistics_beside_chosen_samples():
    """Below the norm "sampled" is an estimate; outputs, buffers and what lies behind it are exact."""
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)]
    plain = nn.Sequential(*layers, Backdrop(0.75, exact=True, choose="gradient")).double()
    fast, x = skip_blocked(plain, when="always", statistics="sampled"), torch.randn(16, 2, 6, 6).double()
    a, b = plain(x), fast(x)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(dict(plain.named_buffers()), dict(fast.named_buffers()))
    for out in (a, b):
        torch.manual_seed(0)
        out.square().sum().backward()
    assert "4 of 16 samples ran with gradients, chosen" in fast.skip_report[0].last
    torch.testing.assert_close(plain[4].weight.grad, fast[4].weight.grad)  # behind the norm nothing is estimated


@captures
def test_dropout_runs_plain_where_samples_are_chosen():
    layers = [nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 2)]
    plain = nn.Sequential(*layers, Backdrop(0.8, exact=True, choose="gradient")).double()
    check(plain, torch.randn(40, 6).double(), "plain: samples chosen by gradients run again")
