"""Inputs that are read where they are needed: their tiles and windows, and what a read that fails leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._source import ReadAhead, Source, moved, read_region
from backdrop.graph.unread import Unread
from backdrop.skip.segments import Demand
from backdrop.skip.tiles import Box, Interval
from backdrop.skip.windows import Windows


def source_of(value: Any) -> Source | None:
    """What a tensor stands for."""
    return value.source if isinstance(value, Unread) else None


def read_tile(source: Source, samples: Interval, box: Box) -> Tensor:
    """A box of some samples."""
    low, high = [a for a, _ in box], [b for _, b in box]
    found = [read_region(source, sample, low, high) for sample in range(*samples)]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def read_windows(source: Source, windows: Windows, demand: Demand, device: torch.device) -> Tensor:
    """What `cut` makes of a tensor; cells outside the map are zero."""
    sizes = tuple(source.shape[axis] for axis in demand.positions)
    regions: list[tuple[int, list[int], list[int], list[int]]] = []
    for sample, unit in zip(windows.sample.tolist(), windows.unit.tolist(), strict=True):
        first = [step * u + start for u, step, start in zip(unit, demand.step, demand.start, strict=True)]
        low = [min(max(a, 0), n) for a, n in zip(first, sizes, strict=True)]
        high = [max(min(a + n, m), b) for a, n, m, b in zip(first, demand.size, sizes, low, strict=True)]
        regions.append((sample, first, low, high))

    def load(region: tuple[int, list[int], list[int], list[int]]) -> Tensor:
        sample, _, low, high = region
        return read_region(source, sample, low, high)

    taken = torch.zeros((len(regions), *demand.size, source.shape[1]), dtype=source.dtype, device=device).movedim(-1, 1)
    with ReadAhead(load, regions) as ahead:
        for (_, first, low, high), window, found in zip(regions, taken, ahead, strict=True):
            for axis, (a, b, c) in enumerate(zip(first, low, high, strict=True), start=1):
                window = window.narrow(axis, b - a if c > b else 0, c - b)
            window.copy_(moved(found, device))
    return taken


def one_value(found: Mapping[Any, Tensor]) -> tuple[Any, ...] | None:
    """The value of each channel, if that is the same at all positions."""
    values: list[Any] = []
    for x in found.values():
        corner = x[(slice(None), slice(None), *[slice(0, 1)] * (x.ndim - 2))]
        if not bool((x == corner).all()):
            return None
        values.append((x.dtype, tuple(corner.flatten().tolist())))
    return tuple(values)


class Snapshot:
    """The buffers of a model before a step, in case that a source cannot be read in the middle of it."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self.versions: list[int] | None = None

    def forward_is_done(self) -> None:
        self.versions = [buffer._version for buffer, _ in self.before]

    def restore(self) -> None:
        """Those that nobody else has changed since the forward pass."""
        versions: list[int | None] = [*self.versions] if self.versions else [None] * len(self.before)
        with torch.no_grad():
            for (buffer, before), version in zip(self.before, versions, strict=True):
                if version is None or buffer._version == version:
                    buffer.copy_(before)
        self.before, self.versions = [], None


_snapshot: ContextVar[Snapshot | None] = ContextVar("backdrop_snapshot", default=None)


def snapshot() -> Snapshot | None:
    """That of the forward pass under way."""
    return _snapshot.get()


@contextlib.contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Buffers are as they were where the forward pass ends in an error."""
    taken = Snapshot(model)
    token = _snapshot.set(taken)
    try:
        yield
    except BaseException:
        taken.restore()
        raise
    finally:
        _snapshot.reset(token)
    taken.forward_is_done()
