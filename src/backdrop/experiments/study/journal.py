"""Optuna's journal file, made to survive what happens to processes and disks.

Every change is a line at the end of the file, written under a lock that ends with the process that holds it. A write
that was cut short, by SIGKILL or a full disk, leaves a torn last line: it never happened, and the next write removes
it.

NOTE: a lock does not end with a process that is stopped (SIGSTOP, Ctrl-Z, a frozen machine), which may be in the
middle of its write. Who waits for `GRACE` seconds, in which nothing changes, puts a copy in the place of the file, and
the stopped process keeps the old one. When it goes on, it finds that its file is not the journal any more, and writes
once more.
1. A write counts when the file that it went to is still the journal after it.
2. The copy is in its place, locked, before what came to the old file meanwhile is looked for and taken over. So of a
   write that counted nothing is lost. One that is written twice changes nothing: an attribute is set to the same, a
   change of state is refused, and two trials at one key are rule 5 of `study`.
3. The copy begins with the same bytes, so that readers find their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from backdrop.experiments.study import alive

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Journal", "held"]

CHUNK = 1 << 16
PAUSE = 0.02  # seconds between two attempts to get a lock


class Journal(JournalFileBackend):
    """A journal file; reading is Optuna's own, which stops before a torn last line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path
        self._open_lock = None if _has_flock(path) else JournalFileOpenLock(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        while True:
            with self._locked() as file:
                _append(file, data)
                if _is_at(self._journal, file):
                    return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, which nobody else writes to."""
        if self._open_lock is None:
            file = self._flocked()
            try:
                yield file
            finally:
                file.close()  # and the lock with it
            return
        self._open_lock.acquire()
        try:
            with self._journal.open("rb+", buffering=0) as file:
                yield file
        finally:
            self._open_lock.release()

    def _flocked(self) -> IO[bytes]:
        before, begin, pause = None, time.monotonic(), PAUSE / 16
        since = begin
        while True:
            file = self._journal.open("rb+", buffering=0)
            try:
                if _try_lock(file):
                    if _is_at(self._journal, file):
                        return file
                    file.close()
                    continue
                state, now = os.fstat(file.fileno()), time.monotonic()
                if (sign := (state.st_ino, state.st_size, state.st_mtime_ns)) != before:
                    before, since = sign, now
                elif now - since > alive.GRACE:
                    self._take_over(file)
                    since = now
                if now - begin > 10 * alive.GRACE:
                    raise OSError(
                        f"{self._journal} has been locked for {now - begin:.0f} seconds, by a process that may have "
                        "been stopped; let it go on or end it, and run the same command again"
                    )
            except BaseException:
                file.close()
                raise
            file.close()
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)

    def _take_over(self, old: IO[bytes]) -> None:
        """Puts a copy in the place of a file whose lock is held by a process that does not go on."""
        guard = self._journal.with_name(f".{self._journal.name}.moved")
        fresh = self._journal.with_name(f".{self._journal.name}.{uuid.uuid4().hex}.new")
        with held(guard, 0.0) as first:
            if not first or not _is_at(self._journal, old):
                return
            try:
                with fresh.open("wb+", buffering=0) as file:
                    _try_lock(file)
                    copied = _whole_lines(old, 0)
                    _append(file, copied)
                    _make_alike(fresh, os.fstat(old.fileno()))
                    fresh.replace(self._journal)
                    if late := _whole_lines(old, len(copied)):
                        _append(file, late)
            except BaseException:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise


@contextlib.contextmanager
def held(path: Path, patience: float) -> Iterator[bool]:
    """A lock that lets one process in at a time and ends with it, however that ends; its file goes with it.

    Args:
        path: of the lock's file.
        patience: seconds to wait for whoever has it. After that the block runs without it, told False.
    """
    end = time.monotonic() + patience
    while True:
        with path.open("ab") as file:
            if _try_lock(file):
                if not _is_at(path, file):  # removed by whoever had it, and others may have made a new one
                    continue
                try:
                    yield True
                finally:
                    with contextlib.suppress(OSError):  # Windows does not remove open files
                        path.unlink()
                return
        if time.monotonic() >= end:
            yield False
            return
        time.sleep(PAUSE)


def _try_lock(file: IO[bytes]) -> bool:
    """Whether the lock of this file is ours now; True as well where there are no such locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether this is still the file that lies there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _append(file: IO[bytes], data: bytes) -> None:
    """Writes whole lines to the end of a file, or nothing."""
    _repair(file)
    file.seek(0, os.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except BaseException:
        _repair(file)
        raise


def _make_alike(path: Path, state: os.stat_result) -> None:
    """Gives a file the permissions of another and, where that is allowed, its owner."""
    path.chmod(stat.S_IMODE(state.st_mode))
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(path, state.st_uid, state.st_gid)


def _whole_lines(file: IO[bytes], start: int) -> bytes:
    """What follows in a file, up to its last end of a line."""
    file.seek(start)
    found = file.read()
    return found[: found.rfind(b"\n") + 1]


def _has_flock(path: Path) -> bool:
    """Whether this system and this file system have locks that end with their process."""
    if fcntl is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
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
