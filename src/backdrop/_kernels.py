"""Faster ways on a GPU, where Triton is there, as it is in torch's CUDA builds. None means: leave it to torch.

`multiply` takes as long as a copy; torch's broadcasting multiply takes 1.6 times as long in float32, and 6 times in
bfloat16 with a float32 weight. `weigh` is one launch instead of six. The plain forms in `functional` and `_draw` say
what is computed; tests/test_cuda.py compares the two bit for bit, and benchmarks/bench_layer.py times them.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

MULTIPLY_BLOCK = 1024
MULTIPLY_LEAST = 2**23  # elements: for fewer, launching the kernel takes the host longer than the GPU gains
WEIGH_BLOCK = 4096
WEIGH_MOST = 2**16  # units in a group: one program walks through them


def multiply(grad: Tensor, weight: Tensor) -> Tensor | None:
    """`grad * weight` in float32, rounded to the dtype of `grad` and laid out like it."""
    if weight.dtype != torch.float32 or grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if grad.numel() < MULTIPLY_LEAST:
        return None
    if torch.is_grad_enabled() or not _usable(grad):  # it knows no second derivatives
        return None
    layout = _layout(grad, weight)
    if layout is None:
        return None
    product, count = torch.empty_like(grad), grad.numel()
    blocks = -(-count // MULTIPLY_BLOCK)
    _triton().multiply[(blocks,)](product, grad, weight, count, *layout, BLOCK=MULTIPLY_BLOCK)
    return product


def weigh(u: Tensor, p: float, numerator: float, per_count: bool) -> Tensor | None:
    """The float32 weights of Bernoulli units from uniform numbers (groups, units), written over them."""
    groups, size = u.shape
    if size > WEIGH_MOST or not _usable(u):
        return None
    _triton().weigh[(groups,)](u, size, p, numerator, PER_COUNT=per_count, BLOCK=WEIGH_BLOCK)
    return u


def _usable(x: Tensor) -> bool:
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
        and x.get_device() == torch.cuda.current_device()
        and _triton() is not None
    )


def _layout(grad: Tensor, weight: Tensor) -> tuple[int, int, int] | None:
    """(outer, shared, inner) if memory holds `grad` as (any, outer, shared, inner) and `weight` as (outer, inner)."""
    if not grad.is_contiguous():
        order = sorted(range(grad.ndim), key=grad.stride, reverse=True)
        grad, weight = grad.permute(order), weight.permute(order)
    if not grad.is_contiguous() or not weight.is_contiguous():
        return None
    outer = shared = inner = 1
    reached = 0  # going outwards: 0 inner, 1 shared, 2 outer, 3 the rest
    for size, weights in zip(reversed(grad.shape), reversed(weight.shape), strict=True):
        if size == 1:
            continue
        is_shared = weights == 1
        if is_shared != (reached % 2 == 1):
            reached += 1
        if reached > 3:
            return None
        if reached == 0:
            inner *= size
        elif reached == 1:
            shared *= size
        elif reached == 2:
            outer *= size
    return outer, shared, inner


@functools.cache
def _triton() -> Any:
    """The kernels, tried out once; None where Triton is not there or cannot build them."""
    try:
        from backdrop import _triton as kernels
    except ImportError:
        return None
    x = torch.ones(1, 1, device="cuda")
    try:
        kernels.multiply[(1,)](torch.empty_like(x), x, x, 1, 1, 1, 1, BLOCK=MULTIPLY_BLOCK)
        kernels.weigh[(1,)](x, 1, 0.5, 1.0, PER_COUNT=True, BLOCK=WEIGH_BLOCK)
    except Exception as error:  # no C compiler, an unsupported GPU: torch's own operations still work
        warnings.warn(f"Triton cannot build kernels here, so Backdrop is slower than it can be: {error}", stacklevel=2)
        return None
    return kernels
