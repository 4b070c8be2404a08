"""The one table of rules: what each torch function reads of its inputs for a part of its result.

A *rule* is asked about one call and about some axes of its result that are followed: the axis of samples, and behind a
mask that drops positions the axes of positions. It answers with a `Step`: along which axes of each input these lie,
which cells of the input a cell of the result needs, and how to run the call on a part. From that the engine knows what
to compute for a kept unit, whether samples are mixed, and placement knows receptive fields. A rule that cannot say so
raises `UnsupportedError` with the reason, and a call without a rule ends what can be skipped.

Rules are found by function: `torch.conv2d`, `torch.nn.functional.relu`, `operator.add`, or the name of a method. A
custom operation is made known in a few lines:

>>> import torch
>>> from backdrop import register_rule
>>> @torch.library.custom_op("doctest::double", mutates_args=())
... def double(x: torch.Tensor) -> torch.Tensor:
...     return 2 * x
>>> @register_rule(torch.ops.doctest.double)
... def _(call):
...     return call.elementwise()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, fx

from backdrop.graph.reach import Taps

Statistics: TypeAlias = Literal["exact", "sampled", "frozen", "running"]
Axes: TypeAlias = tuple[int | None, ...]  # samples first, then positions; None: the same for all


class UnsupportedError(Exception):
    """Why a call cannot run on a part of its inputs."""


class MisalignedError(UnsupportedError):
    """Units have to be `factor` times as large for a call to work on whole cells of its input."""

    def __init__(self, axis: int, factor: int) -> None:
        super().__init__("it needs larger units")
        self.axis, self.factor = axis, factor


class Slide(NamedTuple):
    """Cells b to e of the result need the cells floor((b * down + low) / up) to floor((e * down + high) / up)."""

    down: int = 1
    low: int = 0
    high: int = 0
    up: int = 1
    dilation: int = 1


class Tap(NamedTuple):
    """What a call reads of one input."""

    axes: Axes
    slides: tuple[Slide | None, ...] = ()  # along each axis of positions; empty or None: the same cell
    fill: float | Literal["replicate", "reflect"] | None = None  # what cells outside the map count as, if they are read
    inner: int = 1  # neighbouring rows that belong to one sample
    cells: tuple[Taps | None, ...] = ()  # just which cells are read along each axis, where slides tell the ends alone
    broadcast: bool = False  # whether it may be broadcast along the followed axes that it has not


class Where(NamedTuple):
    """Where windows lie: for rules whose call depends on that."""

    positions: Callable[[], Sequence[Tensor]]  # (windows, cells) of the result along each axis of positions
    sizes: tuple[int, ...]  # of the input's map along these
    first: tuple[tuple[int, int], ...]  # where unit 0 begins in the input and in the result, along each
    size: tuple[int, ...]  # cells of the result along each
    rows: int  # how many samples or windows there are


@dataclass
class Step:
    """One call on parts of its inputs."""

    inputs: dict[fx.Node, Tap]
    run: Callable[..., Any] | None = None  # (args, kwargs, where); None: as it is called
    epilogue: Literal["relu", "norm"] | None = None  # whether it can be a part of `backdrop.skip.epilogue`
    couples: Literal["", "batch", "sample", "pool"] = (
        ""  # statistics over the batch, over a sample, mean over positions
    )
    inner: int = 1  # neighbouring rows of the result that belong to one sample
    repeats: bool = False  # whether one tensor may be several of its arguments
    broadcasts: bool = False  # whether a cell of the result reads the same cell of every input, as far as it has one


@dataclass
class Call:
    """A call to find a step for, and the axes of its result that are followed.

    Attributes:
        node: the call in its graph; `node.args` and `node.kwargs` are what it is given.
        shape: of the result.
        axes: of the result: that of samples, then those of positions.
        shapes: of the inputs that are tensors.
        statistics: the policy for statistics over positions or samples.
        reading: whether it is asked only what the call reads, not how it runs on a part.
        again: whether it is computed a second time in the backward pass, where random numbers would be others.
    """

    node: fx.Node
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    shapes: Mapping[fx.Node, tuple[int, ...]]
    statistics: Statistics = "exact"
    inner: int = 1
    tuples: frozenset[fx.Node] = field(default_factory=frozenset)  # inputs that are several tensors
    reading: bool = False
    again: bool = False

    @property
    def name(self) -> str:
        return str(getattr(self.node.target, "__name__", self.node.target)).strip("_")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def followed(self) -> str:
        """What kind of axes are followed, in words."""
        return "spatial" if self.reading else "masked"

    @property
    def source(self) -> fx.Node:
        """The first argument."""
        first = self.argument(0, "input")
        first = self.node.kwargs.get("self") if first is None else first
        if not isinstance(first, fx.Node) or first not in self.shapes:
            raise UnsupportedError("its first argument is no tensor")
        return first

    @property
    def before(self) -> tuple[int, ...]:
        """The shape of the first argument."""
        return self.shapes[self.source]

    @property
    def tensors(self) -> list[fx.Node]:
        return [source for source in self.node.all_input_nodes if source in self.shapes]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def whole(self) -> Axes:
        """For an input that is the same for all parts, such as a weight."""
        return (None,) * len(self.axes)

    def elementwise(self, epilogue: Literal["relu", "norm"] | None = None) -> Step:
        """Every cell of the result from the same cell of each input; inputs may be broadcast."""
        inputs: dict[fx.Node, Tap] = {}
        for source in self.tensors:
            inputs[source] = Tap(self._broadcast(self.shapes[source]), inner=self.inner)
        return Step(inputs, epilogue=epilogue, inner=self.inner, repeats=True, broadcasts=True)

    def _broadcast(self, shape: tuple[int, ...]) -> Axes:
        more = self.ndim - len(shape)
        found: list[int | None] = []
        for axis in self.axes:
            if axis < more or (shape[axis - more] == 1 and self.shape[axis] != 1):
                found.append(None)
            elif shape[axis - more] != self.shape[axis]:
                raise UnsupportedError("it combines values of different sizes")
            else:
                found.append(axis - more)
        return tuple(found)

    def same(self, source: fx.Node | None = None, others: Literal["whole"] | None = "whole", run: Any = None) -> Step:
        """One input lies along the same axes; all others are whole."""
        return self.moved(self.axes, source, run=run)

    def moved(self, axes: Axes, source: fx.Node | None = None, *, run: Any = None, inner: int | None = None) -> Step:
        """One input has the followed axes elsewhere; all others are whole."""
        source = self.source if source is None else source
        inputs = {other: Tap(self.whole()) for other in self.tensors if other is not source}
        inputs[source] = Tap(tuple(axes), inner=self.inner if inner is None else inner)
        return Step(inputs, run, inner=self.inner)

    def slides(
        self,
        slides: Sequence[Slide | None],
        *,
        fill: float | Literal["replicate", "reflect"] | None = 0.0,
        run: Callable[..., Any] | None = None,
        cells: Sequence[Taps | None] = (),
    ) -> Step:
        """The first argument is read by a window that slides over it; all others are whole.

        Args:
            slides: along each followed axis of positions.
            fill: what cells outside the map count as.
            run: the call on a window that holds all cells that it needs, without padding: (args, kwargs, where).
            cells: just which cells are read along each axis, where that is not all from the first to the last.
        """
        step = self.same(run=run)
        tap = step.inputs[self.source]
        step.inputs[self.source] = tap._replace(slides=tuple(slides), fill=fill, cells=tuple(cells))
        return step

    def spatial(self) -> list[int]:
        """The followed axes of positions as numbers of spatial axes, for calls on (N, C, spatial axes)."""
        if self.axes[0] != 0:
            raise UnsupportedError("its batch lies along another axis")
        if any(axis < 2 for axis in self.axes[1:]):
            raise UnsupportedError(
                "it takes positions for channels" if self.reading else "the mask runs along its channels"
            )
        return [axis - 2 for axis in self.axes[1:]]

    def refuse_along(self, *axes: int) -> None:
        """No followed axis may be one of these, counted from either end."""
        wanted = {axis % self.ndim for axis in axes} if self.ndim else set()
        if wanted & set(self.axes[:1]):
            raise UnsupportedError("it mixes samples")
        if wanted & set(self.axes):
            raise UnsupportedError(f"it mixes positions along a {self.followed} axis")


Rule: TypeAlias = Callable[[Call], Step]
_RULES: dict[Any, Rule] = {}


def register_rule(function: Any) -> Callable[[Rule], Rule]:
    """Say how a function runs on a part of its inputs, so that it can be skipped: a decorator for the rule.

    Args:
        function: as it stands in a captured graph: a torch function, an operator of `torch.ops`, or the name of a
            method.

    The rule is given a `Call` and returns a `Step`, mostly by `call.elementwise()`, `call.same()` (one row or cell of
    the result from the same of the first argument) or `call.slides(...)`; it raises `UnsupportedError` with a reason
    where it cannot. A rule counts for all models captured after it was registered; the last one for a function holds.
    What it says is checked where it can be: shapes that do not fit are an error that names the function.

    Examples:
        >>> import torch
        >>> from backdrop.graph import Slide
        >>> @torch.library.custom_op("doctest::blur", mutates_args=())
        ... def blur(x: torch.Tensor, padding: int) -> torch.Tensor:
        ...     return torch.nn.functional.avg_pool2d(x, 3, 1, padding)
        >>> @register_rule(torch.ops.doctest.blur)
        ... def _(call):
        ...     padding = call.argument(1, "padding")
        ...     along = [Slide(low=-padding, high=2 - padding) for _ in call.spatial()]
        ...     return call.slides(along, run=lambda args, kwargs, where: blur(args[0], 0))
    """
    if not (callable(function) or isinstance(function, str)):
        raise TypeError(
            "function has to be a function, an operator of torch.ops or the name of a method, but got "
            f"{type(function).__name__}"
        )

    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise TypeError(f"a rule has to be a function of a call, but got {type(rule).__name__}")
        _RULES[function] = rule
        return rule

    return register


def rule_of(node: fx.Node) -> Rule | None:
    target: Any = node.target
    if node.op == "call_method":
        return _RULES.get(str(target))
    if node.op != "call_function":
        return None
    try:
        found = _RULES.get(target)
    except TypeError:
        return None
    if found is None and hasattr(target, "overloadpacket"):
        found = _RULES.get(target.overloadpacket)
    if found is None and hasattr(target, "default"):
        found = _RULES.get(target.default)
    return found


def find(call: Call) -> Step:
    """The step for a call, or `UnsupportedError`."""
    rule = rule_of(call.node)
    if rule is None:
        raise UnsupportedError(f"there is no rule for {call.name}")
    step = rule(call)
    if not isinstance(step, Step):
        raise TypeError(f"the rule for {call.name} has to return a Step, but returned {type(step).__name__}")
    if not step.repeats and len(_given(call.node)) != len(call.node.all_input_nodes):
        raise UnsupportedError("it takes one value in several places")
    for source, tap in step.inputs.items():
        if len(tap.axes) != len(call.axes):
            raise ValueError(
                f"the rule for {call.name} follows {len(tap.axes)} axes of {source} instead of {len(call.axes)}"
            )
    return step


def _given(node: fx.Node) -> list[fx.Node]:
    """All its arguments that are nodes, as often as they are given."""
    found: list[fx.Node] = []

    def see(source: fx.Node) -> fx.Node:
        found.append(source)
        return source

    fx.map_arg((node.args, node.kwargs), see)
    return found


def as_tuple(value: Any, count: int) -> tuple[Any, ...]:
    """One value per axis; torch takes a tuple of one for all axes as well."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * count if len(values) == 1 else values


def size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)
