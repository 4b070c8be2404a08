"""A prepared data set on the disk: `ROOT/NAME/images.npy`, `labels.npy` and `manifest.json`.

The manifest says where the arrays are from and what they have to be. The folder is written beside its place and then
renamed, so what is there is whole.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import backdrop
from backdrop.experiments.fetch import checksum
from backdrop.experiments.sources import DATA_SETS, Labels, Obtained, Pixels

__all__ = ["CacheError", "check", "listed", "load", "store"]


class CacheError(ValueError):
    """Files of a data set that are not as they have to be: which, why, and how to get them anew."""


def store(name: str, home: Path, obtained: Obtained) -> None:
    """Puts a data set in its place, and away with what was there. For one process at a time."""
    for rest in home.glob(f".{name}-*"):  # of a process that was killed
        shutil.rmtree(rest)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    try:
        new, old, target = folder / "new", folder / "old", home / name
        new.mkdir()
        files = {}
        for file, array in (("images.npy", obtained.images), ("labels.npy", obtained.labels)):
            with (new / file).open("wb") as stream:
                np.save(stream, np.ascontiguousarray(array))
                stream.flush()
                os.fsync(stream.fileno())
            files[file] = listed(new / file, array.shape, str(array.dtype))
        manifest = {
            "name": name,
            "source": obtained.source,
            "archives": obtained.archives,
            "files": files,
            "backdrop": backdrop.__version__,
        }
        (new / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listed(path: Path, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """What a manifest says of an array."""
    return {"bytes": path.stat().st_size, "shape": shape, "dtype": dtype, "checksum": checksum(path)}


def check(name: str, home: Path, *, verify: bool = False) -> dict[str, Any]:
    """The manifest of a data set, if the files fit it: their sizes and kinds, with `verify` their checksums too."""
    folder = home / name
    command = f"backdrop data fetch {name} --root {shlex.quote(str(home))}"
    if not folder.exists():
        raise FileNotFoundError(f"{name} is not in {home}; get it with: {command}")
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        if manifest["name"] != name or not isinstance(manifest["source"], str):
            raise ValueError(f"manifest.json has to be that of {name}, but it is of {manifest['name']}")
        for file, shape, dtype in _expected(name):
            path, listed = folder / file, manifest["files"][file]
            found = np.lib.format.open_memmap(path, mode="r")  # reads the header alone
            for what, is_now, has_to_be in (
                ("dtype", str(found.dtype), dtype),
                ("shape", found.shape, shape),
                ("size in bytes", path.stat().st_size, listed["bytes"]),
                ("checksum", checksum(path) if verify else None, listed["checksum"] if verify else None),
            ):
                if is_now != has_to_be:
                    raise ValueError(f"the {what} of {file} has to be {has_to_be}, but is {is_now}")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        why = f"no entry {error}" if isinstance(error, KeyError) else error
        raise CacheError(f"{folder} is damaged: {why}; get it anew with: {command} --force") from error
    return manifest


def load(name: str, home: Path) -> tuple[Pixels, Labels]:
    images, labels = (np.load(home / name / file) for file, *_ in _expected(name))
    return images, labels


def _expected(name: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    data_set = DATA_SETS[name]
    count = sum(data_set.per_class) * len(data_set.classes)
    return ("images.npy", (count, *data_set.shape), "uint8"), ("labels.npy", (count,), "int64")
