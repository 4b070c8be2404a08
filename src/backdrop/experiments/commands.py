"""The commands that run studies and look at them, for `cli`. What they do is imported only when it is asked for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["COMMANDS"]

Task = Annotated[
    str,
    typer.Argument(help="gp, ponce, cifar10, auc, latent, or your own, which is run: FILE.py:CLASS or MODULE:CLASS."),
]
Own = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:CLASS",
        help="The study's task, where it is one of your own. It is run; that a study names it is not enough.",
        show_default=False,
    ),
]
Preset = Annotated[
    str, typer.Option(help="quick (2 CPU cores, minutes), laptop (gp and auc, a night) or paper (a GPU).")
]
Place = Annotated[
    str | None,
    typer.Option(
        metavar="URL|PATH",
        help="Where the study lives: postgresql://USER@HOST/DATABASE, or a journal file. Else in its folder.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Option(help="Where studies have their folders.")]
Name = Annotated[str | None, typer.Option(help="Of the study. Else that of its task and preset.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting; KEY=A,B for a grid. May come several times."),
]
Seeds = Annotated[
    str | None, typer.Option(help="How many (5), or which (0,7,11). Else the preset's.", show_default=False)
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Processes that work at the same time. Else one for each GPU, or each core.",
        show_default=False,
    ),
]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Devices = Annotated[int, typer.Option(min=1, max=1024, help="Devices that share the batches of one trial.")]
Strategy = Annotated[str, typer.Option(help="As Lightning Fabric names it, such as ddp.")]
Precision = Annotated[str | None, typer.Option(help="32-true, bf16-mixed, 16-mixed or 64-true.", show_default=False)]
Skip = Annotated[
    str | None,
    typer.Option(
        help="Do not compute what masks block: off, exact, sampled or frozen (what batch statistics do). "
        "Else the preset's, and sampled for the paper's on a GPU.",
        show_default=False,
    ),
]
Log = Annotated[str, typer.Option(help="json, or tensorboard for TensorBoard files besides.")]
KeepWeights = Annotated[bool, typer.Option("--keep-weights", help="Leave trained networks in the trials' folders.")]
Graphs = Annotated[bool, typer.Option("--graphs", help="Record steps as CUDA graphs: for small networks and batches.")]
Compile = Annotated[bool, typer.Option("--compile", help="Train compiled networks: for large images on a GPU.")]
DataRoot = Annotated[
    str | None,
    typer.Option(help="Where data sets lie. Else $BACKDROP_DATA, else ~/.cache/backdrop.", show_default=False),
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Run failed trials once more.")]


def _takes(make: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the parameters of another function in place of `how`, which is what that makes of them."""

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        own, more = (inspect.signature(each, eval_str=True).parameters for each in (command, make))

        @functools.wraps(command)
        def call(**values: Any) -> Any:
            with _resumable():
                how = make(**{name: values.pop(name) for name in more})
                return command(**values, how=how)

        every = {name: each for name, each in {**own, **more}.items() if name != "how"}
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in every.values()]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {name: each.annotation for name, each in every.items()}
        return call

    return changed


def _training(
    workers: Workers = None,
    folder: Folder = Path("runs"),
    storage: Place = None,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    strategy: Strategy = "auto",
    log: Log = "json",
    graphs: Graphs = False,
    compile_: Compile = False,
    keep_weights: KeepWeights = False,
    data_root: DataRoot = None,
) -> Any:
    from backdrop.experiments.runs import How
    from backdrop.experiments.train import Options

    if log not in ("json", "tensorboard"):
        raise ValueError(f"log has to be json or tensorboard, but got {log!r}")
    options = Options(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        log=log,  # type: ignore[arg-type]  # checked above
        graphs=graphs,
        compile=compile_,
        keep_weights=keep_weights,
        data_root=data_root,
    )
    return How(options, folder.expanduser(), storage, workers)


@_takes(_training)
def _beginning(
    set_: Set = None,
    name: Name = None,
    precision: Precision = None,
    skip: Skip = None,
    retry_failed: RetryFailed = False,
    *,
    how: Any,
) -> Any:
    named = {"precision": precision, "skip": skip}  # settings that have an option of their own
    given = (*(set_ or ()), *(f"{setting}={value}" for setting, value in named.items() if value is not None))
    return replace(how, name=name, given=given, retry=retry_failed)


@_takes(_beginning)
def run(
    task: Task,
    preset: Preset = "quick",
    seeds: Seeds = None,
    report: Annotated[bool, typer.Option(help="Write a page about the trials at the end.")] = True,
    *,
    how: Any,
) -> None:
    """Run an experiment, or what is missing of it: the same command goes on with what was stopped.

    It says first how long that takes, and ends with a page about what came of it.
    """
    from backdrop.experiments import runs

    raise typer.Exit(1 if runs.run(task, preset, seeds, replace(how, report=report)) else 0)


@_takes(_beginning)
def tune(
    task: Task,
    preset: Preset = "quick",
    trials: Annotated[int, typer.Option(min=1, help="How many, in all.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of all trials, and of the search.")] = 0,
    *,
    how: Any,
) -> None:
    """Search for mask probabilities, learning rate and weight decay, judged on validation data."""
    from backdrop.experiments import runs

    raise typer.Exit(1 if runs.tune(task, preset, trials, seed, how) else 0)


@_takes(_training)
def worker(
    study: Annotated[str, typer.Argument(help="The name of the study.", show_default=False)],
    wait: Annotated[bool, typer.Option(help="Wait for other workers, to take over from those that die.")] = True,
    task: Own = None,
    *,
    how: Any,
) -> None:
    """Join a study, also from another machine, and work on it until nothing is left to do.

    A study of a task of your own needs --task: a file is not run because a study names it.
    """
    from backdrop.experiments import runs

    runs.join(replace(how, name=study), task=task, wait=wait)


def status(
    study: Annotated[str | None, typer.Argument(help="Its trials; else all studies.", show_default=False)] = None,
    storage: Place = None,
    folder: Folder = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how far studies are. Nothing of a study is run."""
    with contextlib.suppress(KeyboardInterrupt):
        from backdrop.experiments import runs

        while True:
            runs.show(study, storage, folder.expanduser(), as_json=as_json, clear=watch)
            if not watch:
                return
            time.sleep(2)


def repair(
    study: Annotated[
        str, typer.Argument(help="The name of the study, its folder, or a journal file.", show_default=False)
    ],
    folder: Folder = Path("runs"),
) -> None:
    """Rebuild a journal of which lines cannot be read, from what is there.

    Where the beginning of a trial may be among these, all after it is left out. The command that began the study runs
    what is missing then, and trains no trial again that has a result.json. The old journal is kept beside the new one.
    Stop all workers first. Nothing of the study is run.
    """
    from backdrop.experiments import runs

    runs.mend(study, folder.expanduser())


def report(
    study: Annotated[
        str, typer.Argument(help="The name of the study, its folder, or a JSON file.", show_default=False)
    ],
    storage: Place = None,
    folder: Folder = Path("runs"),
    format_: Annotated[str, typer.Option("--format", help="html, md, csv, png or json.")] = "html",
    out: Annotated[
        Path | None, typer.Option(help="A file or a folder. Else the study's folder.", show_default=False)
    ] = None,
    task: Own = None,
    claims: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="A function that says what others claim of such a study, and whether it holds; it is run. The paper's "
            "are results/claims.py:table.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn a study into a page, a text, tables or pictures.

    Nothing of the study is run: its records are all that is needed. With --task the report also knows the presets of a
    task of your own.
    """
    from backdrop.experiments.report.write import write_report
    from backdrop.experiments.study.lookup import open_study
    from backdrop.experiments.study.plan import again
    from backdrop.experiments.tasks import find_claims

    judge = None if claims is None else find_claims(claims)
    folder = folder.expanduser()
    with open_study(study, storage, folder) as found:
        home = folder / study if storage is not None or (folder / study).is_dir() else Path(study)
        home = home.parent if home.is_file() else home
        kind, records = found.spec.shown_task(task), found.records()
        files = write_report(
            kind,
            found.name,
            records,
            out or home,
            format=format_,  # type: ignore[arg-type]  # checked there
            command=again(found.name, found.spec, records, kind),
            spec=found.spec,
            claims=judge,
        )
    for path in files:
        print(path)


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Ctrl-C is nothing unusual."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


COMMANDS = (run, tune, worker, status, repair, report)
