"""A study: trials in an Optuna storage, which any number of workers on any number of machines work through.

NOTE: why no trial is lost or run twice. A point of the study has a key; one Optuna trial is one attempt at it.
1. A trial is claimed by one change of its state, from waiting to running, which the storage lets one worker make.
2. A finished trial (complete, pruned or failed) is never changed again. All that is known of it is stored before its
   state, so a complete trial has its results.
3. A running trial whose worker is dead (see `alive`) is closed as failed, "lost"; one whose worker was stopped is
   closed by that worker, "interrupted". Both are given back. A worker that was taken for dead by mistake cannot record
   anything, by rule 2; it notices that with its next sign of life and lets the trial go.
4. A key whose trials were all given back is enqueued again by whoever sees it. So dying between rules 3 and 4 loses
   nothing, and neither does dying while a study is begun: `run` enqueues the keys that are not there.
5. Two who enqueue at once make two trials for one key. The first that was not given back counts, and the others are
   closed as "duplicate of N" by whoever claims them, also when nothing else is left to do. Numbers are given in order,
   so who sees N sees all before it.
6. A trial that failed for a reason of its own is not run again, unless someone asks for it (`retry`): the new trial
   knows the number of the failed one, and so is no duplicate of it.
7. However often a trial loses its worker, it is given back: machines are preempted, processes killed. Only faults of
   the process itself (a segmentation fault, say), of which it leaves a note in the trial's folder, are held against
   the trial: see `remains`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from backdrop.experiments.records import Record, State, checked
from backdrop.experiments.settings import nearest
from backdrop.experiments.study.alive import Watch
from backdrop.experiments.study.plan import Spec, check_extends
from backdrop.experiments.study.storage import Storage

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

__all__ = ["Study", "studies"]

LOST, INTERRUPTED, DUPLICATE = "lost", "interrupted", "duplicate of"
CLAIM = "claim "  # begins the name under which a worker says that it wants a trial
CURVE = 200  # rows of a curve that are stored
HEARTBEAT = "beat"  # the name under which the last one is stored
KINDS: dict[str, type] = {"key": str, "after": int, "settings": dict, "reason": str, "worker": dict, HEARTBEAT: dict}

STATES: dict[str, State] = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}
Attempts = list["FrozenTrial"]  # at one key, in order


class Study:
    """A study that is there. Several threads may use it."""

    def __init__(self, storage: Storage, name: str) -> None:
        import optuna

        self.storage, self.name, self._backend = storage, name, storage.backend
        try:
            self._id = self._backend.get_study_id_from_name(name)
            spec = self._backend.get_study_user_attrs(self._id)["spec"]
        except KeyError:
            there = studies(storage)
            listed = f"; there are {', '.join(there)}" if there else ""
            raise ValueError(f"there is no study {name!r} in {storage.place}{nearest(name, there)}{listed}") from None
        with self._named():
            self.spec = Spec.from_json(spec)
        self._trial_ids: dict[int, int] = {}
        self._finished: dict[int, Record] = {}
        self.optuna = optuna.load_study(study_name=name, storage=self._backend)

    @classmethod
    def begin(cls, storage: Storage, name: str, spec: Spec) -> Study:
        """The study of this name, made if it is not there. For one process at a time: see `Storage.exclusive`."""
        import optuna

        direction: Literal["maximize", "minimize"] = "maximize" if spec.maximize else "minimize"
        optuna.create_study(storage=storage.backend, study_name=name, direction=direction, load_if_exists=True)
        number = storage.backend.get_study_id_from_name(name)
        if "spec" not in storage.backend.get_study_user_attrs(number):
            if storage.backend.get_n_trials(number):
                raise ValueError(f"the study {name} in {storage.place} is not one of ours; choose another --name")
            storage.backend.set_study_user_attr(number, "spec", dataclasses.asdict(spec))
        return cls(storage, name)

    def add(self, spec: Spec, points: Sequence[Mapping[str, Any]]) -> int:
        """Enqueues the points that are not there yet, if they fit the study; how many these were."""
        check_extends(self.spec, self.name, spec, points)
        there, added = self._attempts(), 0
        for point in points:
            key = self.spec.key(point)
            if key not in there:
                self.enqueue(key, point, {name: point[name] for name in self.spec.varied if name in point})
                added += 1
        return added

    def enqueue(
        self,
        key: str,
        settings: Mapping[str, Any] | None,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution] | None = None,
        after: int = -1,
    ) -> None:
        """Adds a trial for a worker to claim, an attempt at a key. Settings may be chosen when it is claimed.

        Optuna's own displays show the params. `after` is the number of the failed trial that this replaces (rule 6).
        """
        from optuna.trial import TrialState, create_trial

        if distributions is None:
            distributions = {name: found for name, value in params.items() if (found := _distribution(value))}
        attributes = {"key": key, "after": after} | ({} if settings is None else {"settings": dict(settings)})
        self.optuna.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params={name: params[name] for name in distributions if name in params},
                distributions={name: found for name, found in distributions.items() if name in params},
                user_attrs=attributes,
            )
        )

    def retry(self) -> int:
        """Enqueues failed trials anew (rule 6); how many."""
        count = 0
        for key, attempts in self._attempts().items():
            trial = _counting(attempts)
            if trial is not None and trial.state.name == "FAIL":
                self._enqueue_again(key, trial, after=trial.number)
                count += 1
        return count

    def tidy(self, watch: Watch) -> None:
        """Gives back the trials of dead workers (rule 3), and enqueues what was given back (rule 4)."""
        for attempts in self._attempts().values():
            for trial in attempts:
                seen = trial.user_attrs
                claims = [value for name, value in seen.items() if name.startswith(CLAIM)]
                if trial.state.name == "RUNNING" and watch.is_lost(
                    trial.number, seen.get("worker"), seen.get(HEARTBEAT), claims
                ):
                    self.close(trial.number, LOST)
        for key, attempts in self._attempts().items():
            if _counting(attempts) is None:
                self._enqueue_again(key, attempts[-1])

    def _enqueue_again(self, key: str, trial: FrozenTrial, after: int = -1) -> None:
        with self._named():
            self.enqueue(key, trial.user_attrs.get("settings"), trial.params, trial.distributions, after)

    def claim(self, worker: Mapping[str, Any]) -> int | None:
        """The number of a trial that is this worker's from now on; None if none is waiting."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        for trial in self._trials("WAITING"):
            if "key" not in trial.user_attrs:
                continue
            number = trial.number
            try:
                # Said before, so that a worker that dies with the claim is known, and after, to tell who got it.
                self.store(number, **{f"{CLAIM}{worker['id']}": dict(worker)})
                if not self._backend.set_trial_state_values(self.trial_id(number), TrialState.RUNNING):  # rule 1
                    continue
                self.store(number, worker=dict(worker))
            except UpdateFinishedTrialError:
                continue
            counts = _counting(self._attempts()[trial.user_attrs["key"]])
            if counts is None or counts.number == number:
                return number
            self.close(number, f"{DUPLICATE} {counts.number}")  # rule 5
        return None

    def is_unfinished(self) -> bool:
        """Whether there is anything that waits or runs; a duplicate too, which is to be closed (rule 5)."""
        if any("key" in trial.user_attrs for trial in self._trials("WAITING", "RUNNING")):
            return True
        return any(record.state in ("waiting", "running") for record in self.records())  # all given back: rule 4

    def trial(self, number: int) -> FrozenTrial:
        return self._backend.get_trial(self.trial_id(number))

    def store(self, number: int, **values: Any) -> None:
        """Stores something with a trial that is not finished; else Optuna's UpdateFinishedTrialError."""
        for name, value in values.items():
            self._backend.set_trial_user_attr(self.trial_id(number), name, value)

    def finish(
        self, number: int, state: Literal["COMPLETE", "PRUNED", "FAIL"], value: float | None = None, **values: Any
    ) -> bool:
        """Ends a trial, with all that is to be stored of it; False if someone else has ended it (rules 2 and 3)."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        if "curve" in values:
            values["curve"] = _thinned(values["curve"], self.spec.column)
        try:
            self.store(number, **values)
            self._backend.set_trial_state_values(
                self.trial_id(number), TrialState[state], None if value is None else [value]
            )
        except UpdateFinishedTrialError:
            return False
        return True

    def close(self, number: int, reason: str) -> bool:
        return self.finish(number, "FAIL", reason=reason)

    def records(self) -> list[Record]:
        """What is known of each point, in the order in which they were added."""
        found = []
        for key, attempts in self._attempts().items():
            trial = _counting(attempts)
            with self._named():
                if trial is None or trial.state.name == "WAITING":
                    settings = attempts[-1].user_attrs.get("settings", self.spec.base)
                    found.append(checked(Record(key, "waiting", settings)))
                else:
                    found.append(self._record(key, trial))
        return found

    def folders_done(self) -> set[str]:
        """How the folders of trials are called with which nobody will go on."""
        return {self.spec.key(record.settings) for record in self.records() if record.state in ("complete", "pruned")}

    def _record(self, key: str, trial: FrozenTrial) -> Record:
        if trial.number in self._finished:  # which is never changed (rule 2)
            return self._finished[trial.number]
        seen, state = trial.user_attrs, STATES[trial.state.name]
        record = checked(
            Record(
                key,
                state,
                seen.get("settings", self.spec.base),
                metrics=seen.get("metrics", {}),
                curve=seen.get("curve", ()),
                seconds=seen.get("seconds", 0.0),
                machine=seen.get("machine", {}),
                progress=seen.get(HEARTBEAT, {}) if state == "running" else {},
                reason=seen.get("reason", "unknown") if state in ("failed", "pruned") else None,
            )
        )
        if trial.state.is_finished():
            self._finished[trial.number] = record
        return record

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Says which study it is that holds what cannot be."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"the study {self.name} in {self.storage.place}: {error}") from None

    def _trials(self, *states: str) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        chosen = tuple(TrialState[state] for state in states) or None
        return self.optuna.get_trials(deepcopy=False, states=chosen)

    def _attempts(self) -> dict[str, Attempts]:
        found: dict[str, Attempts] = {}
        with self._named():
            for trial in self._trials():
                for name in KINDS.keys() & trial.user_attrs.keys():
                    if not isinstance(value := trial.user_attrs[name], KINDS[name]):
                        raise ValueError(f"a trial has a {name} that cannot be: {str(value)[:80]!r}")
                if "key" in trial.user_attrs:  # else another program has added it
                    found.setdefault(trial.user_attrs["key"], []).append(trial)
        return found

    def trial_id(self, number: int) -> int:
        if number not in self._trial_ids:
            self._trial_ids[number] = self._backend.get_trial_id_from_study_id_trial_number(self._id, number)
        return self._trial_ids[number]


def studies(storage: Storage) -> list[str]:
    """The names of our studies in a storage."""
    return sorted(study.study_name for study in storage.backend.get_all_studies() if "spec" in study.user_attrs)


def _reason(trial: FrozenTrial) -> str | None:
    return trial.user_attrs.get("reason") if trial.state.name == "FAIL" else None


def _counting(attempts: Attempts) -> FrozenTrial | None:
    """The trial that counts for a key (rules 5 and 6); None if all were given back."""
    counts: FrozenTrial | None = None
    for trial in attempts:
        reason = _reason(trial) or ""
        if reason in (LOST, INTERRUPTED) or reason.startswith(DUPLICATE):
            continue
        if counts is None or trial.user_attrs.get("after", -1) >= counts.number:
            counts = trial
    return counts


def _distribution(value: Any) -> BaseDistribution | None:
    """One that holds a setting's value, and that fits those of its other values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(value, bool):
        return CategoricalDistribution([False, True])
    if isinstance(value, int):
        return IntDistribution(min(0, value), max(1, value))
    if isinstance(value, float):
        return FloatDistribution(min(0.0, value), max(1.0, value))
    return None  # texts and the like: Optuna would want to know all of them beforehand


def _thinned(curve: Sequence[Mapping[str, float]], column: str) -> list[dict[str, float]]:
    """At most `CURVE` rows: those with an evaluation first, and of the others as many as fit, evenly."""
    if len(curve) <= CURVE:
        return [dict(row) for row in curve]
    evaluated = [i for i, row in enumerate(curve) if column in row]
    kept = set(_evenly(evaluated, CURVE // 2))
    kept |= set(_evenly([i for i in range(len(curve)) if i not in kept], CURVE - len(kept)))
    return [dict(curve[i]) for i in sorted(kept)]


def _evenly(items: Sequence[int], count: int) -> Iterator[int]:
    """So many of them, the last among them."""
    count = min(count, len(items))
    return (items[len(items) - 1 - i * len(items) // count] for i in range(count))
