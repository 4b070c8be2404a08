"""Real training steps, with their seconds and their memory: what `doctor` measures.

A step is forward, loss and backward, from empty gradients. Ways to compute it take turns, so that whatever else the
machine does slows all of them alike, and the fastest of some steps counts: what else it does only ever adds. Memory is
the most that tensors hold at once beside what is there before the step, by torch's own count: gradients belong to it,
parameters do not.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from backdrop._core import tree
from backdrop.placement.gradients import call, scalar

__all__ = ["Batch", "Reading", "Run", "peak", "seconds_of", "take_turns"]

Run: TypeAlias = Callable[[], object]

LONG = 2.0  # seconds, after which a step is repeated as seldom as possible


class Reading(NamedTuple):
    """A training step.

    Args:
        seconds: the least over the steps that were run.
        memory: bytes at the peak, beside what is there before the step.
    """

    seconds: float
    memory: int


class Batch(NamedTuple):
    """What a step is computed from; without a loss, the mean of the squares of all outputs stands for one."""

    inputs: Any
    targets: tuple[Any, ...]
    loss: Callable[..., Tensor] | None

    @property
    def rows(self) -> int:
        """How many samples there are; 0 if no input has a first axis."""
        return next((len(x) for _, x in tree.leaves(self.inputs) if isinstance(x, Tensor) and x.ndim), 0)

    def first(self, rows: int) -> Batch:
        """The same with so many samples, of whatever has as many rows as the batch."""
        own = self.rows

        def cut(leaf: Any) -> Any:
            return leaf[:rows] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == own else leaf

        return Batch(tree.map_leaves(cut, self.inputs), tuple(tree.map_leaves(cut, t) for t in self.targets), self.loss)

    def without_loss(self) -> Batch:
        return self._replace(targets=(), loss=None)

    def resized(self, factor: float) -> Batch | None:
        """Without its loss, on positions that are so many times as many along each axis; None where there are none."""
        x = self.inputs
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 3:
            return None
        sizes = [max(1, round(size * factor)) for size in x.shape[2:]]
        return Batch(x.new_empty(*x.shape[:2], *sizes).normal_(), (), None)

    def value(self, outputs: Any) -> Tensor:
        """The loss of these outputs."""
        if self.loss is not None:
            return scalar(self.loss(outputs, *self.targets))
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            raise ValueError("model has to return a tensor that carries a gradient, but returned none")
        return torch.stack([leaf.abs().float().square().mean() for leaf in leaves]).sum()

    def step(self, model: nn.Module) -> None:
        """From empty gradients to empty ones, so that the next step does not find memory that it gives back."""
        _without_gradients(model)
        self.value(call(model, self.inputs)).backward()  # type: ignore[no-untyped-call]
        _without_gradients(model)


def _without_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def take_turns(runs: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, Reading]:
    """Readings of each, from rounds in which all of them run once; two rounds come first and do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(2):  # the first captures, the second finds all sizes known
        first = {name: seconds_of(run, device) for name, run in runs.items()}
    slow = max(sum(first.values()) / len(first), 1e-9)
    for _ in range(max(3, min(4 * rounds, int(rounds * LONG / slow)))):
        for name, run in runs.items():
            times[name].append(seconds_of(run, device))
    return {name: Reading(min(times[name]), peak(run, device)) for name, run in runs.items()}


def seconds_of(run: Run, device: torch.device) -> float:
    _finish(device)
    begin = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(run: Run, device: torch.device) -> int:
    """The most bytes that tensors hold at once in a step, beside what they held before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings(), _mute():
        warnings.simplefilter("ignore")  # the profiler's own, about what it was not asked for
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
    return _most(event.nbytes() for event in _memory_events(seen))


@contextlib.contextmanager
def _mute() -> Iterator[None]:
    """The profiler says when it starts and stops, past Python and whatever one sets."""
    try:
        error, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # a program without a place for errors
        yield
        return
    sys.stderr.flush()
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(nowhere)


def _memory_events(seen: Any) -> Sequence[Any]:
    return [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]


def _most(changes: Iterable[int]) -> int:
    now = most = 0
    for change in changes:
        now = max(0, now + change)  # what was there before, and is given back now, makes no room
        most = max(most, now)
    return most
