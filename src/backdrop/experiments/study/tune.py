"""The search for mask probabilities, a learning rate and a weight decay: trials choose their own settings, with TPE.

Trials are judged on validation data, and those that fall behind are pruned. How masks are searched for is said in
`search`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backdrop.experiments import search
from backdrop.experiments.records import Record
from backdrop.experiments.settings import as_text, build
from backdrop.experiments.study.plan import Spec, all_settings, check_extends, plan

if TYPE_CHECKING:
    from optuna.trial import Trial

    from backdrop.experiments.study.study import Study

__all__ = ["add_slots", "ask", "best", "choose", "plan_search", "run_command", "should_prune"]

WEIGHT_DECAY = (1e-5, 0.3)
EVALUATIONS = 5  # at least, of each trial: what is never looked at is never pruned


def plan_search(task: str, preset: str, overrides: Sequence[str], *, seed: int = 0) -> Spec:
    """The specification of a search that starts from a preset's settings."""
    shared, points = plan(task, preset, overrides, seeds=f"{seed},")
    kind = shared.find_task()
    named = [text.partition("=")[0] for text in overrides]
    several = [name for name in named if len({as_text(point[name]) for point in points}) > 1]
    if refused := several or [name for name in named if name in kind.masks]:
        raise ValueError(
            f"{', '.join(refused)} cannot be set so: tune looks for the best {', '.join(kind.masks)}, lr and "
            "weight_decay (around those of --set, where they are given), and everything else has one value"
        )
    values = {**kind.presets[preset].base, **{name: points[0][name] for name in named}}
    base = all_settings(kind, {**values, **dict.fromkeys(kind.masks, 0.0), "judge": "validation", "seed": seed})
    if "evaluations" not in named:
        base["evaluations"] = max(base["evaluations"], EVALUATIONS)
    units = kind(build(kind.Settings, base)).units()
    return dataclasses.replace(
        shared,
        kind="tune",
        base=base,
        varied=(*kind.masks, "lr", "weight_decay"),
        units={mask: units[mask] for mask in kind.masks},
    )


def add_slots(study: Study, spec: Spec, trials: int) -> None:
    """Enqueues as many trials as are missing; the first is the preset itself, without masks."""
    from optuna.distributions import FloatDistribution

    check_extends(study.spec, study.name, spec, [spec.base])
    there = {record.key for record in study.records()}
    for i in range(trials):
        if f"slot-{i}" in there:
            continue
        params, spaces = {}, {}
        if i == 0:
            for name, (low, high) in _spaces(spec).items():
                start = 1.0 if name.startswith("keep ") else spec.base[name]
                params[name] = min(max(start, low), high)
                spaces[name] = FloatDistribution(low, high, log=True)
        study.enqueue(f"slot-{i}", None, params, spaces)


def _spaces(spec: Spec) -> dict[str, tuple[float, float]]:
    lr = spec.base["lr"]
    masks = {search.keep(mask): (1 / units, 1.0) for mask, units in spec.units.items()}
    return {**masks, "lr": (lr / 10, lr * 10), "weight_decay": WEIGHT_DECAY}


def choose(study: Study, number: int, trial: Trial) -> dict[str, Any]:
    """The settings of a trial: those it was given, or what TPE makes of the trials before it."""
    given: dict[str, Any] | None = study.trial(number).user_attrs.get("settings")
    if given is not None:
        return given
    spec = study.spec
    found: dict[str, Any] = {mask: search.suggest_p(trial, mask, units) for mask, units in spec.units.items()}
    for name in ("lr", "weight_decay"):
        found[name] = trial.suggest_float(name, *_spaces(spec)[name], log=True)
    return {**spec.base, **found}


def ask(study: Study, number: int) -> Trial:
    """Optuna's own view of a trial that was claimed."""
    import optuna

    base = study.spec.base
    study.optuna.sampler = search.sampler((base["seed"] * 100_003 + number) % 2**32)  # as NumPy's have to be
    study.optuna.pruner = search.pruner(base["epochs"])
    return optuna.trial.Trial(study.optuna, study.trial_id(number))


def should_prune(trial: Trial, row: Mapping[str, Any], column: str) -> bool:
    """Tells Optuna what was measured after an epoch; whether the trial is worse than the median of the others."""
    trial.report(row[column], int(row["epoch"]))
    return trial.should_prune()


def best(spec: Spec, records: Sequence[Record], count: int = 5) -> list[Record]:
    """The best complete trials, the best first."""
    complete = [record for record in records if record.state == "complete"]
    return sorted(complete, key=lambda record: record.metrics[spec.metric], reverse=spec.maximize)[:count]


def run_command(study: str, spec: Spec, record: Record, *, seeds: int = 5, task: str | None = None) -> str:
    """The command that runs a configuration, and the same without masks, on the test set with several seeds.

    With two masks or more it also runs each of them alone.
    """
    kind = spec.find_task(task)
    named = dict.fromkeys(name for point in kind.presets[spec.preset].grid for name in point)
    preset = all_settings(kind, kind.presets[spec.preset].base)
    own = ("judge", "seed", "evaluations")  # of the search
    differ = [name for name, value in spec.base.items() if value != preset.get(name) and name not in own]
    words = ["backdrop", "run", task or spec.task, "--preset", spec.preset, "--seeds", str(seeds)]
    words += ["--name", f"{study}-best"]
    for name in dict.fromkeys([*spec.varied, *named, *differ]):
        value = record.settings[name]
        text = f"{value:.6g}" if isinstance(value, float) else as_text(value)
        words += ["--set", f"{name}=0,{text}" if name in kind.masks and value else f"{name}={text}"]
    return shlex.join(words)
