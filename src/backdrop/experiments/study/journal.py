"""Optuna's journal file, made to survive what happens to processes and disks.

Every change is a line at the end of the file, written under a lock that ends with the process that holds it. A write
that was cut short, by SIGKILL or a full disk, leaves a torn last line: it never happened, and the next write removes
it. Lines carry a checksum; one in the middle that is damaged is an error that names it, and `repair` says what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
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

__all__ = ["CHUNK", "Damaged", "Journal", "lines", "read_line"]

SUM = b',"crc32":"'  # and eight digits, `"}` and the end of the line

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
        self._ends = [0]  # where each line that was read ends

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """The changes from a number on; a torn last line is none."""
        number = min(log_number_from, len(self._ends) - 1)
        with self._journal.open("rb") as file:
            file.seek(self._ends[number])
            for line in lines(file):
                try:
                    log = read_line(line)
                except ValueError as error:
                    raise Damaged(self._journal, number + 1, str(error)) from None
                number += 1
                if number == len(self._ends):
                    self._ends.append(self._ends[-1] + len(line))
                if number > log_number_from:
                    yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        rest = memoryview(b"".join(map(_line, logs)))
        with self._journal.open("rb+", buffering=0) as file, self._locked(file):
            cut(file)
            file.seek(0, os.SEEK_END)
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


def lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a journal but a torn last one."""
    return (line for line in file if line.endswith(b"\n"))


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
    content = line[: -len(SUM) - 11]
    if "crc32" in log and line != content + _sum(content):
        raise ValueError("is damaged: its checksum does not fit")
    for name, kind in fields:
        if type(log.get(name)) is not kind:
            raise ValueError(f"has to say {name}")
    found: dict[str, Any] = log
    return found


def _line(log: dict[str, Any]) -> bytes:
    """A change as it stands in the file, with its checksum."""
    content = json.dumps(log, separators=(",", ":")).encode()[:-1]
    return content + _sum(content)


def _sum(content: bytes) -> bytes:
    return SUM + b'%08x"}\n' % zlib.crc32(content)


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
