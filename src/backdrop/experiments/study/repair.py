"""Rebuilding a journal of which lines are damaged or missing: `backdrop repair STUDY`.

A lost line may have begun a trial, and then all later trials have other numbers than the lines about them say. So what
came of a trial is believed where no beginning of a trial can be missing before its own, or where a `result.json` or the
study's log says the same. All other trials wait to be run again. The old journal is kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backdrop._core.files import held
from backdrop.experiments import checkpoint
from backdrop.experiments.study import alive
from backdrop.experiments.study.journal import NONE, Journal, lines, links, read_line
from backdrop.experiments.study.plan import Spec
from backdrop.experiments.study.storage import Storage, quieten
from backdrop.experiments.study.study import Study

__all__ = ["Repaired", "Saved", "repair"]

OUTCOME = ("metrics", "curve", "seconds", "machine")  # what a complete trial has
GIVEN_BACK = re.compile(r"lost$|interrupted$|duplicate of ")
FLIPPED = 8  # bytes that are no text, in a line that is still believed to be one
BEGINNINGS = (0, 4)  # of a study, and of a trial
ENDED = COMPLETE, PRUNED, FAIL = 1, 2, 3  # Optuna's numbers
RANKS: dict[str, int] = {"WAITING": 0, "FAIL": 1, "PRUNED": 2, "COMPLETE": 3}

Change = Mapping[str, Any]


@dataclass
class Saved:
    """What of a study is in the new journal: how many trials."""

    states: dict[str, int]
    from_results: int = 0  # complete ones that come from a `result.json`
    again: int = 0  # had a result that could not be saved, so that they are run again


@dataclass
class Repaired:
    """What became of a journal."""

    journal: Path
    lost: list[int]  # the numbers of the lines that could not be read, or before which some are missing
    kept: Path | None = None  # the old file, if there was something to repair
    studies: dict[str, Saved] = field(default_factory=dict)  # what is in the new one


@dataclass
class _Trial:
    """What the lines say of a trial; `key` is known where the line that began it is."""

    key: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    state: int | None = None
    params: dict[str, tuple[str, float]] = field(default_factory=dict)  # distribution and Optuna's own value
    steps: dict[int, float] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        if self.state in ENDED:  # nothing is changed any more
            return
        code = change["op_code"]
        if code == 5:
            self.params[change["param_name"]] = (change["distribution"], change["param_value_internal"])
        elif code == 6:
            self.state = change["state"]
        elif code == 7:
            self.steps[change["step"]] = change["intermediate_value"]
        elif code == 8:
            self.attributes |= change["user_attr"]


@dataclass
class _Study:
    name: str
    is_deleted: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    points: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # settings by key, in order
    trials: list[_Trial] = field(default_factory=list)


@dataclass
class _Found:
    """A trial as it is written into the new journal."""

    settings: dict[str, Any] | None
    state: Literal["WAITING", "COMPLETE", "PRUNED", "FAIL"] = "WAITING"
    outcome: dict[str, Any] = field(default_factory=dict)
    trial: _Trial = field(default_factory=_Trial)


def repair(path: Path, homes: Sequence[Path] = ()) -> Repaired:
    """Puts a new journal in the place of one that is damaged; one that is not stays as it is.

    Trials may have their folders in the journal's own, or in those of their studies in `homes`.
    """
    with held(path.with_name(f".{path.name}.lock"), alive.GRACE):
        changes, lost = _changes(path.read_bytes())
        if not lost:
            return Repaired(path, [])
        saved: dict[str, Saved] = {}
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            studies = _replayed(changes, lost)
            _check_stopped(path, studies)
            fresh.unlink(missing_ok=True)
            for study in studies:
                spec = Spec.from_json(study.attributes["spec"])
                folders = dict.fromkeys((path.parent, *(home / study.name for home in homes)))
                found, saved[study.name] = _found(study, spec, list(folders))
                _write(fresh, study, spec, found)
            kept = _keep(path)
            fresh.replace(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be repaired: {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # lines of another program
            raise ValueError(f"{path} cannot be repaired: it holds what no study of ours does ({error!r})") from None
        finally:
            fresh.unlink(missing_ok=True)
    return Repaired(path, lost, kept, saved)


def _keep(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        os.link(path, kept)
    except OSError:  # a file system without links
        shutil.copy2(path, kept)
    return kept


def _changes(content: bytes) -> tuple[list[Change | None], list[int]]:
    """All changes in order, None where the beginning of a trial may be missing; and the numbers of bad lines."""
    changes: list[Change | None] = []
    lost: list[int] = []
    before, bad = NONE, []
    for number, line in enumerate(lines(content), 1):
        try:
            change = read_line(line)
        except ValueError:
            lost.append(number)
            bad.append(line)
            continue
        after, checksum = links(line)
        if not bad and after not in (None, before):
            lost.append(number)
            changes.append(None)
        elif bad and not _is_harmless(bad, before, after):
            changes.append(None)
        changes.append(change)
        before, bad = checksum, []
    return changes, lost


def _is_harmless(bad: Sequence[bytes], before: bytes, after: bytes | None) -> bool:
    """Whether no trial can have begun in bad lines, by them and the checksums of the lines around them."""
    if after == before != NONE:
        return True  # nothing is missing between those
    if len(bad) > 1:
        return False
    (line,) = bad
    codes = re.findall(rb'"op_code":(\d+)', line)
    if len(codes) != 1 or not line.startswith(b'{"op_code":') or int(codes[0]) in BEGINNINGS:
        return False
    if after is not None and after != NONE:
        return links(line) == (before, after)
    return sum(not 32 <= byte < 127 for byte in line[:-1]) <= FLIPPED and line.endswith(b"}\n")


def _replayed(changes: Sequence[Change | None], lost: Sequence[int]) -> list[_Study]:
    """The studies, with their trials in order."""
    studies: list[_Study] = []
    trials: dict[int, _Trial] = {}
    owners: dict[int, _Study] = {}
    unclear = False
    single = sum(change is not None and change["op_code"] == 0 for change in changes) == 1
    for change in changes:
        if change is None:
            unclear = True
            continue
        code = change["op_code"]
        if code == 0:
            if unclear and not single:
                raise _beyond(lost, "which of several studies it is about")
            if change["study_name"] not in [study.name for study in studies]:
                studies.append(_Study(change["study_name"]))
        elif code in (1, 2, 4):
            number = 0 if single else change["study_id"]
            if not 0 <= number < len(studies):
                raise _beyond(lost, "the name of its study")
            study = studies[number]
            if code == 1:
                study.is_deleted = True
            elif code == 2:
                study.attributes |= change["user_attr"]
            else:
                trial = _begun(change)
                if trial.key is not None:
                    study.points.setdefault(trial.key, trial.attributes.get("settings"))
                if not unclear:
                    owners[len(owners)] = study
                    trials[len(owners) - 1] = trial
                elif trial.state in ENDED:  # all is said in one line, whatever its number
                    study.trials.append(trial)
        elif code in (5, 6, 7, 8):
            trials.setdefault(change["trial_id"], _Trial()).apply(change)
    for number in sorted(trials):
        owner = owners.get(number) or (studies[0] if single else None)
        if owner is not None:
            owner.trials.append(trials[number])
    studies = [study for study in studies if not study.is_deleted]
    if not studies or any(not isinstance(study.attributes.get("spec"), dict) for study in studies):
        raise _beyond(lost, "what its study is about")
    return studies


def _begun(change: Change) -> _Trial:
    attributes = dict(change.get("user_attrs") or {})
    distributions, params = change.get("distributions") or {}, change.get("params") or {}
    return _Trial(
        key=attributes.get("key"),
        attributes=attributes,
        state=change.get("state"),
        params={name: (distributions[name], value) for name, value in params.items() if name in distributions},
        steps={int(step): value for step, value in (change.get("intermediate_values") or {}).items()},
    )


def _beyond(lost: Sequence[int], what: str) -> ValueError:
    return ValueError(
        f"{what} stood in line {', '.join(map(str, lost))}, which cannot be read; move the "
        "file away and give the command again with which the study was begun: trials that have a result.json in their "
        "folder are not trained again"
    )


def _check_stopped(path: Path, studies: Sequence[_Study]) -> None:
    for study in studies:
        for trial in study.trials:
            worker = trial.attributes.get("worker")
            if not isinstance(worker, dict) or type(worker.get("pid")) is not int:
                continue
            if trial.state == 0 and alive.is_dead(worker) is False:
                raise RuntimeError(f"process {worker['pid']} works on {study.name} in {path}: stop it first")


def _found(study: _Study, spec: Spec, folders: Sequence[Path]) -> tuple[dict[str, _Found], Saved]:
    """What there is for each key, and what of it is saved."""
    found = {key: _Found(settings) for key, settings in study.points.items()}
    results = {_mark(result): result for result in _results(folders, spec)}
    said = {**_logged(folders), **{mark: result["settings"] for mark, result in results.items()}}
    unknown, partly = 0, list[str | None]()
    for trial in study.trials:
        state, outcome = _came_of(trial, spec)
        if state == "WAITING":
            if trial.state == COMPLETE:
                partly.append(trial.key)
            if trial.key in found and "settings" in trial.attributes:  # which a search has chosen
                found[trial.key].settings, found[trial.key].trial = trial.attributes["settings"], trial
            continue
        key = trial.key
        settings = trial.attributes.get("settings") or said.get(_mark(outcome))
        if key is None and settings is not None:
            key = spec.key(settings) if spec.kind == "grid" else _free(found)
        if key is None or settings is None:
            unknown += state == "COMPLETE"
        elif key not in found or RANKS[state] > RANKS[found[key].state]:
            found[key] = _Found(settings, state, outcome, trial)
    from_results = 0
    chosen = {json.dumps(each.settings, sort_keys=True): key for key, each in found.items()}
    for result in results.values():
        key = chosen.get(json.dumps(result["settings"], sort_keys=True))
        if key is None and spec.kind == "grid":
            key = result["key"]
        if key is not None and (key not in found or found[key].state != "COMPLETE"):
            trial = found[key].trial if key in found else _Trial()
            outcome = {name: result[name] for name in OUTCOME}
            found[key] = _Found(result["settings"], "COMPLETE", outcome, trial)
            from_results += 1
    if spec.kind == "grid":
        found = {key: each for key, each in found.items() if each.settings is not None}
    unknown += sum(key is None or key not in found or found[key].state != "COMPLETE" for key in partly)
    states = [each.state for each in found.values()]
    return found, Saved({name: states.count(name) for name in RANKS if name in states}, from_results, unknown)


def _came_of(trial: _Trial, spec: Spec) -> tuple[Literal["WAITING", "COMPLETE", "PRUNED", "FAIL"], dict[str, Any]]:
    """How a trial ended, if all is there that says what came of it."""
    seen = trial.attributes
    metrics, reason = seen.get("metrics"), str(seen.get("reason"))
    value = metrics.get(spec.metric) if isinstance(metrics, dict) else None
    measured = isinstance(value, (int, float)) and math.isfinite(value)
    if trial.state in (None, 0, 4, COMPLETE) and measured and all(name in seen for name in OUTCOME):
        return "COMPLETE", {name: seen[name] for name in OUTCOME}
    if trial.state == PRUNED and measured and all(name in seen for name in ("curve", "seconds", "reason")):
        return "PRUNED", {name: seen[name] for name in (*OUTCOME, "reason") if name in seen}
    if trial.state == FAIL and "reason" in seen and not GIVEN_BACK.match(reason):
        return "FAIL", {name: seen[name] for name in ("reason", "curve") if name in seen}
    return "WAITING", {}


def _mark(outcome: Mapping[str, Any]) -> str:
    """What no two trials have in common: what was measured, and how long it took to the last digit."""
    return json.dumps([outcome.get("metrics"), outcome.get("seconds")], sort_keys=True)


def _results(folders: Sequence[Path], spec: Spec) -> Iterator[dict[str, Any]]:
    """The results of trials of this study."""
    for folder in folders:
        for path in sorted(folder.glob("*/result.json")):
            try:
                result = checkpoint.read_result(path)
            except checkpoint.Unusable:
                continue
            if result is not None and result["task"] == spec.task_name and _belongs(result["settings"], spec):
                yield result


def _belongs(settings: Mapping[str, Any], spec: Spec) -> bool:
    shared = {name: value for name, value in spec.base.items() if name not in spec.varied}
    return all(name in settings and settings[name] == value for name, value in shared.items())


def _logged(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The settings of finished trials, by what the logs say came of them."""
    settings: dict[str, dict[str, Any]] = {}
    found = {}
    for folder in folders:
        path = folder / "log.jsonl"
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            said = _event(line)
            if said.get("event") == "started" and isinstance(said.get("settings"), dict):
                settings[str(said.get("key"))] = said["settings"]
            elif said.get("event") == "finished" and str(said.get("key")) in settings:
                found[_mark(said)] = settings[str(said["key"])]
    return found


def _event(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _free(found: Mapping[str, _Found]) -> str:
    """A slot of a search that no trial has, or for which none has a result."""
    number = 0
    while (key := f"slot-{number}") in found and found[key].state != "WAITING":
        number += 1
    return key


def _write(path: Path, study: _Study, spec: Spec, found: Mapping[str, _Found]) -> None:
    """Adds a study to a journal."""
    from optuna.distributions import json_to_distribution
    from optuna.storages import JournalStorage

    quieten()
    backend = JournalStorage(Journal(path))
    written = Study.begin(Storage(backend, str(path), str(path), None), study.name, spec)
    for name, value in study.attributes.items():
        if name != "spec":
            backend.set_study_user_attr(written.optuna._study_id, name, value)
    for number, (key, each) in enumerate(found.items()):
        settings = each.settings
        if spec.kind == "grid" and settings is not None:
            written.enqueue(key, settings, {name: settings[name] for name in spec.varied if name in settings})
        else:
            kinds = {name: json_to_distribution(kind) for name, (kind, _) in each.trial.params.items()}
            params = {name: kinds[name].to_external_repr(value) for name, (_, value) in each.trial.params.items()}
            written.enqueue(key, settings, params, kinds)
        for step, value in each.trial.steps.items():
            backend.set_trial_intermediate_value(written.trial_id(number), step, value)
        if each.state != "WAITING":
            metrics = each.outcome.get("metrics", {})
            written.finish(number, each.state, metrics.get(spec.metric), **each.outcome)
