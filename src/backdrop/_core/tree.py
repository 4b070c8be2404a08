"""Tensors inside tuples, lists, dictionaries and dataclasses, such as the outputs of Transformers models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes)


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every tensor and plain value in the tree, each with the way to it."""
    parts = _parts(tree, path)
    if parts is None:
        return [(path, tree)]
    return [leaf for name, part in parts for leaf in leaves(part, f"{path}{name}")]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with other leaves; `function` meets them in the order of `leaves`."""
    parts = _parts(tree, "")
    if parts is None:
        return function(tree)
    values = [map_leaves(function, part) for _, part in parts]
    if isinstance(tree, Mapping):
        mapped = dict(zip(tree, values, strict=True))
        return type(tree)(**mapped) if dataclasses.is_dataclass(tree) else type(tree)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return dataclasses.replace(tree, **dict(zip(names, values, strict=True)))
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _parts(tree: Any, path: str) -> list[tuple[str, Any]] | None:
    if isinstance(tree, (Tensor, *PLAIN)):
        return None
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, (tuple, list)):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    raise TypeError(
        "Skip takes apart tensors, numbers, strings and None in tuples, lists, dictionaries and dataclasses, but found "
        f"a {type(tree).__name__}{' at ' + path if path else ''}; leave it out of what the module takes and returns"
    )


def with_leaves(tree: Any, values: Sequence[Any]) -> Any:
    """The same tree with these leaves, in the order of `leaves`."""
    given = iter(values)
    return map_leaves(lambda _: next(given), tree)
