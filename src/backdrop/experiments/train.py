"""One trial: a training loop on Lightning Fabric, saved after every epoch.

A trial that was stopped goes on from its last epoch; on a CPU, and with the same number of threads, it ends with the
very same numbers as one that was never stopped.

>>> from pathlib import Path
>>> from backdrop.experiments.tasks import GP
>>> tiny = {"size": 32, "blocks": (1, 1), "channels": 8, "epochs": 2, "passes": 1, "test_per_class": 2}
>>> task = GP.with_preset("quick", tiny, seed=1)
>>> outcome = fit(task, Path(getfixture("tmp_path")))
>>> sorted(outcome.metrics), len(outcome.curve)
(['accuracy', 'large', 'loss', 'small'], 2)
"""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from backdrop.experiments import checkpoint, logs
from backdrop.experiments.task import Task
from backdrop.experiments.tasks import find_task, reference
from backdrop.experiments.training import Diverged, OnEpoch, Training

__all__ = ["Diverged", "Options", "Outcome", "fit"]

Note = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to run a trial; what it is, its settings say.

    Args:
        accelerator: as Lightning Fabric names it: "auto", "cpu", "cuda", "mps".
        devices: how many processes and devices share each batch.
        strategy: as Lightning Fabric names it; "auto" is one process, or DDP for several devices.
        device_index: which of several GPUs to use when one is enough.
        threads: of torch on the CPU.
        log: "json" for log.jsonl alone, or "tensorboard" for TensorBoard files besides.
        keep_weights: leave the trained network in the trial's folder, as weights.pt.
        data_root: where data sets lie.
        graphs: record training steps as CUDA graphs, where they can be: on one GPU, with AdamW, without `skip`,
            `p_warmup` and "16-mixed". For small networks and batches, which keep a GPU waiting for Python.
        compile: train what `torch.compile` makes of the network, where it is not for `skip` to walk through. For large
            images on a GPU, and many steps: compiling takes up to a minute.
    """

    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    device_index: int | None = None
    threads: int | None = None
    log: Literal["json", "tensorboard"] = "json"
    keep_weights: bool = False
    data_root: str | None = None
    graphs: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: metrics at the end, a row per epoch, seconds of work, and where it ran."""

    metrics: dict[str, float]
    curve: list[dict[str, float]]
    seconds: float
    machine: dict[str, str]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def fit(
    task: Task,
    folder: Path,
    options: Options | None = None,
    on_epoch: OnEpoch | None = None,
    note: Note = _warn,
) -> Outcome:
    """Trains a task in a folder, or goes on with it; if it is done there, this returns what came of it.

    A result or a checkpoint that is damaged counts as none.

    Args:
        task: with its settings.
        folder: of this trial alone.
        options: how to run it.
        on_epoch: is told after each epoch what was logged, with "epochs" and "left" (seconds to go, about). What it
            raises ends the training, except where several processes share the work.
        note: is told of a file that is there and cannot be used; by default a warning.
    """
    options, done = options or Options(), None
    try:
        done = checkpoint.read_result(folder / "result.json", task.key)
    except checkpoint.Unusable as error:
        note(f"{error}; it counts as none")
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with threads(options.threads):
            done = _launch(task, folder, options, on_epoch, note)
        checkpoint.write_result(folder / "result.json", done)
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    return Outcome(**{field.name: done[field.name] for field in dataclasses.fields(Outcome)})


def check_device(options: Options) -> None:
    """An error where this machine has no such accelerator, or there is no such strategy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Fabric(accelerator=options.accelerator, devices=1, strategy=options.strategy)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"accelerator and strategy have to be some of this machine, but got {options.accelerator} and "
            f"{options.strategy}: {error}"
        ) from None


def _launch(task: Task, folder: Path, options: Options, on_epoch: OnEpoch | None, note: Note) -> dict[str, Any]:
    devices: int | list[int] = options.devices
    if options.device_index is not None and options.devices == 1:
        devices = [options.device_index]
    strategy = options.strategy
    if options.devices > 1 and strategy in ("auto", "ddp"):
        strategy = "ddp_spawn"  # the other kind starts the whole command anew in every process
    fabric = Fabric(
        accelerator=options.accelerator, devices=devices, strategy=strategy, precision=task.settings.precision
    )
    if fabric.world_size == 1:
        return _begin(fabric, task, folder, options, note).run(on_epoch)
    if task.settings.batch_size < fabric.world_size:
        raise ValueError(
            f"batch_size has to be at least the number of devices, {fabric.world_size}, but got "
            f"{task.settings.batch_size}"
        )
    _saved(task, folder, note)  # here, so that all processes find the same
    # Plain values: Fabric looks into dataclasses, and may not into these.
    how = (dataclasses.asdict(task.settings), task.data_root, str(folder), dataclasses.asdict(options))
    with logs.tail(folder / "log.jsonl", on_epoch), _safe_path():
        result: dict[str, Any] = fabric.launch(_train_in_process, reference(type(task)), *how)  # type: ignore[arg-type]
    if "diverged" in result:
        raise Diverged(result["diverged"])
    return result


def _train_in_process(
    fabric: Fabric, where: str, settings: dict[str, Any], data_root: str | None, folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    with threads(options["threads"]):
        kind = find_task(where)
        task = kind(kind.Settings(**settings), data_root=data_root)
        try:
            result = _begin(fabric, task, Path(folder), Options(**options), _warn).run(None)
        except Diverged as error:  # on all processes alike
            result = {"diverged": str(error)}
    dist.barrier()  # so that none leaves while others wait for its part
    gc.collect()  # networks that hold the group
    dist.destroy_process_group()  # threads of a group that is still there may abort a process that ends
    return result


def _saved(task: Task, folder: Path, note: Note) -> dict[str, Any] | None:
    """The state of a trial that was stopped. A file that cannot be used is removed."""
    path = folder / "checkpoint.pt"
    try:
        return checkpoint.load(path, task.key, task.settings.epochs)
    except checkpoint.Unusable as error:
        note(f"{error}; this trial begins anew")
        path.unlink(missing_ok=True)
        return None


def _begin(fabric: Fabric, task: Task, folder: Path, options: Options, note: Note) -> Training:
    """A training as it was left, or else as it begins."""
    state, training = _saved(task, folder, note), Training(fabric, task, folder, options)
    if state is None:
        return training
    if len(state["rng"]) != fabric.world_size:
        raise ValueError(
            f"{folder} holds a trial that was begun on {len(state['rng'])} devices; go on with as many, or delete it "
            "to begin anew"
        )
    try:
        training.resume(state)
    except Exception as error:  # whatever torch says of a state that is not of this network
        note(f"{folder / 'checkpoint.pt'} does not fit this trial ({error}); it begins anew")
        return Training(fabric, task, folder, options)
    return training


@contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that are started meanwhile do not look for modules in the current folder (from 3.11 on)."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads of torch on the CPU meanwhile; by default as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
