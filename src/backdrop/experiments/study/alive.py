"""Whether the worker of a trial is alive.

On the same machine the process says it: its number and when it was started, since numbers are used again. Of other
machines, where processes cannot be looked up, and of processes that were stopped (SIGSTOP, Ctrl-Z, a debugger), only
signs of life are seen: a worker that gives no new one for `GRACE` seconds, by the clock of whoever waits for it, is
taken for dead. Clocks are never compared.

Optuna has heartbeats too, for databases alone: a journal has none, and a process that is gone is taken for alive until
its time is up.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["GRACE", "HEARTBEAT", "Watch", "identity", "is_dead"]

HEARTBEAT = 5.0  # seconds between two signs of life
GRACE = 60.0


def identity() -> dict[str, Any]:
    """This process, as others can look for it."""
    pid = os.getpid()
    return {
        "host": platform.node(),
        "machine": _machine(),
        "pid": pid,
        "started": _process(pid)[0],
        "id": uuid.uuid4().hex,
    }


def is_dead(worker: Any) -> bool | None:
    """Whether this worker's process is gone; None if it cannot be seen from here, or does not run for now."""
    here = _machine()
    if here is None or not isinstance(worker, Mapping) or worker.get("machine") != here:
        return None
    pid = worker.get("pid")
    if type(pid) is not int or not 0 < pid < 2**31:  # what a study says may be anything
        return True
    started, stopped = _process(pid)
    if started is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # there, and hidden from us
            return None
    if started != worker.get("started"):
        return True
    return None if stopped else False


def _machine() -> str | None:
    """Where numbers of processes mean the same: this system since it was booted, and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process(pid: int) -> tuple[str | None, bool]:
    """When a process was started, None if there is none (a zombie is none), and whether it was stopped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, False
    return (None if state in "ZX" else rest[18]), state in "Tt"


class Watch:
    """Remembers since when signs of life are the same; after `grace` seconds a worker is taken for dead."""

    def __init__(self, grace: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.grace = GRACE if grace is None else grace
        self.clock = clock
        self.seen: dict[int, tuple[Any, float]] = {}

    def is_lost(
        self, trial: int, worker: Mapping[str, Any] | None, heartbeat: Any = None, claims: Sequence[Any] = ()
    ) -> bool:
        """Whether a running trial has lost its worker, as far as can be known.

        A worker that has not yet said that it has the trial is one of the `claims`.
        """
        dead = is_dead(worker) if worker is not None else (bool(claims) and all(map(is_dead, claims))) or None
        if dead is not None:
            return dead
        sign, now = (worker, heartbeat), self.clock()
        before, since = self.seen.setdefault(trial, (sign, now))
        if before != sign:
            self.seen[trial] = (sign, now)
            return False
        return now - since > self.grace
