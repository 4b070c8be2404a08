"""How long trials take on this machine, by a few steps of each kind that are run and forgotten."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from backdrop.experiments.report.statistics import CHOSEN
from backdrop.experiments.settings import build
from backdrop.experiments.task import Task
from backdrop.experiments.train import Options, threads
from backdrop.experiments.training import Training

__all__ = ["Cost", "measure", "seconds"]


class Cost(NamedTuple):
    """What a trial takes on this machine, in seconds.

    Args:
        begin: to make the data and the network.
        step: one training step.
        evaluation: one evaluation.
        steps: to a pass over the training data.
    """

    begin: float
    step: float
    evaluation: float
    steps: int

    def of(self, settings: Any) -> float:
        """A trial that has these settings, and all else as that which was measured."""
        steps, evaluations = settings.epochs * settings.passes * self.steps, min(settings.evaluations, settings.epochs)
        return float(self.begin + steps * self.step + evaluations * self.evaluation)


def seconds(kind: type[Task], points: Sequence[Mapping[str, Any]], options: Options) -> float:
    """Of all trials, one after the other. Masks, learning rates and lengths do not change what a step takes."""
    measured: dict[str, Cost] = {}
    total = 0.0
    for point in points:
        task = kind(build(kind.Settings, point), data_root=options.data_root)
        alike = {name: v for name, v in point.items() if name not in (*CHOSEN, *kind.masks, "seed")}
        key = json.dumps(alike, sort_keys=True, default=str)
        if key not in measured:
            measured[key] = measure(task, options)
        total += measured[key].of(task.settings) / options.devices
    return total


def measure(task: Task, options: Options) -> Cost:
    """Measures a few steps of a trial and a part of its evaluation; nothing is written."""
    with threads(options.threads), torch.random.fork_rng():
        clock = time.perf_counter
        fabric = Fabric(accelerator=options.accelerator, devices=1, precision=task.settings.precision)
        begin = clock()
        training = Training(fabric, task, Path(), dataclasses.replace(options, graphs=False, compile=False))
        begun = clock()
        evaluation = _evaluation(training)
        training.model.train()
        rows = torch.arange(len(training.train.labels), device=fabric.device).tensor_split(training.batches)[0]
        times = [clock()]
        for _ in range(3):  # the first is slower
            training.step(rows).item()
            times.append(clock())
            if times[-1] - times[0] > 5:
                break
        return Cost(begun - begin, times[-1] - times[-2], evaluation, training.batches)


@torch.no_grad()
def _evaluation(training: Training) -> float:
    """By the second of its parts, or by the only one."""
    training.model.eval()
    size = getattr(training.settings, "eval_batch", training.settings.batch_size)
    each = 0.0
    for part in torch.split(training.judge.inputs, size)[:2]:
        begin = time.perf_counter()
        outputs = training.model(part.contiguous(memory_format=training.format))
        (outputs if isinstance(outputs, Tensor) else outputs[0]).sum().item()
        each = (time.perf_counter() - begin) / len(part)
    return each * len(training.judge.labels)
