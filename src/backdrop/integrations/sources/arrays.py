"""Whatever slices, as a source: its axes named by letters, its regions as tensors."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backdrop._source import Source

GAP = 64  # rows that are read and thrown away rather than read around
BLOCK = 2**16  # rows that are read in one piece, where only some of them are wanted
TRIED = 8  # cells along every axis of what a transform is tried on

Opened = Any  # has shape, dtype, and slices
Transform = Callable[[Tensor], Tensor]


def from_array(
    array: Any, axes: str, *, transform: Transform | None = None, dtype: torch.dtype | None = None
) -> Source:
    """A source of an array: of NumPy, a memory map, a torch tensor, or anything with `shape`, `dtype` and slices.

    Args:
        array: it, or the path of a `.npy` file, which is mapped into memory.
        axes: a letter for each axis of the array. `n` is that of samples and `c` that of channels; the others are axes
            of space, in the order in which the array has them. "yxc" is one image with channels last, "nc" a table.
        transform: what is made of a region before the model gets it, a tensor of shape (channels, *space) and the
            array's own dtype: `lambda region: region.float() / 255`. It has to give each position a value that does not
            depend on what lies around it, because regions are cut anywhere; it may change the number of channels.
        dtype: what regions are turned into after that.
    """
    if isinstance(array, (str, Path)):
        return Sliced(functools.partial(_map, str(array)), axes, transform, dtype, str(array))
    if not (hasattr(array, "shape") and hasattr(array, "dtype") and hasattr(array, "__getitem__")):
        raise TypeError(
            "array has to have shape, dtype and slices, as those of NumPy, zarr and h5py have, or to be the path of a "
            f".npy file, but got {type(array).__name__}"
        )
    if type(array).__name__ == "memmap":  # its copies would lie in memory
        return Sliced(Mapped(array), axes, transform, dtype, str(getattr(array, "filename", "memmap")))
    return Sliced(Held(array), axes, transform, dtype, type(array).__name__)


def from_zarr(
    store: Any, key: str = "", axes: str = "", *, transform: Transform | None = None, dtype: torch.dtype | None = None
) -> Source:
    """A source of a zarr array: `store` is a path or a store, `key` the array's path in it.

    In an OME-Zarr image the levels have the keys "0", "1", and so on. `axes`, `transform` and `dtype` are those of
    `from_array`.
    """
    opener = functools.partial(_open_zarr, str(store) if isinstance(store, Path) else store, key)
    return Sliced(opener, axes, transform, dtype, f"{store}/{key}".rstrip("/"))


def from_hdf5(
    path: str | Path, key: str, axes: str, *, transform: Transform | None = None, dtype: torch.dtype | None = None
) -> Source:
    """A source of a data set in an HDF5 file, with h5py. `axes`, `transform` and `dtype` are those of `from_array`."""
    return Sliced(functools.partial(_open_hdf5, str(path), key), axes, transform, dtype, f"{path}:{key}")


class Held:
    """An array that is there. (Something to call, like the openers of files, which can be sent to other processes.)"""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __call__(self) -> Opened:
        return self.array


class Mapped(Held):
    """A memory map that is there, and would be read as a whole to be sent to another process."""

    def __getstate__(self) -> None:
        raise TypeError(
            "a memory map that was opened here cannot be sent to another process without all of its values; give "
            "from_array the path of a .npy file instead, or use a DataLoader with num_workers=0"
        )


def _map(path: str) -> Opened:
    import numpy as np

    return np.load(path, mmap_mode="r", allow_pickle=False)


def _open_zarr(store: Any, key: str) -> Opened:
    import zarr

    found = zarr.open(store, path=key or None, mode="r") if key else zarr.open(store, mode="r")
    if not hasattr(found, "dtype"):
        names = ", ".join(map(repr, list(found)[:8]))
        raise ValueError(
            f"{store}/{key} is a group of zarr and no array; give key= one of {names or '(none are in it)'}"
        )
    return found


def _open_hdf5(path: str, key: str) -> Opened:
    import h5py

    file = h5py.File(path, "r")
    if key not in file or not isinstance(file[key], h5py.Dataset):
        names: list[str] = []
        file.visititems(lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None)
        file.close()
        raise ValueError(f"{path} has no data set {key!r}; it has {', '.join(map(repr, names[:8])) or 'none'}")
    return file[key]


class Sliced(Source):
    """A source of what `opener` returns, which is opened by each process that reads, at its first read."""

    def __init__(
        self,
        opener: Callable[[], Opened],
        axes: str,
        transform: Transform | None,
        dtype: torch.dtype | None,
        name: str,
        *,
        letters: Callable[[Opened], str] | None = None,
    ) -> None:
        self.opener, self.transform, self.name = opener, transform, name
        self._opened: Opened = None
        self._process = 0  # that opened it
        self._lock = threading.Lock()
        if transform is not None and not callable(transform):
            raise TypeError(f"transform has to be something to call with a region, but got {type(transform).__name__}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype has to be a torch.dtype, as torch.float32 is, but got {dtype!r}")
        array = self.array
        self.axes = _letters(axes or (letters(array) if letters is not None else ""), tuple(array.shape), name)
        sizes = dict(zip(self.axes, map(int, array.shape), strict=True))
        self.space = [letter for letter in self.axes if letter not in "nc"]
        tried = self._tried(sizes.get("c", 1), _dtype_of(array, name))
        self.dtype = dtype or tried.dtype
        self._cast = dtype
        self.shape = (sizes.get("n", 1), tried.shape[0], *(sizes[letter] for letter in self.space))

    @property
    def array(self) -> Opened:
        """What slices, opened in this process."""
        if self._opened is None or self._process != os.getpid():
            self._opened, self._process = self.opener(), os.getpid()
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_process", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened, self._process, self._lock = None, 0, threading.Lock()

    def __repr__(self) -> str:
        return f"{self.name} (shape={self.shape}, dtype={self.dtype})"

    def read(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        return self._made(self._slice(slice(sample, sample + 1), low, high)[0])

    def rows(self, indices: Sequence[int]) -> Tensor:
        """In blocks of samples that lie near to each other, so that each is one piece of a file."""
        if not len(indices):
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        size = self.shape[2:]
        wanted, back = torch.unique(torch.as_tensor(indices), return_inverse=True)
        own = getattr(self.array, "chunks", None)
        gap = own[self.axes.index("n")] if own and "n" in self.axes else GAP
        first = wanted[torch.cat([torch.ones(1, dtype=torch.bool), (wanted.diff() > gap)])]
        found: list[Tensor] = []
        for block in torch.tensor_split(wanted, torch.searchsorted(wanted, first[1:])):
            for part in _at_most(block, max(BLOCK, gap)):
                start, stop = int(part[0]), int(part[-1]) + 1
                whole = self._slice(slice(start, stop), (0,) * len(size), size)
                found.append(whole if len(whole) == len(part) else whole[part - start])
        rows = torch.cat(found) if len(found) > 1 else found[0]
        if len(wanted) != len(back) or not torch.equal(back, torch.arange(len(back))):
            rows = rows[back]
        if self.transform is None:
            return self._made(rows)
        return torch.stack([self._made(row) for row in rows])

    def _slice(self, samples: slice, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """Of shape (samples, channels, *space), in the array's own dtype."""
        where = dict(zip(self.space, map(slice, low, high), strict=True)) | {"n": samples, "c": slice(None)}
        with self._lock:
            found = _as_tensor(self.array[tuple(where[letter] for letter in self.axes)])
        order = [self.axes.index(letter) for letter in "nc" if letter in self.axes]
        found = found.permute(*order, *(self.axes.index(letter) for letter in self.space))
        found = found if "n" in self.axes else found.unsqueeze(0)
        return found if "c" in self.axes else found.unsqueeze(1)

    def _made(self, region: Tensor) -> Tensor:
        made = region if self.transform is None else self.transform(region)
        made = made if self._cast is None else made.to(self._cast)
        return made.contiguous()

    def _tried(self, channels: int, dtype: torch.dtype) -> Tensor:
        """What the transform makes of random numbers, which has to be the same where it gets a part of them."""
        if self.transform is None:
            return torch.empty(channels, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        sizes = (channels, *[TRIED] * len(self.space))
        made_up = torch.rand(sizes, generator=generator, dtype=torch.float64)
        region = (made_up if dtype.is_floating_point else made_up * 2).to(dtype)
        if not dtype.is_floating_point and dtype != torch.bool:
            region = (made_up * min(255, torch.iinfo(dtype).max)).to(dtype)
        whole = self.transform(region.clone())
        if not isinstance(whole, Tensor) or whole.ndim != len(sizes) or tuple(whole.shape[1:]) != sizes[1:]:
            got = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise ValueError(
                f"transform has to give a tensor of shape (channels, *space) with the space that it is given, but of a "
                f"region of shape {sizes} it made {got}"
            )
        inside = (slice(None), *[slice(1, TRIED // 2)] * len(self.space))
        for where in (inside, (slice(None),) * len(sizes)):
            part = self.transform(region[where].clone())
            if part.shape != whole[where].shape or not _alike(part, whole[where]):
                raise ValueError(
                    "transform has to give each position the same value every time and whatever lies around it, but "
                    "gave another one when it got a part of a region. What is taken over all of an image (its mean, "
                    "say) has to be computed before; what is drawn at random has to be drawn before"
                )
        return whole


def _alike(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    largest = b.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)


def _letters(axes: str, shape: tuple[int, ...], name: str) -> str:
    if not isinstance(axes, str):
        raise TypeError(f"axes has to be a string with a letter for each axis, as 'yxc', but got {axes!r}")
    letters = axes.lower()
    if not letters or len(letters) != len(shape) or len(set(letters)) < len(letters) or not letters.isalpha():
        raise ValueError(
            f"axes has to be a different letter for each axis of {name}, whose shape is {shape}: n for samples, c for "
            f"channels, any other for an axis of space ('yxc', 'nczyx', 'nc'); but got {axes!r}"
        )
    return letters


def _at_most(rows: Tensor, number: int) -> list[Tensor]:
    """Sorted rows in parts that reach over at most so many."""
    ends = (rows - rows[0]).div(number, rounding_mode="floor")
    return list(torch.split(rows, torch.unique_consecutive(ends, return_counts=True)[1].tolist()))


def _as_tensor(found: Any) -> Tensor:
    """A tensor with memory of its own: a view of a memory map would be read from disk where it is computed with."""
    if isinstance(found, Tensor):
        return found
    import numpy as np

    values = np.array(found, copy=True)
    return torch.from_numpy(values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("=")))


def _dtype_of(array: Opened, name: str) -> torch.dtype:
    if isinstance(array.dtype, torch.dtype):
        return array.dtype
    import numpy as np

    try:
        return torch.from_numpy(np.empty(0, np.dtype(array.dtype).newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"{name} holds {array.dtype}, which torch has no dtype for") from error
