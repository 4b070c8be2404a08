"""Optuna's journal file, made to survive what happens to processes and disks.

Every change is a line at the end of the file, written under a lock that ends with the process that holds it. A write
that was cut short, by SIGKILL or a full disk, leaves a torn last line: it never happened, and the next write removes
it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Journal"]

CHUNK = 1 << 16


class Journal(JournalFileBackend):
    """A journal file; reading is Optuna's own, which stops before a torn last line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path
        self._open_lock = None if _has_flock(path) else JournalFileOpenLock(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        rest = memoryview("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())
        with self._journal.open("rb+", buffering=0) as file, self._locked(file):
            _repair(file)
            file.seek(0, os.SEEK_END)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                _repair(file)
                raise

    @contextlib.contextmanager
    def _locked(self, file: IO[bytes]) -> Iterator[None]:
        if self._open_lock is None:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file ends it
            yield
            return
        self._open_lock.acquire()
        try:
            yield
        finally:
            self._open_lock.release()


def _has_flock(path: Path) -> bool:
    """Whether this system and this file system have locks that end with their process."""
    if fcntl is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
    return True


def _repair(file: IO[bytes]) -> None:
    """Cuts off what follows the last end of a line."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
