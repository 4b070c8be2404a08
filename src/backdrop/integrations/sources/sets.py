"""Sources that are made of others, and of data sets."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backdrop._source import Source, check_source


def stack(sources: Sequence[Source]) -> Source:
    """The samples of several sources, one after the other: a batch of images that lie in a file each.

    All have to have the same dtype, and samples of the same shape. Images of different sizes are steps of their own.
    """
    return Stacked(sources)


class Stacked(Source):
    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = [check_source(source) for source in sources]
        if not self.sources:
            raise ValueError("sources has to hold at least one source, but got none")
        first = self.sources[0]
        for source in self.sources[1:]:
            if tuple(source.shape[1:]) != tuple(first.shape[1:]) or source.dtype != first.dtype:
                raise ValueError(
                    f"sources have to have samples of the same shape and dtype, but got {first} and {source}; "
                    "samples of other sizes are given to the model in a step of their own"
                )
        self.ends = list(itertools.accumulate(source.shape[0] for source in self.sources))
        self.shape, self.dtype = (self.ends[-1], *first.shape[1:]), first.dtype

    def _of(self, sample: int) -> tuple[Source, int]:
        at = bisect.bisect_right(self.ends, sample)
        return self.sources[at], sample - (self.ends[at - 1] if at else 0)

    def read(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        source, own = self._of(sample)
        return source.read(own, low, high)

    def rows(self, indices: Sequence[int]) -> Tensor:
        made = torch.empty(len(indices), *self.shape[1:], dtype=self.dtype)
        for source, group in itertools.groupby(enumerate(indices), lambda pair: self._of(pair[1])[0]):
            places, samples = zip(*group, strict=True)
            made[list(places)] = source.rows([self._of(sample)[1] for sample in samples])
        return made


def from_dataset(dataset: Any, part: Any = None) -> Source:
    """A source of a data set with `len(dataset)` and `dataset[i]`, whose items are tensors of the same shape.

    Args:
        dataset: it; `dataset.__getitems__(indices)` is used where it has that.
        part: which part of an item is the input, if items have several: `item[part]`, 0 for (input, label).
    """
    return OfDataset(dataset, part)


class OfDataset(Source):
    def __init__(self, dataset: Any, part: Any) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            inside = "; give what it loads, its .dataset" if hasattr(dataset, "dataset") else ""
            raise TypeError(
                f"dataset has to have a length and items by number, but got {type(dataset).__name__}{inside}"
            )
        if not len(dataset):
            raise ValueError("dataset has to hold at least one item, but is empty")
        self.dataset, self.part = dataset, part
        first, again = self._items([0])[0], self._items([0])[0]
        if first.ndim < 1:
            raise ValueError("items of the dataset have to have an axis of channels at least, but have none")
        if not torch.equal(first, again) and not first.isnan().any():
            raise ValueError(
                "dataset has to give the same item every time, because the backward pass reads again what the forward "
                "pass has read; draw augmentations before a step, and put them into the model or the dataset"
            )
        self.shape, self.dtype = (len(dataset), *first.shape), first.dtype

    def _items(self, indices: Sequence[int]) -> list[Tensor]:
        several = getattr(self.dataset, "__getitems__", None)
        items = several(list(indices)) if several is not None else [self.dataset[i] for i in indices]
        found = [item if self.part is None else item[self.part] for item in items]
        if not all(isinstance(item, Tensor) for item in found):
            got = next(type(item).__name__ for item in found if not isinstance(item, Tensor))
            raise TypeError(
                f"items of the dataset have to be tensors, or to have one that part= names, but got {got} with "
                f"part={self.part!r}"
            )
        return found

    def read(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        item = self._items([sample])[0]
        return item[(slice(None), *map(slice, low, high))].contiguous()

    def rows(self, indices: Sequence[int]) -> Tensor:
        items = self._items(indices)
        return torch.stack(items) if items else super().rows(indices)


def with_progress(source: Source, description: str = "reading") -> Watched:
    """The same source with a progress bar, of rich, while a `with` block lasts.

        with with_progress(slide) as watched:
            loss(model(watched), label).backward()

    The bar goes from the first cell of the first sample to the last of the last one, in the order in which the forward
    pass takes tiles and rows; beside it stands how much was read, with all that is read again.
    """
    return Watched(source, description)


class Watched(Source):
    def __init__(self, source: Source, description: str) -> None:
        self.source, self.description = check_source(source), description
        self.shape, self.dtype = tuple(source.shape), source.dtype
        self._bar: Any = None

    def __repr__(self) -> str:
        return repr(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bar": None}

    def __enter__(self) -> Watched:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        read = TextColumn("{task.fields[megabytes]:.0f} MB")
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), read, TimeElapsedColumn())
        self._bar.add_task(self.description, total=1.0, megabytes=0.0)
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        bar, self._bar = self._bar, None
        bar.stop()

    def _reached(self, done: float, found: Tensor) -> Tensor:
        bar = self._bar
        if bar is not None:
            (task,) = bar.tasks
            megabytes = task.fields["megabytes"] + found.nbytes / 1e6
            bar.update(task.id, completed=max(done, task.completed), megabytes=megabytes)
        return found

    def read(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        last, cells = sample, 1
        for stop, size in zip(high, self.shape[2:], strict=True):
            last, cells = last * size + stop - 1, cells * size
        return self._reached((last + 1) / (self.shape[0] * cells), self.source.read(sample, low, high))

    def rows(self, indices: Sequence[int]) -> Tensor:
        return self._reached((max(indices, default=-1) + 1) / self.shape[0], self.source.rows(indices))
