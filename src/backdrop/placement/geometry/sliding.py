"""Rules for layers that read other cells than their own: convolutions, pooling, interpolation, padding, indexing.

A rule is a function from a call to its `Effect`: where the positions of the result are, and which cells of the input
each of them reads. `backdrop.placement.geometry.rules` says which rule belongs to which layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from backdrop.placement.geometry.reach import Taps, adaptive, sampled, transposed, window

Axes: TypeAlias = tuple[int, ...]  # where the spatial axes of the model's input are in a value


class UnboundedError(Exception):
    """Why a position may depend on all of the input, and where the positions of the result are."""

    def __init__(self, reason: str, axes: Axes = ()) -> None:
        super().__init__(reason)
        self.axes = axes


@dataclass
class Effect:
    """What a call does to the positions."""

    axes: Axes  # of the result
    taps: dict[fx.Node, Sequence[Taps | None]]  # along each axis, of each input that has positions; None: the same cell
    note: str = ""


@dataclass
class Call:
    """A call to find a rule for: its node, its layer, and what is known of the values around it."""

    node: fx.Node
    layer: nn.Module | None
    shapes: Mapping[fx.Node, torch.Size]
    numbers: Mapping[fx.Node, Any]  # results that are sizes and the like
    axes: dict[fx.Node, Axes]  # of those inputs that depend on the model's input

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the function, or the attribute of the layer that stands for it."""
        if self.layer is not None:
            return getattr(self.layer, name, default)
        args, kwargs = self.node.args, self.node.kwargs
        value = args[position] if len(args) > position else kwargs.get(name, default)
        return fx.map_arg(value, lambda node: self.numbers.get(node, node))

    @property
    def name(self) -> str:
        if self.layer is not None:
            return type(self.layer).__name__
        return str(getattr(self.node.target, "__name__", self.node.target))

    @property
    def source(self) -> fx.Node:
        return next(iter(self.axes))

    @property
    def before(self) -> torch.Size:
        """The shape of its input."""
        return self.shapes[self.source]

    @property
    def shape(self) -> torch.Size:
        if self.node not in self.shapes:
            raise UnboundedError(f"{self.name} returns something that is not one tensor")
        return self.shapes[self.node]


def slides(call: Call, taps: Sequence[Taps | None], note: str = "") -> Effect:
    """The positions stay along the same axes."""
    if len(call.axes) > 1:
        raise UnboundedError("its parameters depend on the input", call.axes[call.source])
    return Effect(call.axes[call.source], {call.source: taps}, note)


def as_tuple(value: Any, count: int) -> tuple[Any, ...]:
    """One value per axis; torch takes a tuple of one for all axes as well."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * count if len(values) == 1 else values


def spatial(call: Call) -> list[int]:
    """The numbers of the spatial axes, for layers that take (N, C, spatial axes)."""
    axes = call.axes[call.source]
    if any(axis < 2 for axis in axes):
        raise UnboundedError("it takes positions for channels")
    return [axis - 2 for axis in axes]


def conv(call: Call) -> Effect:
    kernel = _kernel(call)
    stride = as_tuple(call.argument(3, "stride", 1), len(kernel))
    padding = call.argument(4, "padding", 0)
    dilation = as_tuple(call.argument(5, "dilation", 1), len(kernel))
    if padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    padding = as_tuple(0 if padding == "valid" else padding, len(kernel))
    mode = call.layer.padding_mode if isinstance(call.layer, _ConvNd) else "zeros"
    outside: Any = "constant" if mode == "zeros" else mode
    return slides(call, [window(kernel[i], stride[i], padding[i], dilation[i], outside) for i in spatial(call)])


def transposed_conv(call: Call) -> Effect:
    kernel = _kernel(call)
    settings = [
        as_tuple(call.argument(position, key, default), len(kernel))
        for position, key, default in ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))
    ]
    return slides(call, [transposed(kernel[i], *(each[i] for each in settings)) for i in spatial(call)])


def _kernel(call: Call) -> Sequence[int]:
    if isinstance(call.layer, _ConvNd):
        return call.layer.kernel_size
    return call.shapes[call.argument(1, "weight")][2:]


def adaptive_pool(call: Call) -> Effect:
    axes = [axis + 2 for axis in spatial(call)]
    if any(call.shape[axis] == 1 for axis in axes):
        raise UnboundedError("it pools over all positions", tuple(axes))
    return slides(call, [adaptive(call.before[axis], call.shape[axis]) for axis in axes])


def interpolate(call: Call) -> Effect:
    mode, aligned = call.argument(3, "mode", "nearest"), bool(call.argument(4, "align_corners"))
    scale = None if call.argument(5, "recompute_scale_factor") else call.argument(2, "scale_factor")
    if call.argument(6, "antialias", False):
        raise UnboundedError("there is no rule for interpolation with antialias=True", call.axes[call.source])
    taps = []
    for i in spatial(call):
        cells, positions = call.before[i + 2], call.shape[i + 2]
        ratio = Fraction(cells, positions)
        if scale is not None:
            factor = float(as_tuple(scale, len(call.before) - 2)[i])
            ratio = 1 / Fraction(factor).limit_denominator(1000)
            if not math.isclose(1 / ratio, factor, rel_tol=1e-9):
                raise UnboundedError(f"its factor {factor} is not a simple ratio", call.axes[call.source])
        taps.append(_interpolated(mode, aligned, ratio, cells, positions))
    return slides(call, taps)


def _interpolated(mode: str, aligned: bool, ratio: Fraction, cells: int, positions: int) -> Taps:
    if mode == "area":
        return adaptive(cells, positions)
    if aligned and cells > 1:  # torch takes the first cell for a single position
        ratio, start = Fraction(cells - 1, positions - 1) if positions > 1 else Fraction(cells), Fraction(0)
    else:
        start = {"nearest": Fraction(0), "nearest-exact": ratio / 2}.get(mode, (ratio - 1) / 2)
    around = {"nearest": (0, 0), "nearest-exact": (0, 0), "bicubic": (1, 2)}.get(mode, (0, 1))
    return sampled(ratio, start, *around)


def pixel_shuffle(call: Call) -> Effect:
    factor = call.argument(1, "upscale_factor")
    return slides(call, [sampled(Fraction(1, factor), Fraction(0), 0, 0) for _ in spatial(call)])


def pixel_unshuffle(call: Call) -> Effect:
    factor = call.argument(1, "downscale_factor")
    return slides(call, [window(factor, factor) for _ in spatial(call)])


def pad(outside: Any = None) -> Callable[[Call], Effect]:
    """Padding is given from the last axis on: before it, behind it, before the last but one, ..."""

    def rule(call: Call) -> Effect:
        mode = outside or call.argument(2, "mode", "constant")
        padding, ndim = call.argument(1, "pad" if call.layer is None else "padding"), len(call.shape)
        before = [(*padding[::2], *[0] * ndim)[ndim - 1 - axis] for axis in call.axes[call.source]]
        return slides(call, [window(1, padding=size, outside=mode) for size in before])

    return rule


def getitem(call: Call) -> Effect:
    """One of several results, a part of the channels, a part of the positions, or every so-many-th of them."""
    axes, index = call.axes[call.source], call.argument(1, "index")
    if call.source not in call.shapes:
        return slides(call, [None] * len(axes))
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and not isinstance(item, (int, slice)) for item in items):
        raise UnboundedError("there is no rule for this way to index")
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (len(call.before) - len(items) + (Ellipsis in items))
    taps = []
    for axis in axes:
        if isinstance(items[axis], int):
            raise UnboundedError("it takes one position out of a map")
        start, _, step = items[axis].indices(call.before[axis])
        taps.append(window(1, step, -start))
    left = tuple(axis - sum(isinstance(item, int) for item in items[:axis]) for axis in axes)
    return Effect(left, {call.source: taps})
