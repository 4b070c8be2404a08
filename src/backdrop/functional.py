"""Eqs. 1 and 2 of the paper as functions: draw a mask, apply it to a gradient, or both at once.

A backdrop layer M is the identity going forward and a random mask going backward (paper, section 2.1):

    M(v_n) = v_n,    dM(v_m)/dv_n = delta_nm * b_n * N / |b|,    b_n ~ Bernoulli(1 - p)

where N is the number of units and |b| the number of units kept. What a unit is, is said by `dims` (the axes
along which units are drawn independently; all others share the draw) and `patch` (how many neighbouring
positions make one unit). With axis 0 and others in `dims` every sample is its own group, otherwise there is
one group; N, |b| and "at least one unit is kept" are counted per group.

>>> import torch
>>> from backdrop.functional import backdrop
>>> x = torch.ones(4, 3, requires_grad=True)
>>> generator = torch.Generator().manual_seed(2)
>>> y = backdrop(x, p=0.5, generator=generator)  # the same values, in the same memory
>>> y.sum().backward()
>>> x.grad[:, 0]  # two of four samples kept, each counted twice
tensor([2., 0., 2., 0.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backdrop._core import informed
from backdrop._core.checks import (
    Choose,
    Dims,
    Patch,
    Probability,
    Scale,
    check_choose,
    check_differentiable,
    check_generator,
    check_no_transforms,
    check_not_batched,
    check_p,
    check_scale,
    check_shape,
    check_weight,
)
from backdrop._core.draw import Lattice, draw_units, is_zero, make_lattice, spread
from backdrop._core.product import multiply, names_backdrop, wants_gradient

__all__ = ["backdrop", "choose_weight", "draw_mask", "draw_weight", "effective_batch_size", "mask_gradient"]


def backdrop(
    x: Tensor,
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    choose: Choose = "uniform",
    floor: float = 0.1,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x` unchanged; in the backward pass drop each unit's gradient with probability `p` (Eq. 1).

    The result shares its memory with `x`: torch refuses to modify it in place. It is `x` itself, and no random
    number is consumed, with `training=False`, with `p=0`, and where no gradient is wanted.

    Args:
        x: floating-point or complex tensor of any shape; axis 0 is the batch.
        p: probability that a unit's gradient is dropped, 0 <= p < 1. A 0-d tensor may live on the CPU or beside
            `x`; on a GPU its value is not checked here, because reading it would stall the GPU.
        dims: axes along which units are drawn independently; all other axes share the draw.
        patch: positions per unit along the masked axes other than 0: one number, or one per such axis in the
            order of `dims`. A last patch that does not fit is smaller, and so is one that is longer than its axis.
        exact: keep exactly `max(1, round(N * (1 - p)))` of a group's N units instead of a random number.
        scale: what kept gradients are multiplied by: "count" N/|b| (Eq. 2, unbiased), "eq1" (1-p) N/|b|
            (Eq. 1 as printed), "probability" 1/(1-p), or None for 1.
        choose: "uniform" draws units blindly, in the forward pass. "gradient" draws them in the backward pass, in
            proportion to the size of the gradient that arrives at them, and weighs each by one over the probability
            that it is kept: as unbiased, with less variance where gradients differ (`choose_weight`).
        floor: the share of that choice which stays uniform.
        training: False makes this the identity.
        generator: source of randomness, on the device of `x`; the device's default generator otherwise.
    """
    p = check_p(p)
    check_scale(scale)
    check_choose(choose, floor)
    check_differentiable(x)
    lattice = make_lattice(x.shape, dims, patch)
    if not training or is_zero(p) or not wants_gradient(x):
        return x
    if choose == "gradient":
        return _apply_informed(x, p, lattice, exact, scale, floor, generator)
    dtype = torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
    weight = draw_units(lattice, p, exact, scale, generator, x.device, dtype)
    return _apply(x, spread(weight, lattice, x.shape))


def draw_mask(
    shape: Sequence[int],
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw a mask for a tensor of this shape: boolean, True = kept, no group without a kept unit.

    The result has the rank of `shape`, with size 1 on the axes that share the draw, so it broadcasts against
    the tensor. Arguments as for `backdrop`; the device defaults to the generator's, then to torch's default.

    Examples:
        >>> mask = draw_mask((2, 3, 4, 6), p=0.5, dims=(0, 2, 3), patch=(2, 3))
        >>> mask.shape
        torch.Size([2, 1, 4, 6])
    """
    p = check_p(p)
    lattice = make_lattice(check_shape(shape), dims, patch)
    units = draw_units(lattice, p, exact, None, generator, _device(device, generator))
    return spread(units.bool(), lattice, shape)


def draw_weight(
    shape: Sequence[int],
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw what gradients are multiplied by: `draw_mask` times its scale, as `backdrop` does it.

    The same seed gives the same mask as `draw_mask`.
    """
    p = check_p(p)
    check_scale(scale)
    lattice = make_lattice(check_shape(shape), dims, patch)
    weight = draw_units(lattice, p, exact, scale, generator, _device(device, generator), dtype)
    return spread(weight, lattice, shape)


def choose_weight(
    grad: Tensor,
    p: Probability,
    dims: Dims = 0,
    *,
    patch: Patch = 1,
    exact: bool = False,
    scale: Scale = "count",
    floor: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw what a gradient is multiplied by if its units are chosen by their size: `backdrop` with choose="gradient".

    A unit with gradient g_u is kept with probability pi_u = b + (1 - b) min(1, |g_u| / tau), b = floor k / N, and
    weighs 1 / pi_u; tau is such that the pi_u of a group of N units add up to k = N (1 - p). With `exact` just k units
    are kept, rounded to a whole number, of both signs their share where each has one number alone; otherwise each unit
    by itself, but at least one. Where all gradients are alike, or zero, units are chosen uniformly; infinite and NaN
    ones are kept first. With floor=0 a unit without a gradient is never kept. With scale "eq1" weights are multiplied
    by 1 - p, with None they are 1, which is biased.

    Examples:
        >>> grad = torch.tensor([0.0, 0.0, 8.0, 0.0])
        >>> choose_weight(grad, 0.75, exact=True, floor=0.0)
        tensor([0., 0., 1., 0.])
    """
    p = check_p(p)
    check_scale(scale)
    check_choose("gradient", floor)
    check_differentiable(grad)
    lattice = make_lattice(grad.shape, dims, patch)
    return _choose(grad, lattice, p, exact, scale, floor, generator)


def _choose(
    grad: Tensor,
    lattice: Lattice,
    p: Probability,
    exact: bool,
    scale: Scale,
    floor: float,
    generator: torch.Generator | None,
) -> Tensor:
    with torch.no_grad():
        weight = informed.weigh(grad, lattice, p, exact, scale, floor, generator)
    dtype = torch.float64 if grad.dtype in (torch.float64, torch.complex128) else torch.float32
    return spread(weight.to(dtype), lattice, grad.shape)


def choose_and_count(
    grads: Sequence[Tensor],
    p: Probability,
    dims: Dims,
    patch: Patch,
    exact: bool,
    scale: Scale,
    floor: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, float]:
    """One choice for several tensors, as a weight for the first; and how many equal gradients theirs are worth."""
    for grad in grads:
        check_not_batched(grad)
    with torch.no_grad():
        lattices = [make_lattice(grad.shape, dims, patch) for grad in grads]
        norms = informed.unit_norms(*zip(grads, lattices, strict=True))
        weight = informed.weigh_norms(norms, p, exact, scale, floor, generator)
        effective = informed.effective_number(norms)
    dtype = torch.float64 if grads[0].dtype in (torch.float64, torch.complex128) else torch.float32
    return spread(weight.to(dtype), lattices[0], grads[0].shape), effective


def mask_gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` unchanged, in the same memory; in the backward pass multiply its gradient by `weight`.

    `weight` broadcasts against `x` and is a constant. A float32 weight is not rounded to half precision for a
    half-precision gradient, only their product is. Formally the Jacobian is diag(weight), so the second
    derivative of f(mask_gradient(x, w)) is w_i w_j f_ij.

    Examples:
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> mask_gradient(x, torch.tensor([[2.0], [0.0]])).sum().backward()
        >>> x.grad
        tensor([[2., 2.],
                [0., 0.]])
    """
    check_differentiable(x)
    check_weight(x, weight)
    if not wants_gradient(x):
        return x
    return _apply(x, weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape))


def effective_batch_size(batch: float, p: float) -> float:
    """Of a mask on samples: `batch * (1 - p)` of them carry gradient, on average (paper, section 2.1).

    Minibatches of so many samples would be as noisy. For masks on positions `gradient_noise` measures which would be.

    Examples:
        >>> effective_batch_size(2048, 0.75)
        512.0
    """
    return batch * (1 - float(check_p(p)))


def _apply(x: Tensor, weight: Tensor) -> Tensor:
    transforms = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    function = _TransformableMaskGradient if transforms else _MaskGradient
    masked: Tensor = function.apply(x, weight)  # type: ignore[no-untyped-call]
    return masked


@names_backdrop
class _MaskGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # Not save_for_backward: activation checkpointing would drop the mask there and keep the one that is
        # drawn when the forward pass is run again.
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return multiply(grad, ctx.weight), None


@names_backdrop
class _TransformableMaskGradient(torch.autograd.Function):
    """The same under torch.func's transforms (grad, vmap, jvp), whose form of Function costs more per call."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.weight = inputs[1]

    backward = _MaskGradient.backward

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: None) -> Tensor:
        return multiply(x_tangent, ctx.weight)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        x_dim, weight_dim = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        weight = weight.unsqueeze(0) if weight_dim is None else weight.movedim(weight_dim, 0)
        return _apply(x, weight), 0


def _apply_informed(
    x: Tensor,
    p: Probability,
    lattice: Lattice,
    exact: bool,
    scale: Scale,
    floor: float,
    generator: torch.Generator | None,
) -> Tensor:
    check_no_transforms()
    if torch.compiler.is_compiling() and not isinstance(p, Tensor):
        # Otherwise the count that p decides is a constant of the code, which is compiled anew at every step of p.
        p = p * torch.ones((), dtype=torch.float32 if x.device.type == "mps" else torch.float64, device=x.device)
    masked: Tensor = _InformedMask.apply(x, p, lattice, exact, scale, floor, generator)  # type: ignore[no-untyped-call]
    return masked


@names_backdrop
class _InformedMask(torch.autograd.Function):
    """Chooses in the first backward pass; later ones through the same call have its mask, and are as unbiased."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Probability,
        lattice: Lattice,
        exact: bool,
        scale: Scale,
        floor: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        ctx.how = (lattice, p, exact, scale, floor, generator)
        ctx.weight = None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():
            weight = _choose(grad, *ctx.how)
        else:
            if ctx.weight is None:
                check_not_batched(grad)
                ctx.weight = _choose(grad, *ctx.how)
            weight = ctx.weight
        return multiply(grad, weight), None, None, None, None, None, None


def _device(device: torch.device | str | None, generator: torch.Generator | None) -> torch.device:
    check_generator(generator)
    if device is not None:
        return torch.device(device)
    return torch.get_default_device() if generator is None else generator.device
