"""One rule per kind of layer: which cells of its input a cell of its output needs, and how it runs on a window.

A *window* is the same box of cells around each kept unit. A layer that works on every cell by itself runs on windows as
it is. A layer that slides a kernel runs without its padding, because the window already holds the neighbours; cells of
the window that lie outside the map are set to what the layer would have padded with. Any other layer is not supported.

A rule is a function from a call to a `Step`, found by the type of the layer or by the function that is called.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from backdrop._inserted import has_other_hooks
from backdrop.skip import graph, statistics

Axes: TypeAlias = tuple[int, ...]  # the masked axes of a value, in the order of the mask's


class UnsupportedError(Exception):
    """Why a call cannot run on windows."""


class BatchStatisticsError(UnsupportedError):
    """It takes statistics over the batch, and the exact gradient is asked for."""


class Sliding(NamedTuple):
    """The kernel of a layer along the masked axes, and the value it pads with."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first cell
    dilation: tuple[int, ...]
    fill: float


class Where(NamedTuple):
    """Where the windows of a step's output lie in the whole map."""

    positions: Callable[[], Sequence[Tensor]]  # (windows, cells) along each masked axis
    sizes: tuple[int, ...]  # of the step's input map along the masked axes


@dataclass
class Step:
    """One call on windows."""

    node: fx.Node
    inputs: dict[fx.Node, Axes]  # the values that come as windows
    run: Callable[[nn.Module, Sequence[Any], dict[str, Any], Where], Any]
    sliding: Sliding | None = None
    multiplications: float = 0  # per element of the output
    finishes: Literal["relu", "norm"] | None = None  # whether it can be a part of `backdrop.skip.finish`
    moments: bool = False  # whether it needs the statistics of the forward pass


@dataclass
class Call:
    """A call to find a rule for: its node, its layer, the shapes around it, and the masked axes of its result."""

    node: fx.Node
    layer: nn.Module | None
    shapes: dict[fx.Node, torch.Size]
    axes: Axes
    policy: statistics.Statistics = "exact"
    constants: frozenset[fx.Node] = field(default_factory=frozenset)
    overwrites: bool = False  # whether it changes what others read

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    @property
    def ndim(self) -> int:
        return len(self.shapes[self.node])


def find(call: Call) -> Step:
    """The step for a call, or `UnsupportedError`."""
    node = call.node
    if call.overwrites:
        raise UnsupportedError("it writes over a value that is used elsewhere too")
    if any(source not in call.shapes and source not in call.constants for source in node.all_input_nodes):
        raise UnsupportedError("it takes something from another call that is not a tensor")
    if call.layer is not None:
        if has_other_hooks(call.layer):
            raise UnsupportedError("it has hooks, which would not run on windows")
        if any(True for _ in getattr(call.layer, "parametrizations", nn.Module()).buffers()):
            raise UnsupportedError("its parameters are computed anew, and change, each time they are used")
        for kind in type(call.layer).__mro__:
            if kind in LAYERS:
                return LAYERS[kind](call)
        raise UnsupportedError(f"there is no rule for {type(call.layer).__name__}")
    if node.op == "call_method":
        name = str(node.target)
        if name in METHODS:
            return METHODS[name](call)
        raise UnsupportedError(f"there is no rule for the method {name}")
    if node.target in FUNCTIONS:
        return FUNCTIONS[node.target](call)
    raise UnsupportedError(f"there is no rule for {getattr(node.target, '__name__', node.target)}")


def _as_called(call: Call) -> Callable[..., Any]:
    """Run on windows what runs on the whole map."""

    def run(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Any:
        return graph.invoke(root, call.node, args, kwargs)

    return run


def _windows_of(call: Call, axes: Callable[[fx.Node], Axes]) -> dict[fx.Node, Axes]:
    return {source: axes(source) for source in call.node.all_input_nodes if source not in call.constants}


def _pointwise(call: Call) -> Step:
    """Every output cell from the same cell of each input; inputs without masked axes are broadcast."""
    if call.node.kwargs.get("out") is not None:
        raise UnsupportedError("it writes into another tensor")

    def axes(source: fx.Node) -> Axes:
        return tuple(axis - call.ndim + len(call.shapes[source]) for axis in call.axes)

    shape = call.shapes[call.node]
    for source in call.node.all_input_nodes:
        if source not in call.shapes:
            continue
        along = [call.shapes[source][axis] if axis >= 0 else 1 for axis in axes(source)]
        if source in call.constants:
            if any(size != 1 for size in along):
                raise UnsupportedError("it combines the map with a constant that differs between positions")
        elif along != [shape[axis] for axis in call.axes]:
            raise UnsupportedError("it combines maps of different sizes")
    step = Step(call.node, _windows_of(call, axes), _as_called(call))
    if type(call.layer) is nn.ReLU or call.node.target in (F.relu, torch.relu):
        step.finishes = "relu"
    return step


def _dropout(call: Call) -> Step:
    layer = call.layer
    if isinstance(layer, _DropoutNd):
        active = layer.training and layer.p > 0
    else:
        active = bool(call.argument(2, "training", True)) and call.argument(1, "p", 0.5) != 0
    if active:
        raise UnsupportedError(
            "dropout would draw new numbers when windows are computed again; move it behind the mask"
        )
    return _pointwise(call)


def _conv(call: Call) -> Step:
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
        _windows_of(call, lambda _: call.axes),
        run,
        _sliding(spatial, layer.kernel_size, layer.stride, before, layer.dilation, 0.0),
        math.prod(layer.kernel_size) * layer.in_channels / layer.groups,
    )


def _pool(name: str) -> Callable[[Call], Step]:
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
            _windows_of(call, lambda _: call.axes),
            run,
            _sliding(spatial, kernel, stride, padding, dilation, -math.inf if largest else 0.0),
            math.prod(kernel),
        )

    return rule


def _batch_norm(call: Call) -> Step:
    layer = call.layer
    assert isinstance(layer, _BatchNorm)
    if 1 in call.axes:
        raise UnsupportedError("the mask runs along its channels")
    moments = statistics.uses_batch_statistics(layer)
    if moments and isinstance(layer, nn.SyncBatchNorm):
        raise UnsupportedError("SyncBatchNorm couples all positions of all processes")
    if moments and call.policy == "exact":
        raise BatchStatisticsError(
            "its batch statistics couple all samples and positions; "
            "statistics='sampled' or 'frozen' skips below it, with an estimated gradient"
        )
    step = _pointwise(call)
    step.finishes, step.moments = "norm", moments
    return step


def _over_last_axes(count: Callable[[Call], int]) -> Callable[[Call], Step]:
    """Layers that work on the last axes of every position: no mask may run along these."""

    def rule(call: Call) -> Step:
        if any(axis >= call.ndim - count(call) for axis in call.axes):
            raise UnsupportedError("it mixes positions along a masked axis")
        step = Step(call.node, _windows_of(call, lambda _: call.axes), _as_called(call))
        if isinstance(call.layer, nn.Linear):
            step.multiplications = call.layer.in_features
        return step

    return rule


def _channel_norm(call: Call) -> Step:
    raise UnsupportedError("it takes statistics over space, which couples all positions of a sample")


def _permute(call: Call) -> Step:
    order = call.node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = tuple(order[0])
    return _reordered(call, [_int(axis) % call.ndim for axis in order])


def _transpose(call: Call) -> Step:
    order = list(range(call.ndim))
    a, b = (_int(axis) % call.ndim for axis in call.node.args[1:3])
    order[a], order[b] = b, a
    return _reordered(call, order)


def _reordered(call: Call, order: list[int]) -> Step:
    if order[0] != 0:
        raise UnsupportedError("it moves the batch axis")
    return Step(call.node, _windows_of(call, lambda _: tuple(order[axis] for axis in call.axes)), _as_called(call))


def _cat(call: Call) -> Step:
    if _int(call.argument(1, "dim", 0)) % call.ndim in (0, *call.axes):
        raise UnsupportedError("it joins maps along the batch or a masked axis")
    shape = call.shapes[call.node]
    for source in call.node.all_input_nodes:
        if source in call.constants or any(call.shapes[source][axis] != shape[axis] for axis in call.axes):
            raise UnsupportedError("it joins maps of different sizes")
    return Step(call.node, _windows_of(call, lambda _: call.axes), _as_called(call))


def _softmax(call: Call) -> Step:
    axis = call.layer.dim if isinstance(call.layer, (nn.Softmax, nn.LogSoftmax)) else call.argument(1, "dim")
    if axis is None or axis % call.ndim in call.axes:
        raise UnsupportedError("it mixes positions along a masked axis")
    return Step(call.node, _windows_of(call, lambda _: call.axes), _as_called(call))


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


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise UnsupportedError("its arguments depend on the data")
    return value


_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid),
    *(nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Threshold),
    *(nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Identity),
)
_POINTWISE_NAMES = (
    *("relu", "sigmoid", "tanh", "exp", "abs", "neg", "square", "sqrt", "rsqrt", "log", "clamp", "pow"),
    *("add", "sub", "mul", "div", "maximum", "minimum"),
)
_POINTWISE_FUNCTIONS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow),
    *graph.OUT_OF_PLACE,
    *(getattr(torch, name) for name in _POINTWISE_NAMES),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.sigmoid, F.tanh, F.softplus),
    *(F.softsign, F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid, F.prelu),
)
_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")

LAYERS: dict[type, Callable[[Call], Step]] = {
    **dict.fromkeys(_ACTIVATIONS, _pointwise),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    **{getattr(nn, f"{name[:3].title()}Pool{name[-2:]}"): _pool(name) for name in _POOLS},
    _BatchNorm: _batch_norm,
    _DropoutNd: _dropout,
    nn.GroupNorm: _channel_norm,
    nn.modules.instancenorm._InstanceNorm: _channel_norm,
    nn.LayerNorm: _over_last_axes(lambda call: len(call.layer.normalized_shape)),  # type: ignore[arg-type,union-attr]
    nn.Linear: _over_last_axes(lambda call: 1),
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
}
FUNCTIONS: dict[Any, Callable[[Call], Step]] = {
    **dict.fromkeys(_POINTWISE_FUNCTIONS, _pointwise),
    **{getattr(F, name): _pool(name) for name in _POOLS},
    F.dropout: _dropout,
    F.layer_norm: _over_last_axes(lambda call: len(call.argument(1, "normalized_shape"))),
    F.linear: _over_last_axes(lambda call: 1),
    F.softmax: _softmax,
    F.group_norm: _channel_norm,
    torch.softmax: _softmax,
    torch.permute: _permute,
    torch.transpose: _transpose,
    torch.cat: _cat,
    torch.concat: _cat,
}
METHODS: dict[str, Callable[[Call], Step]] = {
    **dict.fromkeys((*_POINTWISE_NAMES, "contiguous", "clone", "float", "half", "bfloat16", "double"), _pointwise),
    "permute": _permute,
    "transpose": _transpose,
    "softmax": _softmax,
}
