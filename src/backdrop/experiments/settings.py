"""Settings from the command line: `key=value` for a dataclass, with the types that its fields have.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Example:
...     lr: float = 0.1
...     sizes: tuple[int, ...] = (1, 2)
>>> parse(Example, ["lr=0.5,0.25", "sizes=3/4"])
{'lr': [0.5, 0.25], 'sizes': [(3, 4)]}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["MOST", "as_text", "build", "check_finite", "check_range", "nearest", "parse"]

MOST = 2**31 - 1  # of anything that is counted


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A question to end an error message with, where one of the allowed names is much like this one."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_range(settings: Any, low: float, high: float, *names: str) -> None:
    """An error unless these settings, or all parts of them, lie in a range; none lies in any."""
    for name in names:
        for part in _values(settings, name):
            if part is not None and not low <= part <= high:
                bound = f"at least {low:,}" if not part > high else f"at most {high:,}"
                raise ValueError(f"setting {name} has to be {bound}, but got {as_text(getattr(settings, name))}")


def check_finite(settings: Any) -> None:
    """An error unless all numbers among the settings are finite."""
    for field in dataclasses.fields(settings):
        if not all(math.isfinite(part) for part in _values(settings, field.name) if isinstance(part, float)):
            raise ValueError(f"setting {field.name} has to be finite, but got {as_text(getattr(settings, field.name))}")


def _values(settings: Any, name: str) -> tuple[Any, ...]:
    value = getattr(settings, name)
    return value if isinstance(value, tuple) else (value,)


def as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, (list, tuple)):
        return "/".join(map(as_text, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass with these values, whose names and types are checked."""
    hints = _hints(kind)
    for name in values:
        _check_name(name, hints)
    return kind(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def parse(kind: type[Any], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values for `key=value` and, for several, `key=value,value`. A value with several parts has slashes: `3/4`."""
    hints, found = _hints(kind), {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"a setting has to be given as key=value, but got {text!r}")
        _check_name(name, hints)
        if name in found:
            raise ValueError(f"setting {name} is given twice; for several values write {name}=A,B")
        found[name] = [_read(name, value, hints[name]) for value in values.split(",")]
    return found


def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _check_name(name: str, hints: Mapping[str, Any]) -> None:
    if name not in hints:
        raise ValueError(f"there is no setting {name!r}{nearest(name, hints)}; the settings are {', '.join(hints)}")


def _read(name: str, text: str, hint: Any) -> Any:
    """A value from text."""
    hint, may_be_none = _without_none(hint)
    if may_be_none and text.lower() == "none":
        return None
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        return _convert(name, tuple(_read(name, part, kind) for part in text.split("/")), hint)
    if hint is bool and text.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        return text.lower() in ("true", "yes", "on", "1")
    if hint in (int, float):
        try:
            return _convert(name, hint(text), hint)
        except ValueError:
            raise ValueError(f"setting {name} has to be {describe(hint)}, but got {text!r}") from None
    return _convert(name, text, hint)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """The value, if it is of this type; lists become tuples and whole numbers floats where those are wanted."""
    hint, may_be_none = _without_none(hint)
    if may_be_none and value is None:
        return None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, (list, tuple)):
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if length in (None, len(value)):
            return tuple(_convert(name, part, arguments[0]) for part in value)
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif type(value) is hint:
        return value
    close = nearest(value, map(str, arguments)) if origin is typing.Literal and isinstance(value, str) else ""
    raise ValueError(f"setting {name} has to be {describe(hint)}, but got {value!r}{close}")


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type, and whether it may also be none."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    (kind,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    return kind, True


def describe(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if kind is type(None) else describe(kind) for kind in arguments)
    if origin is tuple:
        kind = "whole numbers" if arguments[0] is int else "numbers"
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"{count}{kind} with slashes between them (such as 3/4)"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))
