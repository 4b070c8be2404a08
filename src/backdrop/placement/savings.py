"""What Skip would save, by its cost model: nothing is run.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> stage = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=8), nn.ReLU()]
>>> model = nn.Sequential(*stage, Backdrop2d(0.99), nn.AdaptiveAvgPool2d(1), nn.Flatten())
>>> saving = savings(model, (4, 1, 1024, 1024))["4"]
>>> saving.time < 0.5, saving.memory < 0.8
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from backdrop._draw import is_zero
from backdrop.layers import Backdrop
from backdrop.placement.shapes import as_value_error, check_model, mode, shapes_of
from backdrop.skip.program import Program
from backdrop.skip.statistics import Statistics, check_statistics

__all__ = ["Saving", "savings"]


@dataclass(frozen=True)
class Saving:
    """A training step of the layers that a mask can spare, with Skip over without.

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
        found = {}
        for stretch, entry in zip(program.stretches, program.entries, strict=True):
            skip = plan.skips.get(stretch.mask)
            mask = model.get_submodule(entry.mask)
            assert isinstance(mask, Backdrop)
            kept = [f"not from {path} down: {reason}" for path, reason in entry.kept]
            if is_zero(mask.p):
                found[entry.mask] = Saving(1.0, 1.0, "p is 0, so nothing is blocked")
            elif skip is None:
                found[entry.mask] = Saving(1.0, 1.0, "; ".join([entry.last.removeprefix("plain: "), *kept]))
            else:
                with mode(model, training=False):
                    estimate = skip.estimate(shapes, device)
                if estimate.stays_plain:
                    note = "; ".join([estimate.stays_plain.removeprefix("plain: "), *kept])
                    found[entry.mask] = Saving(1.0, 1.0, note)
                else:
                    time, memory = (
                        estimate.skip_time / estimate.plain_time,
                        estimate.skip_memory / estimate.plain_memory,
                    )
                    note = "; ".join([f"skips {_summary(entry.skipped)}", *kept])
                    found[entry.mask] = Saving(time, memory, note)
    return found


def _summary(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}, {len(names)} calls"
