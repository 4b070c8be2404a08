"""The backward multiply as one pass over a GPU's memory, in Triton, which comes with torch's CUDA builds.

torch's own broadcasting multiply takes 1.6 times as long as a copy in float32, and 6 times in bfloat16 with a float32
weight; this takes as long as a copy (benchmarks/bench_layer.py). What does not fit is left to torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def multiply(grad: Tensor, weight: Tensor) -> Tensor | None:
    """`grad * weight` in float32, rounded to the dtype of `grad` and laid out like it; None where it does not apply."""
    if weight.dtype != torch.float32 or grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if grad.get_device() != torch.cuda.current_device() or grad.numel() == 0:
        return None
    layout = _layout(grad, weight)
    if layout is None:
        return None
    product, count = torch.empty_like(grad), grad.numel()
    _multiply[(-(-count // BLOCK),)](product, grad, weight, count, *layout, BLOCK=BLOCK)
    return product


def _layout(grad: Tensor, weight: Tensor) -> tuple[int, int] | None:
    """(shared, inner) if memory holds `grad` as (outer, shared, inner) and `weight` as (outer, inner), else None."""
    order = range(grad.ndim) if grad.is_contiguous() else sorted(range(grad.ndim), key=grad.stride, reverse=True)
    if not grad.permute(*order).is_contiguous() or not weight.permute(*order).is_contiguous():
        return None
    shared, inner, reached = 1, 1, "inner"
    for axis in reversed(order):
        size = grad.shape[axis]
        if size == 1:
            continue
        if weight.shape[axis] == 1:
            if reached == "outer":
                return None
            shared, reached = shared * size, "shared"
        elif reached == "inner":
            inner *= size
        else:
            reached = "outer"
    return shared, inner


@triton.jit
def _multiply(product, grad, weight, count, shared, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    factor = tl.load(weight + at // inner // shared * inner + at % inner, mask=inside)
    value = tl.load(grad + at, mask=inside).to(tl.float32) * factor
    tl.store(product + at, value.to(product.dtype.element_ty), mask=inside)
