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
FINISH_BLOCK = 2048  # numbers that a program works on at a time
FINISH_CHANNELS = 2048
FINISH_PROGRAMS = 528  # that each take a share of the rows for sums: a few per multiprocessor
MOMENTS_BLOCK = 2048  # numbers that a program looks at together
MOMENTS_SHARES = 16  # programs per channel
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


def few_shapes(number: int, device: torch.device) -> int:
    """Rounded up on a GPU, whose libraries take time for every shape that they have not seen."""
    if device.type == "cpu":
        return number
    step = max(8, 1 << max(0, number.bit_length() - 4))
    return -(-number // step) * step


def finish(x: Tensor, scale: Tensor | None, shift: Tensor | None, how: Any) -> Tensor | None:
    """`backdrop.skip.epilogue` for channels that vary fastest in memory."""
    rows = _rows(x)
    if rows is None:
        return None
    y = torch.empty_like(x)
    grid, *sizes = rows
    _triton().finish[(grid,)](
        *(y, x, scale, shift, how.inside, *sizes, how.fill),
        RELU_FIRST=how.relu_first,
        NORM=scale is not None,
        RELU_LAST=how.relu_last,
        INSIDE=how.inside is not None,
        **_block(x),
    )
    return y


def finish_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None, how: Any, wanted: bool
) -> tuple[Tensor | None, Any] | None:
    """Its gradients: that of x if it is wanted, and per channel the sums of dy and of dy times the normalised x."""
    rows = _rows(x)
    if rows is None:
        return None
    grid, *sizes = rows
    dy = _like(dy, x)
    mean, inverse_std = how.moments or (None, None)
    flags = {"RELU_FIRST": how.relu_first, "RELU_LAST": how.relu_last, "INSIDE": how.inside is not None, **_block(x)}
    sums = None
    if how.moments is not None:
        programs = min(grid, FINISH_PROGRAMS)
        parts = torch.empty(programs, 2, x.shape[1], device=x.device)
        _triton().finish_sums[(programs,)](parts, dy, x, mean, inverse_std, scale, shift, how.inside, *sizes, **flags)
        sums = parts.sum(0)
    if not wanted:
        return None, sums
    dx = torch.empty_like(x)
    spread = sums / how.cells if how.cells is not None else None
    flags |= {"NORM": scale is not None, "SPREAD": spread is not None}
    _triton().finish_backward[(grid,)](dx, dy, x, mean, inverse_std, scale, shift, spread, how.inside, *sizes, **flags)
    return dx, sums


def normalise(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, how: Any, out: Tensor | None = None
) -> Tensor | None:
    """The same for a normalisation alone, with the kernels of torch's SyncBatchNorm, in any layout."""
    if not x.is_cuda or how.moments is None or how.relu_first or how.relu_last or how.inside is not None:
        return None
    mean, inverse_std = how.moments
    return torch.batch_norm_elemt(x, gamma, beta, mean, inverse_std, 0.0, out=out)


def normalise_backward(
    dy: Tensor, x: Tensor, gamma: Tensor | None, how: Any, wanted: bool
) -> tuple[Tensor | None, Any] | None:
    if not x.is_cuda or how.moments is None or how.cells is None or how.relu_first or how.relu_last:
        return None
    if how.inside is not None:
        return None
    mean, inverse_std = how.moments
    sum_dy, sum_dy_x, dgamma, dbeta = torch.batch_norm_backward_reduce(
        dy, x, mean, inverse_std, gamma, True, True, True
    )
    if not wanted:
        return None, (dbeta, dgamma)
    cells = torch.full((1,), how.cells, dtype=torch.int32, device=x.device)
    dx = torch.batch_norm_backward_elemt(dy, x, mean, inverse_std, gamma, sum_dy, sum_dy_x, cells)
    return dx, (dbeta, dgamma)


def moments(
    parts: list[Tensor], eps: float, running: tuple[Tensor, Tensor] | None, momentum: float
) -> tuple[Tensor, Tensor] | None:
    """Mean and 1/sqrt(variance + eps) per channel of a batch in parts; the running statistics take them up."""
    first = parts[0]
    if not first.is_cuda or first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if running is not None and running[0].dtype != torch.float32:
        return None
    if not all(x.is_contiguous() and _usable(x) for x in parts):
        return _native_moments(parts, eps, running, momentum)
    channels = first.shape[1]
    found = torch.empty(len(parts) * MOMENTS_SHARES, 3, channels, device=first.device)
    for i, x in enumerate(parts):
        cells = x[0, 0].numel()
        block = min(1 << (cells - 1).bit_length(), MOMENTS_BLOCK)
        _triton().moments[(channels, MOMENTS_SHARES)](
            found[i * MOMENTS_SHARES :], x, len(x), channels, cells, ROWS=MOMENTS_BLOCK // block, CELLS=block
        )
    mean, inverse_std = torch.empty(2, channels, device=found.device).unbind()
    _triton().join_moments[(-(-channels // 64),)](
        *(mean, inverse_std, *(running or (None, None)), found, len(found), channels, eps, momentum),
        TRACK=running is not None,
        CHANNELS=64,
    )
    return mean, inverse_std


def _native_moments(
    parts: list[Tensor], eps: float, running: tuple[Tensor, Tensor] | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """The same with the kernels of torch's SyncBatchNorm, which are fast where channels vary fastest."""
    found = [torch.batch_norm_stats(x, eps) for x in parts]
    means, inverse_stds = (torch.stack(values) for values in zip(*found, strict=True))
    cells = _counts(tuple(float(x.numel() // x.shape[1]) for x in parts), means.device)
    mean, var = running or (None, None)
    return torch.batch_norm_gather_stats_with_counts(parts[0], means, inverse_stds, mean, var, momentum, eps, cells)


@functools.lru_cache(maxsize=1024)
def _counts(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, because the host waits for the GPU where it sends numbers there."""
    return torch.tensor(values, device=device)


def _rows(x: Tensor) -> tuple[int, ...] | None:
    """Programs, rows, channels, height and width of windows whose channels vary fastest; None for any others."""
    if x.ndim != 4 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not _usable(x):
        return None
    if not x.permute(0, 2, 3, 1).is_contiguous() or x.shape[1] > FINISH_CHANNELS:
        return None
    windows, channels, height, width = x.shape
    rows = windows * height * width
    if rows >= 2**31 - FINISH_BLOCK:
        return None
    return -(-rows // _block(x)["ROWS"]), rows, channels, height, width


def _block(x: Tensor) -> dict[str, int]:
    channels = 1 << (x.shape[1] - 1).bit_length()
    return {"ROWS": max(1, FINISH_BLOCK // channels), "CHANNELS": channels}


def _like(dy: Tensor, x: Tensor) -> Tensor:
    return dy if dy.stride() == x.stride() else torch.empty_like(x, dtype=dy.dtype).copy_(dy)


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
        from backdrop._core import triton as kernels
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
