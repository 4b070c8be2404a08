"""What workers that ended badly leave in the folders of trials: notes of faults, files half written, old checkpoints.

NOTE: rule 7 of `study`. When a fault takes a process down (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT), Python's
faulthandler writes where it was to crash.txt in the trial's folder. Whoever claims the trial counts these notes: after
`STRIKES` of them without an epoch in between, the trial fails for that reason, and the notes become crashes.txt, so
that one who asks for it again (`--retry-failed`) begins at none. Nothing else counts: a worker that was killed or
preempted, or that the system ended because memory ran out, leaves no such note.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from backdrop._core.files import read, regular
from backdrop.experiments import checkpoint
from backdrop.experiments.training import told

__all__ = ["STRIKES", "Faults", "clear", "sweep"]

STRIKES = 4
FATAL = b"Fatal Python error: "


class Faults:
    """Takes note of faults of this process while it has a trial, in the trial's folder."""

    def __init__(self, home: Path) -> None:
        self.path = home / "crash.txt"
        self.file: IO[bytes] | None = None
        self.notes: list[str] = []

    def __enter__(self) -> Faults:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[bytes] = []
        with contextlib.suppress(FileNotFoundError):
            lines = read(self.path).splitlines()
        self.notes = [line.removeprefix(FATAL).decode(errors="replace") for line in lines if line.startswith(FATAL)]
        if not faulthandler.is_enabled():  # else someone else takes note, and where is theirs to say
            self.file = open(self.path, "ab", buffering=0, opener=regular)  # closed in __exit__
            faulthandler.enable(self.file)
        return self

    def __exit__(self, *_: object) -> None:
        if self.file:
            faulthandler.disable()
            self.file.close()
        _remove_empty(self.path)

    def forgive(self) -> None:
        """The trial got further: what was before does not count any more."""
        if self.notes:
            self.notes = []
            os.truncate(self.path, 0)

    def verdict(self) -> str | None:
        """Why the trial has to fail, if it has; the notes are put aside then."""
        if len(self.notes) < STRIKES:
            return None
        kept = self.path.with_name("crashes.txt")
        self.path.replace(kept)
        often = f"its worker crashed {len(self.notes)} times before it got any further"
        return f"{often}: {self.notes[-1]}; see {kept}"


def clear(home: Path, key: str, *, done: bool = False) -> None:
    """Removes files half written, and what a trial that is done needs no more.

    A worker that was taken for dead by mistake may still write to the folder of its trial. It finds its file gone, or
    is told that the trial is not its own, and calls this too; whoever comes last finds the result. With `done`, nobody
    will go on with this trial, though its result may lie on another machine.
    """
    if home.is_symlink():
        raise OSError(f"{home} is a link, so nothing is written or removed there: remove it")
    for path in home.glob(".*.new"):
        path.unlink(missing_ok=True)
    old = home / "checkpoint.pt"
    try:
        result = checkpoint.read_result(home / "result.json", key)
    except ValueError:  # what cannot be read counts as none
        result = None
    if result is None:
        if done:
            old.unlink(missing_ok=True)
            _remove_empty(home / "crash.txt")
        return
    log, rows = home / "log.jsonl", [told(row, result["settings"]["epochs"]) for row in result["curve"]]
    if old.exists() or not log.exists() or read(log).count(b"\n") != len(rows):
        checkpoint.write_log(log, rows)
    old.unlink(missing_ok=True)
    _remove_empty(home / "crash.txt")


def sweep(folder: Path, done: Iterable[str]) -> None:
    """Clears the folders of trials that are done, complete or pruned, by their keys, where something lies about."""
    for key in done:
        home = folder / key
        if any(home.glob(".*.new")) or (home / "checkpoint.pt").exists() or (home / "crash.txt").exists():
            clear(home, key, done=True)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not path.stat().st_size:
            path.unlink()
