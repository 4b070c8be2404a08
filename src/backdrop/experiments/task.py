"""What an experiment is: its settings, data, network, loss and metrics. The five of the paper are in `tasks`.

A task of your own is a subclass of `Task` with four methods; `examples/05_your_own_task.py` shows one, and
`backdrop run FILE.py:CLASS --preset quick` runs it.

>>> from backdrop.experiments.tasks import GP
>>> task = GP.with_preset("quick", {"p_small": 0.99, "p_large": 0.94}, seed=0)
>>> task.settings.p_small, task.settings.seed
(0.99, 0)
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backdrop._core import code
from backdrop._core.checks import check_p
from backdrop.experiments import settings as parsing

__all__ = [
    "Classification",
    "Examples",
    "Preset",
    "Settings",
    "Task",
    "product",
]


MOST_SEED = 2**53 - 1  # JSON and databases keep whole numbers so far to the last digit


class Examples(NamedTuple):
    """Inputs (n, ...) and labels (n,), on the device where they are used."""

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every task can be told; a task adds its own. Together with the seed they say all about a trial.

    Args:
        seed: of the data, first weights, order of samples and masks.
        batch_size: samples in one step, over all devices.
        epochs: after each of them a trial is saved, logged and, now and then, evaluated.
        passes: times over the training data in one epoch; more than one for a handful of samples.
        optimizer: "adamw" or "sgd" (with Nesterov's momentum 0.9).
        lr: the highest learning rate.
        lr_schedule: "one-cycle" (up over the first 30%, then down along a cosine), "cosine" or "constant".
        weight_decay: of the optimiser.
        exact: masks keep exactly their share of units instead of drawing each with probability 1 - p.
        p_warmup: the share of training over which masks rise from 0 to their p.
        precision: as Lightning Fabric names it: "32-true", "bf16-mixed", "16-mixed" or "64-true".
        skip: "off", or what `skip_blocked` shall do with batch statistics: "exact", "sampled" or "frozen".
        evaluations: how often to evaluate during training, the end included.
        judge: what to evaluate on, "test" or "validation". Held-out training data is used for nothing else.
    """

    seed: int = 0
    batch_size: int = 32
    epochs: int = 10
    passes: int = 1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    lr_schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    weight_decay: float = 0.01
    exact: bool = False
    p_warmup: float = 0.0
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    skip: Literal["off", "exact", "sampled", "frozen"] = "off"
    evaluations: int = 10
    judge: Literal["test", "validation"] = "test"

    def __post_init__(self) -> None:
        parsing.check_finite(self)
        parsing.check_range(self, 0, MOST_SEED, "seed")
        parsing.check_range(self, 1, parsing.MOST, "batch_size", "epochs", "passes", "evaluations")
        if not self.lr > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"lr has to be above 0 and weight_decay at least 0, but got {self.lr} and {self.weight_decay}"
            )
        if not 0 <= self.p_warmup <= 1:
            raise ValueError(f"p_warmup has to be a share of training, from 0 to 1, but got {self.p_warmup}")
        for field in dataclasses.fields(self):
            if (field.name.startswith("p_") and field.name != "p_warmup") or field.name == "p":
                try:
                    check_p(getattr(self, field.name))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"setting {field.name}: {error}") from None


@dataclass(frozen=True)
class Preset:
    """A study in one word.

    Args:
        base: settings of all trials.
        grid: for each configuration, the settings in which it differs from `base`.
        seeds: how many times each configuration runs, with the seeds 0, 1, 2 and so on.
    """

    base: Mapping[str, Any]
    grid: Sequence[Mapping[str, Any]]
    seeds: int


def product(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations, the last name running fastest.

    >>> product(batch_size=[32, 256], p=[0.0])
    [{'batch_size': 32, 'p': 0.0}, {'batch_size': 256, 'p': 0.0}]
    """
    return [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]


class Task(ABC):
    """An experiment with given settings. Subclasses say what lies in `Settings`, `presets`, `metric` and `masks`.

    Class attributes:
        name: one word, as on the command line; the class's name in small letters if it is not given.
        title: one line.
        Settings: a subclass of `task.Settings` (a frozen dataclass with keyword-only fields) that adds the task's own;
            `settings` is an instance of it.
        presets: at least "quick".
        masks: the settings that hold a mask probability; a configuration with all of them 0 is the one to beat.
        metric: which metric a study is about.
        maximize: whether more of it is better.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    Settings: ClassVar[type[Settings]] = Settings
    presets: ClassVar[Mapping[str, Preset]]
    masks: ClassVar[tuple[str, ...]] = ("p",)
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True

    def __init__(self, settings: Any, *, data_root: str | None = None) -> None:
        self.settings = settings
        self.data_root = data_root

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if "title" not in cls.__dict__:
            cls.title = (inspect.getdoc(cls) or cls.name).splitlines()[0]

    @abstractmethod
    def data(self, device: torch.device) -> tuple[Examples, Examples]:
        """Training data, and data to evaluate on: which, `settings.judge` says. The same for the same settings."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, with its Backdrop layers, on the CPU. Torch is seeded before this is called."""

    @abstractmethod
    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """The loss of a batch of the model's outputs."""

    @abstractmethod
    def evaluate(self, outputs: Any, labels: Tensor) -> dict[str, float]:
        """Metrics over all outputs for the data to evaluate on; `metric` is one of them."""

    def augment(self, inputs: Tensor) -> Tensor:
        """A batch of training inputs, changed at random; as it is unless a task says otherwise."""
        return inputs

    def examine(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """More metrics, of a trained model in eval mode on the data to evaluate on; measured once, at the end."""
        return {}

    def units(self) -> dict[str, int]:
        """For each mask, how many units it chooses from: `tune` searches from keeping one of them to keeping all."""
        return dict.fromkeys(self.masks, 1000)

    @classmethod
    def with_preset(
        cls, preset: str, overrides: Mapping[str, Any] | None = None, *, seed: int = 0, data_root: str | None = None
    ) -> Task:
        """A task with the settings that all trials of a preset share, and some of your own."""
        values = {**find_preset(cls, preset).base, **(overrides or {}), "seed": seed}
        return cls(parsing.build(cls.Settings, values), data_root=data_root)

    @property
    def key(self) -> str:
        """A name for this task with these settings, the same on all machines."""
        return trial_key(self.name, dataclasses.asdict(self.settings))


def percent_right(found: Tensor, labels: Tensor) -> float:
    return 100 * (found == labels).double().mean().item()


class Classification(Task):
    """A task whose outputs are scores of classes: cross-entropy, and accuracy in percent."""

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels)

    def evaluate(self, outputs: Any, labels: Tensor) -> dict[str, float]:
        loss = F.cross_entropy(outputs.double(), labels).item()
        return {"accuracy": percent_right(outputs.argmax(1), labels), "loss": loss}


def trial_key(name: str, settings: Mapping[str, Any]) -> str:
    text = json.dumps([name, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_preset(task: type[Task], name: str) -> Preset:
    if not isinstance(name, str) or name not in task.presets:
        raise ValueError(
            f"preset has to be one of {', '.join(task.presets)} for {task.name}, but got {name!r}"
            f"{parsing.nearest(str(name), task.presets)}"
        )
    return task.presets[name]


NAMED: dict[str, type[Task]] = {}  # tasks of one's own that were named in this process, by `reference`


def find_task(name: str) -> type[Task]:
    """A task of the paper by its name, or one of your own by `module:Class` or `path/to/file.py:Class`.

    This runs the module or the file, so the name has to come from the user, never from a file or a database.
    """
    from backdrop.experiments.tasks import TASKS

    if name in TASKS:
        return TASKS[name]
    where, colon, which = name.rpartition(":")
    if not colon or not where:
        raise ValueError(
            f"task has to be one of {', '.join(TASKS)}, or one of your own as MODULE:CLASS or FILE.py:CLASS, but got "
            f"{name!r}{parsing.nearest(name, TASKS)}"
        )
    found = getattr(_module(where), which, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ValueError(f"{name} has to be a subclass of backdrop.experiments.task.Task, but is {str(found)[:80]}")
    _check_task(name, found)
    NAMED[reference(found)] = found
    return found


def _check_task(name: str, task: type[Task]) -> None:
    """An error unless a task of the user's own has all that one has to have."""
    if missing := [*sorted(task.__abstractmethods__), *(what for what in ("presets",) if not hasattr(task, what))]:
        raise ValueError(f"{name} has to be a subclass of backdrop.experiments.task.Task with {', '.join(missing)}")
    kinds = {
        "name": isinstance(task.name, str) and bool(task.name) and task.name.isprintable(),
        "Settings": inspect.isclass(task.Settings) and issubclass(task.Settings, Settings),
        "presets": isinstance(task.presets, Mapping) and all(map(_is_preset, task.presets.values())),
        "masks": isinstance(task.masks, (list, tuple)) and all(isinstance(mask, str) for mask in task.masks),
    }
    for what, is_right in kinds.items():
        if not is_right:
            raise ValueError(f"{name} has {what} that cannot be: {str(getattr(task, what))[:80]!r}")


def _is_preset(found: Any) -> bool:
    return isinstance(found, Preset) and type(found.seeds) is int and found.seeds >= 1


def known_task(where: str, name: str) -> type[Task] | None:
    """The task that a file names, by its place and its own name, if it is there already: nothing is run for it.

    These are the tasks of the paper, and those that the user has named in this process.
    """
    from backdrop.experiments.tasks import TASKS

    found = TASKS.get(where) or NAMED.get(where)
    return found if found is not None and found.name == name else None


def reference(task: type[Task]) -> str:
    """What `find_task` finds this task by, also in another process."""
    from backdrop.experiments.tasks import TASKS

    return task.name if TASKS.get(task.name) is task else f"{Path(inspect.getfile(task)).resolve()}:{task.__qualname__}"


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return code.from_name(where)
    path = Path(where).resolve()
    name = f"backdrop_task_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:  # a class has to stay the same class
        code.from_file(path, where, name)
    return sys.modules[name]
