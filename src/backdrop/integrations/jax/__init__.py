"""Backdrop for JAX: the same masks on gradients as functions with an explicit key, and skipping of whole samples.

Units, groups, `patch`, `exact` and `scale` mean what they mean in `backdrop.functional`. Everything composes with
`jit`, `grad`, `vmap`, forward mode and `jax.checkpoint`. Needs jax 0.4.30 or newer.

>>> import jax
>>> import jax.numpy as jnp
>>> from backdrop.integrations.jax import backdrop
>>> key = jax.random.key(0)
>>> x = jnp.ones((4, 3))
>>> gradient = jax.grad(lambda x: backdrop(x, key, p=0.5, exact=True).sum())(x)
>>> sorted(gradient[:, 0].tolist())  # two of four samples kept, each counted twice
[0.0, 0.0, 2.0, 2.0]
"""

from backdrop.integrations.jax.draw import draw_mask, draw_weight
from backdrop.integrations.jax.functional import backdrop, mask_gradient
from backdrop.integrations.jax.informed import choose_weight
from backdrop.integrations.jax.samples import skip

__all__ = ["backdrop", "choose_weight", "draw_mask", "draw_weight", "mask_gradient", "skip"]
