"""Receptive fields: which part of the input every position of every layer depends on.

>>> from torch import nn
>>> model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1))
>>> fields = receptive_fields(model, (1, 1, 64, 64))
>>> print(fields)
layer  kind               lattice  field      stride  start   independent  note
0      Conv2d             64x64    3x3        1x1     -1, -1  484
1      ReLU               64x64    3x3        1x1     -1, -1  484
2      MaxPool2d          32x32    5x5        2x2     -2, -2  121
3      AdaptiveAvgPool2d  1x1      unbounded                               it pools over all positions
>>> fields["2"].footprint(0, 31)  # at a corner, the part of the field that is inside the image
(range(0, 3), range(60, 64))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, overload

import torch
from torch import fx, nn

from backdrop._checks import nearest
from backdrop.placement import shapes
from backdrop.placement.geometry import rules
from backdrop.placement.geometry.reach import NOTHING, Reach, hull
from backdrop.placement.geometry.sliding import Axes, Call, Effect, UnboundedError
from backdrop.skip import graph

__all__ = ["Field", "Fields", "receptive_fields"]

Box: TypeAlias = tuple[Reach, ...]  # along each spatial axis

NAMED = 3  # branches that a note names


@dataclass(frozen=True)
class Field:
    """The receptive field of a layer: of its positions in a model on an input of one shape.

    Args:
        name: dotted path of the layer; for a function, that of the module that calls it and the function.
        kind: type of the layer, or the function.
        shape: of its output, with batch and channels.
        lattice: its positions, the spatial part of the shape; empty where there are none any more.
        size: in input cells along each spatial axis, padding included; where positions differ, the largest. None:
            unbounded, a position may depend on all of the input.
        stride: input cells from one position to the next, below 1 after upsampling.
        start: the first input cell that position 0 sees; negative where that is padding.
        independent: how many positions there are whose fields do not overlap.
        note: why it is unbounded, which branches meet in it, what was not counted.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    lattice: tuple[int, ...]
    size: tuple[int, ...] | None
    stride: tuple[Fraction, ...] | None
    start: tuple[int, ...] | None
    independent: int | None
    note: str = ""
    _boxes: tuple[Box, ...] = field(default=(), repr=False, compare=False)

    def footprint(self, *position: int) -> tuple[range, ...]:
        """From the first to the last input cell that a position depends on, along each axis: none of it is padding."""
        if self.size is None:
            raise ValueError(f"{self.name} has no footprint, because its receptive field is unbounded: {self.note}")
        inside = (0 <= at < count for at, count in zip(position, self.lattice, strict=False))
        if len(position) != len(self.lattice) or not all(inside):
            raise IndexError(f"{self.name} has positions in {by(self.lattice)}, counted from 0, but got {position}")
        ranges = [[_range(reach, at) for reach, at in zip(box, position, strict=True)] for box in self._boxes]
        seen = [box for box in ranges if all(box)] or [[range(0)] * len(position)]
        hulls = [(min(r.start for r in along), max(r.stop for r in along)) for along in zip(*seen, strict=True)]
        return tuple(range(*ends) for ends in hulls)


class Fields(list[Field]):
    """The receptive fields of a model's layers in the order of execution, also by name."""

    def __init__(self, fields: Iterable[Field] = (), outputs: Mapping[str, Field] | None = None) -> None:
        super().__init__(fields)
        self._outputs = dict(outputs or {})  # what modules that hold others return

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Field: ...
    @overload
    def __getitem__(self, key: slice) -> Fields: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> Field | Fields:
        if isinstance(key, slice):
            return Fields(super().__getitem__(key), self._outputs)
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = {**self._outputs, **{each.name: each for each in self}}
        if key not in found:
            raise KeyError(f"there is no layer {key!r}{nearest(key, found)}")
        return found[key]

    def __str__(self) -> str:
        """A table in plain text."""
        rows = [("layer", "kind", "lattice", "field", "stride", "start", "independent", "note")]
        rows += [
            (each.name, each.kind, by(each.lattice), "unbounded", "", "", "", each.note)
            if each.size is None or each.stride is None or each.start is None
            else (
                *(each.name, each.kind, by(each.lattice), by(each.size), by(each.stride)),
                *(", ".join(map(str, each.start)), str(each.independent), each.note),
            )
            for each in self
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def by(values: Iterable[object]) -> str:
    """3x3, or a dash where there are no axes."""
    return "x".join(map(str, values)) or "-"


def receptive_fields(model: nn.Module, input_shape: Sequence[int]) -> Fields:
    """The receptive field of every layer of a model, found without computing anything.

    All channels of a position are taken together. Branches that meet have the largest of their fields. Statistics over
    positions, as in group normalisation, are not counted; the note says where. Attention, pooling over all positions,
    flattening and layers without a rule make a field unbounded, and so are all behind them.

    Args:
        model: any module that takes one tensor and that torch.fx can follow; a part that it cannot follow is one layer
            with an unbounded field.
        input_shape: (samples, channels, positions...), with any number of spatial axes.
    """
    found = follow(model, input_shape)
    outputs: dict[str, Field] = {}
    for node, each in found.fields.items():
        for path in node.meta.get("outputs_of", ()):
            outputs.setdefault(path, each)
    return Fields(found.fields.values(), outputs)


@dataclass(frozen=True)
class Value:
    """What is known of a value that depends on the input."""

    axes: Axes
    boxes: tuple[Box, ...] | None  # None: unbounded
    note: str = ""
    since: str = ""  # where it became unbounded, and why


class Followed(NamedTuple):
    """A model's calls with what is known of their results."""

    traced: shapes.Traced
    values: dict[fx.Node, Value]  # whatever depends on the input
    fields: dict[fx.Node, Field]  # of those that are tensors and not the input itself


def follow(model: nn.Module, input_shape: Sequence[int]) -> Followed:
    traced = shapes.traced(model, input_shape)
    numbers = _numbers(model, traced)
    values: dict[fx.Node, Value] = {}
    fields: dict[fx.Node, Field] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and not node.args:
            axes = tuple(range(2, len(input_shape)))
            boxes = (tuple(Reach.of_input(int(input_shape[axis])) for axis in axes),)
            values[node] = Value(axes, boxes, "" if axes else "the input has no spatial axes")
        inputs = {source: values[source] for source in node.all_input_nodes if source in values}
        if not inputs or node in numbers or node.op == "output":
            continue
        layer = graph.attribute(model, str(node.target)) if node.op == "call_module" else None
        call = Call(node, layer, traced.shapes, numbers, {source: value.axes for source, value in inputs.items()})
        values[node] = _value(call, inputs, traced.reasons.get(str(node.target)) if layer else None)
        if node in traced.shapes:
            fields[node] = _field(call, values[node])
    return Followed(traced, values, fields)


def _numbers(model: nn.Module, traced: shapes.Traced) -> dict[fx.Node, Any]:
    """The results that are sizes, or follow from sizes."""
    found: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        sources = node.all_input_nodes
        if node in traced.shapes or not sources or node.op == "output":
            continue
        if all(source in found for source in sources):
            found[node] = graph.call(model, node, found)
        elif sources[0] in traced.shapes and (
            (node.op == "call_method" and node.target in graph.METADATA_METHODS)
            or (node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device"))
        ):
            stand_in = torch.empty(traced.shapes[sources[0]], device="meta")
            found[node] = graph.call(model, node, {**found, sources[0]: stand_in})
    return found


def _value(call: Call, inputs: dict[fx.Node, Value], opaque: str | None) -> Value:
    unbounded = [value for value in inputs.values() if value.boxes is None]
    try:
        if opaque:
            raise UnboundedError(opaque)
        effect = rules.find(call)
    except UnboundedError as error:
        axes, reason = error.axes, str(error)
    else:
        if not unbounded:
            return _bounded(call, effect, inputs)
        axes, reason = effect.axes, ""
    if unbounded:
        since = unbounded[0].since
        return Value(axes, None, f"unbounded since {since}", since)
    return Value(axes, None, reason, f"{shapes.name_of(call.node)}: {reason}")


def _bounded(call: Call, effect: Effect, inputs: dict[fx.Node, Value]) -> Value:
    branches: dict[fx.Node, tuple[Box, ...]] = {}
    for source, taps in effect.taps.items():
        branches[source] = tuple(
            tuple(
                reach if tap is None else reach.through(tap, call.shape[axis])
                for reach, tap, axis in zip(box, taps, effect.axes, strict=True)
            )
            for box in inputs[source].boxes or ()
        )
    boxes = _merged(box for several in branches.values() for box in several)
    notes = [effect.note, _on_branches(branches), "" if effect.axes else next(iter(inputs.values())).note]
    return Value(effect.axes, boxes, "; ".join(filter(None, notes)))


def _merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """As few boxes as possible: those that are empty at the same positions are one, and mostly that is nowhere.

    A box that is empty along one axis is no part of the footprint, whatever it has along the other.
    """
    alike: dict[tuple[Any, ...], list[Box]] = {}
    for box in boxes:
        empty = tuple(tuple((reach.first > reach.last).nonzero().flatten().tolist()) for reach in box)
        alike.setdefault(empty, []).append(box)
    return tuple(tuple(map(hull, zip(*same, strict=True))) for same in alike.values())


def _on_branches(branches: dict[fx.Node, tuple[Box, ...]]) -> str:
    ideal = {source: _ideal(boxes) for source, boxes in branches.items()}
    sizes = {source: tuple(reach.size for reach in box) for source, box in ideal.items()}
    strides = {tuple(reach.stride for reach in box) for box in ideal.values()}
    notes = []
    if len(set(sizes.values())) > 1:
        largest = sorted(sizes, key=lambda source: -math.prod(sizes[source]))
        named = [f"{by(sizes[source])} by {_name_of(source)}" for source in largest[:NAMED]]
        named += ["..."] if len(largest) > NAMED else []
        notes.append(f"the largest of {len(sizes)} branches ({', '.join(named)})")
    if len(strides) > 1:
        notes.append(f"the strides of its branches differ ({', '.join(map(by, sorted(strides)))})")
    return "; ".join(notes)


def _name_of(node: fx.Node) -> str:
    return "the input" if node.op == "placeholder" else shapes.name_of(node)


def _ideal(boxes: Sequence[Box]) -> Box:
    return tuple(map(hull, zip(*boxes, strict=True)))


def _field(call: Call, value: Value) -> Field:
    lattice = tuple(call.shape[axis] for axis in value.axes)
    about = (shapes.name_of(call.node), call.name, tuple(call.shape), lattice)
    if value.boxes is None:
        return Field(*about, None, None, None, None, value.note)
    box = _ideal(value.boxes)
    independent = math.prod((n - 1) // reach.spacing() + 1 for n, reach in zip(lattice, box, strict=True))
    size, start = tuple(reach.size for reach in box), tuple(reach.start for reach in box)
    stride = tuple(reach.stride for reach in box)
    return Field(*about, size, stride, start, independent, value.note, value.boxes)


def _range(reach: Reach, position: int) -> range:
    first, last = int(reach.first[position]), int(reach.last[position])
    return range(first, last + 1) if first < NOTHING else range(0)
