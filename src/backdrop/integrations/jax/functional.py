"""Eqs. 1 and 2 of the paper as JAX functions: the identity going forward, a mask on the gradient going backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backdrop._core.checks import Choose, Dims, Patch, Scale, check_choose, check_scale, check_weight_shape
from backdrop._core.draw import make_lattice
from backdrop.integrations.jax.draw import Probability, as_probability, check_key, count_kept, draw_weight, is_zero
from backdrop.integrations.jax.informed import chosen


def backdrop(
    x: jax.Array,
    key: jax.Array | None,
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    choose: Choose = "uniform",
    floor: float = 0.1,
    training: bool = True,
) -> jax.Array:
    """Return `x` unchanged; in the backward pass drop each unit's gradient with probability `p` (Eq. 1).

    With `training=False` and with `p=0` it is `x` itself and the key is not used: None will do.

    Args:
        x: floating-point or complex array of any shape; axis 0 is the batch.
        key: source of randomness, from `jax.random.key`; the same key gives the same mask.
        p: probability that a unit's gradient is dropped, 0 <= p < 1. A traced value is not checked, and cannot be had
            with `exact=True`, where it says how many units are kept.
        dims: axes along which units are drawn independently; all other axes share the draw.
        patch: positions per unit along the masked axes other than 0: one number, or one per such axis in the order of
            `dims`. A last patch that does not fit is smaller.
        exact: keep exactly `max(1, round(N * (1 - p)))` of a group's N units instead of a random number.
        scale: what kept gradients are multiplied by: "count" N/|b| (Eq. 2, unbiased), "eq1" (1-p) N/|b|
            (Eq. 1 as printed), "probability" 1/(1-p), or None for 1.
        choose: "uniform" draws units blindly; "gradient" in the backward pass, by the size of the gradient that arrives
            at them, weighted so that it is as unbiased (`choose_weight`). It has first derivatives in reverse mode.
        floor: the share of that choice which stays uniform.
        training: False makes this the identity; it has to be known when the function is traced.
    """
    p = as_probability(p)
    check_scale(scale)
    check_choose(choose, floor)
    x = _as_differentiable(x)
    lattice = make_lattice(x.shape, dims, patch)
    if not training or is_zero(p):
        return x
    if choose == "gradient":
        if exact:
            count_kept(lattice.size, p)
        check_key(key)
        how = {"dims": dims, "patch": patch, "exact": exact, "scale": scale, "floor": floor}
        return chosen(x, key, p, how)
    weight = draw_weight(key, x.shape, p, dims, patch=patch, exact=exact, scale=scale, dtype=weight_dtype(x))
    return masked(x, weight)


def mask_gradient(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `x` unchanged; in the backward pass multiply its gradient by `weight`.

    `weight` broadcasts against `x` and is a constant: its own gradient is zero. A float32 weight is not rounded to half
    precision for a half-precision gradient, only their product is. The Jacobian is diag(weight) in forward mode too, so
    the second derivative of f(mask_gradient(x, w)) is w_i w_j f_ij.

    Examples:
        >>> jax.grad(lambda x: mask_gradient(x, jnp.array([[2.0], [0.0]])).sum())(jnp.ones((2, 2))).tolist()
        [[2.0, 2.0], [0.0, 0.0]]
    """
    x = _as_differentiable(x)
    if not isinstance(weight, (jax.Array, np.ndarray)) or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        kind = weight.dtype if isinstance(weight, (jax.Array, np.ndarray)) else type(weight).__name__
        raise TypeError(f"weight has to be a real or boolean array, but got {kind}")
    check_weight_shape(weight.shape, x.shape)
    return masked(x, jnp.asarray(weight))


@jax.custom_jvp
def masked(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`mask_gradient` without its checks."""
    return x


@masked.defjvp
def _masked_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
    # A rule for tangents and not custom_vjp, which has no forward mode. It is linear in the tangent, so JAX transposes
    # it into the backward pass: the gradient times the weight. The value passes the mask again, for second derivatives.
    x, weight = primals
    tangent = tangents[0]
    return masked(x, weight), (tangent * jax.lax.stop_gradient(weight)).astype(tangent.dtype)


def weight_dtype(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype in (jnp.float64, jnp.complex128) else jnp.float32


def _as_differentiable(x: jax.Array) -> jax.Array:
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"x has to be an array, but got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"x has to be a floating-point or complex array, but got {x.dtype}, which cannot carry gradients; "
            "put backdrop after the layer that turns it into features"
        )
    return jnp.asarray(x)
