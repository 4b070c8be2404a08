"""What the commands do: begin a study or go on with it, work on it, and show what came of it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from backdrop.experiments import cost, live
from backdrop.experiments.records import Record, counts
from backdrop.experiments.report import wording
from backdrop.experiments.study import lookup, remains
from backdrop.experiments.study import tune as search
from backdrop.experiments.study.interrupts import Interrupts
from backdrop.experiments.study.plan import (
    Readable,
    Spec,
    again,
    check_name,
    check_trials,
    plan,
    threads_for,
    workers_for,
)
from backdrop.experiments.study.storage import JOURNAL, Storage, open_storage
from backdrop.experiments.study.study import Study, studies
from backdrop.experiments.study.worker import advice_if_full, work
from backdrop.experiments.task import Task
from backdrop.experiments.tasks import reference
from backdrop.experiments.train import Options, check_device

__all__ = ["How", "join", "mend", "run", "show", "tune"]


@dataclass(frozen=True)
class How:
    """Where a study is to be, and how to work on it."""

    options: Options  # how to run trials
    folder: Path  # that has the folders of studies
    storage: str | None = None  # an address or a path; by default a journal file in the study's folder
    workers: int | None = None  # processes that work at the same time; by default what suits this machine
    name: str | None = None  # of the study; by default that of its task and preset
    given: Sequence[str] = ()  # settings, as `plan` takes them
    retry: bool = False  # run failed trials once more
    report: bool = False  # write a page at the end

    def workers_for(self, trials: int) -> int:
        return self.workers or workers_for(self.options.accelerator, self.options.devices, trials)


def run(task: str, preset: str, seeds: str | None, how: How) -> bool:
    """Runs the points of a grid that are missing, as `plan` has them, and says first how long that takes; whether any
    failed.
    """
    check_device(how.options)

    def begun(storage: Storage) -> Study:
        stored = Study(storage, name).spec if name in studies(storage) else None
        more = _skip(how.given, stored, spec, how.options)
        full, settings = plan(task, preset, [*how.given, *more], seeds=seeds)
        full = replace(full, threads=threads_for(workers))
        study = Study.begin(storage, name, full)
        study.add(full, settings)
        return study

    spec, points = plan(task, preset, how.given, seeds=seeds)
    name, workers = check_name(how.name or spec.name), how.workers_for(len(points))
    return _run(how, name, spec.task, workers, begun)


def tune(task: str, preset: str, trials: int, seed: int, how: How) -> bool:
    """Runs the trials of a search that are missing; whether any failed."""
    check_device(how.options)
    check_trials(trials)
    workers = how.workers_for(trials)
    spec = replace(search.plan_search(task, preset, how.given, seed=seed), threads=threads_for(workers))
    name = check_name(how.name or spec.name)

    def begun(storage: Storage) -> Study:
        study = Study.begin(storage, name, spec)
        search.add_slots(study, spec, trials)
        return study

    return _run(how, name, spec.task, workers, begun, named=task)


def _run(
    how: How, name: str, task: str, workers: int, begun: Callable[[Storage], Study], *, named: str | None = None
) -> bool:
    """Begins a study or goes on with it, works on it, and shows what came of it; whether a trial failed.

    `task` is where others find its class, `named` what the user calls it.
    """
    home = how.folder / name
    with advice_if_full(), open_storage(how.storage or home / JOURNAL, create=True) as storage:
        with storage.exclusive(), Interrupts(storage.hurry):
            study = begun(storage)
            if how.retry:
                study.retry()
        if study.spec.kind == "grid":
            left = [record.settings for record in study.records() if record.state in ("waiting", "running")]
            _say_how_long(study.spec, left, how.options, workers, task)
        _work(study, home, how.options, workers, task=task)
        return _finish(study, home, storage.place if how.storage else None, task, named, report=how.report)


def join(how: How, *, task: str | None = None, wait: bool = True) -> None:
    """Works on a study that is there."""
    check_device(how.options)
    name = check_name(how.name or "")
    home = how.folder / name
    if how.storage is None and not (home / JOURNAL).exists():
        raise lookup.unknown(name, how.folder)
    with open_storage(how.storage or home / JOURNAL) as storage:
        study = Study(storage, name)
        kind = study.spec.find_task(task)  # before workers are started to find that it is wrong
        workers = how.workers_for(counts(study.records())["waiting"])
        _work(study, home, how.options, workers, task=reference(kind), wait=wait)
        _say(f"{name}: {_counted(study)}")


def mend(name: str, folder: Path) -> None:
    """Rebuilds the journal of a study, and says what is in it now."""
    from backdrop.experiments.study.repair import repair

    places = [Path(name)] if Path(name).is_file() else [folder / name / JOURNAL, Path(name) / JOURNAL]
    there = [path for path in places if path.is_file()]
    if not there:
        raise lookup.unknown(name, folder)
    path = there[0]
    done = repair(path)
    if done.kept is None:
        _say(f"all lines of {path} can be read: there is nothing to repair")
        return
    numbers = ", ".join(map(str, done.lost[:20])) + (", ..." if len(done.lost) > 20 else "")
    lines = wording.count(len(done.lost), "line")
    gone = f"; from line {done.since} on nothing was kept" if done.since else ""
    _say(f"{lines} of {path} could not be read: {numbers}{gone}; the old file is kept as {done.kept}")
    with open_storage(path) as storage:
        for study in studies(storage):
            counted = _counted(Study(storage, study)) or "no trials"
            _say(
                f"{study}: {counted}; the command that began the study runs what is missing, and trains no trial again "
                "that has a result.json in its folder"
            )


def show(name: str | None, storage: str | None, folder: Path, *, as_json: bool = False, clear: bool = False) -> None:
    """Prints how far studies are, or one study with its trials."""
    problems: list[Exception] = []
    with contextlib.ExitStack() as stack:
        if name is None:
            found, problems = stack.enter_context(lookup.open_all(storage, folder))
        else:
            found = [stack.enter_context(lookup.open_study(name, storage, folder))]
        known = []
        for study in found:
            with lookup.noted(problems) if name is None else contextlib.nullcontext():
                known.append((study, study.records()))
    if as_json:
        print(json.dumps([_as_json(study, records, name is not None) for study, records in known], indent=1))
        _raise(problems)
        return
    console = Console()
    if clear:
        console.clear()
    for study, records in known:
        console.print(live.progress(study, records))
        if name is not None:
            console.print(live.trials_table(study, records))
    if not known and not problems:
        _say(f"there are no studies in {'this storage' if storage else folder}")
    _raise(problems)


def _raise(problems: Sequence[Exception]) -> None:
    """What could not be shown, after what could."""
    if problems:
        raise ValueError("\n".join(map(str, problems)))


def _as_json(study: Readable, records: Sequence[Record], trials: bool) -> dict[str, Any]:
    spec = study.spec
    found = {"name": study.name, "task": spec.task_name, "preset": spec.preset, "kind": spec.kind}
    return {**found, **counts(records), **({"trials": [asdict(record) for record in records]} if trials else {})}


def _skip(given: Sequence[str], stored: Spec | None, spec: Spec, options: Options) -> list[str]:
    """The setting `skip` where nobody gave it: as in the study that is there; else on for the paper's on a GPU."""
    import torch

    if "skip" not in spec.base or any(text.startswith("skip=") for text in given):
        return []
    if stored is not None:
        return [f"skip={stored.base['skip']}"] if "skip" in stored.base else []
    on_gpu = options.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
    return ["skip=sampled"] if spec.preset == "paper" and on_gpu and spec.base["skip"] == "off" else []


def _work(study: Study, home: Path, options: Options, workers: int, *, task: str, wait: bool = True) -> None:
    """Works on a study, here or with several processes, and shows it."""
    remains.sweep(home, study.folders_done())
    if not study.is_unfinished():
        return
    with live.Display(study, Console(stderr=True)) as display, _hurried_out(study):
        if workers == 1:
            work(study, home, options, task=task, wait=wait, on_progress=display.on_progress)
            return
        from backdrop.experiments.study.workers import Workers

        orders: Mapping[str, Any] = {"task": task, "wait": wait, "count": workers, "say": display.say}
        with Workers(study.storage.given, study.name, home, options, **orders) as processes:
            ended = processes.wait()
        if any(ended):  # they have waited for a storage that is away as long as it makes sense
            study.storage.hurry()
    remains.sweep(home, study.folders_done())
    if any(ended) and study.is_unfinished():
        killed = [f"worker {i} was ended by signal {-code}" for i, code in enumerate(ended) if code < 0]
        raise RuntimeError(f"{'; '.join([*killed, _counted(study)])}; run the same command again to go on")


@contextlib.contextmanager
def _hurried_out(study: Study) -> Iterator[None]:
    """Whatever ends the work, what shows it does not wait for a storage that is away."""
    try:
        yield
    except BaseException:
        study.storage.hurry()
        raise


def _say_how_long(spec: Spec, points: Sequence[Mapping[str, Any]], options: Options, workers: int, task: str) -> None:
    """How many trials are missing, and how long they take: by a few steps of each kind, measured now."""
    if not points:
        return
    missing, machine = wording.count(len(points), "trial"), f"with {wording.count(workers, 'worker')} on this machine"
    try:
        kind, threads = spec.find_task(task), replace(options, threads=spec.threads)
        seconds = cost.seconds(kind, points, threads) / workers
    except Exception as error:  # whatever it is, the trials that meet it say so
        _say(f"{missing} to run; how long that takes could not be measured: {type(error).__name__}: {error}")
        return
    _say(f"{missing} to run: about {wording.duration(seconds)} {machine}, if nothing else runs on it")


def _counted(study: Readable) -> str:
    return ", ".join(f"{number} {state}" for state, number in counts(study.records()).items() if number)


def _finish(
    study: Readable, home: Path, storage: str | None, task: str, named: str | None = None, *, report: bool = False
) -> bool:
    """Shows what came of a study, and writes a page about it; whether a trial failed."""
    kind, records, console = study.spec.find_task(task), study.records(), Console()
    for part in live.outcome(kind, study.spec, records):
        console.print(part)
    words = ["backdrop", "report", study.name, *(["--storage", storage] if storage else [])]
    if home.parent != Path("runs"):
        words += ["--folder", str(home.parent)]
    page = _page(kind, study, records, home) if report and any(record.metrics for record in records) else None
    _say(f"trials are in {home}; a page about them: {page or shlex.join(words)}")
    has_failed = any(record.state == "failed" for record in records)
    if has_failed:
        _say("failed trials are run again with --retry-failed")
    if study.spec.kind == "tune" and (best := search.best(study.spec, records, count=1)):
        command = search.run_command(study.name, study.spec, best[0], task=named)
        _say(f"the best settings, and the same without masks, on the test set: {command}")
    return has_failed


def _page(kind: type[Task], study: Readable, records: Sequence[Record], home: Path) -> Path | None:
    """The report of a study, beside its trials; None where it cannot be made, which the trials do not suffer from."""
    from backdrop.experiments.report.write import write_report

    try:
        command = again(study.name, study.spec, records, kind)
        return write_report(kind, study.name, records, home, format="html", command=command, spec=study.spec)[0]
    except Exception as error:
        _say(f"the report could not be written: {error}")
        return None


def _say(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)
