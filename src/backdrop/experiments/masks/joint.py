"""Trials of a user's own function, on any Optuna storage, in as many processes as join.

Optuna gives every trial a number, and no two trials have the same. That is all these rules need, whatever the storage:

1. A trial counts if it is complete or pruned, if it failed in a way that is a result (such as a value that is no
   number), or if it runs in a process that is not known to be gone.
2. A trial is run if fewer trials before it count than there are to be in all. One that is not needed is given up.
3. Who finds nothing to do waits for those that others run: if one of them fails, its place is free again.

Studies of tasks hand out trials by a change of state that the storage lets one worker make (rule 1 of `study.study`).
SQLite, which may be given here, does not lock the row, so that two could make it; hence rules of their own.

A process that is gone from this machine is noticed at once. One elsewhere is taken for gone after `PATIENCE` seconds
and five times the longest trial so far, by the clock of whoever waits for it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backdrop.experiments import search
from backdrop.experiments.study import alive

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.trial import FrozenTrial, Trial

__all__ = ["Joint", "opened"]

POLL = 0.2  # seconds
PATIENCE = 600.0
TRIES = 5  # to make the tables of a database, which another process may be making too
OWN = "backdrop"  # what we note with a trial: who runs it, and from which starting point
FAILED = "failed because"  # the note of a failure that is a result


@contextlib.contextmanager
def opened(storage: str | Path | BaseStorage | None) -> Iterator[BaseStorage]:
    """Opens a storage, as `tune_masks` takes it, if it is not an open one already."""
    import optuna

    from backdrop.experiments.study.storage import is_address, open_storage, quieten

    verbosity = optuna.logging.get_verbosity()
    try:
        quieten()
        if storage is None or isinstance(storage, optuna.storages.BaseStorage):
            yield optuna.storages.get_storage(storage)
        elif not isinstance(storage, (str, Path)):
            raise TypeError(
                "storage has to be None, the path of a journal file, the address of a database or an Optuna storage, "
                f"but got {type(storage).__name__}"
            )
        elif is_address(storage) and not str(storage).startswith("postgres"):
            database = _database(str(storage))
            try:
                yield optuna.storages.get_storage(database)
            finally:
                database.engine.dispose()
        else:
            with open_storage(storage, create=True) as found:
                yield found.backend
    finally:
        optuna.logging.set_verbosity(verbosity)


def _database(address: str, tries: int = TRIES) -> RDBStorage:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(address)
    except SQLAlchemyError as error:
        if tries > 1:
            time.sleep(POLL)
            return _database(address, tries - 1)
        kind = address.partition(":")[0]  # the rest may hold a password
        raise OSError(f"the storage {kind}:... cannot be used: {getattr(error, 'orig', error)}") from error


class Joint:
    """A study that several processes work on: so many trials in all, the first with the parameters of `starts`."""

    def __init__(
        self,
        study: Study,
        trials: int,
        starts: Sequence[Mapping[str, float]],
        *,
        seed: int | None,
        pruner: BasePruner | None,
    ) -> None:
        self.study, self.trials, self.starts = study, trials, starts
        self.seed, self.pruner = seed, pruner
        self.identity = alive.identity()
        self.watch = alive.Watch(clock=lambda: time.monotonic())

    def finished(self) -> list[FrozenTrial]:
        """Those that count and have ended."""
        return [trial for trial in self._all() if trial.state.is_finished() and self._counts(trial)]

    def next(self, deadline: float) -> Trial | None:
        """A trial to run; None if there is none any more, or no time (of `time.monotonic`) for it."""
        while time.monotonic() < deadline:
            found = [trial for trial in self._all() if self._counts(trial)]
            if len(found) < self.trials:
                trial = self._ask()
                if trial is not None:
                    return trial
            elif all(trial.state.is_finished() for trial in found):
                return None
            time.sleep(POLL)
        return None

    def give_up(self, number: int) -> None:
        """A trial that has not ended well; its place is free again."""
        from optuna.trial import TrialState

        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def fail(self, trial: Trial, why: str) -> None:
        """A trial that has failed, and that is its result."""
        trial.set_user_attr(FAILED, why)
        self.give_up(trial.number)

    def _all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _counts(self, trial: FrozenTrial) -> bool:
        from optuna.trial import TrialState

        if trial.state == TrialState.FAIL:
            return FAILED in trial.user_attrs
        return trial.state != TrialState.WAITING and not self._is_lost(trial)

    def _is_lost(self, trial: FrozenTrial) -> bool:
        """Whether a trial that others run will never end, as far as can be known."""
        if trial.state.is_finished():
            return False
        worker = trial.user_attrs.get(OWN, {}).get("worker")
        longest = max((t.duration.total_seconds() for t in self._all() if t.duration is not None), default=0.0)
        self.watch.grace = PATIENCE + 5 * longest
        is_lost = self.watch.is_lost(trial.number, worker)
        if is_lost and alive.is_dead(worker):
            self.give_up(trial.number)
        return is_lost

    def _ask(self) -> Trial | None:
        """A new trial with its sampler; None if it is not needed after all."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some storages have heartbeats that ours are in place of
            asked = self.study.ask()
        known = self._all()
        before = [trial for trial in known if trial.number < asked.number and self._counts(trial)]
        if len(before) >= self.trials:
            self.give_up(asked.number)
            return None
        enqueued = any("fixed_params" in trial.system_attrs for trial in known if trial.number == asked.number)
        start = None if enqueued else self._start(before)
        asked.set_user_attr(OWN, {"worker": self.identity, "start": start})
        self.study.sampler = search.sampler(None if self.seed is None else self.seed * 100_003 + asked.number)
        if start is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.sampler = optuna.samplers.PartialFixedSampler(dict(self.starts[start]), self.study.sampler)
        steps = max((trial.last_step or 0 for trial in before), default=0)
        self.study.pruner = self.pruner or search.pruner(steps)
        return optuna.trial.Trial(self.study, asked._trial_id)  # with this sampler from the beginning

    def _start(self, before: Sequence[FrozenTrial]) -> int | None:
        """The starting point that a new trial takes: the first that no trial before it has, or is about to take."""
        taken = {trial.user_attrs[OWN]["start"] for trial in before if OWN in trial.user_attrs}
        undecided = sum(OWN not in trial.user_attrs and not trial.state.is_finished() for trial in before)
        due = [i for i in range(len(self.starts)) if i not in taken]
        return due[undecided] if undecided < len(due) else None
