"""What a study is about: its task, its preset, what all its trials share, and the points it consists of.

>>> spec, points = plan("gp", "quick", ["p_small=0,0.99", "epochs=3"], seeds="2")
>>> spec.name, len(points), spec.base["epochs"], sorted(spec.varied)
('gp-quick', 8, 3, ['lr', 'p_large', 'p_small', 'seed', 'weight_decay'])
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import backdrop
from backdrop.experiments.records import Record, column
from backdrop.experiments.settings import as_text, build, parse
from backdrop.experiments.task import Preset, Task, find_preset, trial_key
from backdrop.experiments.tasks import TASKS, find_task, known_task, reference

__all__ = [
    "Readable",
    "Spec",
    "again",
    "all_settings",
    "check_extends",
    "check_name",
    "check_trials",
    "plan",
    "threads_for",
    "workers_for",
]

MOST_WORKERS = 8  # where nobody says how many
MOST_TRIALS = 100_000
MOST_THREADS = 4096  # more than any machine has; with many more a process cannot begin


@dataclass(frozen=True)
class Spec:
    """What is known of a study from the start, and stored with it.

    Args:
        kind: points of a "grid", or slots for which to "tune" settings.
        task: what `find_task` finds it by.
        task_name: its name.
        preset: that it began with.
        base: settings that all trials share.
        varied: names of the others.
        metric: which one the study is about.
        maximize: whether more of it is better.
        threads: of torch in each trial; another number could change the last bits of a result.
        backdrop: the version that began it.
        units: of each mask, for `tune`.
        masks: settings that hold a mask probability.
        title: of the task, in a line.
    """

    kind: Literal["grid", "tune"]
    task: str
    task_name: str
    preset: str
    base: dict[str, Any]
    varied: tuple[str, ...]
    metric: str
    maximize: bool
    threads: int = 1
    backdrop: str = backdrop.__version__
    units: dict[str, int] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    title: str = ""

    @property
    def name(self) -> str:
        """Of a study that was given none."""
        return f"{self.task_name}-{self.preset}" + ("-tune" if self.kind == "tune" else "")

    @property
    def column(self) -> str:
        """The metric in a row of a curve, where "loss" is that of training."""
        return column(self.metric)

    @classmethod
    def from_json(cls, values: Any) -> Spec:
        """What a file or a database says, which may be anything: if it cannot be, an error."""
        if not isinstance(values, Mapping):
            raise ValueError(f"what a study is about cannot be {str(values)[:80]!r}")
        known = {item.name for item in dataclasses.fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        for name, is_right in _KINDS.items():
            required = name not in ("threads", "backdrop", "units", "masks", "title")
            if (required or name in found) and not is_right(found.get(name)):
                raise ValueError(f"the {name} of a study cannot be {str(found.get(name))[:80]!r}")
        masks = found.get("masks") or [name for name in found["varied"] if name == "p" or name.startswith("p_")]
        return cls(**{**found, "varied": tuple(found["varied"]), "masks": tuple(masks)})

    def find_task(self, where: str | None = None) -> type[Task]:
        """The class of the task.

        Args:
            where: what the user says it is found by. Without it, a task of the paper, or one that the user has named in
                this process before: what a study says of itself is not run.
        """
        found = find_task(where) if where is not None else known_task(self.task, self.task_name)
        if found is None:
            raise ValueError(
                f"this study is of a task of its own, {self.task_name} in {self.task}; nothing is run because a study "
                "names it, so name it with --task FILE.py:CLASS if you trust it"
            )
        if found.name != self.task_name:
            raise ValueError(f"this study is of the task {self.task_name}, but got {found.name}")
        return found

    def shown_task(self, where: str | None = None) -> type[Task]:
        """The class of the task as far as a report needs it: without `where`, nothing of the user's own is run."""
        if where is None and (self.task not in TASKS or TASKS[self.task].name != self.task_name):
            name = (
                f"other {self.task_name}" if self.task_name in TASKS else self.task_name
            )  # not ours, with our figures
            about = {"name": name, "title": self.title or self.task_name, "presets": {}}
            return type(
                "Recorded", (Task,), {**about, **{n: getattr(self, n) for n in ("masks", "metric", "maximize")}}
            )
        return self.find_task(where)

    def key(self, settings: Mapping[str, Any]) -> str:
        return trial_key(self.task_name, settings)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_text, value))


def _is_base(value: Any) -> bool:
    return (
        isinstance(value, dict) and all(map(_is_text, value)) and not any(isinstance(v, dict) for v in value.values())
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 2**31


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "kind": lambda value: value in ("grid", "tune"),
    "task": _is_text,
    "task_name": _is_text,
    "preset": _is_text,
    "base": _is_base,
    "varied": _are_texts,
    "metric": _is_text,
    "maximize": lambda value: isinstance(value, bool),
    "threads": lambda value: _is_count(value) and value <= MOST_THREADS,
    "backdrop": _is_text,
    "units": lambda value: (
        isinstance(value, dict) and all(map(_is_text, value)) and all(map(_is_count, value.values()))
    ),
    "masks": _are_texts,
    "title": _is_text,
}


class Readable(Protocol):
    """A study as displays and reports see it."""

    name: str
    spec: Spec

    def records(self) -> list[Record]: ...


def plan(
    task: str, preset: str, overrides: Sequence[str] = (), *, seeds: str | None = None
) -> tuple[Spec, list[dict[str, Any]]]:
    """The specification of a study, and all settings of each of its points, seed by seed.

    Args:
        task: as `find_task` takes it.
        preset: of the task.
        overrides: `key=value` for all points, or `key=value,value` in place of an axis of the preset's grid.
        seeds: how many, or which: "5", or "0,7,11". The preset's number by default.
    """
    kind = find_task(task)
    chosen = find_preset(kind, preset)
    given = parse(kind.Settings, overrides)
    if "seed" in given:
        raise ValueError("seeds are given with --seeds: how many, or which ones, such as --seeds 0,7,11")
    check_trials(max(1, len(chosen.grid)) * math.prod(len(values) for values in given.values()))
    points: list[dict[str, Any]] = []
    for point, values in itertools.product(chosen.grid or [{}], itertools.product(*given.values())):
        points.append({**chosen.base, **point, **dict(zip(given, values, strict=True))})
    numbers = read_seeds(seeds, chosen.seeds)
    check_trials(len(points) * len(numbers))
    full = [all_settings(kind, {**point, "seed": seed}) for seed in numbers for point in points]
    unique = list({trial_key(kind.name, settings): settings for settings in full}.values())
    axes = {name for point in chosen.grid for name in point if name not in given}
    axes |= {name for name, values in given.items() if len(values) > 1} | set(kind.masks) | {"seed"}
    return describe(kind, preset, unique[0], axes), unique


def describe(kind: type[Task], preset: str, settings: Mapping[str, Any], varied: set[str]) -> Spec:
    """The specification of a grid that varies these settings and shares the others."""
    return Spec(
        kind="grid",
        task=reference(kind),
        task_name=kind.name,
        preset=preset,
        base={name: value for name, value in settings.items() if name not in varied},
        varied=tuple(name for name in settings if name in varied),
        metric=kind.metric,
        maximize=kind.maximize,
        masks=tuple(kind.masks),
        title=kind.title,
    )


def all_settings(kind: type[Task], values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, as they are after a way through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(build(kind.Settings, values))))
    return found


def check_trials(count: int) -> None:
    if count > MOST_TRIALS:
        raise ValueError(f"a study has to have at most {MOST_TRIALS:,} trials, but these are {count:,}")


def read_seeds(text: str | None, default: int) -> list[int]:
    if text is None:
        return list(range(default))
    numbers = [part for part in text.split(",") if part]
    if not numbers or not all(re.fullmatch(r"[0-9]{1,16}", part) for part in numbers) or text == "0":
        raise ValueError(f"seeds have to be how many (5) or which ones (0,7,11; one alone: 7,), but got {text!r}")
    if "," not in text and int(text) > MOST_TRIALS:
        raise ValueError(
            f"seeds have to be at most {MOST_TRIALS:,}, but got {text}: this is how many there are; the seed {text} "
            f"alone is --seeds {text},"
        )
    return list(dict.fromkeys(map(int, numbers))) if "," in text else list(range(int(text)))


def check_extends(stored: Spec, name: str, spec: Spec, points: Sequence[Mapping[str, Any]]) -> None:
    """An error unless these points may be added to a study: whatever its trials share, they have to share."""
    if (stored.task_name, stored.kind) != (spec.task_name, spec.kind):
        raise ValueError(
            f"the study {name} is of another kind ({stored.kind}, task {stored.task_name}); choose another --name"
        )
    found: dict[str, list[str]] = {}
    for point in points:
        for setting, value in stored.base.items():
            text = as_text(point.get(setting))
            if point.get(setting) != value and text not in found.setdefault(setting, []):
                found[setting].append(text)
    differing = [
        f"{setting} is {as_text(stored.base[setting])} there and {','.join(texts)} here"
        for setting, texts in found.items()
        if texts
    ]
    if differing:
        raise ValueError(
            f"the study {name} has other settings: {'; '.join(differing)}; give the same ones, or begin another study "
            "with --name"
        )


def again(name: str, spec: Spec, records: Sequence[Record], task: type[Task] | None = None) -> str:
    """The command that makes a study once more: its preset, and what is not as there.

    The presets of a task of one's own are known only where its class is given.
    """
    kind = task or spec.shown_task()
    preset = kind.presets.get(spec.preset) or Preset({}, [], 0)
    defaults = all_settings(kind, preset.base) if kind.presets else {}
    words = ["backdrop", "run" if spec.kind == "grid" else "tune", spec.task, "--preset", spec.preset]
    words += ["--name", name] if name != spec.name else []
    shared, named = defaults, {setting for point in preset.grid for setting in point}
    ours = {*kind.masks, "seed", "judge"} if spec.kind == "tune" else set()
    said = {"skip"} if spec.preset == "paper" else set()  # another on a GPU, unless it is given
    said |= named if spec.kind == "grid" else set()
    for setting, value in spec.base.items():
        if setting not in ours and (value != shared.get(setting) or setting in said):
            words += ["--set", f"{setting}={as_text(value)}"]
    if spec.kind == "tune":
        return shlex.join([*words, "--trials", str(len(records)), "--seed", str(spec.base.get("seed", 0))])
    axes = [setting for setting in spec.varied if setting != "seed"]
    usual = {tuple(as_text({**shared, **point}.get(setting)) for setting in axes) for point in preset.grid}
    if {tuple(as_text(record.settings.get(setting)) for setting in axes) for record in records} != usual:
        for setting in axes:
            words += [
                "--set",
                f"{setting}={','.join(dict.fromkeys(as_text(r.settings.get(setting)) for r in records))}",
            ]
    seeds = sorted({record.settings["seed"] for record in records})
    if seeds != list(range(preset.seeds)):
        words += ["--seeds", str(len(seeds)) if seeds == list(range(len(seeds))) else f"{','.join(map(str, seeds))},"]
    return shlex.join(words)


def check_name(name: str) -> str:
    if not re.fullmatch(r"[\w][\w.+=-]*", name):
        raise ValueError(f"the name of a study has to consist of letters, digits and . _ + = -, but got {name!r}")
    return name


def workers_for(accelerator: str, devices: int, trials: int) -> int:
    """As many workers as there are GPUs to give to so many trials, or else cores, within reason."""
    import torch

    if devices > 1:
        return 1
    on_gpu = accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
    return max(1, min(torch.cuda.device_count() if on_gpu else _cores(), MOST_WORKERS, trials))


def threads_for(workers: int) -> int:
    """Threads of each of so many workers on this machine."""
    return max(1, _cores() // workers)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
