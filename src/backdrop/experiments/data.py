"""The data sets of the paper's experiments: fetched once, kept as two arrays, loaded whole onto the training device.

```
backdrop data fetch cifar10
```

    train, test = data.cifar10(subset="cats-dogs", device="cuda")
    images, labels = train.images.float() / 255, train.labels

Files lie in `ROOT/NAME`: `images.npy`, `labels.npy` and `manifest.json`, which says where they come from and what they
have to be. ROOT is the argument, else `$BACKDROP_DATA`, else `~/.cache/backdrop`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset

from backdrop._core.files import held
from backdrop.experiments import cache
from backdrop.experiments.fetch import forget
from backdrop.experiments.sources import DATA_SETS, fetch_from_net, take

__all__ = ["ImageSet", "Info", "cifar10", "fetch", "info", "uiuc"]

Subset: TypeAlias = Literal["cats-dogs", "imbalanced"] | None
Location: TypeAlias = str | os.PathLike[str] | None

UIUC_TRAINING = 19  # images of each class


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Images and their classes, all in memory.

    Args:
        images: (n, channels, height, width), uint8.
        labels: (n,), int64, on the same device: which of the classes.
        classes: their names.

    Examples:
        >>> images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
        >>> ImageSet(images, torch.tensor([0, 1, 1]), ("cat", "dog"))
        ImageSet(3 images of 1x8x8 on cpu: cat 1, dog 2)
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        given = [(tuple(x.shape), x.dtype, str(x.device)) for x in (self.images, self.labels)]
        (shape, *_, place), (rows, *_, other) = given
        kinds = (self.images.dtype, self.labels.dtype)
        if kinds != (torch.uint8, torch.int64) or len(shape) != 4 or rows != shape[:1] or place != other:
            raise ValueError(
                "an ImageSet has to be (n, channels, height, width) images of uint8 and (n,) labels of int64 on one "
                f"device, but got {given[0]} and {given[1]}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __repr__(self) -> str:
        counts = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        classes = ", ".join(f"{name} {count}" for name, count in zip(self.classes, counts, strict=True))
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"ImageSet({len(self)} images of {shape} on {self.images.device}: {classes})"


def cifar10(
    root: Location = None,
    *,
    subset: Subset = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    verify: bool = False,
) -> tuple[ImageSet, ImageSet]:
    """CIFAR-10 for training and for testing: 50,000 and 10,000 images of 3x32x32 in 10 classes.

    Args:
        root: where data sets lie.
        subset: "cats-dogs" for cats (label 0) and dogs (label 1) at 5 to 1, 6,000 and 1,200 images; "imbalanced" for
            100 images of the first class, 200 of the second, up to 1,000 of the tenth, 5,500 and as many for testing.
        seed: which images a subset takes. They stay in their order, and those of a smaller share are among those of a
            larger one.
        device: where the images shall be.
        verify: whether to compare the files with their checksums first.
    """
    if subset not in (None, "cats-dogs", "imbalanced"):
        raise ValueError(f"subset has to be 'cats-dogs', 'imbalanced' or None, but got {subset!r}")
    images, labels = _load("cifar10", root, verify)
    classes = DATA_SETS["cifar10"].classes
    names = ("cat", "dog") if subset == "cats-dogs" else classes
    generator = torch.Generator().manual_seed(seed)
    sets, start = [], 0
    for size in DATA_SETS["cifar10"].per_class:
        part = slice(start, start + size * len(classes))
        start, x, y = part.stop, images[part], labels[part]
        if subset == "cats-dogs":
            chosen = _choose(y, [{"cat": size, "dog": size // 5}.get(name, 0) for name in classes], generator)
            x, y = x[chosen], (y[chosen] == classes.index("dog")).long()
        elif subset == "imbalanced":
            chosen = _choose(y, [100 * i for i in range(1, len(classes) + 1)], generator)
            x, y = x[chosen], y[chosen]
        sets.append(ImageSet(x.to(device), y.to(device), names))
    train, test = sets
    return train, test


def uiuc(
    root: Location = None, *, seed: int = 0, device: torch.device | str = "cpu", verify: bool = False
) -> tuple[ImageSet, ImageSet]:
    """The UIUC ("Ponce") textures for training and for testing: 475 and 525 images of 1x300x400 in 25 classes.

    Args:
        root: where data sets lie.
        seed: which 19 images of every class are for training; the other 21 are for testing.
        device: where the images shall be.
        verify: whether to compare the files with their checksums first.
    """
    images, labels = _load("uiuc", root, verify)
    classes = DATA_SETS["uiuc"].classes
    training = torch.zeros(len(labels), dtype=torch.bool)
    training[_choose(labels, [UIUC_TRAINING] * len(classes), torch.Generator().manual_seed(seed))] = True
    first, second = (ImageSet(images[i].to(device), labels[i].to(device), classes) for i in (training, ~training))
    return first, second


def _choose(labels: Tensor, counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """The places, in order, of so many images of each class. Every class is shuffled, whatever its count."""
    places = [(labels == i).nonzero().flatten() for i in range(len(counts))]
    chosen = [x[torch.randperm(len(x), generator=generator)[:n]] for x, n in zip(places, counts, strict=True)]
    return torch.cat(chosen).sort().values


@dataclass(frozen=True)
class Info:
    """A data set on this machine, or not: then `problem` says how to get it."""

    name: str
    path: Path
    present: bool
    images: int = 0
    bytes: int = 0
    source: str | None = None
    verified: bool = False  # the files have the checksums in their manifest
    problem: str | None = None


def info(root: Location = None) -> list[Info]:
    """What there is of every data set, where it is from, and whether it is as it was when it was fetched."""
    home, found = _home(root), []
    for name in DATA_SETS:
        path = home / name
        size = sum(file.stat().st_size for file in path.glob("*"))
        try:
            manifest = cache.check(name, home, verify=True)
            images = manifest["files"]["images.npy"]["shape"][0]
            found.append(Info(name, path, True, images, size, manifest["source"], verified=True))
        except (cache.CacheError, FileNotFoundError) as error:
            found.append(Info(name, path, path.exists(), bytes=size, problem=str(error)))
    return found


def fetch(
    name: str, root: Location = None, *, source: Location = None, progress: bool = True, force: bool = False
) -> Path:
    """Gets a data set and returns the folder it is in. Does nothing where it is already.

    Args:
        name: "cifar10" or "uiuc".
        root: where data sets lie.
        source: a file or folder to take instead of downloading: an archive of CIFAR-10; a folder with a folder for each
            texture, or archives of such.
        progress: whether to say what happens.
        force: whether to replace what is there.
    """
    if name not in DATA_SETS:
        raise ValueError(f"a data set has to be one of {', '.join(DATA_SETS)}, but got {name!r}")
    home, downloads = _home(root), _home(root) / "downloads"
    say = partial(Console(stderr=True, quiet=not progress).print, soft_wrap=True, markup=False, highlight=False)
    if not force and _is_there(name, home, say):
        return home / name
    new = not home.exists()
    home.mkdir(parents=True, exist_ok=True)
    waiting = partial(say, f"another process is fetching {name}: waiting for it")
    with _gone_again(home if new else None), held(home / f".{name}.lock", waiting=waiting):
        if not force and _is_there(name, home, say):
            return home / name
        if source is None:
            obtained = fetch_from_net(name, downloads, progress, say)
        else:
            obtained = take(name, Path(source).expanduser())
        cache.store(name, home, obtained)
        for archive in (archive for known in DATA_SETS[name].sources for archive in known.archives):
            forget(archive, downloads)
    say(f"{name}: {len(obtained.labels):,} images from {obtained.source}, now in {home / name}")
    return home / name


@contextlib.contextmanager
def _gone_again(new: Path | None) -> Iterator[None]:
    """Removes a new folder if nothing came into it."""
    try:
        yield
    except BaseException:
        if new is not None:
            with contextlib.suppress(OSError):
                new.rmdir()
        raise


def _is_there(name: str, home: Path, say: Callable[[str], None]) -> bool:
    if not (home / name).exists():
        return False
    cache.check(name, home)
    say(f"{name} is already in {home / name}")
    return True


def _load(name: str, root: Location, verify: bool) -> tuple[Tensor, Tensor]:
    home = _home(root)
    cache.check(name, home, verify=verify)
    images, labels = cache.load(name, home)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _home(root: Location) -> Path:
    if root is None:
        root = os.environ.get("BACKDROP_DATA") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "backdrop"
    return Path(root).expanduser().absolute()
