"""Is it for this model? A few real steps tell, on the machine at hand.

>>> import torch
>>> from torch import nn
>>> from backdrop.losses import rank_statistic_loss
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
>>> batch = torch.randn(256, 20), torch.arange(256) % 5 == 0
>>> found = doctor(model, batch, lambda scores, labels: rank_statistic_loss(scores[:, 0], labels))
>>> found.loss
'needs the whole batch'
>>> [site.after for site in found.sites]
['']
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._core import tree
from backdrop._core.files import put
from backdrop.graph.look import check_model
from backdrop.graph.table import Statistics
from backdrop.graph.trace import first_line
from backdrop.placement.gradients import call, tensors
from backdrop.placement.inspection import Inspection, device_of, inspect
from backdrop.placement.sites import Site, SiteFound, Tried, copied, own_masks, samples, sites_of_positions
from backdrop.placement.steps import Batch, Reading, peak, take_turns

__all__ = ["Diagnosis", "Room", "check_page", "doctor"]

ALIKE = 1e3  # how many roundings apart a gradient may be, of its size, and still be the same
NEARLY = 0.05
FEW, MANY = 4, 16  # samples, from which on masks on them are tried: where the loss needs them all, and where who knows
PART = 32  # samples in the small batches that a loss is tried on
LEAST = 0.02  # of a step's memory: it has to grow so much for a line to say what fits
ROUNDS = 5
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


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found. It prints as a page of text; `save` writes it as HTML.

    Args:
        model: the name of its class.
        inputs: the shapes of what it was given.
        device: where it ran.
        samples: how many of them steps were measured with.
        given: how many the batch holds.
        loss: what the loss needs: "needs the whole batch", "is nearly a mean over samples", "is a mean over samples" or
            "is not known".
        distortion: how far the gradients of small batches of the same outputs are from that of the whole, of its size.
        plain: a step without masks.
        sites: where masks were tried, the best first.
        rooms: what fits in memory.
        notes: what else to know.
        inspection: of the model, with the masks of the first site; None where it does not take one tensor.
    """

    model: str
    inputs: tuple[tuple[int, ...], ...]
    device: str
    samples: int
    given: int
    loss: str
    distortion: float
    plain: Reading
    sites: tuple[SiteFound, ...]
    rooms: tuple[Room, ...]
    notes: tuple[str, ...]
    inspection: Inspection | None

    @property
    def advice(self) -> str:
        """In one sentence."""
        from backdrop.placement.look.diagnosis import advice

        return advice(self)

    @property
    def code(self) -> str:
        """Lines to paste; empty where masks gain nothing."""
        return self.sites[0].code if self.sites and self.sites[0].advised is not None else ""

    def __str__(self) -> str:
        from backdrop.placement.look.diagnosis import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from backdrop.placement.look.diagnosis import fragment

        return fragment(self)

    def save(self, path: str | Path) -> None:
        """Write a page (.html), with the picture of `inspect`. One that is there is replaced. Needs matplotlib."""
        from backdrop.placement.look.diagnosis import page

        put(check_page(path), page(self).encode(), "the page")


def doctor(
    model: nn.Module,
    batch: Tensor | Sequence[Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    sizes: float | Iterable[float] | None = None,
    memory: int | str | None = None,
    statistics: Statistics | None = None,
    progress: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Run a few real training steps with and without masks, and say in measured time and memory what they gain.

    Everything is done on copies: the model, its gradients and buffers and the random state are as before. Steps are
    forward, loss and backward on the device that the model is on; they take a minute or a few. Where the whole batch
    does not fit or a step takes long, fewer samples are measured, and the result says so.

    Args:
        model: any module, with or without masks.
        batch: (inputs, *targets), or the inputs alone. Inputs in a dictionary are passed by name.
        loss: given the output of the model and the targets, returns a scalar. Without one the mean of the squares of
            all outputs stands for it, and what the loss needs is not known.
        sizes: how large structures are, in cells of the input, as for `suggest`: masks go where one position sees as
            much. Without sizes two places are tried that gain something.
        memory: what there is, in bytes or as "8G". Else that of the GPU, or what is free on this machine.
        statistics: as for `skip_blocked`. None tries "exact", and "sampled" where batch statistics stop it.
        progress: is called with a line about what is done next.

    Examples:
        >>> net = nn.Sequential(nn.Conv1d(1, 8, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        >>> print(doctor(net, torch.randn(8, 1, 4096), sizes=10))  # doctest: +ELLIPSIS
        Sequential on 8 x 1 x 4096, measured on cpu...
    """
    check_model(model)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss has to be a function of the model's output, but got {type(loss).__name__}")
    room = check_memory(memory, device_of(model, None))
    say = progress or (lambda line: None)
    given = _batch(batch, loss)
    device, notes = device_of(model, None), list[str]()
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices):
        plain = copied(model)
        if not any(parameter.requires_grad for parameter in plain.parameters()):
            raise ValueError("model has no parameter that requires a gradient, so there is nothing to train")
        say("what the loss needs")
        used, problem = _fitting(plain, given, room, device)
        notes += problem
        needs, distortion, why = _needs(plain, used)
        notes += [why] if why else []
        sites = _sites(plain, used, needs, sizes, notes)
        tried: list[Tried] = []
        reading = None
        for site in sites:
            say(f"a mask {site.where}")
            tried.append(site.measure(plain, used, device, statistics, ROUNDS))
            reading = reading or tried[-1].found.plain
        if reading is None:
            say("a step without masks")
            reading = take_turns({"plain": lambda: used.step(plain)}, device, ROUNDS)["plain"]
        tried.sort(key=lambda each: -each.found.gain)
        say("what fits in memory")
        best = tried[0] if tried and tried[0].found.advised is not None else None
        rooms = _rooms(plain, used, reading, best, room, device)
        inspection = _inspected(model, plain, used, best)
    shapes = tuple(tuple(x.shape) for x in tensors("inputs", used.inputs))
    return Diagnosis(
        type(model).__name__,
        shapes,
        str(device),
        used.rows,
        given.rows,
        needs,
        distortion,
        reading,
        tuple(each.found for each in tried),
        tuple(rooms),
        tuple(notes),
        inspection,
    )


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


def check_page(path: str | Path) -> Path:
    """A page that `save` can write."""
    path = Path(path).expanduser()
    if path.suffix.lower() != ".html":
        raise ValueError(f"path has to end in .html, but got {str(path)!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder")
    return path


def _batch(batch: Tensor | Sequence[Any], loss: Callable[..., Tensor] | None) -> Batch:
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise TypeError("batch has to be (inputs, *targets) or one tensor, but is empty")
        given = Batch(batch[0], tuple(batch[1:]), loss)
    elif isinstance(batch, Tensor):
        given = Batch(batch, (), loss)
    else:
        raise TypeError(f"batch has to be (inputs, *targets) or one tensor, but got {type(batch).__name__}")
    tensors("inputs", given.inputs)
    if not given.rows:
        raise ValueError("inputs have to hold a tensor whose axis 0 is the batch, with at least one sample")
    return given


def _fitting(model: nn.Module, given: Batch, room: int, device: torch.device) -> tuple[Batch, list[str]]:
    """As many samples as fit in half of the memory and take less than half a minute, from a step of one sample."""
    one = given.first(min(2, given.rows)).without_loss()  # two, because batch statistics need them
    (reading,) = take_turns({"one": lambda: one.step(model)}, device, 1).values()
    each_seconds, each_bytes = reading.seconds / one.rows, reading.memory / one.rows
    fits = min(given.rows, int(30 / max(each_seconds, 1e-9)), int(room / 2 / max(each_bytes, 1)))
    rows = max(one.rows, fits)
    if rows == given.rows:
        return given, []
    return given.first(rows), [f"measured with {rows} of {given.rows} samples, so that steps are short and fit"]


def _needs(model: nn.Module, batch: Batch) -> tuple[str, float, str]:
    """Whether the gradient of the loss is put together from those of small batches; how far it is; and what failed."""
    unknown, n = "is not known", batch.rows
    if batch.loss is None:
        return unknown, math.nan, ""
    if n < 2:
        return unknown, math.nan, "a batch of one sample does not tell what the loss needs"
    outputs = call(model, batch.inputs)
    try:
        leaves = [x for x in tensors("outputs", outputs) if x.requires_grad and x.ndim and len(x) == n]
    except TypeError as error:
        return unknown, math.nan, str(error)
    if not leaves:
        return unknown, math.nan, "no output of the model has a row for each sample, so nothing is known of the loss"

    def gradients(rows: Tensor) -> list[Tensor]:
        def some(leaf: Any, *, wanted: bool) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            found = leaf.detach()[rows.to(leaf.device)] if leaf.ndim and len(leaf) == n else leaf.detach()
            return found.requires_grad_() if wanted and leaf.requires_grad else found

        cut = tree.map_leaves(lambda leaf: some(leaf, wanted=True), outputs)
        targets = [tree.map_leaves(lambda leaf: some(leaf, wanted=False), t) for t in batch.targets]
        wanted = [x for x in tensors("outputs", cut) if x.requires_grad and x.ndim and len(x) == len(rows)]
        assert batch.loss is not None
        found = torch.autograd.grad(batch.loss(cut, *targets), wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]

    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    try:
        first = gradients(order)
    except TypeError as error:
        raise TypeError(
            f"loss could not be called with the model's output and the targets, of which batch has "
            f"{len(batch.targets)}: {error}; batch has to be (inputs, *targets)"
        ) from error
    whole = torch.cat([grad.double().flatten(1) for grad in map(_rows, first)], 1)
    parts = torch.split(order, max(1, min(PART, n // 2)))
    try:
        each = [torch.cat([g.double().flatten(1) for g in map(_rows, gradients(rows))], 1) for rows in parts]
    except Exception as error:
        return "needs the whole batch", math.inf, f"on {len(parts[0])} samples the loss says: {first_line(error)}"
    size = float(whole.norm())
    if not size > 0:
        return unknown, math.nan, "the gradient of the loss is zero"
    as_mean = torch.cat([len(grads) / n * grads for grads in each])
    off = min(float((whole - other).norm()) / size for other in (as_mean, torch.cat(each)))
    if off < ALIKE * max(torch.finfo(x.dtype).eps for x in leaves):
        return "is a mean over samples", off, ""
    return ("is nearly a mean over samples" if off < NEARLY else "needs the whole batch"), off, ""


def _rows(grad: Tensor) -> Tensor:
    """With at least one axis beside that of samples."""
    return grad if grad.ndim > 1 else grad[:, None]


def _sites(
    model: nn.Module, batch: Batch, needs: str, sizes: float | Iterable[float] | None, notes: list[str]
) -> list[Site]:
    own = own_masks(model)
    if own is not None:
        return [own]
    sites: list[Site] = []
    if needs == "is a mean over samples":
        notes.append("the loss is a mean over samples: masks on samples gain nothing, smaller batches cost less")
    elif batch.rows >= FEW if needs == "needs the whole batch" else (batch.rows >= MANY and sizes is None):
        sites.append(samples())
    try:
        if not isinstance(batch.inputs, Tensor) or not batch.inputs.is_floating_point():
            raise ValueError("positions are looked for where a model takes one tensor of numbers")
        sites += sites_of_positions(model, tuple(batch.inputs.shape), sizes)
    except ValueError as error:
        notes.append(f"no masks on positions: {first_line(error)}")
    return sites


def _rooms(
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


def _inspected(model: nn.Module, plain: nn.Module, batch: Batch, best: Tried | None) -> Inspection | None:
    x = batch.inputs
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        return None
    masked = best.masked if best is not None and best.masked is not None else plain
    try:
        return inspect(masked, x)
    except (ValueError, RuntimeError, TypeError):
        return None
