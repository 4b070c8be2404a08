"""Samples that stay where they are, on a disk say, and are read region by region.

>>> import torch
>>> from backdrop import Source
>>> class Stripes(Source):
...     shape, dtype = (1, 1, 10**9), torch.float32
...
...     def read(self, sample, low, high):
...         return torch.arange(low[0], high[0]).remainder(2).float()[None]
>>> Stripes().read(0, (123_456_789,), (123_456_793,))
tensor([[1., 0., 1., 0.]])
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")


class Source(abc.ABC):
    """What a model that runs in tiles takes in place of a tensor: an input that is read where it is needed.

    A subclass has two attributes (or properties) and one method. Adapters for arrays and files are in
    `backdrop.integrations.sources`.

    Attributes:
        shape: of all samples together: (samples, channels, *space), as the model would get them in a tensor.
        dtype: the torch dtype of what `read` returns.

    Reads come one at a time, but from more than one thread, and the backward pass reads again what the forward pass has
    read. So the same region has to read the same until a step is done, and whatever is drawn at random (an
    augmentation, say) has to be drawn before.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abc.abstractmethod
    def read(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """The region of one sample from `low` to before `high` along each axis of space, with all channels: a tensor of
        shape (channels, *(high - low)). Regions lie within the sample. Nobody writes to what is returned."""

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Whole samples, in this order. To be replaced where that is faster than reading one after the other."""
        space = tuple(self.shape[2:])
        found = [self.read(int(index), (0,) * len(space), space) for index in indices]
        return torch.stack(found) if found else torch.empty(0, *self.shape[1:], dtype=self.dtype)

    def __len__(self) -> int:
        """The number of samples."""
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def check_source(source: Source) -> Source:
    """Whether what a source says of itself can be true."""
    shape, dtype = getattr(source, "shape", None), getattr(source, "dtype", None)
    name = type(source).__name__
    whole = isinstance(shape, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in shape)
    if shape is None or not whole:
        raise TypeError(
            f"{name}.shape has to be a tuple of whole numbers, (samples, channels, *space), but is {shape!r}"
        )
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"{name}.shape has to be (samples, channels, *space), each at least 1, but is {tuple(shape)}; "
            "an image of one channel has the shape (1, 1, height, width)"
        )
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}.dtype has to be a torch.dtype, as torch.float32 is, but is {dtype!r}")
    return source


def read_region(source: Source, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
    """A region, checked: what is short, of another dtype, or fails names the source, the sample and the region."""
    low, high = tuple(map(int, low)), tuple(map(int, high))
    space = tuple(source.shape[2:])
    inside = len(low) == len(high) == len(space) and all(
        0 <= a <= b <= n for a, b, n in zip(low, high, space, strict=True)
    )
    what = f"{_region(sample, low, high)} of {_named(source)}"
    if not inside or not 0 <= sample < source.shape[0]:
        raise IndexError(f"{what} does not lie in its shape, {tuple(source.shape)}")
    with _explained(what), torch.no_grad():
        found = source.read(sample, low, high)
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    return _checked(found, (source.shape[1], *sizes), source.dtype, what)


def read_rows(source: Source, indices: Tensor | Sequence[int]) -> Tensor:
    """Whole samples, checked in the same way."""
    known = indices.tolist() if isinstance(indices, Tensor) else [int(index) for index in indices]
    some = ", ".join(map(str, known[:3])) + (f", ... ({len(known)} in all)" if len(known) > 3 else "")
    what = f"samples {some} of {_named(source)}"
    if any(not 0 <= index < source.shape[0] for index in known):
        raise IndexError(f"{what} do not lie in its shape, {tuple(source.shape)}")
    with _explained(what), torch.no_grad():
        found = source.rows(known)
    return _checked(found, (len(known), *source.shape[1:]), source.dtype, what)


def moved(found: Tensor, device: torch.device) -> Tensor:
    """What was read, on the device where it is computed with. For the thread that computes, not one that reads: memory
    of a GPU belongs to the stream that it was asked for on."""
    if device.type == "cuda" and found.device.type == "cpu":
        return found.contiguous().pin_memory().to(device, non_blocking=True)
    return found.to(device)


class ReadAhead(Generic[K, V]):
    """`read(key)` for every key in turn, the next ones read in a thread while the caller works on this one.

    No more than `ahead` are read and not yet asked for. To be used in a `with` block, whose end, in whatever way it is
    reached, waits for the read in progress and begins no other. What a read raises, its turn raises.

    >>> with ReadAhead(abs, [-1, -2, -3]) as found:
    ...     list(found)
    [1, 2, 3]
    """

    def __init__(self, read: Callable[[K], V], keys: Iterable[K], ahead: int = 1) -> None:
        self.read, self.ahead = read, ahead
        self._keys = iter(keys)
        self._waiting: collections.deque[concurrent.futures.Future[V]] = collections.deque()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> ReadAhead[K, V]:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="backdrop-read-ahead")
        self._begin(self.ahead)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        thread, self._thread = self._thread, None
        self._waiting.clear()
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[V]:
        return self

    def __next__(self) -> V:
        if self._thread is None:
            raise RuntimeError("what is read ahead has to be taken inside of its with block")
        if not self._waiting:
            self._begin(1)  # with ahead=0
        if not self._waiting:
            raise StopIteration
        found = self._waiting.popleft().result()  # by which the thread is done, so that the next read begins at once
        self._begin(self.ahead - len(self._waiting))
        return found

    def _begin(self, count: int) -> None:
        assert self._thread is not None
        for _ in range(count):
            for key in self._keys:
                self._waiting.append(self._thread.submit(self.read, key))
                break


def _region(sample: int, low: Sequence[int], high: Sequence[int]) -> str:
    space = ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=False))
    return f"sample {sample}, [{space}]" if space else f"sample {sample}"


def _named(source: Source) -> str:
    try:
        return repr(source)
    except Exception:  # it is named in an error, which is to be seen
        return type(source).__name__


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RuntimeError(f"reading {what} failed: {said}") from error


def _checked(found: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    if not isinstance(found, Tensor):
        _refuse(TypeError, what, "a tensor", type(found).__name__)
    if found.dtype != dtype:
        _refuse(TypeError, what, f"{dtype}, as its dtype says,", str(found.dtype))
    if tuple(found.shape) != shape:
        _refuse(ValueError, what, f"the shape {shape}", str(tuple(found.shape)))
    return found.detach()


def _refuse(kind: type[Exception], what: str, expected: str, got: str) -> NoReturn:
    raise kind(f"reading {what} has to give {expected} but gave {got}")
