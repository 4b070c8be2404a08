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
from backdrop.skip.tiles import Box, Interval
from backdrop.skip.windows import Demand, Windows


def source_of(value: Any) -> Source | None:
    """What a tensor stands for."""
    return value.source if isinstance(value, Unread) else None


def _along(source: Source, intervals: Mapping[int, Interval]) -> tuple[list[int], list[int], slice]:
    """A region of space, and channels, from intervals along some axes: all there is along the others."""
    space = [intervals.get(axis, (0, size)) for axis, size in enumerate(source.shape[2:], start=2)]
    return [a for a, _ in space], [b for _, b in space], slice(*intervals.get(1, (0, source.shape[1])))


def _check_axes(source: Source, demand: Demand) -> None:
    if demand.axes[0] != 0:
        raise RuntimeError(f"{source!r} has its samples along axis 0, but the model has them along {demand.axes[0]}")


def read_tile(source: Source, samples: Interval, box: Box, demand: Demand) -> Tensor:
    """A box of some samples."""
    _check_axes(source, demand)
    low, high, channels = _along(source, dict(zip(demand.positions, box, strict=True)))
    found = [read_region(source, sample, low, high)[channels] for sample in range(*samples)]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def read_windows(source: Source, windows: Windows, demand: Demand, device: torch.device) -> Tensor:
    """What `cut` makes of a tensor; cells outside the map are zero."""
    _check_axes(source, demand)
    axes = demand.positions
    regions: list[tuple[int, list[int], list[Interval]]] = []
    for sample, unit in zip(windows.sample.tolist(), windows.unit.tolist(), strict=True):
        first = [step * u + start for u, step, start in zip(unit, demand.step, demand.start, strict=True)]
        inside = []
        for axis, a, n in zip(axes, first, demand.size, strict=True):
            low = min(max(a, 0), source.shape[axis])
            inside.append((low, max(min(a + n, source.shape[axis]), low)))
        regions.append((sample, first, inside))

    def load(region: tuple[int, list[int], list[Interval]]) -> Tensor:
        low, high, channels = _along(source, dict(zip(axes, region[2], strict=True)))
        return read_region(source, region[0], low, high)[channels]

    sizes = list(source.shape[1:])
    for axis, size in zip(axes, demand.size, strict=True):
        sizes[axis - 1] = size
    taken = torch.zeros((len(regions), *sizes[1:], sizes[0]), dtype=source.dtype, device=device).movedim(-1, 1)
    with ReadAhead(load, regions) as ahead:
        for (_, first, inside), window, found in zip(regions, taken, ahead, strict=True):
            for axis, a, (low, high) in zip(axes, first, inside, strict=True):
                window = window.narrow(axis - 1, low - a if high > low else 0, high - low)
            window.copy_(moved(found, device))
    return taken


def one_value(found: Mapping[Any, Tensor]) -> tuple[Any, ...] | None:
    """The value of each channel, if that is the same at all positions."""
    values: list[Any] = []
    for x in found.values():
        corner = x[(slice(None), slice(None), *[slice(0, 1)] * (x.ndim - 2))]
        if not bool((x == corner).all()) or not bool((x.signbit() == corner.signbit()).all()):  # 0.0 is not -0.0
            return None
        values.append((x.dtype, tuple(corner.flatten().tolist()), tuple(corner.signbit().flatten().tolist())))
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
