"""Rules for calls that work on every cell by itself, along some axes, or on the shape alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from backdrop.graph.running import running_batch_norm
from backdrop.graph.sliding import crop, named
from backdrop.graph.table import Axes, Call, Slide, Step, Tap, UnsupportedError, Where, register_rule
from backdrop.graph.trace import drop, itself

LARGEST_CELL = 4  # cells along an axis that one position of a sequence may become
STATISTICS = (
    "its batch statistics couple all samples{}; "
    "statistics='sampled' or 'frozen' skips below it, with an estimated gradient"
)
OVER_SPACE = (
    "it takes statistics over space, which couples all positions of a sample; statistics='sampled' or 'frozen' skips "
    "below it, with an estimated gradient"
)


def _elementwise(call: Call) -> Step:
    if call.node.kwargs.get("out") is not None:
        raise UnsupportedError("it writes into another tensor")
    return call.elementwise()


def _relu(call: Call) -> Step:
    return call.elementwise("relu")


def _dropout(call: Call) -> Step:
    """Also under masks of positions where it does nothing."""
    training = bool(call.argument(2, "training", True))
    return _drawn(call, "dropout", training and call.argument(1, "p", 0.5) != 0)


def _rrelu(call: Call) -> Step:
    return _drawn(call, "rrelu", bool(call.argument(3, "training", False)))


def _drawn(call: Call, name: str, draws: bool) -> Step:
    if call.again and draws:
        raise UnsupportedError(
            f"{name} would draw new numbers when windows are computed again; move it behind the mask"
        )
    return call.elementwise()


def _batch_norm(call: Call) -> Step:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = named(call.node.args, dict(call.node.kwargs), names)
    if call.axes[0] != 0 or 1 in call.axes[1:]:
        raise UnsupportedError("the mask runs along its channels")
    batch = bool(given.get("training")) or given.get("running_mean") is None
    if batch and call.statistics == "exact" and call.node.target is not running_batch_norm:
        raise UnsupportedError(STATISTICS.format(" and positions" if len(call.axes) > 1 else ""))
    if batch and call.inner != 1:
        raise UnsupportedError("it takes statistics over rows of which several belong to one sample")
    step = call.same()
    step.epilogue = "norm"
    step.couples = "batch" if batch else ""
    return step


def _sample_norm(call: Call) -> Step:
    """GroupNorm, and InstanceNorm without running statistics."""
    if call.axes[0] != 0 or 1 in call.axes[1:]:
        raise UnsupportedError("the mask runs along its channels")
    if len(call.axes) > 1:
        if call.statistics == "exact":
            raise UnsupportedError(OVER_SPACE)
        if call.inner != 1 and not call.reading:
            raise UnsupportedError("it takes statistics over rows of which several belong to one sample")
        step = call.same()
        step.couples = "sample"
        return step
    return call.same()


def _instance_norm(call: Call) -> Step:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    given = named(call.node.args, dict(call.node.kwargs), names)
    if given.get("running_mean") is not None and not call.reading:
        raise UnsupportedError("its running statistics would not see all samples at once")
    return _sample_norm(call)


def _layer_norm(call: Call) -> Step:
    over = call.argument(1, "normalized_shape")
    if isinstance(over, fx.Node):
        raise UnsupportedError("its arguments depend on the data")
    count = len(over) if isinstance(over, (tuple, list)) else 1
    if any(axis >= call.ndim - count for axis in call.axes[1:]):
        if call.reading:
            step = call.same()
            step.couples = "sample"
            return step
        raise UnsupportedError("it takes statistics over space, which couples all positions of a sample")
    call.refuse_along(*range(-count, 0))
    return call.same()


def _linear(call: Call) -> Step:
    call.refuse_along(-1)
    return call.same()


def _along(position: int, default: Any = None) -> Callable[[Call], Step]:
    """Calls that work along one axis, or some, of their first argument, and keep its shape."""

    def rule(call: Call) -> Step:
        dims = call.argument(position, "dim", call.node.kwargs.get("dims", default))
        return unless_along(call, dims)

    return rule


def unless_along(call: Call, dims: Any) -> Step:
    if dims is None:
        raise UnsupportedError("it mixes samples")
    call.refuse_along(*(dims if isinstance(dims, (tuple, list)) else (dims,)))
    return call.same()


def several(call: Call, named: Any) -> Any:
    """Axes that are given in a list or, as some methods have it, one by one; or by name."""
    given: Any = call.node.args[1:]
    return given if len(given) > 1 else given[0] if given else named


def _over_channels(call: Call) -> Step:
    call.refuse_along(1)
    return call.same()


def _reduce(call: Call) -> Step:
    """Mean, sum, max and the like over some axes."""
    ndim = len(call.before)
    dims = call.argument(1, "dim", call.node.kwargs.get("axis"))
    if isinstance(dims, fx.Node):
        return call.elementwise()
    if call.name == "count_nonzero":
        dims = several(call, dims)
    dims = None if isinstance(dims, bool) or dims == () or dims == [] else dims
    keep = call.ndim == ndim
    gone = sorted(
        {axis % ndim for axis in (range(ndim) if dims is None else dims if isinstance(dims, (tuple, list)) else [dims])}
    )
    left = list(range(ndim)) if keep else [axis for axis in range(ndim) if axis not in gone]
    axes = tuple(left[axis] for axis in call.axes)
    if axes[0] in gone:
        raise UnsupportedError("it mixes samples")
    if set(axes) & set(gone):
        same = f"it takes the {call.name} over all positions"
        raise UnsupportedError(same if call.reading else "it takes the same value from all positions")
    return call.moved(axes)


def _permute(call: Call) -> Step:
    order = several(call, call.node.kwargs.get("dims"))
    return _reordered(call, [axis % call.ndim for axis in order])


def _transpose(call: Call) -> Step:
    order = list(range(call.ndim))
    names = ("dim0", "dim1") if "dim0" in call.node.kwargs else ("axis0", "axis1")
    a, b = call.argument(1, names[0]), call.argument(2, names[1])
    order[a], order[b] = order[b], order[a]
    return _reordered(call, order)


def _reverse(call: Call) -> Step:
    return _reordered(call, list(range(call.ndim))[::-1])


def _last_two(call: Call) -> Step:
    order = list(range(call.ndim))
    order[-1], order[-2] = order[-2], order[-1]
    return _reordered(call, order)


def _movedim(call: Call) -> Step:
    source, target = call.argument(1, "source"), call.argument(2, "destination")
    moved = torch.empty(tuple(range(2, 2 + call.ndim)), device="meta").movedim(source, target)
    return _reordered(call, [size - 2 for size in moved.shape])


def _getattr(call: Call) -> Step:
    name = call.node.args[1]
    if name in ("T", "mT"):
        return _reverse(call) if name == "T" else _last_two(call)
    if name in ("data", "real", "imag"):
        return call.elementwise()
    raise UnsupportedError(f"there is no rule for .{name}")


def _reordered(call: Call, order: Sequence[int]) -> Step:
    return call.moved(tuple(order[axis] for axis in call.axes))


def reshaped(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which axes of one shape make which of the other: groups with as many numbers, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and j < len(after) and before[i] == after[j]:
            groups.append(([i], [j]))
            i, j = i + 1, j + 1
        elif i < len(before) and before[i] == 1:
            groups.append(([i], []))
            i += 1
        elif j < len(after) and after[j] == 1:
            groups.append(([], [j]))
            j += 1
        else:
            left, right = [i], [j]
            m, n = before[i], after[j]
            i, j = i + 1, j + 1
            while m != n:
                if m < n:
                    left.append(i)
                    m *= before[i]
                    i += 1
                else:
                    right.append(j)
                    n *= after[j]
                    j += 1
            groups.append((left, right))
    return groups


def _reshape(call: Call) -> Step:
    """Also flatten, squeeze and the like. Samples may share an axis with others if they vary slowest, and so may
    positions: then there are several cells for each of them, as in a pixel shuffle."""
    before, after = call.before, call.shape
    bits = any(isinstance(given, torch.dtype) for given in (*call.node.args[1:], *call.node.kwargs.values()))
    if bits or 0 in before or 0 in after or math.prod(before) != math.prod(after):
        raise UnsupportedError("it changes how numbers are stored")
    groups = reshaped(before, after)
    axes: list[int | None] = []
    slides: list[Slide | None] = []
    ups: dict[int, int] = {}  # axes of the result that have so many cells for each position of the input
    inner = 1
    for number, axis in enumerate(call.axes):
        left, right = next((group for group in groups if axis in group[1]), ([], []))
        if number == 0:
            samples = after[axis] // call.inner
            if not left or axis != right[0] or before[left[0]] % samples:
                raise UnsupportedError("it mixes samples with something else along one axis")
            inner = before[left[0]] // samples
            axes.append(left[0])
            continue
        if not left or 1 not in (len(left), len(right)) or axis != right[0] or set(right[1:]) & set(call.axes):
            raise UnsupportedError("it reshapes the positions")
        up, down = math.prod(before[a] for a in left[1:]), math.prod(after[a] for a in right[1:])
        if up > LARGEST_CELL and len(call.axes) == 2:  # a map that is made a sequence
            raise UnsupportedError("it reshapes the positions")
        axes.append(left[0])
        slides.append(Slide(down, 0, down - 1, up) if max(up, down) > 1 else None)
        if up > 1:
            ups[axis] = up

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        x, sizes = _first_of(args, kwargs), _sizes(call, where)
        for axis, up in ups.items():
            taken = axes[call.axes.index(axis)]
            assert taken is not None
            sizes[axis] = x.shape[taken] * up
        return crop(x.reshape(sizes), where, [(axis, ups.get(axis, 1)) for axis in call.axes[1:]] if ups else [])

    step = call.moved(tuple(axes), run=run, inner=inner)
    if any(slides):
        step.inputs[call.source] = step.inputs[call.source]._replace(slides=tuple(slides))
    return step


def _prelu(call: Call) -> Step:
    """Its weights lie along the second axis, unlike what is broadcast."""
    if call.argument(1, "weight") in call.shapes and math.prod(call.shapes[call.argument(1, "weight")]) > 1:
        call.refuse_along(1)
    return call.same()


def _reshape_as(call: Call) -> Step:
    """The other tensor gives its shape alone."""
    step = _reshape(call)
    step.inputs = {call.source: step.inputs[call.source]}
    return step


def _resized(call: Call, function: Callable[[Tensor, list[int]], Any]) -> Callable[..., Any]:
    """Calls that are given a size: on parts it is another."""

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Any:
        return function(_first_of(args, kwargs), _sizes(call, where))

    return run


def _first_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    assert isinstance(x, Tensor)
    return x


def _sizes(call: Call, where: Where) -> list[int]:
    sizes = list(call.shape)
    sizes[call.axes[0]] = where.rows * call.inner
    for axis, size in zip(call.axes[1:], where.size, strict=True):
        sizes[axis] = size
    return sizes


def _expand(call: Call) -> Step:
    step = call.elementwise()
    step.run = _resized(call, lambda x, sizes: x.expand(sizes))
    return step


def _repeat(call: Call) -> Step:
    more = call.ndim - len(call.before)
    axes = tuple(axis - more for axis in call.axes)
    if len(axes) == 1 and call.inner == 1 and (axes[0] < 0 or call.before[axes[0]] == 1 != call.shape[call.axes[0]]):
        times = [n // (call.before[i - more] if i >= more else 1) for i, n in enumerate(call.shape)]

        def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
            times[call.axes[0]] = where.rows
            repeated: Tensor = args[0].repeat(times)
            return repeated

        return Step({call.source: Tap((None,))}, run)
    if any(axis < 0 or call.before[axis] != call.shape[axis + more] for axis in axes):
        raise UnsupportedError("it repeats samples or positions")
    return call.moved(axes)


def _cat(call: Call) -> Step:
    return _joined(call, call.argument(1, "dim", call.node.kwargs.get("axis", 0)))


def _along_its(axis: int) -> Callable[[Call], Step]:
    """hstack and the like, of tensors that have this axis."""

    def rule(call: Call) -> Step:
        if any(len(shape) <= axis for shape in call.shapes.values()):
            raise UnsupportedError("it gives what it joins more axes")
        return _joined(call, axis)

    return rule


def _joined(call: Call, dim: int) -> Step:
    if dim % call.ndim == call.axes[0]:
        raise UnsupportedError("it joins samples")
    if dim % call.ndim in call.axes:
        raise UnsupportedError(f"it joins maps along a {call.followed} axis")
    return Step({source: Tap(call.axes, inner=call.inner) for source in call.tensors}, inner=call.inner, repeats=True)


def _stack(call: Call) -> Step:
    dim = call.argument(1, "dim", call.node.kwargs.get("axis", 0)) % call.ndim
    if dim in call.axes:
        raise UnsupportedError("it joins along a masked axis")
    axes = tuple(axis - (axis > dim) for axis in call.axes)
    return Step({source: Tap(axes, inner=call.inner) for source in call.tensors}, inner=call.inner, repeats=True)


def _cross(call: Call) -> Step:
    dim = call.argument(2, "dim", -1 if "linalg" in call.name else None)
    if dim is None:
        raise UnsupportedError("it takes the first axis of three cells")
    call.refuse_along(dim)
    return call.elementwise()


def _split(position: int) -> Callable[[Call], Step]:
    def rule(call: Call) -> Step:
        call.refuse_along(call.argument(position, "dim", 0))
        return call.same()

    return rule


def _unbind(call: Call) -> Step:
    dim = call.argument(1, "dim", 0) % (call.ndim + 1)
    return call.moved(tuple(axis + (axis >= dim) for axis in call.axes))


def _matmul(first: int = 0) -> Callable[[Call], Step]:
    """Products of matrices: rows come from the left, columns from the right, and what is before them from both."""

    def rule(call: Call) -> Step:
        left = call.argument(first, "input" if not first else "batch1")
        right = call.argument(first + 1, "other" if not first else "batch2")
        if right is None:
            right = call.node.kwargs.get("mat2")
        inputs: dict[fx.Node, Tap] = {}
        for side, source in enumerate((left, right)):
            if not isinstance(source, fx.Node):
                raise UnsupportedError("it multiplies something that is no tensor")
            shape, axes = call.shapes[source], list[int | None]()
            if len(shape) == 1:
                if side == 0 or len(call.shapes[left]) < 2:
                    raise UnsupportedError("it mixes samples")
                axes = [None] * len(call.axes)
            else:
                vector = len(call.shapes[right]) == 1
                for axis in call.axes:
                    back = axis - call.ndim - (1 if vector else 0)
                    if back == -1:
                        axes.append(len(shape) - 1 if side == 1 else None)
                    elif back == -2:
                        axes.append(len(shape) - 2 if side == 0 else None)
                    else:
                        at = back + len(shape)
                        axes.append(None if at < 0 or (shape[at] == 1 and call.shape[axis] != 1) else at)
            tap = Tap(tuple(axes), inner=call.inner)
            if source in inputs and inputs[source] != tap:
                raise UnsupportedError("it multiplies a value with itself")
            inputs[source] = tap
        if first:
            added, tap = call.source, Tap(call._broadcast(call.shapes[call.source]), inner=call.inner)
            if inputs.get(added, tap) != tap:
                raise UnsupportedError("it multiplies a value with itself")
            inputs[added] = tap
        return Step(inputs, inner=call.inner, repeats=True)

    return rule


def _einsum(call: Call) -> Step:
    equation = call.node.args[0]
    operands: Any = call.node.args[1:]
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or not all(isinstance(source, fx.Node) for source in operands):
        raise UnsupportedError("its equation is no text")
    given, result = _letters(equation, [len(call.shapes[source]) for source in operands])
    inputs: dict[fx.Node, Tap] = {}
    for letters, source in zip(given, operands, strict=True):
        shape = call.shapes[source]
        if any(letters.count(result[axis]) > 1 for axis in call.axes):
            raise UnsupportedError("it takes a diagonal")
        axes: Axes = tuple(
            letters.index(result[axis])
            if result[axis] in letters and shape[letters.index(result[axis])] == call.shape[axis]
            else None
            for axis in call.axes
        )
        if source in inputs and inputs[source].axes != axes:
            raise UnsupportedError("it multiplies a value with itself")
        inputs[source] = Tap(axes, inner=call.inner)
    return Step(inputs, inner=call.inner, repeats=True)


def _letters(equation: str, dimensions: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """One name for each axis of the operands and of the result: those that dots stand for are numbers."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = []
    for text, ndim in zip(left.split(","), dimensions, strict=True):
        before, dots, behind = text.partition("...")
        more = ndim - len(before) - len(behind)
        given.append([*before, *(str(number) for number in range(more, 0, -1)), *behind] if dots else [*before])
    numbers = sorted({name for names in given for name in names if name.isdigit()}, key=int, reverse=True)
    if not arrow:
        every = left.replace(",", "").replace("...", "")
        right = "..." + "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    before, dots, behind = right.partition("...")
    return given, [*before, *(numbers if dots else ()), *behind]


def _bilinear(call: Call) -> Step:
    call.refuse_along(-1)
    inputs = {source: Tap(call.whole()) for source in call.tensors}
    for source in (call.source, call.argument(1, "input2")):
        if inputs.get(source) != Tap(call.whole()):
            raise UnsupportedError("its inputs are no tensors")
        inputs[source] = Tap(call.axes, inner=call.inner)
    return Step(inputs, inner=call.inner, repeats=True)


def _compared(position: int, default: int) -> Callable[[Call], Step]:
    """Two inputs that are broadcast, and compared along one axis, which is left out or has one cell."""

    def rule(call: Call) -> Step:
        dim = call.argument(position, "dim", default) if position else default
        first, second = call.source, call.argument(1, "x2")
        if not isinstance(second, fx.Node):
            raise UnsupportedError("it compares with something that is no tensor")
        both = tuple(torch.broadcast_shapes(call.shapes[first], call.shapes[second]))  # type: ignore[no-untyped-call]
        dim %= len(both)
        if len(both) == call.ndim:
            call.refuse_along(dim)
            axes = call.axes
        else:
            axes = tuple(axis + (axis >= dim) for axis in call.axes)
        whole = replace(call, shape=both, axes=axes)
        inputs = {source: Tap(whole._broadcast(call.shapes[source]), inner=call.inner) for source in (first, second)}
        return Step(inputs, inner=call.inner, repeats=True)

    return rule


def _attention(call: Call) -> Step:
    """Rows come from the queries; keys and values are read whole."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = named(call.node.args, dict(call.node.kwargs), names)
    if any(axis >= call.ndim - 1 for axis in call.axes):
        raise UnsupportedError("it mixes samples")
    tokens = call.ndim - 2 in call.axes
    if call.axes[0] >= call.ndim - 2:
        raise UnsupportedError("it mixes samples")
    causal = tokens and bool(given.get("is_causal"))
    if call.again and given.get("dropout_p"):
        raise UnsupportedError("dropout would draw new numbers when windows are computed again; set it to 0")
    inputs: dict[fx.Node, Tap] = {}
    for name in ("query", "key", "value", "attn_mask"):
        source = given.get(name)
        if source is None:
            continue
        shape = call.shapes[source]
        axes: list[int | None] = []
        for axis in call.axes:
            back = axis - call.ndim
            at = back + len(shape)
            broadcast = at < 0 or (shape[at] == 1 and call.shape[axis] != 1)
            axes.append(None if broadcast or (back == -2 and name in ("key", "value")) else at)
        tap = Tap(tuple(axes), inner=call.inner, broadcast=name == "attn_mask")
        if source in inputs and inputs[source] != tap:
            raise UnsupportedError("queries and keys are the same value")
        inputs[source] = tap
    return Step(inputs, _causal(call, names) if causal else None, inner=call.inner, repeats=True)


def _causal(call: Call, names: Sequence[str]) -> Callable[..., Any]:
    """What is hidden from a token depends on where it stands."""
    along = call.axes[1:].index(call.ndim - 2)

    def run(args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Tensor:
        given = named(args, kwargs, names) | {"is_causal": False}
        keys = torch.arange(given["key"].shape[-2], device=given["key"].device)
        at = where.positions()[along].clamp(min=0)  # what lies outside the map may hold anything but NaN
        shape = [1] * call.ndim
        shape[call.axes[0]], shape[-2] = at.shape
        given["attn_mask"] = at.reshape(shape) >= keys
        attended: Tensor = F.scaled_dot_product_attention(**given)
        return attended

    return run


def _multi_head_attention(call: Call) -> Step:
    """Samples lie along axis 1 of queries, keys, values and results."""
    named_inputs = {name: call.node.kwargs.get(name) for name in ("key_padding_mask", "attn_mask")}
    if call.axes != (1,) or call.inner != 1 or call.ndim != 3 or call.again:
        raise UnsupportedError("attention lets every position see all others")
    if len(call.node.args) > 13:
        named_inputs |= dict(
            zip(("training", "key_padding_mask", "need_weights", "attn_mask"), call.node.args[13:], strict=False)
        )
    inputs = {source: Tap((None,)) for source in call.tensors}
    for source in call.node.args[:3]:
        if not isinstance(source, fx.Node) or len(call.shapes[source]) != 3:
            raise UnsupportedError("its queries, keys or values are no tensors with samples")
        inputs[source] = Tap((1,))
    padding, hidden = named_inputs["key_padding_mask"], named_inputs["attn_mask"]
    if isinstance(padding, fx.Node):
        inputs[padding] = Tap((0,))
    if isinstance(hidden, fx.Node) and len(call.shapes[hidden]) == 3:
        raise UnsupportedError("its mask has samples and heads along one axis")
    if {*call.node.args[:3]} & {*call.node.args[3:], *call.node.kwargs.values()} - {None}:
        raise UnsupportedError("it takes one value in several places")
    return Step(inputs, repeats=True)


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
CARRIES = "it carries a state from position to position"


def _recurrent(call: Call) -> Step:
    """Layers over whole sequences: results are the states of the last layer, and one or two last states of all layers.

    Followed axes are those of the first result; see `of_several` for the others."""
    if call.reading or len(call.axes) > 1:
        raise UnsupportedError(CARRIES)
    if len(call.node.args) != 9 or not isinstance(call.node.args[2], (list, tuple)):
        raise UnsupportedError("its sequences are packed")
    arguments: Any = call.node.args
    before, states, weights = arguments[:3]
    samples = _axis_of_sequences(call.node)
    if call.axes != (samples,):
        raise UnsupportedError("it mixes samples")
    inputs = {weight: Tap((None,)) for weight in weights if isinstance(weight, fx.Node)}
    for source, axis in (
        (before, samples),
        *((state, 1) for state in (states if isinstance(states, (tuple, list)) else [states])),
    ):
        tap = Tap((axis,), inner=call.inner)
        if not isinstance(source, fx.Node) or inputs.get(source, tap) != tap:
            raise UnsupportedError("it takes one value in several places")
        inputs[source] = tap
    return Step(inputs, inner=call.inner, repeats=True)


def _axis_of_sequences(node: fx.Node) -> int:
    return 0 if node.args[8] else 1


def of_several(call: Call) -> Axes:
    """The followed axes in the first of several results, from those in the one that is taken."""
    source, index = call.source, call.node.args[1]
    weights = source.target is F.multi_head_attention_forward
    if not weights and source.target not in RECURRENT:
        return call.axes
    if not isinstance(index, int):
        raise UnsupportedError("it takes several of the results")
    if index in (0, -3 if source.target is torch.lstm else -2):
        return call.axes
    if call.axes != ((0,) if weights else (1,)):  # weights of attention have samples first, last states have layers
        raise UnsupportedError("it mixes samples")
    return (1,) if weights else (_axis_of_sequences(source),)


def _recurrent_cell(call: Call) -> Step:
    """One step of a sequence: rows of the results come from the same rows of input and states."""
    if call.axes != (0,) or len(call.before) != 2:
        raise UnsupportedError(CARRIES if len(call.axes) > 1 else "it mixes samples")
    step = call.same()
    states = call.argument(1, "hx")
    for state in states if isinstance(states, (tuple, list)) else [states]:
        if not isinstance(state, fx.Node):
            raise UnsupportedError("its states are no tensors")
        step.inputs[state] = Tap(call.axes, inner=call.inner)
    weights = {weight for weight in (*call.node.args[2:], *call.node.kwargs.values()) if isinstance(weight, fx.Node)}
    if weights & {source for source, tap in step.inputs.items() if tap.axes != (None,)}:
        raise UnsupportedError("it takes one value in several places")
    step.repeats = True
    return step


def _embedding(call: Call) -> Step:
    if call.argument(5, "scale_grad_by_freq", False):
        raise UnsupportedError("scale_grad_by_freq counts how often words occur in the whole batch")
    call.refuse_along(-1)
    return call.moved(call.axes, call.source)


def _mask(call: Call) -> Step:
    """Another mask inside: never a part of what lies before this one."""
    raise UnsupportedError("another mask ends here")


_NAMES = (
    *(
        "relu6",
        "sigmoid",
        "tanh",
        "exp",
        "exp2",
        "expm1",
        "abs",
        "neg",
        "square",
        "sqrt",
        "rsqrt",
        "log",
        "log2",
        "log10",
    ),
    *(
        "log1p",
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
        "pow",
        "float_power",
        "add",
        "sub",
        "subtract",
        "rsub",
        "mul",
    ),
    *(
        "multiply",
        "div",
        "divide",
        "true_divide",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "erf",
        "erfc",
        "sin",
        "cos",
        "tan",
    ),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "atanh", "reciprocal", "sign", "sgn", "floor", "ceil"),
    *(
        "round",
        "trunc",
        "frac",
        "remainder",
        "fmod",
        "lerp",
        "addcmul",
        "addcdiv",
        "where",
        "masked_fill",
        "nan_to_num",
    ),
    *(
        "logit",
        "softplus",
        "logaddexp",
        "hypot",
        "xlogy",
        "positive",
        "conj",
        "real",
        "imag",
        "angle",
        "detach",
        "clone",
    ),
    *("contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool", "relu_"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or"),
    *("bitwise_not", "heaviside", "zeros_like", "ones_like", "full_like", "empty_like", "expand_as", "sinc", "deg2rad"),
    *("erfinv", "lgamma", "digamma", "expit", "i0", "i0e", "i1", "i1e", "erfcx", "ndtr", "ndtri", "log_ndtr", "entr"),
    *("xlog1py", "complex", "polar", "resolve_conj", "resolve_neg", "bernoulli", "poisson", "broadcast_tensors"),
    *("greater_equal", "less_equal", "not_equal", "logical_xor", "signbit", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("logaddexp2", "ldexp", "rad2deg", "floor_divide", "isneginf", "isposinf", "cfloat", "cdouble", "nextafter"),
    *("requires_grad_", "greater", "less", "rsqrt", "threshold", "copysign", "alias"),
)
_FUNCTIONAL = (
    *("relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "threshold", "softshrink", "hardshrink", "tanhshrink"),
)
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "neg", "pos", "pow", "mod", "floordiv", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "xor", "invert", "abs"),
)


# Finite, and with finite slopes, wherever what they are given is finite: numbers may be exchanged there for others.
_TAME = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul"),
    *(
        "bmm",
        "einsum",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "mean",
        "sum",
    ),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "pad", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "batch_norm", "running_batch_norm", "layer_norm", "group_norm"),
    *("instance_norm", "relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("sigmoid", "tanh", "softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "softshrink"),
    *("hardshrink", "tanhshrink", "softmax", "log_softmax", "glu", "add", "iadd", "sub", "neg", "mul", "abs", "square"),
    *("sin", "cos", "clamp", "minimum", "maximum", "dropout", "drop", "itself", "cat", "stack", "split", "chunk"),
    *("unbind", "getitem", "getattr", "reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute"),
    *("transpose", "movedim", "expand", "broadcast_to", "repeat", "contiguous", "clone", "to", "type_as", "float"),
    *("detach", "roll", "flip", "narrow", "select", "amax", "amin", "scaled_dot_product_attention", "embedding"),
}


def is_tame(node: fx.Node) -> bool:
    """Whether a call makes finite numbers of finite numbers, and its gradient too."""
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    if name in ("truediv", "div", "divide", "true_divide"):
        return not any(isinstance(given, fx.Node) for given in (*node.args[1:], *node.kwargs.values()))
    if name == "pow":
        power = node.args[1] if len(node.args) > 1 else None
        return isinstance(power, (int, float)) and power >= 1
    return name in _TAME


def everywhere(name: str) -> list[Any]:
    """What goes by a name: a method, and functions of torch and torch.nn.functional."""
    homes = (torch, F, torch._C._nn, torch.special, torch.linalg)
    return [name, *(getattr(home, name) for home in homes if callable(getattr(home, name, None)))]


def register(rule: Callable[[Call], Step], *names: str) -> None:
    for name in names:
        for function in everywhere(name):
            register_rule(function)(rule)


register(_elementwise, *_NAMES, *_FUNCTIONAL)
for _name in _OPERATORS:
    register_rule(getattr(operator, _name))(_elementwise)
register(_relu, "relu")
register(_prelu, "prelu")
register(
    _dropout,
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)
register(_rrelu, "rrelu")
register_rule(drop)(_elementwise)
register_rule(itself)(_elementwise)
register(_batch_norm, "batch_norm")
register_rule(running_batch_norm)(_batch_norm)
register(_sample_norm, "group_norm")
register(_instance_norm, "instance_norm")
register(_layer_norm, "layer_norm", "rms_norm")
register(_linear, "linear")
register(_along(1), "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
register(_along(1, -1), "glu")
register(_along(4, -1), "gumbel_softmax")
register(_cross, "cross")
register(_along(2, 1), "normalize")
register(_over_channels, "local_response_norm", "channel_shuffle")
register(
    _reduce,
    *("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "std", "var", "var_mean", "std_mean"),
    *("logsumexp", "nansum", "nanmean", "all", "any", "count_nonzero", "median", "mode", "aminmax"),
)
register(_permute, "permute")
register(_transpose, "transpose", "swapaxes", "swapdims")
register(_movedim, "movedim", "moveaxis")
register(_reverse, "t")
register(_reshape, "reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel", "_unsafe_view")
register(_reshape_as, "reshape_as", "view_as")
register(_expand, "expand", "broadcast_to")
register(_repeat, "repeat", "tile")
register(_cat, "cat", "concat", "concatenate")
register(_stack, "stack")
register(_along_its(1), "hstack", "column_stack")
register(_along_its(2), "dstack")
register(_along_its(0), "vstack", "row_stack")
register(_split(2), "split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
register(_unbind, "unbind")
register(_matmul(), "matmul", "bmm", "mm", "mv", "__matmul__")
register(_matmul(1), "baddbmm", "addmm", "addbmm")
register(_einsum, "einsum")
register(_bilinear, "bilinear")
register(_compared(2, 1), "cosine_similarity")
register(_compared(0, -1), "pairwise_distance")
register(_attention, "scaled_dot_product_attention")
register(_embedding, "embedding")
register(_multi_head_attention, "multi_head_attention_forward")
register(_recurrent, "lstm", "gru", "rnn_tanh", "rnn_relu")
register(_recurrent_cell, "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
register_rule(operator.matmul)(_matmul())
register_rule(getattr)(_getattr)
register_rule(torch.ops.backdrop.mask)(_mask)


def _norm_of_vectors(call: Call) -> Step:
    return _without(call, call.argument(2, "dim"))


def _without(call: Call, dims: Any) -> Step:
    """One value of the first argument for all cells along some axes, which are left out or have one cell."""
    if dims is None:
        raise UnsupportedError("it mixes samples")
    before, keep = call.before, call.ndim == len(call.before)
    gone = {axis % len(before) for axis in (dims if isinstance(dims, (tuple, list)) else [dims])}
    left = list(range(len(before))) if keep else [axis for axis in range(len(before)) if axis not in gone]
    axes = tuple(left[axis] for axis in call.axes)
    if set(axes) & gone:
        raise UnsupportedError("it mixes samples" if axes[0] in gone else "it mixes positions along a masked axis")
    return call.moved(axes)


register(_norm_of_vectors, "norm", "vector_norm")
register_rule(torch.linalg.vector_norm)(_norm_of_vectors)


def _renorm(call: Call) -> Step:
    """Each slice along `dim` by its own norm, which is over all other axes."""
    dim = call.argument(2, "dim") % call.ndim
    call.refuse_along(*(axis for axis in range(call.ndim) if axis != dim))
    return call.same()


register(_renorm, "renorm")


def _topk(call: Call) -> Step:
    call.refuse_along(call.argument(2, "dim", -1))
    return call.same()


register(_topk, "topk")


def _kthvalue(call: Call) -> Step:
    return _without(call, call.argument(2, "dim", -1))


register(_kthvalue, "kthvalue")


def _sort(call: Call) -> Step:
    call.refuse_along(call.argument(1, "dim", -1))
    return call.same()


register(_sort, "sort", "argsort")


def _quantile(call: Call) -> Step:
    if not isinstance(call.argument(1, "q"), (int, float)):
        raise UnsupportedError("it takes several quantiles")
    return _without(call, call.argument(2, "dim"))


register(_quantile, "quantile", "nanquantile")


def _as_complex(call: Call) -> Step:
    """Pairs of numbers along the last axis are one number, and the other way round."""
    if call.name == "view_as_real":
        call.refuse_along(-1)
    return call.moved(call.axes)


register(_as_complex, "view_as_real", "view_as_complex")


def _one_hot(call: Call) -> Step:
    number = call.argument(1, "num_classes", -1)
    if not isinstance(number, int) or number < 0:
        raise UnsupportedError("how many classes it has depends on all samples; give num_classes")
    call.refuse_along(-1)
    return call.moved(call.axes)


register(_one_hot, "one_hot")


def _triangle(call: Call) -> Step:
    call.refuse_along(-1, -2)
    return call.same()


register(_triangle, "tril", "triu")


def _bucketize(call: Call) -> Step:
    return call.same()


register(_bucketize, "bucketize")


def _tensordot(call: Call) -> Step:
    """The axes that are left of one, then those of the other."""
    dims, pair = call.argument(2, "dims", 2), (call.source, call.argument(1, "other", call.argument(1, "b")))
    if not all(isinstance(source, fx.Node) and source in call.shapes for source in pair) or pair[0] is pair[1]:
        raise UnsupportedError("it multiplies a value with itself")
    ndims = [len(call.shapes[source]) for source in pair]
    if isinstance(dims, int):
        dims = (range(ndims[0] - dims, ndims[0]), range(dims))
    left = [
        (source, axis)
        for source, ndim, gone in zip(pair, ndims, dims, strict=True)
        for axis in range(ndim)
        if axis not in [each % ndim for each in gone]
    ]
    inputs = {
        source: Tap(tuple(left[axis][1] if left[axis][0] is source else None for axis in call.axes), inner=call.inner)
        for source in pair
    }
    return Step(inputs, inner=call.inner)


register(_tensordot, "tensordot")
