"""The backward pass of a mask: a gradient times a weight, in the wider of the two dtypes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from backdrop._core import kernels

PART = 2**18  # elements that are multiplied at a time where dtypes are mixed on a CPU
_told_of_overflow = False


def names_backdrop(function: Any) -> Any:
    """A decorator: what torch calls such a result where somebody changes it in place."""
    function._backward_cls.__name__ = (
        "Backdrop, which shares the memory of its input (say inplace=False behind it, or use backdrop.insert),"
    )
    return function


def multiply(grad: Tensor, weight: Tensor) -> Tensor:
    """`grad * weight` in the wider of the two dtypes, rounded to that of `grad` and laid out like it."""
    if torch.compiler.is_compiling():
        return (grad * weight).to(grad.dtype)  # one kernel
    product = kernels.multiply(grad, weight)
    if product is not None:
        return product
    if torch.result_type(grad, weight) == grad.dtype:
        return grad * weight
    transforms = torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() or transforms or not grad.is_cpu or grad.numel() <= PART:
        product = grad.clone().mul_(weight)
    else:
        product = torch.empty_like(grad)
        _multiply_in_parts(product, grad, weight)
    if grad.dtype == torch.float16 and grad.is_cpu and not transforms:
        _tell_of_overflow(product, grad)
    return product


def _tell_of_overflow(product: Tensor, grad: Tensor) -> None:
    """Once, and on a CPU alone: a GPU would have to be waited for."""
    global _told_of_overflow
    if _told_of_overflow or not bool((product.detach().isinf() & grad.detach().isfinite()).any()):
        return
    _told_of_overflow = True
    warnings.warn(
        "a gradient in float16 times the weight of its unit is larger than 65,504 and became infinite; use bfloat16, a "
        "smaller loss scale, a smaller p, or scale=None (this is said once)",
        stacklevel=2,
    )


def _multiply_in_parts(product: Tensor, grad: Tensor, weight: Tensor) -> None:
    """On a CPU torch makes copies in the wider dtype; part by part they stay small and in cache."""
    if grad.numel() <= PART:
        torch.mul(grad, weight, out=product)
        return
    axis = next(axis for axis, size in enumerate(grad.shape) if size > 1)
    parts = min(grad.shape[axis], -(-grad.numel() // PART))
    weight = weight.expand([size if i == axis else -1 for i, size in enumerate(grad.shape)])
    for part in zip(*(tensor.tensor_split(parts, axis) for tensor in (product, grad, weight)), strict=True):
        _multiply_in_parts(*part)


def wants_gradient(x: Tensor) -> bool:
    if x.requires_grad or not torch.is_grad_enabled():
        return torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            # torch.compile loses track of the gradient here and would leave the mask out.
            raise RuntimeError("torch.compile cannot see through torch.func's transforms here; compile inside them")
        return False
    # Under torch.func's transforms the outermost wrapper (say vmap's) may not require a gradient while one inside it
    # (say grad's) does.
    while not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad
