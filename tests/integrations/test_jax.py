"""The JAX functions against the torch layer on shared masks, hand-built weights and exact expectations."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from backdrop import functional
from oracle import weights
from test_functional import SCALES, bernstein, moments

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from backdrop.integrations.jax import backdrop, draw_mask, draw_weight, mask_gradient, skip  # noqa: E402

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _compiled_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def to_jax(tensor):
    return jnp.asarray(tensor.detach().numpy())


def gradient_of(masked, x, upstream):
    """What reaches x when `upstream` arrives behind the mask."""
    value, pull_back = jax.vjp(masked, x)
    np.testing.assert_array_equal(value, x)
    return pull_back(upstream)[0]


MASKS = [  # shape, dims, patch
    ((6,), 0, 1),
    ((5, 3, 4), 0, 1),
    ((5, 7), 1, 3),
    ((3, 2, 5, 7), (0, 2, 3), (2, 3)),
    ((3, 5, 7, 2), (1, 2), 4),
    ((2, 9, 3), (-2, 0), 2),
    ((4, 3), (0, 1), 1),
    ((1, 6), (0, -1), 8),
    ((0, 4), (0, 1), 1),
]


@pytest.mark.parametrize(("shape", "dims", "patch"), MASKS)
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_equal_those_of_torch_on_shared_masks(shape, dims, patch, scale):
    generator = torch.Generator().manual_seed(1)
    for p, exact in ((0.5, False), (0.7, True)):
        weight = functional.draw_weight(shape, p, dims, patch=patch, exact=exact, scale=scale, generator=generator)
        x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
        (expected,) = torch.autograd.grad(functional.mask_gradient(x, weight), x, upstream)
        shared = to_jax(weight)
        mine = gradient_of(lambda x, w=shared: mask_gradient(x, w), to_jax(x), to_jax(upstream))
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=0)


def test_a_network_has_the_gradients_it_has_in_torch(x64):
    # Positions behind the first convolution, channels behind the second, samples at the end.
    torch.manual_seed(0)
    convs, linear = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)], nn.Linear(3 * 4 * 4, 1)
    network = nn.ModuleList([*convs, linear]).double()
    x, y = torch.randn(6, 2, 8, 8).double(), torch.randn(6, 1).double()
    shapes = [((6, 4, 6, 6), (0, 2, 3), 2), ((6, 3, 4, 4), (0, 1), 1), ((6, 1), 0, 1)]
    drawn = [functional.draw_weight(shape, 0.6, dims, patch=patch, dtype=x.dtype) for shape, dims, patch in shapes]

    hidden = x
    for conv, weight in zip(convs, drawn, strict=False):
        hidden = functional.mask_gradient(conv(hidden), weight).tanh()
    ((functional.mask_gradient(linear(hidden.flatten(1)), drawn[2]) - y) ** 2).mean().backward()

    def loss(params):
        hidden = to_jax(x)
        for (kernel, bias), weight in zip(params, drawn[:2], strict=False):
            hidden = jax.lax.conv_general_dilated(hidden, kernel, (1, 1), "VALID") + bias[:, None, None]
            hidden = jnp.tanh(mask_gradient(hidden, to_jax(weight)))
        kernel, bias = params[2]
        scores = mask_gradient(hidden.reshape(6, -1) @ kernel.T + bias, to_jax(drawn[2]))
        return ((scores - to_jax(y)) ** 2).mean()

    gradients = jax.jit(jax.grad(loss))([(to_jax(layer.weight), to_jax(layer.bias)) for layer in network])
    for layer, (kernel, bias) in zip(network, gradients, strict=True):
        np.testing.assert_allclose(kernel, layer.weight.grad, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(bias, layer.bias.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("shape", "dims", "patch"), MASKS)
def test_masks_and_weights_are_those_of_the_definition(shape, dims, patch):
    axes = {axis % len(shape) for axis in ([dims] if isinstance(dims, int) else dims)}
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    for p, exact in ((0.5, False), (0.9, False), (0.7, True)):
        mask = draw_mask(KEY, shape, p, dims, patch=patch, exact=exact)
        assert mask.dtype == bool
        assert mask.shape == tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
        for scale in SCALES:
            expected, total, count = weights(torch.tensor(np.array(mask)), shape, dims, patch, p, scale)
            weight = draw_weight(KEY, shape, p, dims, patch=patch, exact=exact, scale=scale)
            np.testing.assert_allclose(jnp.broadcast_to(weight, shape), expected, rtol=1e-6, atol=0)
            if exact:
                assert all(count[group] == max(1, round(size * (1 - p))) for group, size in total.items())
        masked = jax.jit(partial(backdrop, p=p, dims=dims, patch=patch, exact=exact, scale="eq1"))
        expected = (x + 1) * draw_weight(KEY, shape, p, dims, patch=patch, exact=exact, scale="eq1")
        np.testing.assert_allclose(gradient_of(partial(masked, key=KEY), x, x + 1), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_mean_weight_is_the_expectation(n, p):
    # 320 means in all, each off by more than its bound with probability below 1e-9.
    draws = 100_000
    for exact in (False, True):
        for scale in ("count", None):
            mean, variance = moments(n, p, exact, scale)
            weight = draw_weight(KEY, (draws, n), p, (0, 1), exact=exact, scale=scale)
            bound = bernstein(max(variance, 0), weight.max().item(), draws) + 1e-5 * mean  # float32 sums
            assert abs(np.float64(weight).mean(0) - mean).max() < bound
            assert weight.any(1).all()


def test_exact_choices_are_uniform():
    # All 20 ways to keep 3 of 6 units, each at 1e-9.
    draws = 100_000
    kept = draw_mask(KEY, (draws, 6), 0.5, (0, 1), exact=True)
    frequency = np.bincount((np.array(kept) * 2 ** np.arange(6)).sum(1), minlength=64) / draws
    assert (frequency > 0).sum() == 20
    assert abs(frequency[frequency > 0] - 1 / 20).max() < bernstein(1 / 20 * 19 / 20, 1, draws)


@pytest.mark.parametrize("n", [1, 2, 100])
def test_a_group_that_would_be_empty_keeps_exactly_one_unit(n):
    # At p = 1 - 2^-23 a unit passes the threshold about once in 8 million draws; the key is fixed.
    kept = draw_mask(KEY, (1000, n), 1 - 2**-23, (0, 1))
    assert (kept.sum(1) == 1).all()
    assert kept.any(0).all()


def test_same_key_same_mask():
    first, second = (draw_mask(key, (64,), 0.5) for key in jax.random.split(KEY))
    assert (first != second).any()
    assert (first == draw_mask(jax.random.split(KEY)[0], (64,), 0.5)).all()
    raw = jax.random.PRNGKey(0)  # the older form of a key
    assert (draw_mask(raw, (64,), 0.5) == draw_mask(KEY, (64,), 0.5)).all()


def test_double_precision_draws_the_same_mask_and_finer_weights(x64):
    jax.config.update("jax_enable_x64", False)
    mask = draw_mask(KEY, (7, 1), 0.6, exact=True)
    jax.config.update("jax_enable_x64", True)
    assert mask.sum() == 3
    for dtype in (jnp.float64, jnp.complex128):
        ones = jnp.ones((7, 2), dtype)
        gradient = jax.vjp(lambda x: backdrop(x, KEY, 0.6, exact=True), ones)[1](ones)
        np.testing.assert_allclose(gradient[0], jnp.where(mask, 7 / 3, 0) * ones, rtol=1e-14, atol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_traced_p_draws_what_the_number_draws(scale):
    draw = jax.jit(lambda p: draw_weight(KEY, (9, 8), p, (0, 1), scale=scale))
    for p in (0.0, 0.25, 0.9375):
        expected = draw_weight(KEY, (9, 8), p, (0, 1), scale=scale)
        np.testing.assert_allclose(draw(p), expected, rtol=1e-6, atol=0)
        np.testing.assert_array_equal(draw_weight(KEY, (9, 8), jnp.float32(p), (0, 1), scale=scale), expected)
    static = jax.jit(lambda p: draw_mask(KEY, (8,), p, exact=True), static_argnums=0)
    assert static(0.75).sum() == 2


@pytest.mark.parametrize("exact", [False, True])
def test_jit_vmap_and_checkpoint_give_the_gradients_of_a_loop(exact):
    x, keys = jax.random.normal(KEY, (4, 6, 5)), jax.random.split(KEY, 4)

    def loss(x, key):
        return jnp.sin(backdrop(x**2, key, 0.5, (0, 1), exact=exact)).sum()

    by_itself = jax.jit(jax.grad(loss))
    gradients = [by_itself(x[i], keys[i]) for i in range(4)]
    assert len({bytes(np.array(gradient == 0)) for gradient in gradients}) == 4  # four masks
    for transformed in (loss, jax.checkpoint(loss)):
        together = jax.vmap(jax.grad(transformed))(x, keys)
        np.testing.assert_allclose(together, jnp.stack(gradients), rtol=1e-6, atol=1e-6)
    alone = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(x, keys[0])  # one mask for all
    np.testing.assert_allclose(alone[0], gradients[0], rtol=1e-6, atol=1e-6)
    assert ((alone == 0) == (alone[0] == 0)).all()


def test_derivatives_are_those_of_a_function_with_this_jacobian(x64):
    # s(x) = x0 + weight (x - x0) has the value x0 and the Jacobian diag(weight) at x0.
    weight = jnp.array([[2.0, 0.0, 0.5], [0.0, 3.0, 0.0]])
    mix, x0 = (
        jax.random.normal(key, shape) for key, shape in zip(jax.random.split(KEY), ((6, 6), (2, 3)), strict=True)
    )

    def f(x):
        return jnp.sin(mix @ x.ravel()).prod()

    for derivative in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        mine = jax.jit(derivative(lambda x: f(mask_gradient(x, weight))))(x0)
        expected = jax.jit(derivative(lambda x: f(x0 + weight * (x - x0))))(x0)
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)
    value, tangent = jax.jvp(lambda x: mask_gradient(x, weight), (x0,), (x0,))
    np.testing.assert_array_equal(value, x0)
    np.testing.assert_array_equal(tangent, x0 * weight)


def test_weights_are_constants_of_any_real_dtype():
    x = jnp.ones((4, 3))
    for weight in (jnp.array([True, False, True]), np.array([1, 0, 2]), jnp.array(0.5), jnp.ones((4, 1))):
        gradient = jax.grad(lambda x, w=weight: mask_gradient(x, w).sum())(x)
        np.testing.assert_array_equal(gradient, jnp.broadcast_to(weight, x.shape).astype(float))

    def f(weight):
        return (mask_gradient(x, weight) ** 2).sum()

    def slope(weight):
        return jax.grad(lambda x: (mask_gradient(x, weight) ** 2).sum())(x).sum()

    assert slope(jnp.ones(3)) == 24
    for function in (f, slope):
        np.testing.assert_array_equal(jax.grad(function)(jnp.ones(3)), jnp.zeros(3))


@pytest.mark.parametrize(("dtype", "weight", "gradient"), [("bfloat16", 257.0, 772.0), ("float16", 1e5, 2 * 1e5**0.5)])
def test_weights_are_not_rounded_to_half_precision(dtype, weight, gradient):
    # In bfloat16 257 would be 256, and in float16 100000 infinite; the products are at home in both.
    upstream = {"bfloat16": 3.0, "float16": 2 * 1e5**-0.5}[dtype]
    x = jnp.ones((2,), dtype)
    mine = gradient_of(lambda x: mask_gradient(x, jnp.array([weight, 0.0])), x, jnp.full((2,), upstream, dtype))
    assert mine.dtype == x.dtype
    assert mine[1] == 0
    np.testing.assert_allclose(float(mine[0]), gradient, rtol=1e-3)


def test_values_pass_bit_for_bit():
    x = jnp.array([[-0.0, jnp.nan], [jnp.inf, 1e-45], [1.0, -jnp.inf]])
    for y in (backdrop(x, KEY, 0.5), jax.jit(lambda x: backdrop(x, KEY, 0.5))(x)):
        assert bytes(np.array(y)) == bytes(np.array(x))
    z = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    np.testing.assert_array_equal(gradient_of(lambda z: mask_gradient(z, jnp.array([2.0, 0.0])), z, z), [2 + 4j, 0])


@pytest.mark.parametrize("setting", [{"training": False}, {"p": 0.0}, {"p": jnp.float32(0)}])
def test_the_identity_needs_no_key(setting):
    setting = {"p": 0.5, **setting}
    x = jnp.arange(6.0).reshape(3, 2)
    assert backdrop(x, None, **setting) is x
    assert not jax.make_jaxpr(lambda x: backdrop(x, None, **setting))(x).eqns
    assert skip(lambda scale, x: scale * x, setting["p"])(2.0, x, training=setting.get("training", True)).sum() == 30


def test_a_compiled_forward_pass_alone_draws_nothing():
    def masked(x, key):
        return backdrop(x, key, 0.5)

    def gradient(x, key):
        return jax.grad(lambda x: masked(x, key).sum())(x)

    alone, with_gradient = (jax.jit(f).lower(X, KEY).compile().as_text() for f in (masked, gradient))
    assert "xor" in with_gradient  # of the random numbers
    assert "xor" not in alone


X = jnp.ones((4, 3))
BAD = [
    (lambda: backdrop(X, KEY, 1.0), ValueError, r"p has to be in \[0, 1\), but got 1.0"),
    (lambda: backdrop(X, KEY, jnp.float32(-0.5)), ValueError, r"p has to be in \[0, 1\), but got -0.5"),
    (lambda: backdrop(X, KEY, "half"), TypeError, "p has to be a number"),
    (
        lambda: backdrop(X, KEY, jnp.ones(2)),
        TypeError,
        r"0-d floating-point array, but got shape \(2,\), dtype float32",
    ),
    (lambda: backdrop(X, KEY, jnp.int32(0)), TypeError, r"0-d floating-point array, but got shape \(\), dtype int32"),
    (
        lambda: jax.jit(lambda p: backdrop(X, KEY, p, exact=True))(0.5),
        TypeError,
        "has to be a number for an exact mask",
    ),
    (lambda: jax.jit(lambda p: skip(jnp.dot, p)(X, X.T, key=KEY))(0.5), TypeError, "static_argnames='p'"),
    (
        lambda: backdrop(X, 0, 0.5),
        TypeError,
        r"key has to be a JAX random key, but got 0; make one with jax.random.key",
    ),
    (lambda: backdrop(X, None, 0.5), TypeError, "key has to be a JAX random key, but got None"),
    (lambda: backdrop(X, KEY, 0.5, 2), ValueError, r"dims has to name axes of the input, in \[-2, 1\]"),
    (lambda: backdrop(X, KEY, 0.5, (0, 1), patch=(1, 2)), ValueError, "patch has to be one size, or one for each"),
    (lambda: backdrop(X, KEY, 0.5, scale="sum"), ValueError, "scale has to be one of 'count'"),
    (lambda: draw_weight(KEY, (4,), 0.5, scale="sum"), ValueError, "scale has to be one of 'count'"),
    (lambda: draw_mask(KEY, (-1,), 0.5), ValueError, "shape has to be a sequence of sizes"),
    (lambda: backdrop(X.astype(int), KEY, 0.5), TypeError, "floating-point or complex array, but got int32"),
    (lambda: backdrop([1.0], KEY, 0.5), TypeError, "x has to be an array, but got list"),
    (lambda: mask_gradient(X, jnp.ones(4)), ValueError, r"but got weight with shape \(4,\) and x with shape \(4, 3\)"),
    (lambda: mask_gradient(X[0], jnp.ones((1, 3))), ValueError, r"but got weight with shape \(1, 3\)"),
    (lambda: mask_gradient(X, 2.0), TypeError, "weight has to be a real or boolean array, but got float"),
    (lambda: mask_gradient(X, jnp.ones(3) * 1j), TypeError, "weight has to be .* but got complex64"),
    (lambda: skip(X, 0.5), TypeError, r"function has to be callable"),
    (lambda: skip(jnp.dot, 1.5), ValueError, r"p has to be in \[0, 1\), but got 1.5"),
    (lambda: skip(jnp.dot, 0.5, scale="sum"), ValueError, "scale has to be one of 'count'"),
    (lambda: skip(jnp.dot, 0.5)(X, X), TypeError, "key has to be a JAX random key, but got None"),
    (lambda: skip(jnp.dot, 0.5)(X, key=KEY), ValueError, "one row per sample, but got none"),
    (lambda: skip(jnp.dot, 0.5)(X, X, X.T, key=KEY), ValueError, r"one row per sample, but got \(4, 3\), \(3, 4\)"),
    (
        lambda: skip(jnp.dot, 0.5)(X, X, 2.0, key=KEY),
        ValueError,
        r"but got \(4, 3\), float; put what all samples share",
    ),
    (lambda: skip(lambda w, x: {"a": x, "b": w}, 0.5)(X, X, key=KEY), ValueError, r"\['b'\] has shape \(4, 3\) for 2"),
    (lambda: skip(lambda w, x: x.sum(), 0.5)(X, X, key=KEY), ValueError, r"the output has shape \(\) for 2 samples"),
    (lambda: skip(lambda w, x: X[:2], 0.25)(X, X, key=KEY), ValueError, r"has shape \(2, 3\) for 3 samples"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
