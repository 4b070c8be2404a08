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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._core import tree
from backdrop._core.files import put
from backdrop.graph.table import Statistics
from backdrop.graph.trace import first_line
from backdrop.graph.untouched import check_model
from backdrop.placement.gradients import call, tensors
from backdrop.placement.inspection import Inspection, device_of, inspect
from backdrop.placement.rooms import Room, check_memory, fitting, rooms
from backdrop.placement.sites import Site, SiteFound, Tried, copied, own_masks, samples, sites_of_positions
from backdrop.placement.steps import Batch, Reading, take_turns

__all__ = ["Diagnosis", "Room", "check_page", "doctor"]

ALIKE = 1e3  # how many roundings apart a gradient may be, of its size, and still be the same
NEARLY = 0.05
FEW, MANY = 4, 16  # samples, from which on masks on them are tried: where the loss needs them all, and where who knows
PART = 32  # samples in the small batches that a loss is tried on
ROUNDS = 5


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
        used, problem = fitting(plain, given, room, device)
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
        found = rooms(plain, used, reading, best, room, device)
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
        tuple(found),
        tuple(notes),
        inspection,
    )


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


def _inspected(model: nn.Module, plain: nn.Module, batch: Batch, best: Tried | None) -> Inspection | None:
    x = batch.inputs
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        return None
    masked = best.masked if best is not None and best.masked is not None else plain
    try:
        return inspect(masked, x)
    except (ValueError, RuntimeError, TypeError):
        return None
