"""Files that are there whole or not at all, lines that are, and files that are no links and no pipes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
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
        with open(fresh, "wb", opener=regular) as file:
            file.write(content)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, f"{what} cannot be written: {error.strerror}", str(path)) from error


def append(path: Path, line: bytes) -> None:
    """Adds a line to a file that several processes write to.

    It is there whole or not at all, and so are those before it: what a write that was cut short has left is removed.
    """
    with open(path, "ab+", buffering=0, opener=regular) as file, locked(file):
        cut(file)
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


def regular(path: str, flags: int) -> int:
    """For `open`: a file in a folder that others may have filled. What a link leads to is read, but not written to."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    flags |= getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if writes else 0)  # a pipe may wait for ever
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(f"{path} is a link or a pipe, so nothing is written to it: remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no file: remove it")
    return file


def read(path: Path) -> bytes:
    """The content of a file, and an error for anything else: a pipe would be waited for."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


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
