"""Files of a trial: its checkpoint, its log and its result. All are whole or not there, whenever a process ends.

A checkpoint and a result carry a checksum of what they hold. One that does not fit, or that cannot be read, is
`Unusable`: it counts as none, so that nothing wrong is gone on with, and no trial fails for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from backdrop._core.files import read, replace
from backdrop.experiments.records import is_number
from backdrop.experiments.task import trial_key

__all__ = ["Unusable", "load", "read_result", "save", "save_weights", "write_log", "write_result"]

HEAD = b"backdrop checkpoint 1 sha256:"
STATE = (
    *("key", "epoch", "model", "optimizer", "schedule", "p_schedule", "rng", "generators", "mask steps", "curve"),
    "seconds",
)
ROW = ("epoch", "step", "loss", "lr", "seconds")
RESULT = ("key", "task", "settings", "metrics", "curve", "seconds", "machine")


class Unusable(ValueError):  # noqa: N818
    """A file of a trial that is damaged, or not what it has to be: which, and why."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    """A line with the checksum, and then what torch writes."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getvalue()
    head = HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n"
    replace(path, lambda file: file.writelines((head, content)))


def save_weights(path: Path, state: Mapping[str, Any]) -> None:
    """As torch writes it: for others to load."""
    replace(path, lambda file: torch.save(dict(state), file))


def load(path: Path, key: str, epochs: int) -> dict[str, Any] | None:
    """The state that was saved for this trial of so many epochs, if there is one. Nothing in the file is run."""
    content = _content(path)
    if content is None:
        return None
    head, _, payload = content.partition(b"\n")
    if head != HEAD + hashlib.sha256(payload).hexdigest().encode():
        raise Unusable(f"{path} is damaged: its checksum does not fit")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many ways to say that it cannot read a file
        raise Unusable(f"{path} is no checkpoint of ours: {type(error).__name__}") from error
    problem = _problem(state, key, epochs)
    if problem:
        raise Unusable(f"{path} {problem}")
    result: dict[str, Any] = state
    return result


def _content(path: Path) -> bytes | None:
    """What is in a file, if it is there."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror or error}") from error


def _problem(state: Any, key: str, epochs: int) -> str | None:
    """What keeps a trial from going on from here."""
    if not isinstance(state, dict) or any(name not in state for name in STATE):
        return f"has to hold {', '.join(STATE)}"
    if state["key"] != key:
        return f"has to be of trial {key}, but is of {state['key']}"
    epoch, curve = state["epoch"], state["curve"]
    if type(epoch) is not int or not 1 <= epoch <= epochs:
        return f"has to be of an epoch from 1 to {epochs}, but is of {epoch!r}"
    if not (isinstance(curve, list) and len(curve) == epoch and all(map(_is_row, curve))):
        return f"has to hold a row of numbers for each of {epoch} epochs"
    if [row["epoch"] for row in curve] != list(range(1, epoch + 1)):
        return f"has to hold the epochs 1 to {epoch}"
    if not (is_number(state["seconds"]) and 0 <= state["seconds"] < math.inf):
        return f"has to say how many seconds it took, but got {state['seconds']!r}"
    ranks = state["rng"]
    if not (isinstance(ranks, list) and ranks and all(map(_are_tensors, ranks)) and _are_tensors(state["generators"])):
        return "has to hold the states of its random numbers"
    return None


def _is_row(row: Any) -> bool:
    numbers = isinstance(row, dict) and all(isinstance(name, str) and is_number(row[name]) for name in row)
    return numbers and all(name in row for name in ROW)


def _are_tensors(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, Tensor) for value in values)


def write_log(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row of JSON per line, in place of what was there."""
    rows = [{n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in row.items()} for row in rows]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    replace(path, lambda file: file.write(text.encode()))


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    def write(file: IO[bytes]) -> None:
        file.write((json.dumps({**result, "checksum": _checksum(result)}, indent=1) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())  # the rest of the trial is removed after this

    replace(path, write)


def read_result(path: Path, key: str | None = None) -> dict[str, Any] | None:
    """What came of a trial, if it is done: of the one with this key, or by default of any."""
    content = _content(path)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise Unusable(f"{path} is {'no JSON' if content else 'empty'}") from None
    problem = _result_problem(found)
    if problem:
        raise Unusable(f"{path} {problem}")
    result: dict[str, Any] = {name: found[name] for name in RESULT}
    return result if key in (None, result["key"]) else None


def _result_problem(found: Any) -> str | None:
    """What is wrong with a result. Those of older versions have no checksum."""
    if not isinstance(found, dict) or not set(RESULT) <= set(found) <= {*RESULT, "checksum"}:
        return f"has to hold {', '.join(RESULT)}"
    result = {name: value for name, value in found.items() if name != "checksum"}
    if "checksum" in found and found["checksum"] != _checksum(result):
        return "is damaged: its checksum does not fit"
    kinds = {"settings": dict, "metrics": dict, "curve": list, "machine": dict}
    if not all(isinstance(result[name], kind) for name, kind in kinds.items()):
        return "has to hold settings, metrics, a curve and a machine"
    if result["key"] != trial_key(str(result["task"]), result["settings"]):
        return "has a key that does not fit its settings"
    numbers = [result["seconds"], *result["metrics"].values()]
    if not all(map(is_number, numbers)) or not all(map(_is_row, result["curve"])):
        return "has to hold numbers"
    return None


def _checksum(result: Mapping[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()}"
