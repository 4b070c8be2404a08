"""What rules are about: a call, the step that it becomes on windows, and why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn

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


def as_called(call: Call) -> Callable[..., Any]:
    """Run on windows what runs on the whole map."""

    def run(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], where: Where) -> Any:
        return graph.invoke(root, call.node, args, kwargs)

    return run


def windows_of(call: Call, axes: Callable[[fx.Node], Axes]) -> dict[fx.Node, Axes]:
    return {source: axes(source) for source in call.node.all_input_nodes if source not in call.constants}
