"""Units chosen by gradient in JAX: the probabilities of torch's, unbiased, and composed with jit, vmap and grad."""

from functools import partial

import numpy as np
import pytest
import torch

from backdrop._core import informed as by_torch
from backdrop._core.draw import make_lattice

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from backdrop.integrations.jax import backdrop, choose_weight, mask_gradient  # noqa: E402
from backdrop.integrations.jax import informed as by_jax  # noqa: E402

KEY = jax.random.key(0)
SIGMAS = 6.5  # as in tests/core/test_informed.py: below 1e-6 for all comparisons of a test together
CASES = [
    ((7, 3), {"dims": 0}),
    ((2, 3, 8), {"dims": (0, 2), "patch": 3}),
    ((2, 2, 5, 6), {"dims": (2, 3), "patch": 2}),
    ((3, 2, 4, 4), {"dims": (-1, 0, 2)}),
    ((200,), {"dims": 0}),
]


@pytest.fixture(autouse=True)
def _compiled_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def gradient(shape, seed=1):
    torch.manual_seed(seed)
    return torch.randn(shape).pow(3)


@pytest.mark.parametrize(("shape", "settings"), CASES)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_probabilities_are_those_of_torch(shape, settings, floor):
    grad = gradient(shape)
    lattice = make_lattice(shape, settings["dims"], settings.get("patch", 1))
    norms = by_torch.unit_norms((grad, lattice))
    found = by_jax._unit_norms(jnp.asarray(grad.numpy()), lattice, jnp.float32)
    np.testing.assert_allclose(found / found.max(), norms / norms.max(), rtol=1e-5)
    for number in (max(1, round(0.4 * lattice.size)), 0.3 * lattice.size):
        expected = by_torch.inclusion_probabilities(norms, number, floor)
        np.testing.assert_allclose(by_jax._inclusion(found, number, floor), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("shape", "settings"), CASES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_gradient_is_unbiased(shape, settings, exact, floor):
    """The mean weight over many draws is 1, by Bernstein's inequality for numbers between 0 and 1 / pi."""
    grad, draws = gradient(shape), 1000
    lattice = make_lattice(shape, settings["dims"], settings.get("patch", 1))
    number = max(1, round(0.4 * lattice.size)) if exact else 0.4 * lattice.size
    pi = by_torch.inclusion_probabilities(by_torch.unit_norms((grad, lattice)), number, floor)
    draw = partial(choose_weight, jnp.asarray(grad.numpy()), p=0.6, exact=exact, floor=floor, **settings)
    weights = np.asarray(jax.jit(jax.vmap(lambda key: draw(key)))(jax.random.split(KEY, draws)))
    mean = torch.tensor(weights, dtype=torch.float64).mean(0)
    allowed = SIGMAS * ((1 / pi - 1).clamp(min=0) / draws).sqrt() + SIGMAS**2 / (3 * draws * pi)
    units = torch.stack([mean.expand(shape).flatten(), *where(lattice, shape)])
    for weight, unit in units.T.tolist():
        assert abs(weight - 1) <= allowed.flatten()[int(unit)].item() + 1e-5


def where(lattice, shape):
    """The unit of each position."""
    numbers = torch.arange(lattice.groups * lattice.size, dtype=torch.float64).reshape(lattice.shape)
    for axis, size in zip(lattice.axes, lattice.patch, strict=True):
        numbers = numbers.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return [numbers.expand(shape).flatten()]


@pytest.mark.parametrize("size", [10, 100_000])
def test_exact_choices_keep_just_as_many_units(size):
    """In single precision too, where sums of so many probabilities are not whole numbers."""
    grad = jnp.asarray(gradient((size,)).numpy())
    for p in (0.3, 0.99):
        for seed in range(3):
            weight = choose_weight(grad, jax.random.key(seed), p, exact=True)
            assert int((weight > 0).sum()) == max(1, round(size * (1 - p)))


@pytest.mark.parametrize(("size", "p"), [(3, 0.1), (8, 0.05), (1000, 1e-4), (5, 1e-300)])
@pytest.mark.parametrize("skewed", [False, True])
def test_masks_that_keep_all_keep_all(size, p, skewed):
    """Probabilities that are one but for rounding."""
    grad = jnp.asarray(gradient((size,)).numpy()) if skewed else jnp.ones(size)
    np.testing.assert_allclose(choose_weight(grad, KEY, p, exact=True), 1, rtol=1e-5)


@pytest.mark.parametrize("p", [0.02, 0.5, 0.98])
def test_exact_choices_of_many_alike(p):
    """Whose probabilities add up to something else than a whole number, in single precision."""
    for size in (1000, 300_000):
        weight = choose_weight(jnp.ones(size), KEY, p, exact=True)
        assert int((weight > 0).sum()) == round(size * (1 - p))
        np.testing.assert_allclose(jnp.median(weight[weight > 0]), 1 / (1 - p), rtol=1e-4)


def test_the_backward_pass_chooses_by_what_arrives():
    x, key = jnp.linspace(0.1, 3, 12).reshape(6, 2), KEY

    def loss(x, key):
        return (backdrop(x, key, 0.5, exact=True, choose="gradient") ** 3).sum()

    assert loss(x, key) == (x**3).sum()
    plain = 3 * x**2
    expected = plain * choose_weight(plain, key, 0.5, exact=True)
    for take in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
        np.testing.assert_allclose(take(x, key), expected, rtol=1e-5)
    keys = jax.random.split(KEY, 5)
    several = jax.vmap(jax.grad(loss), (None, 0))(x, keys)
    for one, other in zip(several, keys, strict=True):
        np.testing.assert_allclose(one, jax.grad(loss)(x, other), rtol=1e-5)
    assert len({tuple((one[:, 0] != 0).tolist()) for one in several}) > 1
    jacobian = jax.jacrev(lambda x: backdrop(x, key, 0.5, exact=True, choose="gradient").sum(0))(x)
    assert ((jacobian != 0).any(-1).sum(-1) == 3).all()


def test_p_may_be_traced_where_it_is_not_a_count():
    step = jax.jit(jax.grad(lambda x, p: (backdrop(x, KEY, p, choose="gradient") ** 2).sum()))
    x = jnp.linspace(1, 2, 400)
    for p in (0.5, 0.9):
        kept = int((step(x, jnp.float32(p)) != 0).sum())
        assert abs(kept - 400 * (1 - p)) < 100  # 10 standard deviations
    with pytest.raises(TypeError, match="exact mask"):
        jax.jit(lambda x, p: backdrop(x, KEY, p, exact=True, choose="gradient"))(x, 0.5)


def test_scales_identity_and_odd_gradients():
    ones = jnp.ones(10)
    for scale, weight in (("count", 5), ("probability", 5), ("eq1", 1), (None, 1)):
        found = choose_weight(ones, KEY, 0.8, exact=True, scale=scale)
        np.testing.assert_allclose(sorted(found)[-2:], [weight] * 2, rtol=1e-5)
    x = jnp.ones((4, 2))
    assert backdrop(x, None, 0.5, choose="gradient", training=False) is x
    np.testing.assert_array_equal(backdrop(x, None, 0.0, choose="gradient"), x)
    assert choose_weight(jnp.zeros((0, 4)), KEY, 0.5).shape == (0, 1)
    assert sorted(choose_weight(jnp.zeros(6), KEY, 0.5, exact=True).tolist()) == [0, 0, 0, 2, 2, 2]
    for odd in (jnp.nan, jnp.inf):
        weight = choose_weight(jnp.ones(6).at[4].set(odd), KEY, 0.9, exact=True, floor=0.0)
        np.testing.assert_allclose(weight, [0, 0, 0, 0, 1, 0])
    for size in (1e-38, 3e38):
        kept = choose_weight(jnp.full((50, 3), size), KEY, 0.5, exact=True)
        np.testing.assert_allclose(sorted(kept.flatten()), [0] * 25 + [2] * 25, rtol=1e-5)
    half = jax.grad(lambda x: backdrop(x, KEY, 0.5, exact=True, choose="gradient").astype(float).sum())
    assert half(jnp.ones(8, jnp.float16)).dtype == jnp.float16
    z = jnp.ones(6) * (1 + 1j)
    found = jax.grad(lambda z: jnp.abs(backdrop(z, KEY, 0.5, exact=True, choose="gradient")).sum())(z)
    assert int((found != 0).sum()) == 3


def test_what_is_refused():
    x = jnp.arange(1.0, 9)

    def loss(x):
        return (backdrop(x, KEY, 0.5, choose="gradient") ** 2).sum()

    with pytest.raises(TypeError, match="first derivatives only"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))
    with pytest.raises(TypeError, match="key has to be"):
        backdrop(x, None, 0.5, choose="gradient")
    with pytest.raises(ValueError, match="choose has to be"):
        backdrop(x, KEY, 0.5, choose="largest")
    with pytest.raises(ValueError, match="floor"):
        choose_weight(x, KEY, 0.5, floor=2.0)
    weight = choose_weight(x, KEY, 0.5)  # what is named instead has second derivatives
    second = jax.grad(lambda x: jax.grad(lambda x: (mask_gradient(x, weight) ** 2).sum())(x).sum())(x)
    np.testing.assert_allclose(second, 2 * weight * weight, rtol=1e-5)
