"""From a shape to a mask: which positions make a unit, which units make a group, which are kept, what they weigh.

`generator_for` makes generators that are a function of a key.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

from backdrop._core import kernels
from backdrop._core.checks import Dims, Patch, Probability, Scale, check_devices, check_dims, check_patch, is_readable


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
    # A patch is at most the axis: what is cut away would take memory, too.
    fitting = [
        size if size == 1 else max(1, min(size, shape[axis]))
        for axis, size in zip(grouped, check_patch(patch, len(grouped), dims), strict=True)
    ]
    sizes = dict.fromkeys(axes, 1) | dict(zip(grouped, fitting, strict=True))
    units = tuple(-(-size // sizes[axis]) if axis in sizes else 1 for axis, size in enumerate(shape))
    groups = units[0] if 0 in axes and grouped else 1
    size = math.prod(units[1:]) if 0 in axes and grouped else math.prod(units)
    return Lattice(axes, tuple(sizes[axis] for axis in axes), units, groups, size)


def draw_units(
    lattice: Lattice,
    p: Probability,
    exact: bool,
    scale: Scale,
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What each unit's gradient is multiplied by, (groups, units): 0 or its scale. Nothing waits for the device."""
    groups, size = lattice.groups, lattice.size
    check_devices(p, generator, device)
    if size == 0 or is_zero(p):
        return torch.ones(groups, size, device=device, dtype=dtype)
    u = _uniform(groups, size, generator, device)
    if isinstance(p, Tensor) and p.dtype in (torch.float16, torch.bfloat16):
        p = p.float()  # counts in float16 end at 65,504
    numerator, per_count = weight_terms(scale, size, p)
    if exact and not isinstance(p, Tensor) and torch.compiler.is_compiling():
        # A count that p decides would be a constant of the code, which would be compiled anew at every step of p.
        p = p * torch.ones((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    if isinstance(p, Tensor):
        units = _keep_exactly(u, p) if exact else _keep(u, p)
    elif exact:
        count = max(1, round(size * (1 - p)))
        largest = u.topk(count, sorted=False).indices
        return _put(torch.zeros_like(u, dtype=dtype), largest, numerator / count if per_count else numerator)
    else:
        weights = kernels.weigh(u, p, numerator, per_count) if dtype == u.dtype else None
        if weights is not None:
            return weights
        units = _keep(u, p)
    units = units.to(dtype)
    kept = units.sum(1, keepdim=True) if per_count else 1.0
    return units.mul_(numerator).div_(kept)


def _keep(u: Tensor, p: Probability) -> Tensor:
    """Bernoulli units, never empty: where any passes the threshold the largest does too; where none does, the largest
    is a uniform choice."""
    largest = u.argmax(1, keepdim=True)
    return _put(u.ge_(p), largest, 1.0)


def _put(units: Tensor, index: Tensor, value: float) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        return units.scatter(1, index, value)  # vmap has no rule for the form in place
    return units.scatter_(1, index, value)


def _keep_exactly(u: Tensor, p: Tensor) -> Tensor:
    """The units with the largest numbers, as many as p says, without reading p."""
    size = u.shape[1]
    kept = torch.arange(size, device=u.device) < (size * (1 - p)).round().clamp(min=1)
    return torch.zeros_like(u).scatter(1, u.argsort(1, descending=True), kept.to(u.dtype).expand_as(u))


def weight_terms(scale: Scale, size: int, p: Probability) -> tuple[Any, bool]:
    """The weight of a kept unit, and whether it is still to be divided by the number of kept units."""
    if scale == "count":
        return float(size), True
    if scale == "eq1":
        return size * (1 - p), True
    if scale == "probability":
        return 1 / (1 - p), False
    return 1.0, False


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
    rerun = checkpoint_rerun()
    if rerun == "reentrant" and generator is None:
        raise RuntimeError(
            "Backdrop without a generator inside torch.utils.checkpoint(use_reentrant=True) would draw the same mask "
            "at every step, because that function rewinds the random state; use use_reentrant=False or pass generator="
        )
    # The non-reentrant form runs the forward pass a second time. The mask of the first time is the one that counts
    # (see _MaskGradient), and the second draw must not move the generator; torch itself rewinds its default one.
    rewind = generator.get_state() if rerun == "non-reentrant" and generator is not None else None
    # Without the argument where there is none: the form with it cannot be compiled for batches of any size.
    if generator is None:
        return torch.rand(groups, size, device=device, dtype=torch.float32)
    u = torch.rand(groups, size, generator=generator, device=device, dtype=torch.float32)
    if rewind is not None:
        generator.set_state(rewind)
    return u


def checkpoint_rerun() -> Literal["reentrant", "non-reentrant"] | None:
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


def generator_for(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose whole state is a hash of the key, so that no two keys share their numbers.

    The seed of a CPU generator has 32 bits only: among a hundred thousand hashed seeds two would be equal.
    """
    words = 624
    digest = hashlib.shake_128(repr(key).encode()).digest(4 * words)
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    state = generator.manual_seed(0).get_state()
    mersenne = state[24 : 24 + 8 * words].view(torch.int64)  # the layout of torch's CPU generator
    if mersenne[:3].tolist() != [0, 1, 1812433255]:  # what seed 0 gives
        raise RuntimeError(f"torch {torch.__version__} keeps the state of its CPU generator in a way not known here")
    mersenne.copy_(torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF)
    return generator.set_state(state)
