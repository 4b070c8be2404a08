"""Samples dropped: run the kept ones with gradients and the others without, and put the rows back in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backdrop._core import draw as masks
from backdrop._core.checks import Scale, check_scale
from backdrop.integrations.jax.draw import Probability, as_probability, count_kept, draw_mask, is_zero
from backdrop.integrations.jax.functional import masked, weight_dtype


def skip(function: Callable[..., Any], p: Probability, *, scale: Scale = "count") -> Callable[..., Any]:
    """A function like `function(params, *inputs)` that is differentiated through its kept samples only.

    `skip(function, p)(params, x, key=key)` has the value and the gradients of
    `backdrop(function(params, x), key, p, exact=True)`. But the samples that this mask blocks run without gradients: no
    backward pass is computed for them, and none of their activations is kept. A training step then costs
    1 + 2(1-p) forward passes instead of 3. In return `function` is traced and compiled twice, once for each kind.

    Masks are exact, because JAX compiles for fixed shapes: with a random number of kept samples every step would have
    shapes of its own. So p is a number, and each number of kept samples is compiled for itself.

    Args:
        function: its outputs depend on one sample each; that is not checked. Layers with batch statistics in training
            are the usual exception. What is differentiated goes into `params`, any pytree, modules included; every
            array of `inputs` has one row per sample; outputs are a pytree of arrays with one row per sample, and all
            get the same mask. Everything else, such as flags, is to be closed over; randomness goes in as one key per
            sample.
        p: probability that a sample's gradient is dropped, 0 <= p < 1; exactly `max(1, round(N * (1 - p)))` of N are
            kept.
        scale: what kept gradients are multiplied by, as for `backdrop`.

    Returns:
        A function of `params`, `*inputs`, `key` and `training=True`. With `training=False` and with `p=0` it is
        `function` itself, and needs no key.

    Examples:
        >>> def scores(params, x):
        ...     return jnp.tanh(x @ params["first"]) @ params["second"]
        >>> params = {"first": jnp.ones((64, 256)), "second": jnp.ones(256)}
        >>> x, key = jnp.ones((1000, 64)), jax.random.key(0)
        >>> skip(scores, p=0.9)(params, x, key=key).shape  # the gradient comes from 100 of 1000 rows
        (1000,)
    """
    if not callable(function):
        raise TypeError(f"function has to be callable as function(params, *inputs), but got {type(function).__name__}")
    p = as_probability(p)
    check_scale(scale)

    def skipped(params: Any, *inputs: Any, key: jax.Array | None = None, training: bool = True) -> Any:
        rows = _count_rows(inputs)
        if not training or is_zero(p) or rows == 0:
            return function(params, *inputs)
        count = count_kept(rows, p)
        mask = draw_mask(key, (rows,), p, exact=True)
        numerator, per_count = masks.weight_terms(scale, rows, p)  # type: ignore[arg-type]
        weight = numerator / count if per_count else numerator
        kept, rest = (jnp.flatnonzero(m, size=size) for m, size in ((mask, count), (~mask, rows - count)))
        outputs = _check_rows(function(params, *_take(inputs, kept)), count)
        if count == rows:
            return jax.tree.map(lambda leaf: _mask(leaf, weight), outputs)
        # Constants go in, so that nothing is computed or kept for a backward pass; and constants come out, for the
        # sake of what the function closes over.
        constants = jax.tree.map(_constant, (params, *_take(inputs, rest)))
        others = jax.tree.map(_constant, _check_rows(function(*constants), rows - count))
        return jax.tree.map(lambda a, b: _put(_put(_zeros(a, rows), rest, b), kept, _mask(a, weight)), outputs, others)

    return skipped


def _count_rows(inputs: Any) -> int:
    leaves = jax.tree.leaves(inputs)
    shapes = [jnp.shape(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else () for leaf in leaves]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        found = [shape or type(leaf).__name__ for shape, leaf in zip(shapes, leaves, strict=True)]
        raise ValueError(
            f"inputs have to be arrays with one row per sample, but got {', '.join(map(str, found)) or 'none'}; "
            "put what all samples share into params, or let function close over it"
        )
    return int(shapes[0][0])


def _check_rows(outputs: Any, rows: int) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != rows:
            raise ValueError(
                "skip puts the rows of outputs back in order, but the output"
                f"{jax.tree_util.keystr(path)} has shape {shape} for {rows} samples; "
                "let function return one row per sample"
            )
    return outputs


def _constant(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf  # leaves of modules may be anything


def _mask(leaf: jax.Array, weight: float) -> jax.Array:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return masked(leaf, jnp.asarray(weight, weight_dtype(leaf))) if inexact else leaf


# Every row is named once, in order and within bounds.
_ROWS: Any = {"indices_are_sorted": True, "unique_indices": True, "mode": "promise_in_bounds"}


def _take(inputs: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[rows].get(**_ROWS), inputs)


def _put(whole: jax.Array, rows: jax.Array, leaf: jax.Array) -> jax.Array:
    return whole.at[rows].set(leaf, **_ROWS)


def _zeros(leaf: jax.Array, rows: int) -> jax.Array:
    return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)
