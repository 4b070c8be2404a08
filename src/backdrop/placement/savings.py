"""What Skip would save, by its cost model: nothing is run.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> stage = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=8), nn.ReLU()]
>>> model = nn.Sequential(*stage, Backdrop2d(0.99), nn.AdaptiveAvgPool2d(1), nn.Flatten())
>>> saving = savings(model, (4, 1, 1024, 1024))["4"]
>>> saving.time < 0.5
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from backdrop._draw import is_zero
from backdrop.layers import Backdrop
from backdrop.placement.shapes import as_value_error, check_model, mode, quiet, shapes_of
from backdrop.skip import cost, graph
from backdrop.skip.program import Program
from backdrop.skip.statistics import Statistics, check_statistics

__all__ = ["Saving", "savings"]


@dataclass(frozen=True)
class Saving:
    """A training step of the whole model in which Skip spares what one mask blocks, over a plain step.

    Args:
        time: forward and backward; 1 where Skip would leave the step as it is.
        memory: of activations at the peak.
        note: what is skipped, what not, and why.
    """

    time: float
    memory: float
    note: str


def savings(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    statistics: Statistics = "exact",
    device: torch.device | str = "cpu",
) -> dict[str, Saving]:
    """What `skip_blocked` would save, for every mask by its dotted path.

    Args:
        model: takes one tensor.
        input_shape: of a batch.
        statistics: as for `skip_blocked`.
        device: to estimate for.
    """
    check_model(model)
    check_statistics(statistics)
    device = torch.device(device)
    with mode(model, training=True):
        with as_value_error(model):
            program = Program(model, {}, statistics, "", strict=False)
        shapes = shapes_of(model, program.graph, input_shape)
        plan = program.plan(shapes)
    try:
        with mode(model, training=False), quiet():
            estimates = {
                node.target: skip.estimate(shapes, device)
                for node, skip in plan.skips.items()
                if all(value in shapes for value in (*skip.stretch.entries, skip.stretch.exit))
            }
            run = partial(_run, model, program.graph)
            whole = cost.look_at(run, [torch.Size(input_shape)], model)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise ValueError(
            f"what Skip would save cannot be estimated, because a part of {type(model).__name__} looks at values: "
            f"{'; '.join(f'{path}, {reason}' for path, reason in program.opaque.items())}"
        ) from None
    largest = max(math.prod(shape) for shape in shapes.values())
    working = cost.working(whole.cost, device, largest, gradients=True)
    step = max(whole.cost.step(device), sum(estimate.plain_time for estimate in estimates.values()))
    found = {}
    for entry in program.entries:
        estimate = estimates.get(entry.mask)
        kept = [f"not from {path} down: {reason}" for path, reason in entry.kept]
        if is_zero(_mask(model, entry.mask).p):
            found[entry.mask] = Saving(1.0, 1.0, "p is 0, so nothing is blocked")
        elif estimate is None or estimate.stays_plain:
            unknown = "what enters or leaves it is not one tensor, so this cannot be estimated"
            last = entry.last if entry.last.startswith("plain") else unknown
            why = estimate.stays_plain if estimate else last
            found[entry.mask] = Saving(1.0, 1.0, "; ".join([why.removeprefix("plain: "), *kept]))
        else:
            time = 1 - (estimate.plain_time - estimate.skip_time) / step
            memory = (whole.kept - estimate.kept + max(working, estimate.skip_memory)) / (whole.kept + working)
            found[entry.mask] = Saving(time, memory, "; ".join([f"skips {_summary(entry.skipped)}", *kept]))
    return found


def _run(model: nn.Module, calls: fx.Graph, x: Tensor) -> list[object]:
    """All values at once, as a pass with gradients keeps most of them."""
    return list(graph.walk(model, calls, [x]))


def _mask(model: nn.Module, path: str) -> Backdrop:
    mask = model.get_submodule(path)
    assert isinstance(mask, Backdrop)
    return mask


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}, {len(names)} calls"
