"""Sample-skipping in JAX against the plain pair of function and mask, with functions of JAX, Flax and Equinox."""

import json
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from test_functional import SCALES

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from backdrop.integrations.jax import backdrop, draw_mask, skip  # noqa: E402

KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def _compiled_quickly_for_double_precision():
    settings = "jax_enable_x64", "jax_disable_most_optimizations"
    for setting in settings:
        jax.config.update(setting, True)
    yield
    for setting in settings:
        jax.config.update(setting, False)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def perceptron(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


def case(rows=12):
    return {"first": normal(0, 5, 8), "second": normal(1, 8, 3)}, normal(2, rows, 5), normal(4, rows, 3)


def whole_batch(outputs, target):
    """A loss that no sum over samples gives."""
    return jnp.log(((outputs - target) ** 2).sum()) + outputs.mean() ** 2


def assert_close(mine, expected):
    leaves, structure = jax.tree.flatten(expected)
    assert jax.tree.structure(mine) == structure
    for a, b in zip(jax.tree.leaves(mine), leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "p", "scale"),
    [
        *((12, 0.75, scale) for scale in SCALES),
        (12, 0.3, "count"),
        (7, 0.99, "count"),  # one row
        (1, 0.5, "probability"),
        (5, 0.01, "eq1"),  # all rows
        (3, 0.0, "count"),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_pair(rows, p, scale):
    params, x, target = case(rows)

    def loss(params, x, run):
        outputs = run(params, x)
        return whole_batch(outputs, target), outputs

    def plain(params, x):
        return backdrop(perceptron(params, x), KEY, p, exact=True, scale=scale)

    steps = [
        jax.jit(jax.value_and_grad(partial(loss, run=run), argnums=(0, 1), has_aux=True))(params, x)
        for run in (partial(skip(perceptron, p, scale=scale), key=KEY), plain)
    ]
    assert_close(*steps)
    assert jnp.any(steps[0][1][1] != 0, 1).sum() == max(1, round(rows * (1 - p)))  # rows with an input gradient


@jax.custom_vjp
def spy(x, seen):
    return x


def spy_forward(x, seen):
    seen["with gradients"].append(len(x))
    return x, seen


def spy_backward(seen, grad):
    seen["backward"].append(len(grad))
    return grad, None


class Seen(dict):
    """How many rows were run; JAX takes it for a part of the structure."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


jax.tree_util.register_static(Seen)
spy.defvjp(spy_forward, spy_backward)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("closed_over", [False, True])
def test_blocked_samples_have_no_backward_pass(jit, closed_over):
    params, x, target = case(20)
    seen = Seen({"rows": [], "with gradients": [], "backward": []})

    def watched(params, x):
        seen["rows"].append(len(x))
        return spy(perceptron(params, x), seen)

    def loss(params):
        if closed_over:
            outputs = skip(lambda _, x: watched(params, x), 0.9)(None, x, key=KEY)
        else:
            outputs = skip(watched, 0.9)(params, x, key=KEY)
        return whole_batch(outputs, target)

    def plain(params, x):
        return backdrop(perceptron(params, x), KEY, 0.9, exact=True)

    gradient = (jax.jit if jit else lambda f: f)(jax.grad(loss))(params)
    assert_close(gradient, jax.jit(jax.grad(lambda params: whole_batch(plain(params, x), target)))(params))
    assert sorted(seen["rows"]) == [2, 18]
    assert seen["backward"] == [2]
    if not closed_over:
        assert seen["with gradients"] == [2]


def test_pytrees_go_in_and_come_out_with_one_mask():
    params, x, target = case(10)
    mask = draw_mask(KEY, (10, 1), 0.6, exact=True)

    def function(params, inputs, scale):
        scores = perceptron(params, inputs["x"]) * scale[:, None]
        return {"scores": scores, "pair": (scores[:, 0].astype(jnp.float32), jnp.argmax(scores, 1)), "nothing": None}

    def loss(params, inputs, scale, run):
        outputs = run(params, inputs, scale)
        return whole_batch(outputs["scores"], target) + (outputs["pair"][0] ** 2).sum(), outputs

    def plain(params, inputs, scale):
        outputs = function(params, inputs, scale)
        first, best = outputs["pair"]
        masked = backdrop(outputs["scores"], KEY, 0.6, exact=True)
        return {**outputs, "scores": masked, "pair": (backdrop(first, KEY, 0.6, exact=True), best)}

    arguments = params, {"x": np.array(x)}, normal(7, 10)
    mine, expected = (
        jax.jit(jax.value_and_grad(partial(loss, run=run), argnums=(0, 2), has_aux=True))(*arguments)
        for run in (partial(skip(function, 0.6), key=KEY), plain)
    )
    assert_close(mine, expected)
    assert (mine[1][1] != 0).tolist() == mask[:, 0].tolist()
    assert mine[0][1]["pair"][0].dtype == jnp.float32


def test_one_compilation_serves_all_keys():
    params, x, target = case()
    traced, x = [], np.array(x)  # inputs that are not JAX's will do

    @jax.jit
    def step(params, key):
        traced.append(None)
        return jax.grad(lambda params: whole_batch(skip(perceptron, 0.75)(params, x, key=key), target))(params)

    gradients = [step(params, key) for key in jax.random.split(KEY, 5)]
    assert len(traced) == 1
    assert len({float(gradient["first"].sum()) for gradient in gradients}) > 1


def test_vmap_checkpoint_and_forward_mode_compose():
    params, _, target = case(8)
    batches, keys = normal(5, 3, 8, 5), jax.random.split(KEY, 3)

    def loss(params, x, key):
        return whole_batch(skip(perceptron, 0.5)(params, x, key=key), target)

    def plain(params, x, key):
        return whole_batch(backdrop(perceptron(params, x), key, 0.5, exact=True), target)

    by_itself = jax.jit(jax.grad(plain))
    one_by_one = [by_itself(params, x, key) for x, key in zip(batches, keys, strict=True)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    for transformed in (loss, jax.checkpoint(loss)):
        assert_close(jax.jit(jax.vmap(jax.grad(transformed), (None, 0, 0)))(params, batches, keys), expected)
    for derivative in (jax.jacfwd, jax.hessian):
        mine, right = (jax.jit(derivative(f))(params, batches[0], KEY) for f in (loss, plain))
        assert_close(mine, right)


def test_randomness_of_one_key_per_sample():
    params, x, _ = case(10)

    def dropout(params, x, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(keys)
        return perceptron(params, jnp.where(kept, x, 0))

    for keys in (jax.random.split(jax.random.key(1), 10), jax.random.split(jax.random.PRNGKey(1), 10)):
        skipped = jax.jit(partial(skip(dropout, 0.7), key=KEY))
        assert_close(skipped(params, x, keys), jax.jit(dropout)(params, x, keys))


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from backdrop.integrations.jax import backdrop, skip

def function(kernel, x):
    return jnp.tanh(x @ kernel)

key, kernel, x = jax.random.key(0), jnp.ones((5, 3)), jax.random.normal(jax.random.key(1), (16, 5))
sharded = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), "rows"), PartitionSpec("rows")))
assert len(sharded.sharding.device_set) == 2
for run in (
    lambda kernel, x: skip(function, 0.75)(kernel, x, key=key),
    lambda kernel, x: backdrop(function(kernel, x), key, 0.75),
):
    gradient = jax.jit(jax.grad(lambda kernel, x: jnp.log((run(kernel, x) ** 2).sum()), argnums=(0, 1)))
    for one, two in zip(gradient(kernel, x), gradient(kernel, sharded), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
print("equal")
"""


def test_a_batch_over_two_devices_has_the_gradients_of_one():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_TWO_DEVICES]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "equal\n"


def test_an_empty_batch_is_left_to_the_function():
    params, x, _ = case(4)
    assert skip(perceptron, 0.5)(params, x[:0], key=KEY).shape == (0, 3)


def network(linen):
    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.tanh(linen.Conv(4, (3, 3), strides=2)(x))
            x = linen.LayerNorm()(x)
            return linen.Dense(1)(x.reshape(len(x), -1))

    return Network()


def test_flax_modules():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    model, x, y = network(linen), normal(0, 8, 6, 6, 2), normal(1, 8, 1)
    params = model.init(jax.random.key(0), x)

    def plain(params, x):
        return backdrop(model.apply(params, x), KEY, 0.75, exact=True)

    runs = partial(skip(model.apply, 0.75), key=KEY), plain
    steps = [jax.jit(jax.grad(lambda params, run=run: whole_batch(run(params, x), y)))(params) for run in runs]
    assert_close(*steps)


def test_flax_batch_statistics_are_refused():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    model, x = linen.BatchNorm(use_running_average=False), normal(0, 8, 3)
    variables = model.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"the output\[1\]\['batch_stats'\]\['mean'\] has shape \(3,\) for 2 samples"):
        skip(lambda v, x: model.apply(v, x, mutable=["batch_stats"]), 0.75)(variables, x, key=KEY)


def test_flax_nnx_modules():
    nnx = pytest.importorskip("flax.nnx", reason="flax.nnx is not installed")
    structure, state = nnx.split(nnx.Linear(5, 1, rngs=nnx.Rngs(0)))
    x, y = normal(0, 8, 5), normal(1, 8, 1)

    def apply(state, x):
        return nnx.merge(structure, state)(x)

    def plain(state, x):
        return backdrop(apply(state, x), KEY, 0.75, exact=True)

    runs = partial(skip(apply, 0.75), key=KEY), plain
    assert_close(*(jax.jit(jax.grad(lambda state, run=run: whole_batch(run(state, x), y)))(state) for run in runs))


def test_equinox_modules_whole_and_in_parts():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(5, 1, 8, 2, key=jax.random.key(0))  # its activation is a leaf that is not an array
    x, y = normal(0, 8, 5), normal(1, 8, 1)

    def apply(model, x):
        return jax.vmap(model)(x)

    def plain(model, x):
        return backdrop(apply(model, x), KEY, 0.75, exact=True)

    def loss(model, run):
        return whole_batch(run(model, x), y)

    expected = eqx.filter_jit(eqx.filter_grad(loss))(model, plain)
    skipped = partial(skip(apply, 0.75), key=KEY)
    assert_close(eqx.filter_jit(eqx.filter_grad(loss))(model, skipped), expected)

    params, static = eqx.partition(model, eqx.is_inexact_array)
    in_parts = partial(skip(lambda params, x: apply(eqx.combine(params, static), x), 0.75), key=KEY)
    assert_close(jax.jit(jax.grad(partial(loss, run=in_parts)))(params), expected)


def test_the_page_shows_the_measured_figures():
    pytest.importorskip("rich", reason="rich is not installed")
    root = Path(__file__).parents[2]
    bench, page = runpy.run_path(str(root / "benchmarks" / "bench_jax.py")), (root / "docs" / "jax.md").read_text()
    for row in json.loads((root / "benchmarks" / "results" / "jax-cpu.json").read_text())["rows"]:
        assert f"| {' | '.join(bench['cells'](row))} |" in page
