"""Files of a trial: its checkpoint, its log and its result. All are whole or not there, whenever a process ends."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["load", "read_result", "replace", "save", "write_log", "write_result"]


def save(path: Path, state: Mapping[str, Any]) -> None:
    replace(path, lambda file: torch.save(dict(state), file))


def load(path: Path, key: str) -> dict[str, Any] | None:
    """The state that was saved for this trial, if there is one. Nothing in the file is run.

    A file that cannot be read, as a power failure may leave it, counts as none.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["key"]
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        warnings.warn(f"{path} cannot be read, so this trial begins anew: {error}", stacklevel=2)
        return None
    if found != key:
        raise ValueError(f"{path} has to be of trial {key}, but is of {found}; delete it to begin this trial anew")
    return state


def write_log(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row of JSON per line, in place of what was there."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    replace(path, lambda file: file.write(text.encode()))


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    def write(file: IO[bytes]) -> None:
        file.write((json.dumps(result, indent=1) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())  # the rest of the trial is removed after this

    replace(path, write)


def read_result(path: Path, key: str) -> dict[str, Any] | None:
    """What came of this trial, if it is done."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result.get("key") == key else None


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file beside its place and then moves it there; if that fails, what was there stays."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            write(file)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
