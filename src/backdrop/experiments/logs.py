"""What trials tell: where they run, the log of a study, TensorBoard files, the log of a training in other processes."""

from __future__ import annotations

import json
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import backdrop
from backdrop._core.files import append

__all__ = ["TensorBoard", "log_event", "machine", "tail"]


def log_event(folder: Path, event: str, **values: Any) -> None:
    """A line of JSON in a study's log, however many processes write to it."""
    line = json.dumps(_strict({"time": round(time.time(), 3), "event": event, **values}), allow_nan=False)
    append(folder / "log.jsonl", line.encode())


def _strict(value: Any) -> Any:
    """Without what JSON has no numbers for."""
    if isinstance(value, Mapping):
        return {str(name): _strict(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine(device: torch.device, devices: int) -> dict[str, str]:
    """Where a trial runs, and with which versions."""
    import lightning

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return {
        "host": platform.node(),
        "device": name,
        "devices": str(devices),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "backdrop": backdrop.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class TensorBoard:
    """TensorBoard files in the trial's folder."""

    def __init__(self, folder: Path, curve: list[dict[str, float]]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise RuntimeError("--log tensorboard needs TensorBoard: pip install tensorboard") from error
        after = int(curve[-1]["step"]) + 1 if curve else None  # what a trial wrote before it was killed
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=after)

    def write(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, int(row["step"]))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@contextmanager
def tail(log: Path, on_epoch: Callable[[Mapping[str, Any]], None] | None) -> Iterator[None]:
    """Tells of the rows that another process writes to a log."""
    if on_epoch is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        told = 0
        while True:
            last = done.wait(0.5)
            rows = log.read_text().splitlines() if log.exists() else []
            for row in rows[told:]:
                on_epoch(json.loads(row))
            told = max(told, len(rows))
            if last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
