"""What is known of a trial: its task, how far it is, what came of it. Studies make these, reports read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = ["Record", "State", "checked", "column", "counts", "is_number"]

State = Literal["complete", "running", "waiting", "pruned", "failed"]
PLAIN = "\n\t"


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


def column(metric: str) -> str:
    """What a metric is called in a curve, where "loss" is that of training."""
    return "test loss" if metric == "loss" else metric


def counts(records: Sequence[Record]) -> dict[str, int]:
    """How many trials are in each state."""
    found = Counter(record.state for record in records)
    return {state: found[state] for state in get_args(State)}


def checked(record: Record) -> Record:
    """The record, if everything in it is of its kind: files and databases may hold anything.

    So that displays and reports need not look: numbers, texts that no terminal takes for orders, and settings that are
    numbers, texts, or lists of these.
    """
    kinds: Mapping[str, Callable[[Any], bool]] = {
        "key": _is_text,
        "state": lambda value: value in get_args(State),
        "settings": lambda value: _is_mapping(value, _is_setting) and _is_seed(value.get("seed")),
        "metrics": lambda value: _is_mapping(value, is_number),
        "curve": lambda value: isinstance(value, (list, tuple)) and all(_is_mapping(row, is_number) for row in value),
        "seconds": is_number,
        "machine": lambda value: _is_mapping(value, _is_text),
        "progress": lambda value: _is_mapping(value, is_number),
        "reason": lambda value: value is None or isinstance(value, str),
    }
    for name, is_right in kinds.items():
        if not is_right(getattr(record, name)):
            raise ValueError(f"a trial has a {name} that cannot be: {str(getattr(record, name))[:80]!r}")
    if any("epoch" not in row or "step" not in row for row in record.curve):
        raise ValueError("a trial has a row in its curve without epoch and step")
    if record.reason and not _is_text(record.reason):  # what an error says may hold anything
        shown = "".join(
            sign if sign.isprintable() or sign in PLAIN else "\N{REPLACEMENT CHARACTER}" for sign in record.reason
        )
        return replace(record, reason=shown)
    return record


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and all(sign.isprintable() or sign in PLAIN for sign in value)


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _is_seed(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_setting(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(part is None or isinstance(part, bool) or is_number(part) or _is_text(part) for part in parts)


def _is_mapping(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(_is_text(name) and is_right(value[name]) for name in value)
