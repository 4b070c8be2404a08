"""Optuna's journal file, made to survive what happens to processes and disks.

Every change is a line at the end of the file, written under a lock that ends with the process that holds it. A write
that was cut short, by SIGKILL or a full disk, leaves a torn last line: it never happened, and the next write removes
it. Lines carry a checksum, and that of the line before: one in the middle that is damaged or missing is an error that
names it, and `repair` says what is left.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from backdrop._files import CHUNK, cut

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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
    """A journal file.

    Args:
        path: of the file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path
        self._open_lock = None if _has_flock(path) else JournalFileOpenLock(str(path))
        self._ends = [(0, NONE)]  # where each line that was read ends, and its checksum

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """The changes from a number on; a torn last line is none."""
        with self._journal.open("rb") as file:
            try:
                found = self._read(file, log_number_from)
            except Damaged:  # or seen while it was written
                with self._locked(file):
                    found = self._read(file, log_number_from)
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
        with self._journal.open("rb+", buffering=0) as file, self._locked(file):
            cut(file)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_SIZE))
            content, (_, checksum) = b"", links(file.read(TAIL_SIZE))
            for log in logs:
                line, checksum = _line(log, checksum)
                content += line
            rest = memoryview(content)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException:
                cut(file)
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
