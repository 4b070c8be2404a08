"""Files that are there whole or not at all, and lines that are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16


def put(path: Path, content: bytes, what: str) -> None:
    """Write a file, in place of one that is there; `what` it is, for an error."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, f"{what} cannot be written: {error.strerror}", str(path)) from error


def append(path: Path, line: bytes) -> None:
    """Adds a line to a file that several processes write to.

    It is there whole or not at all, and so are those before it: what a write that was cut short has left is removed.
    """
    with path.open("ab+", buffering=0) as file, locked(file):
        cut(file)
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


@contextlib.contextmanager
def locked(file: IO[bytes]) -> Iterator[None]:
    """Lets one process in at a time, where the system and the file system can do that; closing the file ends it."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
    yield


def cut(file: IO[bytes]) -> None:
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
