"""Which units are computed again, and cutting their windows out of a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from backdrop.skip import cost, steps
from backdrop.skip.plan import Box, Plan

LOOK_AGAIN = 16  # steps after which to look again whether the incoming gradient is zero at kept units
ONE_THREAD = 2**15 - 1  # torch works on more elements with several threads, which may take longer to start than to work
MOSTLY = 0.75  # of the kept units have a gradient: then computing all of them is faster than looking first


class Inside(NamedTuple):
    """Which cells of each window lie inside the map: from `first` to before `behind` along each masked axis."""

    ranges: Tensor  # (windows, axes, 2), on the device
    complete: bool  # whether every cell of every window does
    number: int  # of cells that do


@dataclass
class Windows:
    """Which units are computed again: the sample and the unit index along each masked axis."""

    sample: Tensor  # (windows,), on the device
    unit: Tensor  # (windows, axes), on the device
    cells: dict[fx.Node, list[Tensor]]  # (windows, cells) along each axis: what to cut out of entries and the exit
    real: int  # how many of them are not there for their number alone
    inside: dict[tuple[Box, tuple[int, ...]], Inside]

    def __len__(self) -> int:
        return len(self.sample)

    def positions(self, box: Box) -> list[Tensor]:
        """(windows, cells) along each masked axis: where the cells of the box lie in the whole map."""
        return [
            (unit * step + start)[:, None] + torch.arange(size, device=unit.device)
            for unit, step, start, size in zip(self.unit.unbind(1), box.step, box.start, box.size, strict=True)
        ]

    def part(self, first: int, last: int) -> Windows:
        inside = {key: value._replace(ranges=value.ranges[first:last]) for key, value in self.inside.items()}
        cells = {node: [along[first:last] for along in axes] for node, axes in self.cells.items()}
        return Windows(self.sample[first:last], self.unit[first:last], cells, self.real, inside)


class Kept:
    """The units that a mask keeps, on their way to the host while the device computes the forward pass."""

    def __init__(self, plan: Plan, weight: Tensor) -> None:
        units = units_of(plan, weight != 0)
        self.samples = plan.shapes[plan.stretch.exit][0]
        self.event: torch.cuda.Event | None = None
        self.units = units
        if units.is_cuda:
            self.units = torch.empty(units.shape, dtype=torch.bool, pin_memory=True)
            self.units.copy_(units, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def on_host(self) -> Tensor:
        """(kept units, 1 + axes): the sample and the unit index along each masked axis."""
        if self.event is not None:
            self.event.synchronize()
        return self.units.expand(self.samples, *self.units.shape[1:]).nonzero()


def units_of(plan: Plan, positions: Tensor) -> Tensor:
    """From a boolean map of the exit's rank to (N or 1, units): whether any position of a unit is set."""
    axes, patches = plan.boxes[plan.stretch.exit][:2]
    others = [axis for axis in range(1, positions.ndim) if axis not in axes]
    units = (
        positions.permute(0, *axes, *others).flatten(1 + len(axes)).any(-1) if others else positions.permute(0, *axes)
    )
    for axis, patch in enumerate(patches, start=1):
        units = _any_of(units, axis, patch)
    return units


def find_windows(plan: Plan, kept: Kept, weight: Tensor, grad: Tensor) -> Windows:
    """The units to compute again: the kept ones whose incoming gradient is not zero.

    On a GPU, looking at the gradient means waiting for it. Where most kept units had a gradient the last time, all of
    them are taken; with a gradient of zero they add nothing but time.
    """
    plan.looks += 1
    if grad.is_cuda and plan.alive >= MOSTLY and plan.looks % LOOK_AGAIN:
        units = kept.on_host()
    else:
        units = units_of(plan, (grad != 0) & (weight != 0)).nonzero().cpu()
        plan.alive = len(units) / max(1, len(kept.on_host()))
    real = len(units)
    if added := cost.few_shapes(real, grad.device) - real:
        units = torch.cat([units, units[:1].expand(added, -1)])
    return _place(plan, units, real, grad.device)


def _place(plan: Plan, units: Tensor, real: int, device: torch.device) -> Windows:
    """Work out on the device which cells of each window lie inside each map, and on the host how many."""
    rows = max(1, ONE_THREAD // (2 * len(plan.maps) * (units.shape[1] - 1)))
    numbers = [_count(_inside(plan, part)) for part in torch.split(units[:real, 1:], rows)]
    counts = torch.stack(numbers).sum(0).tolist()
    there = units.to(device, non_blocking=True)
    sample, unit = there[:, 0], there[:, 1:]
    ranges = _inside(plan, unit).to(torch.int32)
    ranges[:, real:] = 0  # windows that are there for their number alone have no cell inside
    inside = {
        key: Inside(ranges[i], counts[i] == len(units) * math.prod(key[0].size), counts[i])
        for i, key in enumerate(plan.maps)
    }
    cells: dict[fx.Node, list[Tensor]] = {}
    for node in (plan.stretch.exit, *plan.stretch.entries):
        box, sizes = plan.map(node, plan.boxes[node])
        cells[node] = [
            torch.add(torch.arange(start, start + size, device=device), u[:, None], alpha=step).clamp_(0, most - 1)
            for u, step, start, size, most in zip(unit.unbind(1), *box[1:], sizes, strict=True)
        ]
    return Windows(sample, unit, cells, real, inside)


def _inside(plan: Plan, unit: Tensor) -> Tensor:
    """(maps, windows, axes, 2): the first cell of each window inside each map, and the first one behind those."""
    step, start, size, sizes = plan.maps_on(unit.device)
    first = torch.addcmul(start, unit, step)
    return torch.stack([-first, sizes - first], -1).clamp_(min=0).minimum(size[..., None])


def _count(ranges: Tensor) -> Tensor:
    """How many cells of all windows lie inside each map."""
    return (ranges[..., 1] - ranges[..., 0]).clamp_(min=0).prod(-1).sum(-1)


def _any_of(alive: Tensor, axis: int, patch: int) -> Tensor:
    if patch == 1:
        return alive
    size = alive.shape[axis]
    ragged = -size % patch
    if ragged:
        shape = [*alive.shape]
        shape[axis] = ragged
        alive = torch.cat([alive, alive.new_zeros(shape)], axis)
    return alive.reshape(*alive.shape[:axis], -1, patch, *alive.shape[axis + 1 :]).any(axis + 1)


def cut(x: Tensor, windows: Windows, node: fx.Node, axes: steps.Axes) -> Tensor:
    """Windows of a map; cells outside it repeat the nearest one inside. Channels vary fastest in memory."""
    order = (0, *axes, *(axis for axis in range(1, x.ndim) if axis not in axes))
    return x.permute(order)[_cells(windows, node)].permute(_inverse(order))


def paste(grad: Tensor, x: Tensor, windows: Windows, node: fx.Node, axes: steps.Axes) -> Tensor:
    """The opposite of `cut`: add the gradients of windows up where they were cut."""
    order = (0, *axes, *(axis for axis in range(1, x.ndim) if axis not in axes))
    shape = [x.shape[axis] for axis in order]
    rest = shape[1 + len(axes) :]
    flat, *along = _cells(windows, node)
    for cell, size in zip(along, shape[1:], strict=False):
        flat = flat * size + cell
    total = grad.new_zeros(math.prod(shape[: 1 + len(axes)]), *rest)
    total.index_add_(0, flat.flatten(), grad.permute(order).reshape(-1, *rest))
    return total.view(shape).permute(_inverse(order))


def _cells(windows: Windows, node: fx.Node) -> tuple[Tensor, ...]:
    """Where the cells of windows lie: the sample and the position along each masked axis, to index with."""
    axes = windows.cells[node]
    index = [windows.sample.view(-1, *[1] * len(axes))]
    for i, along in enumerate(axes):
        index.append(along.reshape(len(along), *(along.shape[1] if j == i else 1 for j in range(len(axes)))))
    return tuple(index)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
