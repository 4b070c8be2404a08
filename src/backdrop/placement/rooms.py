"""What fits in memory: how large a batch `doctor` measures with, and how large one may be.

Memory grows along a line with samples and positions, if it grows; so two measurements tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from backdrop.placement.inspection import device_of
from backdrop.placement.sites import Tried, copied
from backdrop.placement.steps import Batch, Reading, peak, take_turns

__all__ = ["Room", "check_memory", "fitting", "random_batch", "rooms"]

LEAST = 0.02  # of a step's memory: it has to grow so much for a line to say what fits
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
ADAM = 4  # numbers for each parameter: itself, its gradient, and two of the optimiser's


@dataclass(frozen=True)
class Room:
    """What fits in memory: parameters, gradients, the two numbers of Adam, and what a step keeps.

    Args:
        what: "samples", or "positions" along each axis of an input.
        memory: bytes.
        plain: the most without skipping.
        skip: the most with the masks of the first site; None where there is no such way.
        base: what was measured.
    """

    what: str
    memory: int
    plain: tuple[int, ...]
    skip: tuple[int, ...] | None
    base: tuple[int, ...]


def check_memory(memory: int | str | None, device: torch.device) -> int:
    """Bytes."""
    if memory is None:
        return _there(device)
    if isinstance(memory, str):
        hit = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)i?B?\s*", memory, re.IGNORECASE)
        size = int(float(hit[1]) * UNITS[hit[2].upper()]) if hit else 0
    elif isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    else:
        raise TypeError(f"memory has to be a number of bytes or a text such as '8G', but got {memory!r}")
    if size < 1:
        raise ValueError(f"memory has to be a number of bytes or a text such as '8G' or '500M', but got {memory!r}")
    return size


def _there(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not on Linux
        return 8 * UNITS["G"]
    hit = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return int(hit[1]) * 1024 if hit else 8 * UNITS["G"]


def random_batch(model: nn.Module, shape: Sequence[int], room: int) -> tuple[Tensor, str]:
    """Random inputs of this shape, or of fewer positions where a step would not fit or take long, which is said.

    A model that begins with an embedding gets words of it.
    """
    device = device_of(model, None)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0, device=device))
    words = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    generator = torch.Generator().manual_seed(0)
    sizes, plain = list(shape), copied(model)

    def made() -> Tensor:
        return torch.randn(sizes, generator=generator).to(like)

    def one(rows: int, *more: int) -> Reading:
        batch = Batch(torch.randn(rows, *more, generator=generator).to(like), (), None)
        return take_turns({"": lambda: batch.step(plain)}, device, 1)[""]

    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        small = [min(size, 256) for size in sizes[2:]]
        try:
            reading = one(min(2, sizes[0]), sizes[1], *small)
        except Exception:
            if words:
                return torch.randint(words, tuple(sizes), generator=generator).to(device), ""
            return made(), ""  # it takes one size alone, or says itself what it does not take
    times = math.prod(sizes[2:]) / max(1, math.prod(small)) * (1 if sizes[0] > 1 else 0.5)
    over = max(times * reading.seconds / 30, times * reading.memory / (room / 2))
    if over <= 1 or not small:
        return made(), ""
    factor = over ** (-1 / len(small))
    sizes[2:] = [max(min(32, size), int(size * factor) // 32 * 32) for size in sizes[2:]]
    return (
        made(),
        f"Measured with {' x '.join(map(str, sizes))}, because steps would be long or large.",
    )


def fitting(model: nn.Module, given: Batch, room: int, device: torch.device) -> tuple[Batch, list[str]]:
    """As many samples as fit in half of the memory and take less than half a minute, from a step of one sample."""
    one = given.first(min(2, given.rows)).without_loss()  # two, because batch statistics need them
    (reading,) = take_turns({"one": lambda: one.step(model)}, device, 1).values()
    each_seconds, each_bytes = reading.seconds / one.rows, reading.memory / one.rows
    fits = min(given.rows, int(30 / max(each_seconds, 1e-9)), int(room / 2 / max(each_bytes, 1)))
    rows = given.rows
    while rows > max(one.rows, fits):  # by halves, for losses whose samples come in pairs
        rows = max(one.rows, rows // 2)
    if rows == given.rows:
        return given, []
    return given.first(rows), [f"measured with {rows} of {given.rows} samples, so that steps are short and fit"]


def rooms(
    model: nn.Module,
    batch: Batch,
    plain: Reading,
    best: Tried | None,
    room: int,
    device: torch.device,
) -> list[Room]:
    """From a second measurement with half of the samples, or half as many positions along each axis."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    left = room - ADAM * parameters
    gradients = parameters  # which a step's memory holds, too
    ways = [(model, plain.memory)]
    if best is not None and best.made is not None and best.found.advised is not None:
        ways.append((best.made, best.found.advised.memory))
    found: list[Room] = []
    half = batch.rows // 2
    if half >= 2:
        if best is not None and best.found.advised is not None and not best.found.after:
            share = 1 - best.found.advised.p
            if abs(max(1, round(half * share)) * batch.rows / half - max(1, round(batch.rows * share))) > 0.5:
                ways = ways[:1]  # so few are kept that a line through two measurements says nothing
        smaller = batch.first(half).without_loss()
        whole = batch.without_loss()
        most = [_most(made, memory, whole, smaller, 2.0, left, gradients, device) for made, memory in ways]
        numbers = [None if times is None else (int(batch.rows * times),) for times in [*most, None]]
        if numbers[0] is not None:
            found.append(Room("samples", room, numbers[0], numbers[1], (batch.rows,)))
    reduced = batch.resized(0.5)
    if reduced is not None and (best is None or best.found.after):
        axes = len(batch.inputs.shape) - 2
        base = tuple(batch.inputs.shape[2:])
        most = [
            _most(made, memory, batch.without_loss(), reduced, 2.0**axes, left, gradients, device)
            for made, memory in ways
        ]
        sides = [None if m is None else tuple(int(size * m ** (1 / axes)) for size in base) for m in [*most, None]]
        if sides[0] is not None:
            found.append(Room("positions", room, sides[0], sides[1], base))
    return found


def _most(
    model: nn.Module,
    memory: int,
    whole: Batch,
    smaller: Batch,
    factor: float,
    left: int,
    gradients: int,
    device: torch.device,
) -> float | None:
    """How many times as large an input may be: memory grows along a line through two measurements, if it grows."""
    try:
        smaller.step(model)
        low = peak(lambda: smaller.step(model), device)
        whole.step(model)
        high = peak(lambda: whole.step(model), device)
    except Exception:  # a model that takes one size alone
        return None
    if high - low < LEAST * high:
        return None
    slope = (high - low) / (1 - 1 / factor) * memory / high
    return max(0.0, 1 + (left + gradients - memory) / slope)
