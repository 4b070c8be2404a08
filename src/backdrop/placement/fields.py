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

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, overload

import torch
from torch import Tensor, fx, nn

from backdrop._core.checks import nearest
from backdrop.graph.look import Look, look
from backdrop.graph.reach import NOTHING, Reach, Taps, between, hull, window
from backdrop.graph.table import Call, Slide, Step, Tap, UnsupportedError, find
from backdrop.graph.untouched import check_input_shape

__all__ = ["Field", "Fields", "receptive_fields"]

Axes: TypeAlias = tuple[int, ...]  # where the spatial axes of the model's input are in a value
Box: TypeAlias = tuple[Reach, ...]  # along each spatial axis

NAMED = 3  # branches that a note names
COUPLED = "its statistics couple all positions of a sample; they are not counted"
ELSEWHERE = "it combines maps whose positions lie along different axes"
WHOLE = "it combines a map with one value for all positions"
PARAMETERS = "its parameters depend on the input"
ATTENTION = "attention lets every position see all others"
PRODUCTS = ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum")


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


def receptive_fields(model: nn.Module, input_shape: Sequence[int] | Tensor) -> Fields:
    """The receptive field of every layer of a model, found without computing anything.

    All channels of a position are taken together. Branches that meet have the largest of their fields. Statistics over
    positions, as in group normalisation, are not counted; the note says where. Attention, pooling over all positions,
    flattening and calls without a rule (see `backdrop.register_rule`) make a field unbounded, and all behind them.

    Args:
        model: any module that takes one tensor. What comes of code that torch.compile's front end cannot follow has an
            unbounded field.
        input_shape: (samples, channels, positions...), with any number of spatial axes, or a tensor of that shape.
    """
    found = follow(model, input_shape)
    outputs: dict[str, Field] = {}
    for node, paths in found.look.outputs_of.items():
        if node in found.fields:
            for path in paths:
                outputs.setdefault(path, found.fields[node])
    return Fields((found.fields[node] for node in found.look.rows if node in found.fields), outputs)


@dataclass(frozen=True)
class Value:
    """What is known of a value that depends on the input."""

    axes: Axes
    batch: int | None  # the axis of samples
    boxes: tuple[Box, ...] | None  # None: unbounded
    note: str = ""
    since: str = ""  # where it became unbounded,
    reason: str = ""  # and why


class Followed(NamedTuple):
    """A model's calls with what is known of their results."""

    look: Look
    values: dict[fx.Node, Value]  # whatever depends on the input
    fields: dict[fx.Node, Field]  # of those that are tensors and not the input itself


def follow(model: nn.Module, input_shape: Sequence[int] | Tensor) -> Followed:
    found = look(model, input_shape)
    shape = check_input_shape(input_shape)
    axes = tuple(range(2, len(shape)))
    boxes = (tuple(Reach.of_input(shape[axis]) for axis in axes),)
    values = {found.input: Value(axes, 0, boxes, "" if axes else "the input has no spatial axes")}
    fields: dict[fx.Node, Field] = {}
    for node in found.graph.nodes:
        inputs = {source: values[source] for source in node.all_input_nodes if source in values}
        if node in found.lost:
            kept = _kept_axes(found, node, inputs)
            values[node] = Value(*kept, None, "", found.names.get(node, "a graph break"), found.lost[node])
        elif not inputs or node.op == "output":
            continue
        else:
            values[node] = _value(found, node, inputs)
        if node.op.startswith("call") and found.is_tensor(node):
            fields[node] = _field(found, node, values[node])
    return Followed(found, values, fields)


def _value(found: Look, node: fx.Node, inputs: dict[fx.Node, Value]) -> Value:
    source, first = next(iter(inputs.items()))
    if is_identity(node):
        if source in found.lost and source.op == "placeholder":  # it was not followed itself
            return replace(first, since=found.names[node])
        own = found.within.get(source) is node
        return first if own or first.boxes is None else replace(first, note="" if first.axes else first.note)
    unbounded = [value for value in inputs.values() if value.boxes is None]
    axes, batch = _kept_axes(found, node, inputs)
    try:
        effect = _effect(found, node, inputs)
    except UnsupportedError as error:
        if unbounded:
            return replace(unbounded[0], axes=axes, batch=batch, note="")
        return Value(axes, batch, None, "", found.names[node], str(error))
    if unbounded:
        return replace(unbounded[0], axes=effect.axes, batch=effect.batch, note="")
    return _bounded(found, node, effect, inputs)


def is_identity(node: fx.Node) -> bool:
    """A mask, or what stands for the output of a layer."""
    ops = torch.ops.backdrop
    return node.target in (ops.mask, ops.mask.default, ops.output, ops.output.default)


def _kept_axes(found: Look, node: fx.Node, inputs: Mapping[fx.Node, Value]) -> tuple[Axes, int | None]:
    """Where the positions of a result may be of which nothing is known: where they were, if it has as many axes."""
    after = found.shape(node)
    for source, value in inputs.items():
        before = found.shape(source)
        if before is None or after is None or len(before) != len(after):
            continue
        if all(after[axis] in (1, before[axis]) for axis in value.axes):
            return value.axes, value.batch
    return (), None


class Effect(NamedTuple):
    """What a call does to the positions."""

    axes: Axes  # of the result
    batch: int | None
    taps: Mapping[
        fx.Node, Sequence[Taps | None]
    ]  # along each axis, of each input that has positions; None: the same cell
    note: str = ""


def _effect(found: Look, node: fx.Node, inputs: Mapping[fx.Node, Value]) -> Effect:
    """Ask the rule of a call, which is asked backwards, for those axes of the result that come from the inputs' own."""
    if not any(value.axes for value in inputs.values()):
        bounded = all(value.boxes is not None for value in inputs.values())
        if bounded:
            return Effect((), next(iter(inputs.values())).batch, dict.fromkeys(inputs, ()))
        raise UnsupportedError("its input has no positions")
    shape = found.shape(node)
    if shape is None:
        raise UnsupportedError("it returns something that is no tensor")
    shapes = {source: each for source in node.all_input_nodes if (each := found.shape(source)) is not None}
    tuples = frozenset(source for source in shapes if not found.is_tensor(source))
    reasons: list[str] = []
    samples = (found.shape(found.input) or (1,))[0]
    for batch, *axes in _candidates(shape, shapes, inputs):
        inner = max(1, shape[batch] // samples)
        call = Call(node, shape, (batch, *axes), shapes, "frozen", inner, tuples, reading=True)
        try:
            step = find(call)
            _check(call, step, inputs)
        except UnsupportedError as error:
            reasons.append(str(error))
            continue
        taps = {
            source: [_taps(step.inputs[source], i) for i in range(len(axes))]
            for source, value in inputs.items()
            if value.axes and source in step.inputs
        }
        return Effect(tuple(axes), batch, taps, COUPLED if step.couples == "sample" else "")
    raise UnsupportedError(_reason(found, node, reasons, inputs))


def _candidates(
    shape: tuple[int, ...], shapes: Mapping[fx.Node, tuple[int, ...]], inputs: Mapping[fx.Node, Value]
) -> Iterator[tuple[int, ...]]:
    """Axes of a result, that of samples first, that may be those of its inputs; the likely ones first."""
    seen: set[tuple[int, ...]] = set()
    for source, value in inputs.items():
        if value.axes and value.batch is not None:
            more = len(shape) - len(shapes[source])
            for shift in (0, more):
                same = tuple(axis + shift for axis in (value.batch, *value.axes))
                if same not in seen and all(0 <= axis < len(shape) for axis in same):
                    seen.add(same)
                    yield same
    count = max(len(value.axes) for value in inputs.values())
    if all(value.batch is None for value in inputs.values()):
        return
    for order in itertools.permutations(range(len(shape)), count + 1):
        if order not in seen:
            yield order


def _check(call: Call, step: Step, inputs: Mapping[fx.Node, Value]) -> None:
    """Whether a step reads samples and positions of all inputs where these are."""
    taps = {source: step.inputs[source].axes for source in inputs if source in step.inputs}
    own = {source: (inputs[source].batch, *inputs[source].axes) for source in taps}
    bounded = {source for source in taps if inputs[source].boxes is not None}
    if not bounded and any(taps[source] == own[source] for source in taps):
        return
    if any(taps[source] != own[source] and None not in taps[source] for source in taps):
        raise UnsupportedError(ELSEWHERE)
    for source in bounded or taps:
        if None in taps[source]:
            one = all(call.shapes[source][axis] == 1 for axis in inputs[source].axes)
            raise UnsupportedError(WHOLE if one else ATTENTION if call.name in PRODUCTS else PARAMETERS)


def _taps(tap: Tap, i: int) -> Taps | None:
    """The cells that a call reads along one axis of positions; None: the same cell."""
    if tap.cells:
        return tap.cells[i]
    slide = tap.slides[i] if tap.slides else None
    if slide is None or slide == Slide():
        return None
    outside: Any = tap.fill if isinstance(tap.fill, str) else "constant"
    if slide.up == 1:
        kernel = (slide.high - slide.low) // slide.dilation + 1
        return window(kernel, slide.down, -slide.low, slide.dilation, outside)
    return between(slide.down, slide.low, slide.high, slide.up)._replace(outside=outside)


def _bounded(found: Look, node: fx.Node, effect: Effect, inputs: dict[fx.Node, Value]) -> Value:
    shape = found.shape(node) or ()
    branches: dict[fx.Node, tuple[Box, ...]] = {}
    for source, taps in effect.taps.items():
        branches[source] = tuple(
            tuple(
                reach if tap is None else reach.through(tap, shape[axis])
                for reach, tap, axis in zip(box, taps, effect.axes, strict=True)
            )
            for box in inputs[source].boxes or ()
        )
    boxes = _merged(box for several in branches.values() for box in several)
    notes = [effect.note, _on_branches(found, branches), "" if effect.axes else next(iter(inputs.values())).note]
    return Value(effect.axes, effect.batch, boxes, "; ".join(filter(None, notes)))


def _merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """As few boxes as possible: those that are empty at the same positions are one, and mostly that is nowhere.

    A box that is empty along one axis is no part of the footprint, whatever it has along the other.
    """
    alike: dict[tuple[Any, ...], list[Box]] = {}
    for box in boxes:
        empty = tuple(tuple((reach.first > reach.last).nonzero().flatten().tolist()) for reach in box)
        alike.setdefault(empty, []).append(box)
    return tuple(tuple(map(hull, zip(*same, strict=True))) for same in alike.values())


def _on_branches(found: Look, branches: dict[fx.Node, tuple[Box, ...]]) -> str:
    ideal = {source: _ideal(boxes) for source, boxes in branches.items()}
    sizes = {source: tuple(reach.size for reach in box) for source, box in ideal.items()}
    strides = {tuple(reach.stride for reach in box) for box in ideal.values()}
    notes = []
    if len(set(sizes.values())) > 1:
        largest = sorted(sizes, key=lambda source: -math.prod(sizes[source]))
        named = [f"{by(sizes[source])} by {_name_of(found, source)}" for source in largest[:NAMED]]
        named += ["..."] if len(largest) > NAMED else []
        notes.append(f"the largest of {len(sizes)} branches ({', '.join(named)})")
    if len(strides) > 1:
        notes.append(f"the strides of its branches differ ({', '.join(map(by, sorted(strides)))})")
    return "; ".join(notes)


def _name_of(found: Look, node: fx.Node) -> str:
    return "the input" if node.op == "placeholder" else found.names[node]


def _ideal(boxes: Sequence[Box]) -> Box:
    return tuple(map(hull, zip(*boxes, strict=True)))


def _field(found: Look, node: fx.Node, value: Value) -> Field:
    shape, name = found.shape(node) or (), found.names[node]
    lattice = tuple(shape[axis] for axis in value.axes)
    about = (name, found.kinds[node], shape, lattice)
    if value.boxes is None:
        note = value.reason if value.since == name else f"unbounded since {value.since}: {value.reason}"
        return Field(*about, None, None, None, None, note)
    box = _ideal(value.boxes)
    independent = math.prod((n - 1) // reach.spacing() + 1 for n, reach in zip(lattice, box, strict=True))
    size, start = tuple(reach.size for reach in box), tuple(reach.start for reach in box)
    stride = tuple(reach.stride for reach in box)
    return Field(*about, size, stride, start, independent, value.note, value.boxes)


def _range(reach: Reach, position: int) -> range:
    first, last = int(reach.first[position]), int(reach.last[position])
    return range(first, last + 1) if first < NOTHING else range(0)


def _reason(found: Look, node: fx.Node, reasons: Sequence[str], inputs: Mapping[fx.Node, Value]) -> str:
    """Why no axes of the result are those of the inputs."""
    called, before, after = found.kinds[node], found.shape(next(iter(inputs))) or (), found.shape(node) or ()
    if len(after) < len(before) and math.prod(after) < math.prod(before):
        picks = called in ("getitem", "select")
        return "it takes one position out of a map" if picks else f"it takes the {called} over all positions"
    if len(after) < len(before):
        return "it reshapes the positions"
    return reasons[0] if reasons else f"there is no rule for {called}"
