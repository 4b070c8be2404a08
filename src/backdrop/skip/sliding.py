"""Rules for layers that slide a kernel: they run without padding, because windows already hold the neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from backdrop.skip import graph
from backdrop.skip.steps import Call, Sliding, Step, UnsupportedError, Where, windows_of


def conv(call: Call) -> Step:
    layer = call.layer
    assert isinstance(layer, nn.modules.conv._ConvNd)
    if layer.padding_mode != "zeros":
        raise UnsupportedError(f"padding_mode={layer.padding_mode!r} is not supported, only 'zeros'")
    spatial = _spatial(call)
    # torch keeps the padding of both sides of each axis, last axis first.
    before = layer._reversed_padding_repeated_twice[::-1][1::2]
    after = layer._reversed_padding_repeated_twice[::-1][0::2]
    masked = [axis in spatial for axis in range(len(layer.kernel_size))]
    if any(low != high for low, high, inside in zip(before, after, masked, strict=True) if not inside):
        raise UnsupportedError("padding='same' with an even kernel is not supported along an axis without a mask")
    padding = [0 if inside else low for low, inside in zip(before, masked, strict=True)]
    functions: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    function = functions[len(layer.kernel_size)]
    path = str(call.node.target)

    def run(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        live = graph.attribute(root, path)
        (x,) = (*args, *kwargs.values())
        return function(x, live.weight, live.bias, live.stride, padding, live.dilation, live.groups)

    return Step(
        call.node,
        windows_of(call, lambda _: call.axes),
        run,
        _sliding(spatial, layer.kernel_size, layer.stride, before, layer.dilation, 0.0),
        math.prod(layer.kernel_size) * layer.in_channels / layer.groups,
    )


def pool(name: str) -> Callable[[Call], Step]:
    """Max and average pooling, as layer or function, in any dimension."""
    largest, dimensions = name.startswith("max"), int(name[-2])
    function = getattr(F, name)
    names = ("kernel_size", "stride", "padding")
    rest = ("dilation", "ceil_mode", "return_indices") if largest else ("ceil_mode", "count_include_pad")
    defaults: dict[str, Any] = {"padding": 0, "dilation": 1, "count_include_pad": True}

    def rule(call: Call) -> Step:
        order = (*names, *rest, *(() if largest or dimensions == 1 else ("divisor_override",)))
        if call.layer is not None:
            settings = {key: getattr(call.layer, key, defaults.get(key)) for key in order}
        else:
            settings = {key: call.argument(1 + i, key, defaults.get(key)) for i, key in enumerate(order)}
        if settings.get("return_indices"):
            raise UnsupportedError("return_indices=True is not supported")
        spatial = _spatial(call)
        kernel = _tuple(settings["kernel_size"], dimensions)
        stride = _tuple(settings["stride"], dimensions) if settings["stride"] else kernel
        padding = _tuple(settings["padding"], dimensions)
        dilation = _tuple(settings.get("dilation", 1), dimensions)
        if settings["ceil_mode"] and len(spatial) < dimensions:
            raise UnsupportedError("ceil_mode=True is not supported along an axis without a mask")
        inside = [0 if axis in spatial else size for axis, size in enumerate(padding)]
        ragged = settings["ceil_mode"] or any(padding[axis] for axis in spatial)
        count_padding, override = settings.get("count_include_pad", True), settings.get("divisor_override")

        def run(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            x: Tensor = args[0] if args else kwargs["input"]
            pooled: Tensor
            if largest:
                pooled = function(x, kernel, stride, inside, dilation)
                return pooled
            if override is not None:
                pooled = function(x, kernel, stride, inside, False, True, override)
                return pooled
            pooled = function(x, kernel, stride, inside, False, count_padding)
            if not ragged:
                return pooled
            for i, (axis, position) in enumerate(zip(spatial, where.positions(), strict=True)):
                size, first = where.sizes[i], position * stride[axis] - padding[axis]
                low, high = (-padding[axis], size + padding[axis]) if count_padding else (0, size)
                count = (first + kernel[axis]).clamp(max=high) - first.clamp(min=low)
                share = kernel[axis] / count.clamp(min=1).to(pooled.dtype)
                pooled = pooled * _along(share, call.axes[i], pooled.ndim)
            return pooled

        return Step(
            call.node,
            windows_of(call, lambda _: call.axes),
            run,
            _sliding(spatial, kernel, stride, padding, dilation, -math.inf if largest else 0.0),
            math.prod(kernel),
        )

    return rule


def _spatial(call: Call) -> list[int]:
    """The masked axes as numbers of spatial axes, for layers that take (N, C, spatial axes)."""
    if any(axis < 2 for axis in call.axes):
        raise UnsupportedError("the mask runs along its channels")
    return [axis - 2 for axis in call.axes]


def _sliding(
    spatial: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    fill: float,
) -> Sliding:
    kernel, stride, padding, dilation = (
        tuple(values[axis] for axis in spatial) for values in (kernel, stride, padding, dilation)
    )
    return Sliding(kernel, stride, padding, dilation, fill)


def _along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """(windows, cells) as a tensor that broadcasts along axis 0 and `axis`."""
    return values.view(values.shape[0], *(values.shape[1] if i == axis else 1 for i in range(1, ndim)))


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
