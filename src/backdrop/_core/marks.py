"""How a mask shows in a captured graph: as one node, whatever its p, with a number that leads back to its layer.

While `backdrop.graph.capture` has torch.compile's front end follow a model, a Backdrop layer puts `backdrop::mask` into
the graph instead of what it computes. A new p, or another mode of the layer, then needs no new capture: whoever runs
the graph asks the layer itself. Outside a capture of ours the operator is never called, except in parts of a graph that
we do not look into; there it is the layer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

CAPTURING = False  # a guard of every captured graph: read where the layer is followed, and set while it runs

_numbers = itertools.count(1)
_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_lock = threading.RLock()
_depth = 0

_library = torch.library.Library("backdrop", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mask(Tensor(a) x, int layer, int leaf) -> Tensor(a)")  # type: ignore[no-untyped-call]


def register(layer: nn.Module) -> None:
    """Gives a layer its number, a new one to every copy of it."""
    layer._number = number = next(_numbers)  # type: ignore[assignment]  # torch takes any attribute
    _layers[number] = layer


def layer_of(number: int) -> Any:
    return _layers[number]


def mark(x: Tensor, layer: nn.Module, leaf: int = 0) -> Tensor:
    """Leaf 0 starts a draw of the layer's mask; others of the same call share it."""
    marked: Tensor = torch.ops.backdrop.mask(x, layer._number, leaf)
    return marked


def implement(forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Makes `forward` what the operator does: that of `Backdrop`, also for subclasses with one of their own."""

    def mask(x: Tensor, number: int, leaf: int) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(x, FakeTensor) or x.is_meta:
            return x.view_as(x)
        if leaf:
            raise RuntimeError("a mask over several tensors cannot be drawn where the graph is not looked into")
        return forward(layer_of(number), x)

    _library.impl("mask", mask, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


@contextmanager
def capturing() -> Iterator[None]:
    """While open, captures show masks as nodes."""
    global CAPTURING, _depth
    with _lock:
        _depth += 1
        CAPTURING = True
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            CAPTURING = _depth > 0
