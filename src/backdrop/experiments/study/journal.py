"""Optuna's journal file, made to survive what happens to processes and disks.

Every change is a line at the end of the file, written under a lock that ends with the process that holds it. A write
that was cut short, by SIGKILL or a full disk, leaves a torn last line: it never happened, and the next write removes
it. Lines carry a checksum, and that of the line before: one in the middle that is damaged or missing is an error that
names it, and `repair` says what is left.

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
import io
import json
import os
import re
import stat
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from backdrop._core.files import CHUNK, PAUSE, cut, has_locks, held, is_at, try_lock
from backdrop.experiments.study import alive

__all__ = ["CHUNK", "Damaged", "Journal", "lines", "links", "read_line"]

TAIL = re.compile(rb',"after":"([0-9a-f]{8})","crc32":"([0-9a-f]{8})"}\n\Z')
TAIL_SIZE = len(b',"after":"00000000","crc32":"00000000"}\n')
NONE = b"00000000"  # instead of the checksum of a line that has none

# What every change has to say besides "op_code" and "worker_id", by its code.
FIELDS: dict[int, tuple[tuple[str, type], ...]] = {
    0: (("study_name", str), ("directions", list)),
    1: (("study_id", int),),
    2: (("study_id", int), ("user_attr", dict)),
    3: (("study_id", int), ("system_attr", dict)),
    4: (("study_id", int),),
    5: (("trial_id", int), ("param_name", str), ("distribution", str)),
    6: (("trial_id", int), ("state", int)),
    7: (("trial_id", int), ("step", int)),
    8: (("trial_id", int), ("user_attr", dict)),
    9: (("trial_id", int), ("system_attr", dict)),
}


class Damaged(ValueError):  # noqa: N818
    """A line of a journal that cannot be read: which, why, and what to do."""

    def __init__(self, path: Path, number: int, why: str) -> None:
        super().__init__(
            f"{path}, line {number}, {why}; backdrop repair {path} rebuilds the journal and says what cannot be saved"
        )


class Journal(JournalFileBackend):
    """A journal file, made if it is not there."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path
        self._open_lock = None if has_locks(path) else JournalFileOpenLock(str(path))
        self._ends = [(0, NONE)]  # where each line that was read ends, and its checksum

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """The changes from a number on; a torn last line is none."""
        with self._journal.open("rb") as file:
            try:
                found = self._read(file, log_number_from)
            except Damaged:  # or seen while it was written
                with self._locked() as whole:
                    found = self._read(whole, log_number_from)
        return iter(found)

    def _read(self, file: IO[bytes], start: int) -> list[dict[str, Any]]:
        number, found = min(start, len(self._ends) - 1), []
        file.seek(self._ends[number][0])
        for line in lines(file.read()):
            try:
                log, (after, checksum) = read_line(line), links(line)
                if after not in (None, self._ends[number][1]):
                    raise ValueError("does not follow the one before it: some are missing")
            except ValueError as error:
                raise Damaged(self._journal, number + 1, str(error)) from None
            number += 1
            if number == len(self._ends):
                self._ends.append((self._ends[-1][0] + len(line), checksum))
            if number > start:
                found.append(log)
        return found

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        while True:
            with self._locked() as file:
                _append(file, logs)
                if is_at(self._journal, file):
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
                if try_lock(file):
                    if is_at(self._journal, file):
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
            if not first or not is_at(self._journal, old):
                return
            try:
                with fresh.open("wb+", buffering=0) as file:
                    try_lock(file)
                    copied = _whole_lines(old, 0)
                    _write(file, copied)
                    _make_alike(fresh, os.fstat(old.fileno()))
                    fresh.replace(self._journal)
                    if late := _whole_lines(old, len(copied)):
                        _write(file, late)
            except BaseException:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise


def _append(file: IO[bytes], logs: list[dict[str, Any]]) -> None:
    """Writes changes to the end of a file, or nothing."""
    cut(file)
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_SIZE))
    content, (_, checksum) = b"", links(file.read(TAIL_SIZE))
    for log in logs:
        line, checksum = _line(log, checksum)
        content += line
    _write(file, content)


def _write(file: IO[bytes], lines: bytes) -> None:
    """Puts whole lines behind those of a file, or nothing."""
    cut(file)
    file.seek(0, os.SEEK_END)
    rest = memoryview(lines)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except BaseException:
        cut(file)
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


def lines(content: bytes) -> Iterator[bytes]:
    """The lines of a journal but a torn last one."""
    return (line for line in io.BytesIO(content) if line.endswith(b"\n"))


def read_line(line: bytes) -> dict[str, Any]:
    """A change, or an error that says why it is none. Lines of older versions and of Optuna itself have no checksum."""
    if not line.strip():
        raise ValueError("is blank")
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    code = log.get("op_code") if isinstance(log, dict) and isinstance(log.get("worker_id"), str) else None
    fields = FIELDS.get(code) if type(code) is int else None
    if fields is None:
        raise ValueError("is no change of a study")
    if ("crc32" in log or "after" in log) and line != _signed(line[:-TAIL_SIZE], *links(line)[:1])[0]:
        raise ValueError("is damaged: its checksum does not fit")
    for name, kind in fields:
        if type(log.get(name)) is not kind:
            raise ValueError(f"has to say {name}")
    found: dict[str, Any] = log
    return found


def links(line: bytes) -> tuple[bytes | None, bytes]:
    """The checksum of the line before, and its own, as a line says them."""
    found = TAIL.match(line[-TAIL_SIZE:])
    return (found[1], found[2]) if found else (None, NONE)


def _line(log: dict[str, Any], after: bytes) -> tuple[bytes, bytes]:
    """A change as it stands in the file, and its checksum."""
    return _signed(json.dumps(log, separators=(",", ":")).encode()[:-1], after)


def _signed(content: bytes, after: bytes | None) -> tuple[bytes, bytes]:
    content += b',"after":"%s"' % (after or NONE)
    checksum = b"%08x" % zlib.crc32(content)
    return content + b',"crc32":"%s"}\n' % checksum, checksum
