"""Signals that ask a process to end, heard where ending does no harm."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


@dataclass
class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt where that is allowed, and as soon as it is.

    An exception in the middle of a change to a storage would leave it half done. Who asks twice is heard at once.

    Args:
        hurry: is called when a signal comes, for what would keep the process waiting.
    """

    hurry: Callable[[], object] = lambda: None
    heard: bool = False
    open: bool = False
    before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.heard and (error is None or isinstance(error, Exception)):  # what goes wrong on the way out is no news
            raise KeyboardInterrupt from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.heard = self.heard, True
        self.hurry()
        if self.open or again:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        if self.heard:
            raise KeyboardInterrupt
        self.open = True
        try:
            yield
        finally:
            self.open = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        before, self.open = self.open, False
        try:
            yield
        finally:
            self.open = before
        if self.open and self.heard:
            raise KeyboardInterrupt
