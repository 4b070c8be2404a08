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
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from backdrop.distributed import all_gather
from backdrop.experiments import checkpoint, logs
from backdrop.experiments.records import column
from backdrop.experiments.steps import Recorded, check_alike, load_state, make_optimizer, make_schedule
from backdrop.experiments.task import Examples, Task
from backdrop.experiments.tasks import find_task, reference
from backdrop.layers import Backdrop
from backdrop.schedules import LinearP
from backdrop.skip import Skip, skip_blocked

__all__ = ["Diverged", "Options", "Outcome", "fit"]

OnEpoch = Callable[[Mapping[str, Any]], None]
Note = Callable[[str], None]


class Diverged(RuntimeError):  # noqa: N818
    """Training whose loss is no number any more."""


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


class Cost(NamedTuple):
    """What a trial takes on this machine, in seconds.

    Args:
        begin: to make the data and the network.
        step: one training step.
        evaluation: one evaluation.
        steps: to a pass over the training data.
    """

    begin: float
    step: float
    evaluation: float
    steps: int

    def of(self, settings: Any) -> float:
        """A trial that has these settings, and all else as that which was measured."""
        steps, evaluations = settings.epochs * settings.passes * self.steps, min(settings.evaluations, settings.epochs)
        return float(self.begin + steps * self.step + evaluations * self.evaluation)


def cost(task: Task, options: Options) -> Cost:
    """Measures a few steps of a trial and a part of its evaluation, and forgets them: nothing is written."""
    with _threads(options.threads), torch.random.fork_rng():
        clock = time.perf_counter
        fabric = Fabric(accelerator=options.accelerator, devices=1, precision=task.settings.precision)
        begin = clock()
        training = _Training(fabric, task, Path(), dataclasses.replace(options, graphs=False, compile=False))
        begun = clock()
        evaluation = training.evaluation_seconds()
        training.model.train()
        rows = torch.arange(len(training.train.labels), device=fabric.device).tensor_split(training.batches)[0]
        times = [clock()]
        for _ in range(3):  # the first is slower
            training._step(rows).item()
            times.append(clock())
            if times[-1] - times[0] > 5:
                break
        return Cost(begun - begin, times[-1] - times[-2], evaluation, training.batches)


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
        with _threads(options.threads):
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
    with _threads(options["threads"]):
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


def _begin(fabric: Fabric, task: Task, folder: Path, options: Options, note: Note) -> _Training:
    """A training as it was left, or else as it begins."""
    state, training = _saved(task, folder, note), _Training(fabric, task, folder, options)
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
        return _Training(fabric, task, folder, options)
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
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Training:
    """The parts of a training, as they stand between two epochs."""

    def __init__(self, fabric: Fabric, task: Task, folder: Path, options: Options) -> None:
        self.fabric, self.task, self.folder, self.options = fabric, task, folder, options
        s = self.settings = task.settings
        self.train, self.judge = task.data(fabric.device)
        self.batches = max(1, math.ceil(len(self.train.labels) / s.batch_size))
        self.steps = s.epochs * s.passes * self.batches
        torch.manual_seed(_seed(s.seed, "weights"))
        model = task.model()
        if s.skip != "off" and any(isinstance(m, Backdrop) and m.p for m in model.modules()):
            model = skip_blocked(model, statistics=s.skip)
        if fabric.world_size > 1 and fabric.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        layers = [m for m in model.modules() if isinstance(m, Backdrop)]
        self.generators: list[torch.Generator] = []
        skips = any(isinstance(m, Skip) or hasattr(m, "skip_report") for m in model.modules())
        compiled = options.compile and not skips
        alone = compiled and fabric.world_size == 1  # with generators, a network would be compiled in pieces
        one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
        for i, layer in enumerate(layers):
            if layer.group is not None and not alone:  # one mask over all processes: a generator that all of them have
                if one_gpu:  # where it draws by itself, so that steps can be recorded
                    layer.group = None
                layer.generator = torch.Generator(fabric.device).manual_seed(_seed(s.seed, "masks", i))
                self.generators.append(layer.generator)
        self.shared = [layer for layer in layers if layer.group is not None]
        # Channels last is up to twice as fast for convolutions, on a CPU and on a GPU.
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        self.format = formats.get(self.train.inputs.ndim, torch.contiguous_format)
        model = model.to(memory_format=self.format)  # type: ignore[call-overload]
        if compiled:
            for layer in layers:
                if layer.p:  # as a tensor, so that what is compiled serves, and is found in the cache for, every p
                    layer.p = torch.tensor(layer.p, device=fabric.device)
            model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
        graphs = options.graphs and not skips and self._can_record()
        optimizer = make_optimizer(model, s, fabric.device, recorded=graphs)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.recorded = Recorded(self._forward, self._loss, self._update, self.generators) if graphs else None
        self.schedule = make_schedule(optimizer, s, self.steps)
        self.p_schedule = None
        if s.p_warmup and layers:
            self.p_schedule = LinearP(layers, start=0.0, steps=max(1, round(s.p_warmup * self.steps)))
        torch.manual_seed(_seed(s.seed, "order", fabric.global_rank))
        self.epoch, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []

    def run(self, on_epoch: OnEpoch | None) -> dict[str, Any]:
        writer = (
            logs.TensorBoard(self.folder, self.curve) if self.options.log == "tensorboard" and self._first else None
        )
        while self.epoch < self.settings.epochs:
            begin, before = time.perf_counter(), self.seconds
            row = self._train_epoch()
            if self._is_due():
                with self._uncompiled():
                    row |= self._evaluate()
            self.seconds = before + time.perf_counter() - begin
            row["seconds"] = self.seconds
            self.curve.append(row)
            state = self._state()
            if self._first:
                checkpoint.save(self.folder / "checkpoint.pt", state)
                checkpoint.write_log(self.folder / "log.jsonl", [told(row, self.settings.epochs) for row in self.curve])
                if writer:
                    writer.write(row)
            if on_epoch:
                on_epoch(told(row, self.settings.epochs))
        if self._first and self.options.keep_weights:
            checkpoint.save_weights(
                self.folder / "weights.pt", {"key": self.task.key, "model": self.model.state_dict()}
            )
        if writer:
            writer.close()
        names = {"epoch", "step", "loss", "lr", "seconds"}
        metrics = {name.removeprefix("test "): self.curve[-1][name] for name in self.curve[-1] if name not in names}
        if self._first:
            self.model.eval()
            with self._uncompiled():
                metrics |= self.task.examine(self.model.module, self.judge)
        return {
            "key": self.task.key,
            "task": self.task.name,
            "settings": dataclasses.asdict(self.settings),
            "metrics": metrics,
            "curve": self.curve,
            "seconds": self.seconds,
            "machine": logs.machine(self.fabric.device, self.fabric.world_size),
        }

    @property
    def _first(self) -> bool:
        return bool(self.fabric.global_rank == 0)

    def _train_epoch(self) -> dict[str, float]:
        s, self.epoch = self.settings, self.epoch + 1
        losses = torch.zeros((), device=self.fabric.device, dtype=torch.float64)
        self.model.train()
        for number in range(s.passes):
            order = torch.randperm(
                len(self.train.labels),
                generator=torch.Generator().manual_seed(_seed(s.seed, "batches", self.epoch, number)),
            )
            for rows in order.to(self.fabric.device).tensor_split(self.batches):
                losses += self._step(self._own(rows)).double()
        loss = (losses / (s.passes * self.batches)).item()
        if self.fabric.world_size > 1:
            loss = float(self.fabric.all_reduce(torch.tensor(loss).double(), reduce_op="mean"))  # type: ignore[arg-type]
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss was {loss} in epoch {self.epoch} of {s.epochs}, with a learning rate of {s.lr:g}; "
                "a lower one may help"
            )
        step = self.epoch * s.passes * self.batches
        return {"epoch": self.epoch, "step": step, "loss": loss, "lr": float(self.schedule.get_last_lr()[0])}

    def _step(self, rows: Tensor) -> Tensor:
        if self.recorded:
            loss = self.recorded(rows)
        else:
            loss = self._loss(self._forward(rows), rows)
            self._update(loss)
        self.schedule.step()
        if self.p_schedule:
            self.p_schedule.step()
        return loss.detach()

    def _forward(self, rows: Tensor) -> Any:
        inputs = self.task.augment(self.train.inputs[rows])
        return self.model(inputs.contiguous(memory_format=self.format))

    def _loss(self, outputs: Any, rows: Tensor) -> Tensor:
        return self.task.loss(outputs, self.train.labels[rows])

    def _update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        self.optimizer.step()

    def _can_record(self) -> bool:
        s = self.settings
        one_gpu = self.fabric.device.type == "cuda" and self.fabric.world_size == 1
        return one_gpu and s.optimizer == "adamw" and s.precision != "16-mixed" and not s.p_warmup

    def _own(self, rows: Tensor) -> Tensor:
        """The part of a batch that is this process's. Parts are alike in size, so that means of means are means."""
        world = self.fabric.world_size
        return rows[: len(rows) // world * world].tensor_split(world)[self.fabric.global_rank]

    def _is_due(self) -> bool:
        s = self.settings
        return bool(self.epoch * s.evaluations // s.epochs > (self.epoch - 1) * s.evaluations // s.epochs)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """For networks in evaluation, which are others and have other sizes, for few calls each."""
        return torch.compiler.set_stance("force_eager") if self.options.compile else nullcontext()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        mine = Examples(*(x.tensor_split(self.fabric.world_size)[self.fabric.global_rank] for x in self.judge))
        size = getattr(self.settings, "eval_batch", self.settings.batch_size)
        parts = torch.split(mine.inputs, size)
        found = [self.model(part.contiguous(memory_format=self.format)) for part in parts]
        single = isinstance(found[0], Tensor)
        columns = [found] if single else list(zip(*found, strict=True))
        outputs = [all_gather(torch.cat(parts)) for parts in columns]
        metrics = self.task.evaluate(outputs[0] if single else outputs, all_gather(mine.labels))
        if self.task.metric not in metrics:
            raise ValueError(f"evaluate has to give {self.task.metric!r}, but got {', '.join(metrics) or 'nothing'}")
        return {column(name): float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def evaluation_seconds(self) -> float:
        """How long an evaluation takes, by the second of its parts, or by the only one."""
        self.model.eval()
        parts = torch.split(self.judge.inputs, getattr(self.settings, "eval_batch", self.settings.batch_size))
        seconds = 0.0
        for part in parts[:2]:
            begin = time.perf_counter()
            outputs = self.model(part.contiguous(memory_format=self.format))
            (outputs if isinstance(outputs, Tensor) else outputs[0]).sum().item()
            seconds = (time.perf_counter() - begin) / len(part)
        return seconds * len(self.judge.labels)

    def _state(self) -> dict[str, Any]:
        rng = [torch.get_rng_state()]
        if self.fabric.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(self.fabric.device))
        ranks: list[Any] = [rng]
        if self.fabric.world_size > 1:
            ranks = [None] * self.fabric.world_size
            dist.all_gather_object(ranks, rng)
        return {
            "key": self.task.key,
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "p_schedule": self.p_schedule and self.p_schedule.state_dict(),
            "rng": ranks,
            "generators": [generator.get_state() for generator in self.generators],
            "mask steps": [layer.step for layer in self.shared],
            "curve": self.curve,
            "seconds": self.seconds,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; any exception means that it is not of this trial."""
        steps = [(i + 1) * self.settings.passes * self.batches for i in range(state["epoch"])]
        if [row["step"] for row in state["curve"]] != steps or state["schedule"]["last_epoch"] != steps[-1]:
            raise ValueError(f"it has other steps than the {steps[-1]} of {state['epoch']} epochs")
        if state["epoch"] == self.settings.epochs and column(self.task.metric) not in state["curve"][-1]:
            raise ValueError(f"its last epoch has no {self.task.metric}")
        self.model.load_state_dict(state["model"])
        load_state(self.optimizer, state["optimizer"])
        check_alike("schedule", state["schedule"], self.schedule.state_dict())
        self.schedule.load_state_dict(state["schedule"])
        if self.p_schedule:
            self.p_schedule.load_state_dict(state["p_schedule"])
        for generator, value in zip(self.generators, state["generators"], strict=False):  # none if it was compiled
            generator.set_state(value)
        for layer, step in zip(self.shared, state["mask steps"], strict=True):
            layer.step = step
        cpu, *cuda = state["rng"][self.fabric.global_rank]
        torch.set_rng_state(cpu)
        if cuda and self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(cuda[0], self.fabric.device)
        self.epoch, self.curve, self.seconds = state["epoch"], state["curve"], state["seconds"]


def told(row: Mapping[str, float], epochs: int) -> dict[str, Any]:
    """A row of the curve as others hear of it: with how many epochs there are, and about how many seconds are left."""
    return {**row, "epochs": epochs, "left": row["seconds"] / row["epoch"] * (epochs - row["epoch"])}


def _seed(*parts: object) -> int:
    """A seed for one purpose, unlike those for all others."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
