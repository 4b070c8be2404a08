"""What stands between one layer's sums and the next layer's input, in one go: rectify, normalise, rectify, pad.

On windows these cost more time and memory than the convolutions around them when each is a call of its own. Here they
are one function of the layer's output x, which keeps x alone for its backward pass:

    y = relu(gamma * (relu(x) - m) * r + beta), and `fill` where a window's cell lies outside the map

with either relu or the normalisation left out as the network has it. The backward pass is that of statistics.py. The
plain operations below say what is computed; `backdrop._core.kernels` has the same as three kernels for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backdrop._core import kernels


class Moments(NamedTuple):
    """The statistics that one call of a normalising layer used, per channel."""

    mean: Tensor
    inverse_std: Tensor


Sums: TypeAlias = tuple[Tensor, Tensor]  # of dy and of dy x_hat, per channel


class Epilogue(NamedTuple):
    """Which of the operations there are."""

    relu_first: bool = False
    moments: Moments | None = None
    cells: int | None = None  # over how many cells the gradient of the statistics is spread; None: they are constants
    relu_last: bool = False
    inside: Tensor | None = None  # (windows, axes, 2): the first cell inside the map and the first behind it
    axes: tuple[int, ...] = ()  # the axes that `inside` speaks of
    fill: float = 0.0
    total: Callable[[Sums], Sums] | None = None  # the sums over all cells, from those over the cells of this call


def finish(x: Tensor, gamma: Tensor | None, beta: Tensor | None, how: Epilogue) -> Tensor:
    y: Tensor = _Finish.apply(x, gamma, beta, how)  # type: ignore[no-untyped-call]
    return y


def cells_inside(x: Tensor, how: Epilogue) -> Tensor:
    """Which cells lie inside the map, shaped to broadcast against `x`."""
    assert how.inside is not None
    valid = torch.ones([1] * x.ndim, dtype=torch.bool, device=x.device)
    for i, axis in enumerate(how.axes):
        cell = torch.arange(x.shape[axis], device=x.device)
        first, behind = how.inside[:, i, :1], how.inside[:, i, 1:]
        shape = [size if j in (0, axis) else 1 for j, size in enumerate(x.shape)]
        valid = valid & ((cell >= first) & (cell < behind)).view(shape)
    return valid


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, how: Epilogue) -> Tensor:
        scale, shift = scale_and_shift(gamma, beta, how.moments)
        ctx.save_for_backward(x, gamma, scale, shift)
        ctx.how = how
        y = kernels.normalise(x, gamma, beta, how)
        y = kernels.finish(x, scale, shift, how) if y is None else y
        if y is not None:
            return y
        y = _normalised(x, scale, shift, how)
        y = y.relu() if how.relu_last else y
        y = y.clone() if y is x else y
        return y if how.inside is None else y.masked_fill_(~cells_inside(x, how), how.fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, scale, shift = ctx.saved_tensors
        how, wanted = ctx.how, ctx.needs_input_grad
        found = None
        if how.total is None:
            found = kernels.normalise_backward(dy, x, gamma, how, wanted[0])
            found = kernels.finish_backward(dy, x, scale, shift, how, wanted[0]) if found is None else found
        dx, sums = _plain_backward(dy, x, scale, shift, how) if found is None else found
        dbeta, dgamma = (None, None) if sums is None else sums
        return dx, dgamma if wanted[1] else None, dbeta if wanted[2] else None, None


def scale_and_shift(
    gamma: Tensor | None, beta: Tensor | None, moments: Moments | None
) -> tuple[Tensor | None, Tensor | None]:
    """The normalisation as relu(x) * scale + shift."""
    if moments is None:
        return None, None
    scale = moments.inverse_std if gamma is None else moments.inverse_std * gamma
    shift = -moments.mean * scale
    return scale, shift if beta is None else shift + beta


def _channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


def normalised(x: Tensor, gamma: Tensor | None, beta: Tensor | None, how: Epilogue, out: Tensor | None) -> Tensor:
    """The normalisation alone, without gradients, into `out` if that is given."""
    y = kernels.normalise(x, gamma, beta, how, out)
    if y is not None:
        return y
    scale, shift = scale_and_shift(gamma, beta, how.moments)
    assert scale is not None
    assert shift is not None
    return torch.addcmul(_channels(shift, x), x, _channels(scale, x), out=out).to(x.dtype)


def _normalised(x: Tensor, scale: Tensor | None, shift: Tensor | None, how: Epilogue) -> Tensor:
    y = x.relu() if how.relu_first else x
    if scale is None or shift is None:
        return y
    return torch.addcmul(_channels(shift, x), y, _channels(scale, x)).to(x.dtype)


def _plain_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None, how: Epilogue
) -> tuple[Tensor, Sums | None]:
    outside = None if how.inside is None else ~cells_inside(x, how)
    dx = dy if outside is None else torch.where(outside, 0, dy)  # masked_fill would lose the order in memory
    if how.relu_last:
        dx = dx * (_normalised(x, scale, shift, how) > 0)
    sums = None
    if how.moments is not None:
        y = x.relu() if how.relu_first else x
        x_hat = (y - _channels(how.moments.mean, x)) * _channels(how.moments.inverse_std, x)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        sums = dx.sum(axes, dtype=x_hat.dtype), (dx * x_hat).sum(axes)
        if how.cells is not None:
            total = sums if how.total is None else how.total(sums)
            dx = dx - _channels(total[0] / how.cells, x) - x_hat * _channels(total[1] / how.cells, x)
            dx = dx if outside is None else dx.masked_fill_(outside, 0)
        assert scale is not None
        dx = dx * _channels(scale, x)
    return (dx * (x > 0) if how.relu_first else dx).to(x.dtype), sums
