"""The functions against hand-built Jacobians, exact expectations and finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from backdrop import effective_batch_size
from backdrop._core import product
from backdrop._core.draw import make_lattice
from backdrop.functional import backdrop, draw_mask, draw_weight, mask_gradient
from oracle import weights

SCALES = ["count", "eq1", "probability", None]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def masks(draw):
    """A shape of rank 1 to 5 (0-sized batches too) with dims, patch and p to go with it."""
    rank = draw(st.integers(1, 5))
    shape = [draw(st.integers(0, 4)), *(draw(st.integers(1, 5 if rank < 4 else 3)) for _ in range(rank - 1))]
    axes = draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
    dims = [axis - rank if draw(st.booleans()) else axis for axis in axes]
    dims = dims[0] if len(dims) == 1 and draw(st.booleans()) else dims
    sizes = [draw(st.integers(1, 6)) for axis in axes if axis != 0]
    patch = sizes if draw(st.booleans()) else draw(st.integers(1, 6))
    p = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]))
    return shape, dims, patch, p


@given(masks(), st.sampled_from(SCALES), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=400)
def test_gradient_is_the_hand_built_jacobian(mask_setting, scale, exact, seed):
    shape, dims, patch, p = mask_setting
    mask = draw_mask(shape, p, dims, patch=patch, exact=exact, generator=seeded(seed))
    weight, total, count = weights(mask, shape, dims, patch, p, scale)
    if p == 0:
        weight = torch.ones_like(weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = backdrop(x, p, dims, patch=patch, exact=exact, scale=scale, generator=seeded(seed))

    assert torch.equal(y, x)
    assert y.data_ptr() == x.data_ptr()
    assert y.stride() == x.stride()
    basis = torch.eye(x.numel(), dtype=torch.float64).reshape(x.numel(), *shape)
    rows = [torch.autograd.grad(y, x, e, retain_graph=True)[0].flatten() for e in (*basis, torch.ones_like(x))]
    expected = torch.cat([torch.diag(weight.flatten()), weight.reshape(1, -1)])
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-15, atol=0)
    if exact and p > 0:
        assert all(count[group] == max(1, round(size * (1 - p))) for group, size in total.items())


@given(masks(), st.booleans(), st.integers(0, 2**32))
def test_mask_has_the_rank_of_the_shape_and_size_1_where_shared(mask_setting, exact, seed):
    shape, dims, patch, p = mask_setting
    mask = draw_mask(shape, p, dims, patch=patch, exact=exact, generator=seeded(seed))
    masked = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    assert mask.dtype == torch.bool
    assert list(mask.shape) == [size if axis in masked else 1 for axis, size in enumerate(shape)]
    weight = draw_weight(shape, p, dims, patch=patch, exact=exact, generator=seeded(seed))
    assert torch.equal(weight != 0, mask)
    unscaled = draw_weight(shape, p, dims, patch=patch, exact=exact, scale=None, generator=seeded(seed))
    assert torch.equal(unscaled, mask.float())


def moments(n, p, exact, scale):
    """Mean and variance of one unit's weight, summed over the number K of units kept among n.

    K is binomial with its mass at 0 moved to 1 (never empty), or fixed. Given K every unit is kept with
    probability K/n.
    """
    if exact:
        chance = {max(1, round(n * (1 - p))): 1.0}
    else:
        chance = {k: math.comb(n, k) * (1 - p) ** k * p ** (n - k) for k in range(n + 1)}
        chance[1] = chance[1] + chance.pop(0)
    factor = {
        "count": lambda k: n / k,
        "eq1": lambda k: (1 - p) * n / k,
        "probability": lambda k: 1 / (1 - p),
        None: lambda k: 1.0,
    }[scale]
    mean = sum(c * k / n * factor(k) for k, c in chance.items())
    square = sum(c * k / n * factor(k) ** 2 for k, c in chance.items())
    return mean, square - mean**2


def bernstein(variance, largest, draws, error_rate=1e-9):
    """How far the mean of `draws` values in [0, largest] may lie from its expectation, but for `error_rate`.

    Solves 2 exp(-draws t^2 / (2 variance + 2 largest t / 3)) = error_rate for t.
    """
    log = math.log(2 / error_rate)
    b = largest * log / (3 * draws)
    return b + math.sqrt(b**2 + 2 * variance * log / draws)


STATED = {
    "count": lambda n, p: 1,
    "eq1": lambda n, p: 1 - p,
    "probability": lambda n, p: 1 + p**n / (n * (1 - p)),
    None: lambda n, p: 1 - p + p**n / n,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("n", [1, 2, 3, 16])
def test_mean_weight_is_the_stated_expectation(n, p, scale):
    # 640 means in all (Bernoulli and exact), each off by more than its bound with probability below 1e-9.
    draws = 100_000
    for exact in (False, True):
        mean, variance = moments(n, p, exact, scale)
        if not exact:
            assert mean == pytest.approx(STATED[scale](n, p), rel=1e-9)
        # every sample is a group of its own: one call makes many independent draws
        weight = draw_weight((draws, n), p, (0, 1), exact=exact, scale=scale, generator=seeded(n), dtype=torch.float64)
        bound = bernstein(max(variance, 0), weight.max().item(), draws) + 1e-12
        assert (weight.mean(0) - mean).abs().max() < bound
        assert weight.any(1).all()


@pytest.mark.parametrize("p", [0.3, 0.9])
def test_units_and_groups_are_independent(p):
    # Products of two units of one group, and of the same unit in neighbouring groups: 15 + 6 means, each at 1e-9.
    draws, n = 100_000, 6
    kept = draw_mask((draws, n), p, (0, 1), generator=seeded(1)).double()
    both = kept.T @ kept / draws
    bound = bernstein((1 - p) ** 2 * (1 - (1 - p) ** 2), 1, draws)
    assert (both - (1 - p) ** 2)[~torch.eye(n, dtype=torch.bool)].abs().max() < bound
    single = moments(n, p, False, None)[0]
    neighbours = (kept[0::2] * kept[1::2]).mean(0)
    assert (neighbours - single**2).abs().max() < bernstein(single**2 * (1 - single**2), 1, draws // 2)


def test_exact_choices_are_uniform():
    # All 20 ways to keep 3 of 6 units, each at 1e-9.
    draws = 100_000
    kept = draw_mask((draws, 6), 0.5, (0, 1), exact=True, generator=seeded(0))
    code = (kept * 2 ** torch.arange(6)).sum(1)
    frequency = torch.bincount(code, minlength=64) / draws
    assert (frequency > 0).sum() == 20
    assert (frequency[frequency > 0] - 1 / 20).abs().max() < bernstein(1 / 20 * 19 / 20, 1, draws)


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_a_group_that_would_be_empty_keeps_exactly_one_unit(n):
    # At p = 1 - 2^-24 a unit passes the threshold about once in 16 million draws; the seed is fixed.
    kept = draw_mask((1000, n), 1 - 2**-24, (0, 1), generator=seeded(0))
    assert torch.equal(kept.sum(1), torch.ones(1000, dtype=torch.long))


@pytest.mark.parametrize(
    "setting", [{"training": False}, {"p": 0.0}, {"p": torch.tensor(0.0)}, {"requires_grad": False}]
)
@pytest.mark.parametrize("use_generator", [False, True])
def test_identity_consumes_no_random_number(setting, use_generator):
    setting = {"p": 0.5, "training": True, "requires_grad": True} | setting
    generator = seeded(0) if use_generator else None
    states = torch.get_rng_state(), seeded(0).get_state()
    x = torch.randn(3, 4, requires_grad=setting["requires_grad"], generator=seeded(1))
    y = backdrop(x, setting["p"], training=setting["training"], generator=generator)
    assert y is x
    assert torch.equal(torch.get_rng_state(), states[0])
    if use_generator:
        assert torch.equal(generator.get_state(), states[1])


def test_no_grad_mode_is_the_identity():
    x = torch.randn(3, 4, requires_grad=True)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert backdrop(x, 0.5) is x
        assert mask_gradient(x, torch.ones(3, 1)) is x
    with torch.inference_mode():
        assert backdrop(x, 0.5) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_same_seed_same_masks_and_default_generator_untouched():
    state = torch.get_rng_state()
    generator = seeded(5)
    first, second = (draw_mask((64,), 0.5, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, draw_mask((64,), 0.5, generator=seeded(5)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(first, draw_mask((64,), 0.5))
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_p_as_a_tensor_draws_what_the_number_draws(exact, scale):
    for p in (0.25, 0.5, 0.9375):
        as_number = draw_weight((9, 8), p, (0, 1), exact=exact, scale=scale, generator=seeded(3))
        as_tensor = draw_weight((9, 8), torch.tensor(p), (0, 1), exact=exact, scale=scale, generator=seeded(3))
        torch.testing.assert_close(as_number, as_tensor, rtol=1e-6, atol=0)


WEIGHT = torch.tensor([[2.0, 0.0, 0.5], [0.0, 3.0, 0.0]], dtype=torch.float64)


def test_backward_map_passes_gradcheck_and_gradgradcheck():
    # The forward pass is the identity, so finite differences of it know nothing of the mask. The map from outgoing
    # to incoming gradients is an ordinary function, v -> v * weight: that is what is differentiated here.
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def pull_back(v):
        return torch.autograd.grad(mask_gradient(x, WEIGHT), x, v, create_graph=True)[0]

    assert torch.equal(pull_back(v), v * WEIGHT)
    assert gradcheck(pull_back, (v,))
    assert gradgradcheck(pull_back, (v,))


def test_second_derivatives_are_those_of_a_function_with_this_jacobian():
    # s(x) = x0 + weight * (x - x0) has the value x0 and the Jacobian diag(weight) at x0, and, unlike the masked
    # identity, finite differences see it. So f(mask(x)) must have the first and second derivatives of f(s(x)).
    mix = torch.randn(6, 6, dtype=torch.float64)
    x0 = torch.randn(2, 3, dtype=torch.float64)

    def f(x):
        return (mix @ x.flatten()).sin().prod()

    def surrogate(x):
        return f(x0 + WEIGHT * (x - x0))

    def masked(x):
        return f(mask_gradient(x, WEIGHT))

    assert gradcheck(surrogate, (x0.clone().requires_grad_(),))
    assert gradgradcheck(surrogate, (x0.clone().requires_grad_(),))
    for derivative in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
        torch.testing.assert_close(derivative(masked, x0), derivative(surrogate, x0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.func.hessian(masked)(x0), torch.func.hessian(surrogate)(x0), rtol=1e-12, atol=1e-12
    )


def test_weight_may_have_fewer_axes_and_any_real_dtype():
    x = torch.randn(4, 3, requires_grad=True)
    for weight in (torch.tensor([True, False, True]), torch.tensor([1, 0, 2]), torch.tensor(0.5), WEIGHT[0]):
        (gradient,) = torch.autograd.grad(mask_gradient(x, weight).sum(), x)
        assert torch.equal(gradient, weight.to(x.dtype).expand(4, 3))
        assert gradient.dtype == x.dtype


@given(
    st.lists(st.integers(0, 5), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.tuples(*(st.sampled_from([1, size]) for size in shape)))
    ),
    st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_half_precision_in_parts_equals_the_whole(shapes, part, dtype):
    shape, weight_shape = shapes
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    upstream, weight = torch.randn(shape, dtype=dtype), torch.rand(weight_shape) * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "PART", part)
        (gradient,) = torch.autograd.grad(mask_gradient(x, weight), x, upstream)
    assert torch.equal(gradient, (upstream.float() * weight).to(dtype))


@pytest.mark.parametrize("patch", [8, 9, 50_000_000, 2**62, 2**70, (8, 2**70)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_patch_longer_than_its_axis_is_the_axis(patch, exact):
    """And takes no more memory than that: 50,000,000 would take gigabytes."""
    lattice = make_lattice((2, 3, 8, 8), (0, 2, 3), patch)
    assert lattice.patch == (1, 8, 8)
    assert (lattice.groups, lattice.size) == (2, 1)
    found = draw_weight((2, 3, 8, 8), 0.5, (0, 2, 3), patch=patch, exact=exact, generator=seeded(0))
    assert torch.equal(found, torch.ones(2, 1, 8, 8))
    mixed = [draw_mask((2, 3, 8, 8), 0.5, (0, 2, 3), patch=(2, n), generator=seeded(1)) for n in (8, 2**70)]
    assert torch.equal(*mixed)
    assert draw_mask((2, 0), 0.5, (0, 1), patch=2**70).shape == (2, 0)


def test_a_product_beyond_float16_is_infinite_and_told_once(monkeypatch):
    monkeypatch.setattr(product, "_told_of_overflow", False)
    x = torch.ones(4, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([2.0**17, 0.0, 2.0, 2.0**17])
    upstream = torch.tensor([0.25, 60_000.0, 3.0, 60_000.0], dtype=torch.float16)

    def masked():
        return torch.autograd.grad(mask_gradient(x, weight), x, upstream)[0]

    with pytest.warns(UserWarning, match="float16 times the weight of its unit is larger than 65,504"):
        gradient = masked()
    assert gradient.tolist() == [2.0**15, 0.0, 6.0, math.inf]  # the weight itself is never rounded
    assert masked().isinf().any()  # and no second warning, which would be an error here
    monkeypatch.setattr(product, "_told_of_overflow", False)
    upstream[3] = math.inf  # which is not of our making
    assert masked()[3] == math.inf


def test_complex_input():
    x = torch.randn(6, 2, dtype=torch.complex128, requires_grad=True)
    backdrop(x, 0.5, generator=seeded(0)).abs().square().sum().backward()
    weight = draw_weight((6, 2), 0.5, generator=seeded(0), dtype=torch.float64)
    torch.testing.assert_close(x.grad, 2 * x.detach() * weight)


def test_effective_batch_size():
    assert effective_batch_size(2048, 0.75) == 512
    assert effective_batch_size(10, 0) == 10
