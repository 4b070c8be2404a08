"""Files and lines that are there whole or not at all, locks that end with their process, no links and no pipes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16
PAUSE = 0.02  # seconds between two attempts to get a lock


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file beside its place and then moves it there; if that fails, what was there stays."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(fresh, "wb", opener=regular) as file:
            write(file)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def put(path: Path, content: bytes, what: str) -> None:
    """Writes a file, in place of one that is there; `what` it is, for an error."""
    try:
        replace(path, lambda file: file.write(content))
    except OSError as error:
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


@contextlib.contextmanager
def held(path: Path, patience: float | None = None, waiting: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """A lock that lets one process in at a time and ends with it, however that ends; its file goes with it.

    Args:
        path: of the lock's file.
        patience: seconds to wait for whoever has it. After that the block runs without it, told False. By default as
            long as it takes.
        waiting: is called before that wait without an end.
    """
    end = time.monotonic() + (patience or 0.0)
    while True:
        with open(path, "ab", opener=regular) as file:
            taken = try_lock(file)
            if not taken and patience is None and fcntl is not None:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
                taken = True
            if taken:
                if not is_at(path, file):  # removed by whoever had it, and others may have made a new one
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


def try_lock(file: IO[bytes]) -> bool:
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


def is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether this is still the file that lies there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def has_locks(path: Path) -> bool:
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
