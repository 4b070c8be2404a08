"""Search the p of every Backdrop layer of a model, for a training function of your own.

    from backdrop.experiments import tune_masks

    def objective(model, trial):            # a fresh copy of the model, its masks set for this trial
        for epoch in range(20):
            train_for_an_epoch(model)
            trial.report(accuracy(model, validation), epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return accuracy(model, validation)  # on data that are neither for training nor for the final test

    tuned = tune_masks(objective, model, input_shape=(8, 3, 64, 64), direction="maximize", storage="masks.log")
    print(tuned)
    model = tuned.model                     # a copy with the best masks, not trained

The same call in other processes, or on other machines with a database, works on the same study.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import nn

from backdrop._core.checks import check_int
from backdrop._core.code import how_to_install
from backdrop.experiments import search
from backdrop.experiments.masks import space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

    from backdrop.experiments.masks.joint import Joint

__all__ = ["Tuned", "tune_masks"]

Objective: TypeAlias = "Callable[[nn.Module, Trial], float]"
Direction: TypeAlias = Literal["minimize", "maximize"]
Update: TypeAlias = Callable[[int, float | None], None]

MASKS = "units of masks"  # what a study notes about itself


@dataclass(frozen=True)
class Tuned:
    """What came of a search; prints in words.

    Args:
        p: of each mask, by its dotted path, in the best trial.
        value: of the best trial. The best of many noisy values is better than what it stands for: measure again, on
            other data and seeds.
        trials: how many were run, in all processes.
        without: the value without masks; None if that trial is not complete.
        direction: "minimize" or "maximize".
        units: of each mask.
        study: Optuna's, with all trials.
        model: a copy of the model with the best masks, not trained.
    """

    p: dict[str, float]
    value: float
    trials: int
    without: float | None
    direction: Direction
    units: dict[str, int]
    study: Study
    model: nn.Module

    def __str__(self) -> str:
        better = "lower" if self.direction == "minimize" else "higher"
        lines = [f"The best of {self.trials} trials has the value {self.value:.6g} (the {better} the better), with"]
        for path, p in self.p.items():
            units = self.units[path]
            kept = max(1, round(units * (1 - p)))
            lines.append(
                f"  p = {p:.4g} at {path}: keeps about {kept} of {units} units" if p else f"  no mask at {path}"
            )
        if not any(self.p.values()):
            return "\n".join([*lines, "No masks at all were the best."])
        return "\n".join([*lines, f"Without masks: {'unknown' if self.without is None else f'{self.without:.6g}'}."])


def tune_masks(
    objective: Objective,
    model: nn.Module,
    *,
    input_shape: Sequence[int] | None = None,
    units: Mapping[str, int] | int | None = None,
    trials: int = 30,
    direction: Direction = "minimize",
    storage: str | Path | BaseStorage | None = None,
    name: str = "masks",
    leave: Iterable[str] = (),
    start: Iterable[Mapping[str, float]] = (),
    seed: int | None = 0,
    pruner: BasePruner | None = None,
    timeout: float | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Search the p of every Backdrop layer for which a training function of your own gives the best value.

    A mask is searched for by the share of units that it keeps, on a logarithmic scale from one unit to all. The first
    trial is without masks, the second has the p that the model came with, where they are not 0, then come those of
    `start`; after eight trials Optuna's TPE chooses.

    Calls with the same storage and name, one after the other or at the same time, work on one study, and each returns
    when all trials are done. What is finished stays, whatever happens: an exception in the objective ends this call,
    and the same call again goes on. A value of nan is a failed trial, and the search goes on.

    Args:
        objective: is given a fresh copy of the model with its masks set, and Optuna's trial, to report and prune; it
            trains the copy and returns its value on validation data.
        model: with at least one Backdrop layer.
        input_shape: of the batches that the model takes, from which the units of each mask are counted.
        units: of each mask by its dotted path, or one number for all, for models whose calls cannot be followed.
        trials: how many to run in all, over all processes and calls that share the storage.
        direction: whether a value should be small, "minimize", or large, "maximize".
        storage: where the study lives: None for memory, the path of a journal file, an address such as
            "sqlite:///masks.db" or "postgresql://USER@HOST/DATABASE", or an Optuna storage.
        name: of the study in the storage.
        leave: paths of masks that keep their p.
        start: more masks to try first, p by path; those that are not named keep theirs.
        seed: of the search; None for another one each time.
        pruner: Optuna's, instead of one that ends trials that are worse than the median after a third of their steps.
        timeout: seconds after which no trial is begun any more.
        progress: whether to show a bar with the best value so far; by default in a terminal.
    """
    if not callable(objective):
        raise TypeError(f"objective has to be a function of a model and a trial, but got {type(objective).__name__}")
    if direction not in ("minimize", "maximize"):
        raise ValueError(f"direction has to be 'minimize' or 'maximize', but got {direction!r}")
    trials, seed = check_int("trials", trials, 1), None if seed is None else check_int("seed", seed, 0)
    masks = space.find(model, leave)
    counts = space.units(model, masks, input_shape, units)
    starts = space.starts(masks, counts, start)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    _import_optuna()
    from backdrop.experiments.masks.joint import Joint, opened

    with opened(storage) as backend, _bar(progress, trials) as update:
        study = _study(backend, name, direction, counts)
        joint = Joint(study, trials, starts, seed=seed, pruner=pruner)
        update(len(joint.finished()), _best(study))
        while (trial := joint.next(deadline)) is not None:
            _run(objective, model, trial, counts, joint)
            update(len(joint.finished()), _best(study))
        return _tuned(model, study, joint.finished(), direction, counts)


def _run(objective: Objective, model: nn.Module, trial: Trial, units: Mapping[str, int], joint: Joint) -> None:
    from optuna import TrialPruned
    from optuna.trial import TrialState

    try:
        p = {path: search.suggest_p(trial, path, count) for path, count in units.items()}
        value = objective(_with(model, p), trial)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"objective has to return a number, but got {value!r}") from None
    except TrialPruned:
        joint.study.tell(trial, state=TrialState.PRUNED)
    except BaseException:  # Ctrl-C among them
        joint.give_up(trial.number)
        raise
    else:
        if math.isnan(number):
            joint.fail(trial, "its value is no number")
        else:
            joint.study.tell(trial, number)


def _with(model: nn.Module, p: Mapping[str, float]) -> nn.Module:
    copied = copy.deepcopy(model)
    for path, value in p.items():
        copied.get_submodule(path).p = value  # type: ignore[assignment]
    return copied


def _import_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(f"tune_masks needs Optuna: {how_to_install('experiments')}") from error


def _study(backend: BaseStorage, name: str, direction: Direction, units: dict[str, int]) -> Study:
    """The study of this name, made if it is not there."""
    import optuna

    study = optuna.create_study(storage=backend, study_name=name, direction=direction, load_if_exists=True)
    directions = [found.name.lower() for found in study.directions]
    if directions != [direction]:
        raise ValueError(f"the study {name!r} is there already, to {directions[0]}; give another name")
    is_new = not study.get_trials(deepcopy=False)  # first, because another process may be making it just now
    known = study.user_attrs.get(MASKS)
    if known is None and is_new:
        study.set_user_attr(MASKS, units)
    elif known != units:
        raise ValueError(
            f"the study {name!r} is there already, with masks of {known} units, not {units}; give another name"
        )
    return study


def _best(study: Study) -> float | None:
    try:
        return study.best_value
    except ValueError:  # no trial is complete
        return None


def _tuned(
    model: nn.Module, study: Study, finished: Sequence[FrozenTrial], direction: Direction, units: dict[str, int]
) -> Tuned:
    from optuna.trial import TrialState

    complete = [trial for trial in finished if trial.state == TrialState.COMPLETE]
    if not complete:
        why = f"of {len(finished)} trials none is complete" if finished else "there was no time for a trial"
        raise RuntimeError(f"there are no best masks: {why}")
    best = study.best_trial
    off = [trial.value for trial in complete if all(trial.params[search.keep(path)] == 1 for path in units)]
    p = {path: 1 - best.params[search.keep(path)] for path in units}
    without = None if not off else min(off) if direction == "minimize" else max(off)  # type: ignore[type-var]
    return Tuned(p, study.best_value, len(finished), without, direction, units, study, _with(model, p))


@contextmanager
def _bar(progress: bool | None, trials: int) -> Iterator[Update]:
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda done, best: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("no value yet", total=trials)

        def update(done: int, best: float | None) -> None:
            text = "no value yet" if best is None else f"best so far {best:.6g}"
            bar.update(task, completed=done, description=text)

        yield update
