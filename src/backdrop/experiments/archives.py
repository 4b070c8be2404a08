"""Reading archives that are not trusted: nothing is unpacked onto the disk, nothing in them is run.

`members` takes the files out of a zip, tar or tar.gz archive, or a folder; `read_image`, `read_json` and `read_pickle`
read one of them. The standard library's filters for tar files, and pickles of NumPy, allow more than the data sets
need. Whatever is broken, dangerous or not as expected is an `ArchiveError`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import pickletools
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["ArchiveError", "Member", "PickledArray", "members", "read_image", "read_json", "read_pickle"]

MEMBER_LIMIT = 64 << 20  # bytes of one file in an archive
ARCHIVE_LIMIT = 1 << 30  # bytes of all of them

_Entry = tuple[str, int, str | None, Callable[[], bytes]]  # name, size, what is wrong with its kind, how to read it


class ArchiveError(ValueError):
    """An archive, or a file in it, that is broken, dangerous or not what was expected: which, and why."""

    def __init__(self, archive: Path, member: str | None, why: object) -> None:
        super().__init__(f"{archive}{f', {member!r}' if member else ''}: {why}")


@dataclass(frozen=True)
class Member:
    """A file in an archive or in a folder."""

    archive: Path
    name: str
    content: bytes

    def error(self, why: object) -> ArchiveError:
        return ArchiveError(self.archive, self.name, why)


def members(archive: Path, wanted: Callable[[str], object]) -> Iterator[Member]:
    """The files whose names are wanted, in the order of the archive.

    One bad entry, wanted or not, and the whole archive is refused: a path that leads out of it, a link or a device,
    more bytes than `MEMBER_LIMIT` and `ARCHIVE_LIMIT`, a wanted name that comes twice.
    """
    name: str | None = None
    seen: set[str] = set()
    left = ARCHIVE_LIMIT
    try:
        for name, size, problem, read in _entries(archive, wanted):
            left -= size
            path = PureWindowsPath(name)  # knows both kinds of slashes, and drives
            if path.anchor or ".." in path.parts:
                problem = "its path leads out of the archive"
            elif size > MEMBER_LIMIT or left < 0:
                problem = f"is too large: {MEMBER_LIMIT:,} bytes a file and {ARCHIVE_LIMIT:,} in all are allowed"
            elif name in seen:
                problem = "is there twice"
            if problem:
                raise ArchiveError(archive, name, problem)
            if wanted(name):
                seen.add(name)
                yield Member(archive, name, read())
    except ArchiveError:
        raise
    except Exception as error:  # tarfile and zipfile have a great many ways to fail on what is broken
        raise ArchiveError(archive, name, f"cannot be read: {str(error) or type(error).__name__}") from error


def _entries(archive: Path, wanted: Callable[[str], object]) -> Iterator[_Entry]:
    if archive.is_dir():  # the user's own, which may hold anything else as well
        for path in sorted(archive.rglob("*")):
            name = path.relative_to(archive).as_posix()
            if wanted(name) and path.is_file():
                yield name, path.stat().st_size, None, path.read_bytes
        return
    with archive.open("rb") as file:
        start = file.read(2)
        file.seek(0)
        if start == b"PK":
            yield from _zip_entries(file)
        elif start == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as plain:
                yield from _tar_entries(plain)
        else:
            yield from _tar_entries(file)


def _zip_entries(file: IO[bytes]) -> Iterator[_Entry]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            problem = None
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                problem = "is neither a file nor a folder"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # zipfile unpacks the other kinds in one go, whatever size they claim to have
                problem = "is compressed in a way that is not allowed: only deflated files are"
            if not info.filename.endswith("/"):
                yield info.filename, info.file_size, problem, partial(archive.read, info)


def _tar_entries(file: IO[bytes] | gzip.GzipFile) -> Iterator[_Entry]:
    limited = _Limited(file)
    with tarfile.open(fileobj=limited, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            problem = (
                None if info.isdir() or (info.isreg() and not info.issparse()) else "is neither a file nor a folder"
            )
            if problem or not info.isdir():
                yield info.name, info.size, problem, partial(_tar_content, archive, info)
    while limited.read(1 << 20):  # tarfile stops before the end, where gzip has its checksum
        pass


def _tar_content(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(info)
    return file.read() if file else b""


class _Limited:
    """A stream that ends with an error before it fills the memory: tarfile reads headers of any size."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file, self._left = file, ARCHIVE_LIMIT

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it holds more than {ARCHIVE_LIMIT:,} bytes")
        return content


def read_image(
    member: Member,
    kind: Literal["PNG", "JPEG"],
    mode: Literal["RGB", "L"],
    sizes: Collection[tuple[int, int]],
    resize: tuple[int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """An image of one of these sizes (width, height) as (height, width) or (height, width, 3)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(member.content), formats=[kind]) as image:
                size = image.size  # known before anything is decompressed
                if size in sizes:
                    image.verify()
            if size not in sizes:
                allowed = " or ".join(f"{width}x{height}" for width, height in sizes)
                raise member.error(f"has to be an image of {allowed} pixels, but is {size[0]}x{size[1]}")
            with Image.open(io.BytesIO(member.content), formats=[kind]) as image:  # verify() has used the other one up
                pixels = image.convert(mode)
                if resize is not None and resize != size:
                    pixels = pixels.resize(resize, Image.Resampling.LANCZOS)
                return np.asarray(pixels)
    except ArchiveError:
        raise
    except Exception as error:  # Pillow has a great many ways to say that a file is broken
        raise member.error(f"is not a whole {kind} image: {error}") from error


def read_json(member: Member) -> Any:
    try:
        return json.loads(member.content)
    except (ValueError, RecursionError) as error:
        raise member.error(f"is not JSON: {error}") from error


def read_pickle(member: Member) -> Any:
    """What a pickle holds: numbers, bytes, lists, dicts and NumPy arrays. Text of Python 2 comes as bytes."""
    try:
        _check_memo(member.content)
        return _Unpickler(io.BytesIO(member.content), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise member.error(f"is not a pickle of plain arrays: {error}") from error


def _check_memo(content: bytes) -> None:
    """An error for a pickle that would fill the memory: its memo is as long as the highest number in it says."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) < len(content):
            raise ValueError(f"it remembers more than its {len(content):,} bytes can hold")


class PickledArray:
    """Stands for the array, its dtype and NumPy's functions in a pickle, so that none of NumPy's code runs on it."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The array, if it is one of bytes."""
        try:
            _, shape, dtype, fortran, content = self.state
            if dtype.args[0] in (b"u1", "u1") and not fortran and math.prod(shape) == len(content):
                return np.frombuffer(content, np.uint8).reshape(shape)
        except Exception:  # a pickle may hold anything
            pass
        raise ValueError("it has to be an array of bytes")


class _Unpickler(pickle.Unpickler):
    _allowed = (
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
    )

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return PickledArray
