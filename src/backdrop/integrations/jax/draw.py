"""Masks and weights from a key: which units are kept, and what their gradients are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from backdrop._core import draw as masks
from backdrop._core.checks import Dims, Patch, Scale, check_p, check_scale, check_shape

Probability: TypeAlias = float | jax.Array


def draw_mask(
    key: jax.Array | None,
    shape: Sequence[int],
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
) -> jax.Array:
    """Draw a mask for an array of this shape: boolean, True = kept, no group without a kept unit.

    The result has the rank of `shape`, with size 1 on the axes that share the draw, so it broadcasts against the array.

    Args:
        key: source of randomness, from `jax.random.key`; the same key gives the same mask. Not used with p = 0.
        shape: of the array; axis 0 is the batch.
        p: probability that a unit's gradient is dropped, 0 <= p < 1. A traced value is not checked, and cannot be had
            with `exact=True`, where it says how many units are kept.
        dims: axes along which units are drawn independently; all other axes share the draw.
        patch: positions per unit along the masked axes other than 0: one number, or one per such axis in the order of
            `dims`. A last patch that does not fit is smaller.
        exact: keep exactly `max(1, round(N * (1 - p)))` of a group's N units instead of a random number.

    Examples:
        >>> draw_mask(jax.random.key(0), (2, 4, 6, 3), p=0.5, dims=(0, 1, 2), patch=(2, 3)).shape
        (2, 4, 6, 1)
    """
    return draw_weight(key, shape, p, dims, patch=patch, exact=exact, scale=None) != 0


def draw_weight(
    key: jax.Array | None,
    shape: Sequence[int],
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Draw what gradients are multiplied by: `draw_mask` of the same key times its scale, as `backdrop` does it."""
    p = as_probability(p)
    check_scale(scale)
    lattice = masks.make_lattice(check_shape(shape), dims, patch)
    kept = _draw_units(key, lattice, p, exact)
    numerator, per_count = masks.weight_terms(scale, lattice.size, p)  # type: ignore[arg-type]
    count = kept.sum(1, keepdims=True) if per_count else 1
    return spread((kept.astype(dtype) * numerator / count).astype(dtype), lattice, shape)


def spread(units: jax.Array, lattice: masks.Lattice, shape: Sequence[int]) -> jax.Array:
    """From (groups, units) to one value per position, size 1 on the axes that share the draw."""
    weight: jax.Array = units.reshape(lattice.shape)
    for axis, size in zip(lattice.axes, lattice.patch, strict=True):
        if size > 1:
            weight = jax.lax.slice_in_dim(jnp.repeat(weight, size, axis), 0, shape[axis], axis=axis)
    return weight


def _draw_units(key: jax.Array | None, lattice: masks.Lattice, p: Probability, exact: bool) -> jax.Array:
    """Which units are kept, (groups, units)."""
    groups, size = lattice.groups, lattice.size
    count = count_kept(size, p) if exact else None
    if size == 0 or is_zero(p):
        return jnp.ones((groups, size), bool)
    u = jax.random.uniform(check_key(key), (groups, size), jnp.float32)
    if count is not None:
        largest = jax.lax.top_k(u, count)[1]
        return jnp.zeros((groups, size), bool).at[jnp.arange(groups)[:, None], largest].set(True)
    # Never empty: where any unit passes the threshold the largest does too; where none does, it is a uniform choice.
    kept: jax.Array = (u >= p) | (jnp.arange(size) == u.argmax(1, keepdims=True))
    return kept


def check_key(key: jax.Array | None) -> jax.Array:
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"key has to be a JAX random key, but got {key!r}; make one with jax.random.key(0)")
    return key


def count_kept(size: int, p: Probability) -> int:
    """How many units an exact mask keeps."""
    if isinstance(p, jax.Array):
        raise TypeError(
            "p has to be a number for an exact mask, because it says how many units are kept, but got a traced value; "
            "make it static (jax.jit(..., static_argnames='p')), or use backdrop with exact=False"
        )
    return max(1, round(size * (1 - p)))


def as_probability(p: Probability) -> Probability:
    """A checked number, or an array that has no value yet."""
    if isinstance(p, (jax.Array, np.ndarray)):
        if p.ndim or not jnp.issubdtype(p.dtype, jnp.floating):
            raise TypeError(
                f"p has to be a number or a 0-d floating-point array, but got shape {p.shape}, dtype {p.dtype}"
            )
        if isinstance(p, jax.core.Tracer):
            return p
        p = float(p)
    return float(check_p(p))


def is_zero(p: Probability) -> bool:
    """Whether p is known to be 0."""
    return not isinstance(p, jax.Array) and p == 0
