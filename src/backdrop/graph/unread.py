"""A tensor that holds nothing and stands for a source while torch follows a model.

It has the shape, dtype and device that the samples of the source would have, so that a model can be captured with it
(see capture.py). In the captured graph it is an input like any other; whoever runs a segment reads of its source what
is needed. Whatever else wants a value from it is an error that names the source: it is never computed with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from backdrop._source import Source, check_source, read_region, read_rows

UNFOLLOWED = "where torch does not follow the model (TORCH_LOGS=graph_breaks shows why; a wrong shape is a reason, too)"


class Unread(Tensor):
    """What stands for a source."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    source: Source | None
    empty: Tensor

    @staticmethod
    def __new__(cls, empty: Tensor, source: Source | None) -> Unread:
        made: Unread = Tensor._make_wrapper_subclass(
            cls, empty.shape, dtype=empty.dtype, device=empty.device, requires_grad=False
        )
        made.empty, made.source = empty, source
        return made

    def __init__(self, empty: Tensor, source: Source | None) -> None:
        super().__init__()

    @staticmethod
    def of(source: Source, device: torch.device) -> Unread:
        """All axes share one number, so that this takes no memory whatever the shape."""
        check_source(source)
        return Unread(torch.zeros(1, dtype=source.dtype, device=device).expand(tuple(source.shape)), source)

    def rows(self, indices: Tensor) -> Tensor:
        """Samples of the source, where it reads them."""
        assert self.source is not None
        return read_rows(self.source, indices)

    def region(self, sample: int, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """A region of one sample."""
        assert self.source is not None
        return read_region(self.source, sample, low, high)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """For torch's front end, which makes a copy of it that does not even hold the one number."""
        return ["empty"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Unread:
        return Unread(inner["empty"], None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def followed(value: Any) -> Any:
            if not isinstance(value, Unread):
                return value
            if value.source is not None:
                called = str(function).removeprefix("aten.").partition(".")[0]
                raise RuntimeError(cannot_read(value, f"{called} wants all of it {UNFOLLOWED}"))
            return value.empty

        args, kwargs = tree_map(followed, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unread({self.source})"


def cannot_read(unread: Unread, reason: str) -> str:
    """An error for a source that would have to be read as a whole."""
    return (
        f"{unread.source} was given in place of a tensor, but {reason}. It is read in parts by what lies before a mask "
        "and can be skipped; skip_report says what that is. Where it fits in memory, give the model source.rows(...)"
    )


def stand_for_sources(args: Any, device: torch.device) -> tuple[Any, list[Unread]]:
    """Arguments with something that stands for every source in them, and that."""
    made: list[Unread] = []

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, Source):
            made.append(Unread.of(leaf, device))
            return made[-1]
        return leaf

    return tree_map(stand_in, args), made


def sources_again(output: Any) -> Any:
    """What a model returns, with the sources that it returns as they came."""
    return tree_map(lambda leaf: leaf.source if isinstance(leaf, Unread) else leaf, output)
