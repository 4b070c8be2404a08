"""Rules for calls that take cells, or put them, by where they lie: slices, indices, shifts, scattering."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from backdrop.graph.rules import of_several, register, several, unless_along
from backdrop.graph.sliding import crop, named
from backdrop.graph.table import Call, Slide, Step, Tap, UnsupportedError, Where, register_rule
from backdrop.graph.trace import set_cells


def _getitem(call: Call) -> Step:
    source = call.source
    if source in call.tuples:
        return Step({source: Tap(of_several(call), inner=call.inner)}, inner=call.inner)
    index = call.node.args[1]
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    if any(isinstance(part, (fx.Node, list, bool)) for part in parts):
        return _gather_rows(call, parts)
    before = call.before
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(before) - used)
    else:
        parts += [slice(None)] * (len(before) - used)
    into: dict[int, int] = {}  # axis of the result: axis of the input
    axis = result = 0
    cuts: dict[int, slice] = {}
    for part in parts:
        if part is None:
            result += 1
        elif isinstance(part, int):
            axis += 1
        elif isinstance(part, slice) and all(
            isinstance(v, (int, type(None))) for v in (part.start, part.stop, part.step)
        ):
            into[result], cuts[result] = axis, part
            axis, result = axis + 1, result + 1
        else:
            raise UnsupportedError("its arguments depend on the data")
    if any(each not in into for each in call.axes):
        raise UnsupportedError("it makes a new axis where the mask runs")
    axes = tuple(into[each] for each in call.axes)
    first = cuts[call.axes[0]].indices(before[axes[0]])
    if first != (0, before[axes[0]], 1):
        raise UnsupportedError("it takes some of the samples")
    slides: list[Slide | None] = []
    for each, at in zip(call.axes[1:], axes[1:], strict=True):
        start, _, step = cuts[each].indices(before[at])
        slides.append(Slide(step, start, start))

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        index, result = list[Any](), 0
        for part in parts:
            if result in call.axes and isinstance(part, slice):
                index.append(slice(None, None, part.step))
            else:
                index.append(part)
            result += not isinstance(part, int)
        found: Tensor = args[0][tuple(index)]
        return found

    taken = call.moved(axes, run=run)
    taken.inputs[source] = taken.inputs[source]._replace(slides=tuple(slides))
    return taken


def _gather_rows(call: Call, parts: Sequence[Any]) -> Step:
    """x[:, index] with one tensor of indices that is the same for all samples, or x[torch.arange(len(x)), index]."""
    if call.axes == (0,) and call.inner == 1 and len(parts) > 1 and _counts(parts[0], call.before[0]):
        return _cell_of_each(call, parts)
    at = [i for i, part in enumerate(parts) if not (isinstance(part, slice) and part == slice(None))]
    index = parts[at[0]] if len(at) == 1 else None
    listed = isinstance(index, list) and all(type(cell) is int for cell in index)
    if not listed and (not isinstance(index, fx.Node) or index not in call.shapes):
        raise UnsupportedError("it looks up cells by an index")
    position, ndim = at[0], len(call.shapes[index]) if isinstance(index, fx.Node) else 1
    if any(position <= axis < position + ndim for axis in call.axes):
        raise UnsupportedError("it looks up samples or positions by an index")
    if len(call.before) - 1 + ndim != call.ndim:
        raise UnsupportedError("it looks up cells by an index")
    return call.moved(tuple(axis if axis < position else axis - ndim + 1 for axis in call.axes))


def _counts(index: Any, number: int) -> bool:
    """Whether an index is 0, 1, ... for so many samples."""
    return isinstance(index, fx.Node) and index.target is torch.arange and index.args in ((number,), (0, number))


def _cell_of_each(call: Call, parts: Sequence[Any]) -> Step:
    """One cell of each sample, such as the last word of each text."""
    index = parts[1]
    if isinstance(index, fx.Node) and call.shapes.get(index) != call.before[:1]:
        raise UnsupportedError("it looks up cells by an index")
    if not isinstance(index, (fx.Node, int)) or any(part != slice(None) for part in parts[2:]):
        raise UnsupportedError("it looks up cells by an index")

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x, given = args
        taken: Tensor = x[torch.arange(where.rows, device=x.device), given[1]]
        return taken

    inputs = {parts[0]: Tap((None,)), call.source: Tap((0,))}
    return Step(inputs | ({index: Tap((0,))} if isinstance(index, fx.Node) else {}), run)


def _set_cells(call: Call) -> Step:
    """x[..., 2:5] = values along other axes than those that are followed, or x[x < 0] = number."""
    index, value = call.node.args[1:3]
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    inputs = {call.source: Tap(call.axes, inner=call.inner)}
    if len(parts) == 1 and isinstance(parts[0], fx.Node):
        return _set_where(call, parts[0], value)
    if not all(part is Ellipsis or _is_constant(part) for part in parts):
        raise UnsupportedError("it writes to cells by an index")
    used = sum(part is not None and part is not Ellipsis for part in parts)
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (call.ndim - used)
    into: dict[int, int] = {}  # axis of what is written over: axis of x
    axis = result = 0
    for part in parts:
        if isinstance(part, slice):
            if axis in call.axes and part.indices(call.shape[axis]) != (0, call.shape[axis], 1):
                what = "samples" if axis == call.axes[0] else "positions"
                raise UnsupportedError(f"it writes to some of the {what}")
            into[axis], result = result, result + 1
        elif part is None:
            result += 1
            continue
        axis += 1
    if any(axis not in into for axis in call.axes):
        raise UnsupportedError("it writes to one of the samples or positions")
    if isinstance(value, fx.Node) and value in call.shapes:
        shape = call.shapes[value]
        back = [into[axis] - result + len(shape) for axis in call.axes]
        broadcast = [b < 0 or (shape[b] == 1 != call.shape[a]) for a, b in zip(call.axes, back, strict=True)]
        axes = tuple(None if none else b for b, none in zip(back, broadcast, strict=True))
        tap = Tap(axes, inner=call.inner)
        if inputs.get(value, tap) != tap:
            raise UnsupportedError("it writes a value into itself")
        inputs[value] = tap
    return Step(inputs, inner=call.inner, repeats=True)


def _set_where(call: Call, index: fx.Node, value: Any) -> Step:
    example = index.meta.get("example_value")
    shape = call.shapes.get(index, ())
    several_values = isinstance(value, fx.Node) and call.shapes.get(value, (2,)) != ()
    if getattr(example, "dtype", None) is not torch.bool or several_values or shape != call.shape[: len(shape)]:
        raise UnsupportedError("it writes to cells by an index")
    inputs = {call.source: Tap(call.axes, inner=call.inner)}
    inputs[index] = Tap(tuple(axis if axis < len(shape) else None for axis in call.axes), inner=call.inner)
    if isinstance(value, fx.Node):
        inputs[value] = Tap(call.whole())
    return Step(inputs, inner=call.inner)


def _is_constant(part: Any) -> bool:
    if isinstance(part, slice):
        return all(isinstance(end, (int, type(None))) for end in (part.start, part.stop, part.step))
    return part is None or type(part) is int


def _index_select(call: Call) -> Step:
    call.refuse_along(call.argument(1, "dim"))
    return call.same()


def _narrow(call: Call) -> Step:
    dim, start = call.argument(1, "dim"), call.argument(2, "start")
    dim %= call.ndim
    if dim not in call.axes[1:]:
        call.refuse_along(dim)
        return call.same()
    if not isinstance(start, int):
        raise UnsupportedError("its arguments depend on the data")
    start += call.before[dim] if start < 0 else 0
    step = call.same(run=lambda args, kwargs, where: args[0] if args else kwargs["input"])
    slides = tuple(Slide(1, start, start) if axis == dim else None for axis in call.axes[1:])
    step.inputs[call.source] = step.inputs[call.source]._replace(slides=slides)
    return step


def _select(call: Call) -> Step:
    dim = call.argument(1, "dim") % (call.ndim + 1)
    return call.moved(tuple(axis + (axis >= dim) for axis in call.axes))


def _take_along(call: Call) -> Step:
    first = call.name == "gather"
    dim, index = (
        call.argument(1 if first else 2, "dim"),
        call.argument(2 if first else 1, "index" if first else "indices"),
    )
    return _by_index(call, dim, index)


def _by_index(call: Call, dim: Any, *others: Any) -> Step:
    """Calls along one axis, by an index that has as many axes as the first argument."""
    if not isinstance(dim, int):
        raise UnsupportedError("it mixes samples")
    call.refuse_along(dim)
    inputs = {}
    for source in (call.source, *others):
        if not isinstance(source, fx.Node) or source not in call.shapes:
            continue
        shape = call.shapes[source]
        if shape and (len(shape) != call.ndim or any(shape[axis] != call.shape[axis] for axis in call.axes)):
            raise UnsupportedError("it takes some of the samples" if call.axes == (0,) else "its sizes differ")
        tap = Tap(call.axes if shape else call.whole(), inner=call.inner if shape else 1)
        inputs[source] = tap
    return Step(inputs, inner=call.inner, repeats=True)


def _scatter(call: Call) -> Step:
    names = ("input", "dim", "index", "src")
    given = named(call.node.args, dict(call.node.kwargs), names)
    return _by_index(call, given.get("dim"), given.get("index"), given.get("src", given.get("value")))


def _index_add(call: Call) -> Step:
    """Rows of one along an axis are added to those of the other, or replace them: the index has one axis."""
    names = ("input", "dim", "index", "source")
    given = named(call.node.args, dict(call.node.kwargs), names)
    dim, index = given.get("dim"), given.get("index")
    step = _by_index(call, dim, given.get("source", given.get("value")))
    if isinstance(index, fx.Node):
        if index in step.inputs:
            raise UnsupportedError("it takes one value in several places")
        step.inputs[index] = Tap(call.whole())
    return step


def _flip(call: Call) -> Step:
    return unless_along(call, several(call, call.node.kwargs.get("dims")))


def _roll(call: Call) -> Step:
    return unless_along(call, call.argument(2, "dims"))


def _turned_over(axis: int) -> Callable[[Call], Step]:
    def rule(call: Call) -> Step:
        return unless_along(call, axis)

    return rule


def _rot90(call: Call) -> Step:
    return unless_along(call, call.argument(2, "dims", (0, 1)))


def _diff(call: Call) -> Step:
    """Of neighbours along one axis."""
    dim = call.argument(2, "dim", -1) % call.ndim
    more = [each for each in (call.argument(3, "prepend"), call.argument(4, "append")) if each is not None]
    if dim not in call.axes:
        step = call.same()
        for source in more:
            step.inputs[source] = Tap(call.axes, inner=call.inner)
        step.repeats = True
        return step
    if dim == call.axes[0] or more:
        call.refuse_along(dim)
    number = call.argument(1, "n", 1)
    step = call.same()
    slides = tuple(Slide(1, 0, number) if axis == dim else None for axis in call.axes[1:])
    step.inputs[call.source] = step.inputs[call.source]._replace(slides=slides)
    return step


def _unfold(call: Call) -> Step:
    """Tensor.unfold: windows along one axis, whose cells are a new last one."""
    dim = call.argument(1, "dimension") % (call.ndim - 1)
    size, stride = call.argument(2, "size"), call.argument(3, "step")
    call.refuse_along(-1)
    if dim == call.axes[0]:
        raise UnsupportedError("it mixes samples")
    step = call.moved(call.axes)
    if dim in call.axes:
        slides = tuple(Slide(stride, 0, size - 1) if axis == dim else None for axis in call.axes[1:])
        step.inputs[call.source] = step.inputs[call.source]._replace(slides=slides)
    return step


def _repeat_interleave(call: Call) -> Step:
    """Every cell several times, one after the other."""
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if dim is None:
        raise UnsupportedError("it mixes samples")
    dim %= call.ndim
    if dim not in call.axes:
        return call.same()
    if dim == call.axes[0]:
        raise UnsupportedError("it repeats samples")
    if not isinstance(times, int):
        raise UnsupportedError("it repeats positions, each as often as the data say")

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        ups = [times if axis == dim else 1 for axis in call.axes[1:]]
        return crop(x.repeat_interleave(times, dim), where, list(zip(call.axes[1:], ups, strict=True)))

    step = call.same(run=run)
    slides = tuple(Slide(up=times) if axis == dim else None for axis in call.axes[1:])
    step.inputs[call.source] = step.inputs[call.source]._replace(slides=slides)
    return step


def _max_unpool(call: Call) -> Step:
    """Samples only: an index counts the cells of a whole map."""
    if len(call.axes) > 1:
        raise UnsupportedError("it puts cells by an index where positions are masked")
    call.refuse_along(1)
    index = call.argument(1, "indices")
    return Step({source: Tap(call.axes, inner=call.inner) for source in (call.source, index)}, inner=call.inner)


def _bags(call: Call) -> Step:
    """embedding_bag with one bag of each sample."""
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
    given = named(call.node.args, dict(call.node.kwargs), (*names, "per_sample_weights"))
    if (
        call.axes != (0,)
        or len(call.before) != 2
        or given.get("scale_grad_by_freq")
        or given.get("offsets") is not None
    ):
        raise UnsupportedError("its bags are not one for each sample")
    step = call.same()
    for source in (given["input"], given.get("per_sample_weights")):
        if isinstance(source, fx.Node):
            step.inputs[source] = Tap(call.axes, inner=call.inner)
    return step


register_rule(operator.getitem)(_getitem)
register_rule("__getitem__")(_getitem)
register_rule(set_cells)(_set_cells)
register(_index_select, "index_select")
register(_narrow, "narrow")
register(_select, "select")
register(_take_along, "gather", "take_along_dim")
register(_scatter, "scatter", "scatter_add", "scatter_reduce")
register(_index_add, "index_add", "index_copy", "index_fill", "index_reduce")
register(_flip, "flip")
register(_roll, "roll")
register(_turned_over(1), "fliplr")
register(_turned_over(0), "flipud")
register(_rot90, "rot90")
register(_diff, "diff")
register_rule("unfold")(_unfold)
register(_repeat_interleave, "repeat_interleave")
for _function in (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d):
    register_rule(_function)(_max_unpool)
register_rule(F.embedding_bag)(_bags)
