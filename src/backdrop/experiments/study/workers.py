"""Several workers on one machine, each a process of its own.

They end with the process that started them, however that ends: each waits for the end of its standard input, through
which it also gets its orders, since these may hold a password.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.study.worker import work
from backdrop.experiments.train import Options

__all__ = ["Workers", "main"]

PATIENCE = 15.0  # seconds that workers are given to end

# As `python -m` would start it, without looking for modules in the current folder: whose files these are is not known.
START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "from backdrop.experiments.study import workers; workers.main()"
)


class Workers:
    """So many workers on a study, as `work` has it; at the end of its `with` block all of them are told to end.

    `say` is told every line that a worker writes.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        folder: Path,
        options: Options,
        *,
        task: str | None = None,
        wait: bool = True,
        count: int,
        say: Callable[[str], None],
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.threads: list[threading.Thread] = []
        gpus = _gpus(options)
        for i in range(count):
            own = replace(options, device_index=i % gpus) if gpus > 1 else options
            order = {"storage": storage, "study": study, "folder": str(folder), "options": asdict(own)}
            process = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C comes to us alone, and we tell them
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self.processes.append(process)
            self.threads.append(threading.Thread(target=_forward, args=(process.stdout, say), daemon=True))
            self.threads[-1].start()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({**order, "task": task, "wait": wait}) + "\n")
                process.stdin.flush()

    def __enter__(self) -> Workers:
        return self

    def wait(self) -> list[int]:
        """How each of them ended."""
        return [process.wait() for process in self.processes]

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        end = time.monotonic() + PATIENCE
        for process, thread in zip(self.processes, self.threads, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()  # does nothing to one that has ended
            process.wait()
            thread.join()
            process.stdout.close()  # type: ignore[union-attr]


def _forward(lines: IO[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line.rstrip("\n"))


def _gpus(options: Options) -> int:
    import torch

    wanted = options.accelerator in ("auto", "gpu", "cuda") and options.devices == 1 and options.device_index is None
    return torch.cuda.device_count() if wanted else 0


def main() -> None:
    sys.exit(_main())


def _main() -> int:
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with open_storage(order["storage"]) as storage:
            study = Study(storage, order["study"])
            work(study, Path(order["folder"]), Options(**order["options"]), task=order["task"], wait=order["wait"])
    except KeyboardInterrupt:
        return 130
    except (OSError, TypeError, ValueError, RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    _thread.interrupt_main()
    time.sleep(PATIENCE * 2 / 3)
    os._exit(130)
