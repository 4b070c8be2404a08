"""From a shape to a mask: which positions make a unit, which units make a group, which are kept, what they weigh."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

from backdrop._checks import Dims, Patch, Probability, Scale, check_devices, check_dims, check_patch, is_readable


class Lattice(NamedTuple):
    """How the positions of a tensor make units, and units make groups."""

    axes: tuple[int, ...]  # those along which units are drawn
    patch: tuple[int, ...]  # positions per unit along each of them
    shape: tuple[int, ...]  # units along every axis of the tensor, 1 where the draw is shared
    groups: int
    size: int  # units in a group: the N of Eq. 1


def make_lattice(shape: Sequence[int], dims: Dims, patch: Patch) -> Lattice:
    axes = check_dims(dims, len(shape))
    grouped = [axis for axis in axes if axis != 0]
    sizes = dict.fromkeys(axes, 1) | dict(zip(grouped, check_patch(patch, len(grouped), dims), strict=True))
    units = tuple(-(-size // sizes[axis]) if axis in sizes else 1 for axis, size in enumerate(shape))
    groups = units[0] if 0 in axes and grouped else 1
    size = math.prod(units[1:]) if 0 in axes and grouped else math.prod(units)
    return Lattice(axes, tuple(sizes[axis] for axis in axes), units, groups, size)


def draw_units(
    lattice: Lattice, p: Probability, exact: bool, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Which units are kept: (groups, units) of 1.0 and 0.0. Nothing here waits for the device."""
    groups, size = lattice.groups, lattice.size
    check_devices(p, generator, device)
    if size == 0 or is_zero(p):
        return torch.ones(groups, size, device=device, dtype=torch.float32)
    u = _uniform(groups, size, generator, device)
    if not exact:
        # Never empty: where any unit passes the threshold the largest does too, and where none does, the largest is
        # a uniform choice.
        largest = u.argmax(1, keepdim=True)
        return u.ge_(p).scatter(1, largest, 1.0)
    if isinstance(p, Tensor):
        kept = torch.arange(size, device=device) < (size * (1 - p)).round().clamp(min=1)
        return torch.zeros_like(u).scatter(1, u.argsort(1, descending=True), kept.to(u.dtype).expand(groups, size))
    largest = u.topk(max(1, round(size * (1 - p))), sorted=False).indices
    return torch.zeros_like(u).scatter(1, largest, 1.0)


def weigh(units: Tensor, p: Probability, scale: Scale, dtype: torch.dtype) -> Tensor:
    units = units.to(dtype)
    if scale is None:
        return units
    if scale == "probability":
        return units / (1 - p)
    size = units.shape[1] if scale == "count" else units.shape[1] * (1 - p)
    count = units.sum(1, keepdim=True)
    return units.mul_(size).div_(count)  # in this order N/|b| is rounded once


def spread(units: Tensor, lattice: Lattice, shape: Sequence[int]) -> Tensor:
    """From (groups, units) to one value per position, size 1 on the axes that share the draw."""
    positions = units.reshape(lattice.shape)
    for axis, size in zip(lattice.axes, lattice.patch, strict=True):
        if size > 1:
            positions = positions.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return positions


def is_zero(p: Probability) -> bool:
    """Whether p is known to be 0 without waiting for a device."""
    if isinstance(p, Tensor):
        return is_readable(p) and bool(p == 0)
    return p == 0


def _uniform(groups: int, size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    rerun = _checkpoint_rerun()
    if rerun == "reentrant" and generator is None:
        raise RuntimeError(
            "Backdrop without a generator inside torch.utils.checkpoint(use_reentrant=True) would draw the same mask "
            "at every step, because that function rewinds the random state; use use_reentrant=False or pass generator="
        )
    # The non-reentrant form runs the forward pass a second time. The mask of the first time is the one that counts
    # (see _MaskGradient), and the second draw must not move the generator; torch itself rewinds its default one.
    rewind = generator.get_state() if rerun == "non-reentrant" and generator is not None else None
    u = torch.rand(groups, size, generator=generator, device=device, dtype=torch.float32)
    if rewind is not None and generator is not None:
        generator.set_state(rewind)
    return u


def _checkpoint_rerun() -> Literal["reentrant", "non-reentrant"] | None:
    """Which form of torch.utils.checkpoint, if any, is running this forward pass again in a backward pass."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is checkpoint.CheckpointFunction.backward.__code__:
            return "reentrant"
        if frame.f_code.co_filename == checkpoint.__file__ and frame.f_code.co_name == "recompute_fn":
            return "non-reentrant"
        frame = frame.f_back
    return None
