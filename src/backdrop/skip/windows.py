"""What a unit needs of each value, which units are computed again, and cutting their windows out of a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from backdrop._core import kernels
from backdrop.graph.table import Axes

LOOK_AGAIN = 16  # steps after which to look again whether the incoming gradient is zero at kept units
ONE_THREAD = 2**15 - 1  # torch works on more elements with several threads, which may take longer to start than to work
MOSTLY = 0.75  # of the kept units have a gradient: then computing all of them is faster than looking first

Sizes: TypeAlias = tuple[int, ...]
Map: TypeAlias = tuple[Sizes, Sizes, Sizes, Sizes]  # step, start and size of a box, and the sizes of what it lies in


class Demand(NamedTuple):
    """What is needed of a value: where samples and positions lie, and the cells of unit u along each axis of positions,
    `size` of them from `step * u + start`."""

    axes: Axes
    inner: int = 1
    step: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        return None not in self.axes

    @property
    def per_sample(self) -> bool:
        return self.axes[0] is not None and all(axis is None for axis in self.axes[1:])

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes[1:] if axis is not None)


class Inside(NamedTuple):
    """Which cells of each window lie inside the map: from `first` to before `behind` along each axis of positions."""

    ranges: Tensor  # (windows, axes, 2), on the device
    complete: bool  # whether every cell of every window does
    number: int  # of cells that do


@dataclass
class Lattice:
    """The units of a mask on a map: where they lie, which maps matter, and what the last steps were like."""

    shape: tuple[int, ...]  # of what the mask takes
    demand: Demand  # of that
    samples: int
    maps: list[Map]
    on_devices: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict)
    # The share of kept units that had an incoming gradient when this was last looked at; steps so far.
    alive: float = 0.0
    looks: int = 0

    @property
    def positions(self) -> tuple[int, ...]:
        return self.demand.positions

    def units(self) -> int:
        """How many there are, all samples together."""
        along = zip(self.positions, self.demand.step, strict=True)
        return self.samples * math.prod(-(-self.shape[axis] // step) for axis, step in along)

    def maps_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Step, start and size of the boxes in `maps` and the sizes of what they lie in: (maps, 1, axes) each."""
        if device not in self.on_devices:
            every = torch.tensor([list(each) for each in self.maps], device=device)
            self.on_devices[device] = every[:, :, None].unbind(1)
        return self.on_devices[device]


@dataclass
class Windows:
    """Which units are computed again: the sample and the unit index along each axis of positions."""

    sample: Tensor  # (windows,), on the device
    unit: Tensor  # (windows, axes), on the device
    real: int  # how many of them are not there for their number alone
    inside: dict[Map, Inside]

    def __len__(self) -> int:
        return len(self.sample)

    def cells(self, demand: Demand) -> list[Tensor]:
        """(windows, cells) along each axis of positions: where the cells of the box lie in the whole map."""
        return [
            torch.add(torch.arange(start, start + size, device=unit.device), unit[:, None], alpha=step)
            for unit, step, start, size in zip(self.unit.unbind(1), demand.step, demand.start, demand.size, strict=True)
        ]

    def part(self, first: int, last: int) -> Windows:
        inside = {key: value._replace(ranges=value.ranges[first:last]) for key, value in self.inside.items()}
        return Windows(self.sample[first:last], self.unit[first:last], self.real, inside)


class Kept:
    """The units that a mask keeps, on their way to the host while the device computes the forward pass."""

    def __init__(self, lattice: Lattice, weight: Tensor) -> None:
        units = units_of(lattice, weight != 0)
        self.samples = lattice.samples
        self.event: torch.cuda.Event | None = None
        self.units = units
        if units.is_cuda:
            self.units = torch.empty(units.shape, dtype=torch.bool, pin_memory=True)
            self.units.copy_(units, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def on_host(self) -> Tensor:
        """(kept units, 1 + axes): the sample and the unit index along each axis of positions."""
        if self.event is not None:
            self.event.synchronize()
        return self.units.expand(self.samples, *self.units.shape[1:]).nonzero()


def units_of(lattice: Lattice, cells: Tensor) -> Tensor:
    """From a boolean map of the exit's rank to (N or 1, units): whether any cell of a unit is set."""
    batch, axes = lattice.demand.axes[0], lattice.positions
    assert batch is not None
    others = [axis for axis in range(cells.ndim) if axis != batch and axis not in axes]
    units = cells.permute(batch, *axes, *others)
    units = units.flatten(1 + len(axes)).any(-1) if others else units
    for axis, patch in enumerate(lattice.demand.step, start=1):
        units = _any_of(units, axis, patch)
    return units


def find_windows(lattice: Lattice, kept: Kept, weight: Tensor, grad: Tensor) -> Windows:
    """The units to compute again: the kept ones whose incoming gradient is not zero.

    On a GPU, looking at the gradient means waiting for it. Where most kept units had a gradient the last time, all of
    them are taken; with a gradient of zero they add nothing but time.
    """
    lattice.looks += 1
    if grad.is_cuda and lattice.alive >= MOSTLY and lattice.looks % LOOK_AGAIN:
        units = kept.on_host()
    else:
        units = units_of(lattice, (grad != 0) & (weight != 0)).nonzero().cpu()
        lattice.alive = len(units) / max(1, len(kept.on_host()))
    real = len(units)
    if added := kernels.few_shapes(real, grad.device) - real:
        units = torch.cat([units, units[:1].expand(added, -1)])
    return _place(lattice, units, real, grad.device)


def _place(lattice: Lattice, units: Tensor, real: int, device: torch.device) -> Windows:
    """Work out on the device which cells of each window lie inside each map, and on the host how many."""
    rows = max(1, ONE_THREAD // (2 * len(lattice.maps) * (units.shape[1] - 1)))
    numbers = [_count(_inside(lattice, part)) for part in torch.split(units[:real, 1:], rows)]
    counts = torch.stack(numbers).sum(0).tolist()
    there = units.to(device, non_blocking=True)
    sample, unit = there[:, 0], there[:, 1:]
    ranges = _inside(lattice, unit).to(torch.int32)
    ranges[:, real:] = 0  # windows that are there for their number alone have no cell inside
    inside = {
        key: Inside(ranges[i], counts[i] == len(units) * math.prod(key[2]), counts[i])
        for i, key in enumerate(lattice.maps)
    }
    return Windows(sample, unit, real, inside)


def _inside(lattice: Lattice, unit: Tensor) -> Tensor:
    """(maps, windows, axes, 2): the first cell of each window inside each map, and the first one behind those."""
    step, start, size, sizes = lattice.maps_on(unit.device)
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


def cut(x: Tensor, windows: Windows, demand: Demand) -> Tensor:
    """Windows of a map; cells outside it repeat the nearest one inside. Channels vary fastest in memory."""
    order = _order(x, demand)
    return x.permute(order)[_cells(x, windows, demand)].permute(_inverse(order))


def paste(grad: Tensor, x: Tensor, windows: Windows, demand: Demand) -> Tensor:
    """The opposite of `cut`: add the gradients of windows up where they were cut."""
    order, count = _order(x, demand), 1 + len(demand.positions)
    shape = [x.shape[axis] for axis in order]
    rest = shape[count:]
    flat, *along = _cells(x, windows, demand)
    for cell, size in zip(along, shape[1:], strict=False):
        flat = flat * size + cell
    total = grad.new_zeros(math.prod(shape[:count]), *rest)
    total.index_add_(0, flat.flatten(), grad.permute(order).reshape(-1, *rest))
    pasted = total.view(shape).permute(_inverse(order))
    # With an axis of one torch takes some strides for others (batch_norm in eval mode), so they are those of x.
    return torch.empty_like(x).copy_(pasted) if 1 in x.shape else pasted


def _order(x: Tensor, demand: Demand) -> list[int]:
    """Samples first, then positions, then the rest."""
    first = [axis for axis in demand.axes if axis is not None]
    return [*first, *(axis for axis in range(x.ndim) if axis not in first)]


def _cells(x: Tensor, windows: Windows, demand: Demand) -> tuple[Tensor, ...]:
    """Where the cells of windows lie: the sample and the position along each axis, to index with."""
    axes = windows.cells(demand)
    index = [windows.sample.view(-1, *[1] * len(axes))]
    for i, (cells, axis) in enumerate(zip(axes, demand.positions, strict=True)):
        cells = cells.clamp_(0, x.shape[axis] - 1)
        index.append(cells.reshape(len(cells), *(cells.shape[1] if j == i else 1 for j in range(len(axes)))))
    return tuple(index)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
