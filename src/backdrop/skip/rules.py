"""One rule per kind of layer: which cells of its input a cell of its output needs, and how it runs on a window.

A *window* is the same box of cells around each kept unit. A layer that works on every cell by itself runs on windows as
it is. A layer that slides a kernel (see sliding.py) runs without its padding, because the window already holds the
neighbours; cells of the window that lie outside the map are set to what the layer would have padded with. Any other
layer is not supported.

A rule is a function from a call to a `Step`, found by the type of the layer or by the function that is called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from backdrop._inserted import has_other_hooks
from backdrop.skip import graph, statistics
from backdrop.skip.sliding import conv, pool
from backdrop.skip.steps import Axes, BatchStatisticsError, Call, Step, UnsupportedError, as_called, windows_of


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
    step = Step(call.node, windows_of(call, axes), as_called(call))
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
        step = Step(call.node, windows_of(call, lambda _: call.axes), as_called(call))
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
    return Step(call.node, windows_of(call, lambda _: tuple(order[axis] for axis in call.axes)), as_called(call))


def _cat(call: Call) -> Step:
    if _int(call.argument(1, "dim", 0)) % call.ndim in (0, *call.axes):
        raise UnsupportedError("it joins maps along the batch or a masked axis")
    shape = call.shapes[call.node]
    for source in call.node.all_input_nodes:
        if source in call.constants or any(call.shapes[source][axis] != shape[axis] for axis in call.axes):
            raise UnsupportedError("it joins maps of different sizes")
    return Step(call.node, windows_of(call, lambda _: call.axes), as_called(call))


def _softmax(call: Call) -> Step:
    axis = call.layer.dim if isinstance(call.layer, (nn.Softmax, nn.LogSoftmax)) else call.argument(1, "dim")
    if axis is None or axis % call.ndim in call.axes:
        raise UnsupportedError("it mixes positions along a masked axis")
    return Step(call.node, windows_of(call, lambda _: call.axes), as_called(call))


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
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), conv),
    **{getattr(nn, f"{name[:3].title()}Pool{name[-2:]}"): pool(name) for name in _POOLS},
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
    **{getattr(F, name): pool(name) for name in _POOLS},
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
