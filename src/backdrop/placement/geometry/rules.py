"""One rule per kind of layer, found by the type of the layer or by the function that is called.

What is not here is looked for among the rules of `backdrop.skip`, which know pooling and whatever works on every cell
by itself. A call without a rule, or one that lets every position see all others, raises `UnboundedError`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from backdrop._inserted import has_other_hooks
from backdrop.layers import Backdrop
from backdrop.placement.geometry import sliding
from backdrop.placement.geometry.reach import window
from backdrop.placement.geometry.sliding import Call, Effect, UnboundedError, as_tuple, slides
from backdrop.skip import rules as skip_rules
from backdrop.skip import steps

CELL_BY_CELL = skip_rules.FUNCTIONS[torch.relu]
COUPLED = "its statistics couple all positions of a sample; they are not counted"


def find(call: Call) -> Effect:
    """What a call does to the positions, or `UnboundedError`."""
    node, layer = call.node, call.layer
    if layer is not None:
        for kind in type(layer).__mro__:
            if kind in LAYERS and _is_plain(layer, kind):
                return LAYERS[kind](call)
            if kind in skip_rules.LAYERS and _is_plain(layer, kind):
                return _as_for_windows(call, skip_rules.LAYERS[kind])
        hooked = ", which has hooks and is therefore taken as one call" if has_other_hooks(layer) else ""
        raise UnboundedError(f"there is no rule for {call.name}{hooked}", _axes_of_same_shape(call))
    if node.op == "call_method":
        method = str(node.target).rstrip("_")  # in place or not
        if method in METHODS:
            return METHODS[method](call)
        if method in skip_rules.METHODS:
            return _as_for_windows(call, skip_rules.METHODS[method])
    elif node.target in FUNCTIONS:
        return FUNCTIONS[node.target](call)
    elif node.target in skip_rules.FUNCTIONS:
        return _as_for_windows(call, skip_rules.FUNCTIONS[node.target])
    raise UnboundedError(f"there is no rule for {call.name}", _axes_of_same_shape(call))


def _is_plain(layer: nn.Module, kind: type) -> bool:
    """Whether a layer does what its kind does: others may have derived it and done something else."""
    ours = type(layer).__module__.startswith(("torch.nn.", "backdrop."))
    return ours or type(layer).forward is getattr(kind, "forward", None)


def _axes_of_same_shape(call: Call) -> sliding.Axes:
    same = call.node in call.shapes and call.shapes[call.node] == call.shapes.get(call.source)
    return call.axes[call.source] if same else ()


def _as_for_windows(call: Call, rule: Callable[[steps.Call], steps.Step]) -> Effect:
    if rule is CELL_BY_CELL:
        return _same_cell(call)
    axes = tuple(axis + 2 for axis in sliding.spatial(call))
    try:
        step = rule(steps.Call(call.node, call.layer, dict(call.shapes), axes, "frozen"))
    except steps.UnsupportedError as error:
        raise UnboundedError(str(error), axes) from None
    assert step.sliding is not None
    kernel, stride, padding, dilation, _ = step.sliding
    return slides(call, [window(*along) for along in zip(kernel, stride, padding, dilation, strict=True)])


def _axes_of_result(call: Call) -> sliding.Axes:
    """Where the positions are after the shapes were broadcast."""
    ranks = {node: len(call.shape) - len(call.shapes[node]) for node in call.axes if call.axes[node]}
    return next((tuple(axis + more for axis in call.axes[node]) for node, more in ranks.items()), ())


def _same_cell(call: Call) -> Effect:
    """Every position from the same one of each input."""
    shape, result = call.shape, _axes_of_result(call)
    for node, axes in call.axes.items():
        more = len(shape) - len(call.shapes[node])
        if axes and tuple(axis + more for axis in axes) != result:
            raise UnboundedError("it combines maps whose positions lie along different axes", result)
        if any(axis < more or call.shapes[node][axis - more] != shape[axis] for axis in result):
            raise UnboundedError("it combines a map with one value for all positions", result)
    return Effect(result, {node: [None] * len(result) for node in call.axes})


def _norm(call: Call) -> Effect:
    return slides(call, [None] * len(call.axes[call.source]), COUPLED)


def _layer_norm(call: Call) -> Effect:
    axes = call.axes[call.source]
    coupled = any(axis >= len(call.shape) - len(call.argument(1, "normalized_shape")) for axis in axes)
    return slides(call, [None] * len(axes), COUPLED if coupled else "")


def _along(position: int, default: Any, what: str) -> Callable[[Call], Effect]:
    """Functions that work along one axis, which may not be a spatial one."""

    def rule(call: Call) -> Effect:
        axes, axis = call.axes[call.source], call.argument(position, "dim", default)
        if axes and (axis is None or axis % len(call.before) in axes):
            raise UnboundedError(f"it {what} along a spatial axis", axes)
        return slides(call, [None] * len(axes))

    return rule


def _linear(call: Call) -> Effect:
    axes = call.axes[call.source]
    if len(call.before) - 1 in axes:
        raise UnboundedError("it mixes all positions along a spatial axis")
    return slides(call, [None] * len(axes))


def _reduce(call: Call) -> Effect:
    axes, ndim = call.axes[call.source], len(call.before)
    along, keeps = call.argument(1, "dim"), bool(call.argument(2, "keepdim", False))
    gone = {axis % ndim for axis in (range(ndim) if along is None else as_tuple(along, 1))}
    if gone & set(axes):
        raise UnboundedError(f"it takes the {call.name} over all positions", axes if keeps else ())
    left = tuple(axis if keeps else axis - sum(other < axis for other in gone) for axis in axes)
    return Effect(left, {call.source: [None] * len(axes)})


def _permute(call: Call) -> Effect:
    order: Any = call.node.args[1:] or call.node.kwargs["dims"]
    order = order[0] if isinstance(order[0], (tuple, list)) else order
    return _reordered(call, [axis % len(call.shape) for axis in order])


def _transpose(call: Call) -> Effect:
    order = list(range(len(call.shape)))
    a, b = call.argument(1, "dim0"), call.argument(2, "dim1")
    order[a], order[b] = order[b], order[a]
    return _reordered(call, order)


def _reordered(call: Call, order: list[int]) -> Effect:
    axes = tuple(order.index(axis) for axis in call.axes[call.source])
    return Effect(axes, {call.source: [None] * len(axes)})


def _reshape(call: Call) -> Effect:
    """Also flatten, squeeze and the like: an axis that stays has the same size, and as many numbers behind it."""
    before, after, axes = call.before, call.shape, list[int]()
    for axis in call.axes[call.source]:
        wanted = before[axis], math.prod(before[axis + 1 :])
        same = [other for other, size in enumerate(after) if (size, math.prod(after[other + 1 :])) == wanted]
        same = [other for other in same if other not in axes]
        if not same:
            raise UnboundedError("it reshapes the positions")
        axes.append(same[0])
    return Effect(tuple(axes), {call.source: [None] * len(axes)})


def _cat(call: Call) -> Effect:
    axes = call.axes[call.source]
    if any(other != axes for other in call.axes.values()):
        raise UnboundedError("it joins maps whose positions lie along different axes")
    if call.argument(1, "dim", 0) % len(call.shape) in axes:
        raise UnboundedError("it joins maps along a spatial axis", axes)
    return Effect(axes, {node: [None] * len(axes) for node in call.axes})


def _unbounded(reason: str) -> Callable[[Call], Effect]:
    def rule(call: Call) -> Effect:
        raise UnboundedError(reason, _axes_of_same_shape(call))

    return rule


def _named(module: Any, *names: str) -> list[Any]:
    """What there is of these names with 1d, 2d and 3d behind them."""
    return [getattr(module, f"{name}{n}d") for name in names for n in (1, 2, 3) if hasattr(module, f"{name}{n}d")]


_ATTENTION = _unbounded("attention lets every position see all others")
_SPLITS = dict.fromkeys(("chunk", "split"), _along(2, 0, "splits a map"))
_SOFTMAX = _along(1, None, "normalises")
_REDUCTIONS = dict.fromkeys(("mean", "sum", "amax", "amin"), _reduce)
_SHAPINGS = dict.fromkeys(("reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape)
_POINTWISE = (torch.where, torch.relu_, torch.erf, torch.sin, torch.cos, F.batch_norm, F.local_response_norm)

LAYERS: dict[type, Callable[[Call], Effect]] = {
    Backdrop: _same_cell,
    **dict.fromkeys((_BatchNorm, _DropoutNd, nn.ChannelShuffle, nn.Softmax2d, nn.LocalResponseNorm), _same_cell),
    **dict.fromkeys(_named(nn, "Conv"), sliding.conv),
    **dict.fromkeys(_named(nn, "ConvTranspose"), sliding.transposed_conv),
    **dict.fromkeys(_named(nn, "AdaptiveAvgPool", "AdaptiveMaxPool"), sliding.adaptive_pool),
    **dict.fromkeys(_named(nn, "ZeroPad", "ConstantPad"), sliding.pad("constant")),
    **dict.fromkeys(_named(nn, "ReflectionPad"), sliding.pad("reflect")),
    **dict.fromkeys(_named(nn, "ReplicationPad"), sliding.pad("replicate")),
    **dict.fromkeys(_named(nn, "CircularPad"), sliding.pad("circular")),
    nn.Upsample: sliding.interpolate,
    nn.PixelShuffle: sliding.pixel_shuffle,
    nn.PixelUnshuffle: sliding.pixel_unshuffle,
    **dict.fromkeys((nn.GroupNorm, _InstanceNorm), _norm),
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), _SOFTMAX),
    **dict.fromkeys((nn.Flatten, nn.Unflatten), _reshape),
    **dict.fromkeys((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder), _ATTENTION),
    nn.RNNBase: _unbounded("it carries a state from position to position"),
}
FUNCTIONS: dict[Any, Callable[[Call], Effect]] = {
    **dict.fromkeys((*_POINTWISE, F.dropout, F.alpha_dropout, *_named(F, "dropout")), _same_cell),
    **dict.fromkeys(_named(F, "conv"), sliding.conv),
    **dict.fromkeys(_named(F, "conv_transpose"), sliding.transposed_conv),
    **dict.fromkeys(_named(F, "adaptive_avg_pool", "adaptive_max_pool"), sliding.adaptive_pool),
    F.pad: sliding.pad(),
    F.interpolate: sliding.interpolate,
    F.pixel_shuffle: sliding.pixel_shuffle,
    F.pixel_unshuffle: sliding.pixel_unshuffle,
    **dict.fromkeys((F.group_norm, F.instance_norm), _norm),
    F.layer_norm: _layer_norm,
    F.linear: _linear,
    **dict.fromkeys((F.softmax, F.log_softmax, torch.softmax, torch.log_softmax), _SOFTMAX),
    **dict.fromkeys((torch.cat, torch.concat), _cat),
    torch.permute: _permute,
    torch.transpose: _transpose,
    **{getattr(torch, name): rule for name, rule in (_SPLITS | _REDUCTIONS | _SHAPINGS).items()},
    operator.getitem: sliding.getitem,
    F.scaled_dot_product_attention: _ATTENTION,
}
METHODS: dict[str, Callable[[Call], Effect]] = {
    **dict.fromkeys(("to", "type", "type_as", "detach", "erf"), _same_cell),
    **(_SPLITS | _REDUCTIONS | _SHAPINGS),
    "view": _reshape,
    **dict.fromkeys(("softmax", "log_softmax"), _SOFTMAX),
    "permute": _permute,
    "transpose": _transpose,
}
