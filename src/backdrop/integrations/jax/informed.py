"""Units chosen by the gradient that arrives at them, as `backdrop._core.informed` has it for torch.

JAX has single precision unless it is told otherwise. So positions on the line of a systematic choice are multiples of
2^-32, which add up without error, modulo one; and weights are one over the probabilities that these stand for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from backdrop._core import draw as masks
from backdrop._core.checks import Dims, Patch, Scale, check_choose, check_scale
from backdrop.integrations.jax.draw import Probability, as_probability, check_key, count_kept, is_zero, spread

ONE = 2.0**32
ROUNDING = 2.0**-20  # a unit that is as close to being sure is


def choose_weight(
    grad: jax.Array,
    key: jax.Array | None,
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    floor: float = 0.1,
) -> jax.Array:
    """Draw what a gradient is multiplied by if its units are chosen by their size.

    As `backdrop.functional.choose_weight`, which says how, with a key; `backdrop` with choose="gradient" does it in the
    backward pass.

    Examples:
        >>> choose_weight(jnp.array([0.0, 0.0, 8.0, 0.0]), jax.random.key(0), 0.75, exact=True, floor=0.0).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    p = as_probability(p)
    check_scale(scale)
    check_choose("gradient", floor)
    grad = jnp.asarray(grad)
    lattice = masks.make_lattice(grad.shape, dims, patch)
    if exact:
        count_kept(lattice.size, p)  # which has to be known
    wide = jnp.float64 if grad.dtype in (jnp.float64, jnp.complex128) else jnp.float32
    if lattice.groups * lattice.size == 0 or is_zero(p):
        return spread(jnp.ones((lattice.groups, lattice.size), wide), lattice, grad.shape)
    check_key(key)
    norms = _unit_norms(jax.lax.stop_gradient(grad), lattice, wide)
    number: Any = count_kept(lattice.size, p) if exact else lattice.size * (1 - p)
    pi = _inclusion(norms, number, floor)
    kept, pi = _systematic(pi, norms > 0, key) if exact else _independent(pi, key)
    weight = jnp.where(kept, 1 / jnp.where(kept, pi, 1), 0) if scale is not None else kept.astype(wide)
    weight = weight * (1 - p) if scale == "eq1" else weight
    return jax.lax.stop_gradient(spread(weight.astype(wide), lattice, grad.shape))


def _unit_norms(grad: jax.Array, lattice: masks.Lattice, wide: Any) -> jax.Array:
    """|g_u| up to a common factor, (groups, units), with its sign where it is one number, of a sample of its own."""
    if 0 in lattice.axes and grad.shape == lattice.shape and not jnp.iscomplexobj(grad):
        return grad.astype(wide).reshape(lattice.groups, lattice.size)
    sizes = jnp.abs(grad).astype(wide)
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0))
    squares = jnp.square(sizes / jnp.where(largest > 0, largest, 1))  # so that they stay in range
    others = tuple(axis for axis in range(grad.ndim) if axis not in lattice.axes)
    squares = squares.sum(others, keepdims=True)
    for axis, patch in zip(lattice.axes, lattice.patch, strict=True):
        if patch > 1:
            missing = -squares.shape[axis] % patch
            squares = jnp.pad(squares, [(0, missing if i == axis else 0) for i in range(grad.ndim)])
            shape = [*squares.shape[:axis], squares.shape[axis] // patch, patch, *squares.shape[axis + 1 :]]
            squares = squares.reshape(shape).sum(axis + 1)
    return jnp.sqrt(squares).reshape(lattice.groups, lattice.size)


def _inclusion(norms: jax.Array, number: Any, floor: float) -> jax.Array:
    """pi for each unit, which add up to `number` in each group."""
    size, norms = norms.shape[1], jnp.abs(norms)
    base = floor * number / size
    if floor == 1:
        return jnp.full_like(norms, base)
    pi = _proportional(norms, number * (1 - floor) / (1 - base))
    return pi + base * (1 - pi) if floor else pi


def _proportional(norms: jax.Array, number: Any) -> jax.Array:
    """min(1, norms / tau), with the tau for which they add up to the number."""
    size = norms.shape[1]
    finite = jnp.isfinite(norms)
    norms = jnp.where(finite.all(1, keepdims=True), norms, (~finite).astype(norms.dtype))
    largest = norms.max(1, keepdims=True)
    norms = norms / jnp.where(largest > 0, largest, 1)  # so that sums stay in range
    order = jnp.argsort(-norms, axis=1)
    ordered = jnp.take_along_axis(norms, order, 1)
    tail = jnp.cumsum(ordered[:, ::-1], 1)[:, ::-1]
    rank = jnp.arange(size)
    sure = (ordered * (number - rank) > tail) & (rank < number)
    count = sure.sum(1, keepdims=True)
    rest = jnp.where(sure, 0, ordered).sum(1, keepdims=True)
    left = number - count
    share = jnp.where(rest > 0, ordered * left / jnp.where(rest > 0, rest, 1), left / jnp.maximum(size - count, 1))
    pi = jnp.where(sure, 1, jnp.clip(share, 0, 1)).astype(norms.dtype)
    return jnp.take_along_axis(pi, jnp.argsort(order, axis=1), 1)


def _systematic(pi: jax.Array, positive: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Just as many units as the pi add up to, positive ones behind the others, and their probabilities."""
    first, second = jax.random.split(key)
    sure = pi >= 1 - ROUNDING
    parts = jnp.where(sure, 0, pi * ONE).astype(jnp.uint32)
    missing = -parts.sum(1, keepdims=True, dtype=jnp.uint32).astype(jnp.int32)  # of a whole number, by rounding
    # What is missing goes to the unit that is furthest from one, and what is too much is taken from the largest.
    least = jnp.where(sure | (parts == 0), 2, pi).argmin(1)[:, None]
    at = jnp.where(missing > 0, least, jnp.where(sure, -1, pi).argmax(1)[:, None])
    parts = jnp.where(jnp.arange(pi.shape[1]) == at, parts + missing.astype(jnp.uint32), parts)
    order = jnp.argsort(jax.random.uniform(first, pi.shape) + positive, axis=1)
    offset = jax.random.bits(second, (pi.shape[0], 1), jnp.uint32)
    laid = jnp.take_along_axis(parts, order, 1)
    ends = offset + jnp.cumsum(laid, 1, dtype=jnp.uint32)  # modulo one
    kept = ends < ends - laid  # where it began anew
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=1), 1)
    return kept | sure, jnp.where(sure, 1, parts.astype(pi.dtype) / ONE)


def _independent(pi: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Each unit by itself, and one chosen by pi where none came out: which, and their inclusion probabilities."""
    first, second = jax.random.split(key)
    kept = jax.random.uniform(first, pi.shape, pi.dtype) < pi
    shares = pi / pi.sum(1, keepdims=True)
    instead = jax.random.categorical(second, jnp.log(shares), axis=1)[:, None]
    kept = kept | (~kept.any(1, keepdims=True) & (jnp.arange(pi.shape[1]) == instead))
    none = jnp.exp(jnp.log1p(-jnp.minimum(pi, 1)).sum(1, keepdims=True))
    return kept, pi + none * shares


@jax.custom_vjp
def _once(grad: jax.Array) -> jax.Array:
    return grad


def _refuse(grad: jax.Array) -> Any:
    raise TypeError(
        "choose='gradient' has first derivatives only, because a second pass would choose other units; use "
        "choose='uniform', or weights of choose_weight with mask_gradient"
    )


_once.defvjp(_refuse, _refuse)


def chosen(x: jax.Array, key: Any, p: Probability, how: dict[str, Any]) -> jax.Array:
    """`x`, and in the backward pass its gradient times the weight that it chooses."""

    @jax.custom_vjp
    def identity(x: jax.Array, key: Any, p: Probability) -> jax.Array:
        return x

    def forward(x: jax.Array, key: Any, p: Probability) -> tuple[jax.Array, Any]:
        return x, (key, p)

    def backward(known: Any, grad: jax.Array) -> tuple[Any, None, None]:
        weight = choose_weight(grad, *known, **how)
        return _once((grad * weight).astype(grad.dtype)), None, None

    identity.defvjp(forward, backward)
    found: jax.Array = identity(x, key, p)
    return found
