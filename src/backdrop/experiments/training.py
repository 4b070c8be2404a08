"""One training, epoch by epoch: what stands between two epochs is a state that goes on to the very same numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from backdrop.distributed import all_gather
from backdrop.experiments import checkpoint, logs
from backdrop.experiments.records import column
from backdrop.experiments.steps import Recorded, check_alike, load_state, make_optimizer, make_schedule
from backdrop.experiments.task import Examples, Task
from backdrop.layers import Backdrop
from backdrop.schedules import LinearP
from backdrop.skip import Skip, skip_blocked

if TYPE_CHECKING:
    from backdrop.experiments.train import Options

__all__ = ["Diverged", "OnEpoch", "Training", "told"]

OnEpoch = Callable[[Mapping[str, Any]], None]


class Diverged(RuntimeError):  # noqa: N818
    """Training whose loss is no number any more."""


class Training:
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
                losses += self.step(self._own(rows)).double()
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

    def step(self, rows: Tensor) -> Tensor:
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
