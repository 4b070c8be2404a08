"""What is known of a trial: its task, how far it is, what came of it. Studies make these, reports read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Record", "State"]

State = Literal["waiting", "running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Record:
    """One trial: one configuration and one seed.

    Args:
        key: names the task with these settings and this seed, the same on all machines.
        state: how far it is.
        settings: all of them, by name, the seed among them.
        metrics: what was measured at the end, by name.
        curve: what was logged after each epoch: "epoch", "step", "loss" (of training), "lr", "seconds" (since the
            beginning), and after an evaluation the metrics too; one that is called "loss" is "test loss" here.
        seconds: of training and evaluation.
        machine: "host", "device", "threads", "python", "torch", "backdrop" and so on.
        progress: of a running trial: "epoch", "epochs", "loss", the main metric and "left" (seconds), as far as known.
        reason: why it failed or was pruned.
    """

    key: str
    state: State
    settings: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = ()
    seconds: float = 0.0
    machine: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
