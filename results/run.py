"""Runs the trials that the results are made of, most on a GPU: `python results/run.py TASK STAGE [--seconds N]`.

The stages of a task, in `textures.py` and `photographs.py`, come one after the other, and each takes what those before
it found best on validation data. Trials that are in `results/TASK` are not run again; when the time is up, those that
are done are kept, and the same command goes on. Where a search went on and found better settings, trials of the old
ones move to `earlier.json`. `python results/make.py` then makes the tables and the page.
"""

import argparse
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import photographs
import search
from rich.console import Console
from search import Settings, Stage

import textures
from backdrop.experiments import live
from backdrop.experiments.records import Record
from backdrop.experiments.study.archive import Archive, pack
from backdrop.experiments.study.plan import Spec, all_settings, describe, threads_for
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.study.workers import Workers
from backdrop.experiments.task import trial_key
from backdrop.experiments.tasks import TASKS
from backdrop.experiments.train import Options

STAGES: dict[str, dict[str, Callable[[], Stage]]] = {"gp": textures.STAGES, **photographs.STAGES}
EARLIER = "earlier"  # the file of what was judged by test images before the search went on


def settings_of(task: str, stage: Stage) -> dict[str, Settings]:
    """All settings of all trials by their key, seed by seed."""
    kind = TASKS[task]
    base = {**kind.presets["paper"].base, "precision": "bf16-mixed"}
    found = [all_settings(kind, {**base, **point, "seed": seed}) for seed in stage.seeds for point in stage.points]
    return {trial_key(task, settings): settings for settings in found}


def kept(task: str, stage: Stage) -> tuple[list[Record], list[Record]]:
    """The trials that are there, and those of them that were judged by test images and are not asked for any more."""
    path, kind = search.ROOT / task / f"{stage.file}.json", TASKS[task]
    records = Archive(path).records() if path.exists() else []
    if all(point.get("judge") == "validation" for point in stage.points):
        return records, []  # all that was tried counts
    wanted, found = settings_of(task, stage), ([], [])
    for record in records:
        found[trial_key(task, all_settings(kind, record.settings)) not in wanted].append(record)
    return found


def write(task: str, file: str, records: Sequence[Record], folder: Path) -> None:
    path = folder / task / f"{file}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{task}-{'paper' if file == 'trials' else file}"
    path.write_bytes(pack(name, specification(task, [record.settings for record in records]), records))
    print(f"{path} has {len(records)} trials now")


def specification(task: str, points: Sequence[Settings]) -> Spec:
    kind = TASKS[task]
    varied = {name for point in points for name, value in point.items() if value != points[0][name]}
    return describe(kind, "paper", points[0], varied | {*kind.masks, "seed"})


def train(study: Study, home: Path, options: Options, workers: int, seconds: int) -> None:
    """Works on a study until it is done or the time is up."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    with (
        contextlib.suppress(TimeoutError),
        live.Display(study, Console(stderr=True)) as display,
        Workers(study.storage.given, study.name, home, options, count=workers, say=display.say) as processes,
    ):
        processes.wait()
    signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STAGES)
    parser.add_argument("stage", help="; ".join(f"{task}: {', '.join(names)}" for task, names in STAGES.items()))
    parser.add_argument("--seconds", type=int, default=0, help="stop after so many; 0 for never")
    parser.add_argument("--workers", type=int, default=8, help="trials at the same time")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for the study, while it runs")
    parser.add_argument(
        "--to", type=Path, default=search.ROOT, help="where TASK/FILE.json is written, with what was there"
    )
    parser.add_argument("--graphs", action="store_true", help="as of `backdrop run`")
    parser.add_argument("--compile", action="store_true", help="as of `backdrop run`")
    parser.add_argument("--dry", action="store_true", help="only tell what is missing")
    args = parser.parse_args()
    if args.stage not in STAGES[args.task]:
        parser.error(f"the stages of {args.task} are {', '.join(STAGES[args.task])}, but got {args.stage!r}")

    task, stage = args.task, STAGES[args.task][args.stage]()
    before, replaced = kept(task, stage)
    done = {trial_key(task, all_settings(TASKS[task], record.settings)) for record in before}
    wanted = settings_of(task, stage)
    points = [point for key, point in wanted.items() if key not in done]
    print(f"{task} {args.stage}: {len(points)} trials are missing")
    if args.dry or not points:
        return
    spec = replace(specification(task, [*wanted.values()]), threads=threads_for(args.workers))
    name = f"{task}-{args.stage}-{trial_key(task, wanted)[:6]}"  # another stage, another study
    with open_storage(args.folder / name, create=True) as storage:
        study = Study.begin(storage, name, spec)
        study.add(spec, points)
        train(study, args.folder / name, Options(graphs=args.graphs, compile=args.compile), args.workers, args.seconds)
        records = study.records()
    for record in records:
        if record.state == "failed":
            print(f"failed: {record.settings}: {record.reason}")
    records = [*before, *(record for record in records if record.state == "complete" and record.key not in done)]
    if not records:
        return
    if replaced:
        path = search.ROOT / task / f"{EARLIER}.json"
        write(task, EARLIER, [*(Archive(path).records() if path.exists() else []), *replaced], args.to)
    write(task, stage.file, records, args.to)


if __name__ == "__main__":
    main()
