"""A study as it runs, and what came of it, for a terminal; where there is no terminal, a line for what happens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backdrop.experiments.records import Record, counts
from backdrop.experiments.report import wording
from backdrop.experiments.report.statistics import Results
from backdrop.experiments.study.plan import Readable, Spec
from backdrop.experiments.task import Task

if TYPE_CHECKING:
    from backdrop.experiments.report import tables

__all__ = ["Display", "outcome", "progress", "trials_table"]

POLL = 1.0  # seconds between two looks at the study
MOST = 12  # running trials that are shown
DONE = ("complete", "pruned", "failed")
COLOURS = {"complete": "green", "pruned": "yellow", "failed": "red", "running": "cyan", "waiting": ""}


def _summary(records: Sequence[Record]) -> str:
    parts = [f"{number} {state}" for state, number in counts(records).items() if number and state != "complete"]
    done = sum(record.state in DONE for record in records)
    return ", ".join([f"{done} of {wording.count(len(records), 'trial')} done", *parts])


def _name(record: Record, spec: Spec) -> str:
    varied = [name for name in spec.varied if name != "seed"]
    masks = list(spec.units) or [name for name in varied if name == "p" or name.startswith("p_")]
    name = wording.label(record.settings, varied, masks)
    return f"{name}, seed {record.settings['seed']}" if spec.kind == "grid" else f"{record.key}: {name}"


def progress(study: Readable, records: Sequence[Record]) -> RenderableType:
    """A bar, and a line for each trial that runs."""
    spec = study.spec
    done = sum(record.state in DONE for record in records)
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(study.name, "bold"), ProgressBar(max(1, len(records)), done, width=30), Text(_summary(records)))
    running = [record for record in records if record.state == "running"]
    lines = Table.grid(padding=(0, 2))
    for record in running[:MOST]:
        lines.add_row(Text("  "), Text(_name(record, spec), "cyan"), *map(Text, _cells(record.progress, spec)))
    more = [Text(f"  and {len(running) - MOST} more")] if len(running) > MOST else []
    return Group(head, *([lines] if running else []), *more)


def _cells(row: Mapping[str, Any], spec: Spec) -> list[str]:
    """Epoch, loss, metric and time left, as far as they are known."""
    found = [f"epoch {row['epoch']}/{row['epochs']}" if "epochs" in row else "begins"]
    found.append(f"loss {row['loss']:.4g}" if "loss" in row else "")
    metric = f"{wording.metric_name(spec.metric)} {row[spec.column]:.4g}" if spec.column in row else ""
    return [*found, metric, f"{wording.duration(row['left'])} left" if "left" in row else ""]


class Display:
    """Shows a study while others work on it, or this process does: it has a thread of its own."""

    def __init__(self, study: Readable, console: Console) -> None:
        self.study, self.console = study, console
        self.states: dict[str, str] = {}
        self.own: dict[str, Mapping[str, Any]] = {}  # what this process knows before the storage does
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        self.states = {record.key: record.state for record in self.study.records()}
        if self.live:
            self.live.start()
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        if self.live:
            self.live.stop()
        if kind is None:
            self._look()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def on_progress(self, key: str, row: Mapping[str, Any] | None) -> None:
        """Takes note of what a worker in this process says."""
        if row is None:
            self.own.pop(key, None)
        else:
            self.own[key] = row

    def _watch(self) -> None:
        while not self.stop.wait(POLL):
            # A storage that is away for a moment: what needs it says so, this only looks.
            with contextlib.suppress(Exception):
                self._look()

    def _look(self) -> None:
        records = self.study.records()
        if self.live and not self.stop.is_set():
            self.live.update(progress(self.study, list(self._with_own(records))), refresh=True)
        for record in records:
            before = self.states.get(record.key, "waiting")
            self.states[record.key] = record.state
            if before == record.state or record.state == "waiting" or (self.live and record.state == "running"):
                continue
            self._tell(record, records)

    def _with_own(self, records: Sequence[Record]) -> Iterator[Record]:
        for record in records:
            row = self.own.get(self.study.spec.key(record.settings)) if record.state == "running" else None
            yield record if row is None else replace(record, progress=row)

    def _tell(self, record: Record, records: Sequence[Record]) -> None:
        spec = self.study.spec
        text = Text(f"{record.state}: ", COLOURS[record.state]).append(_name(record, spec), "default")
        if spec.metric in record.metrics:
            text.append(f", {wording.metric_name(spec.metric)} {record.metrics[spec.metric]:.4g}", "default")
        if record.reason:
            text.append(f": {record.reason}", "default")
        if record.state != "running":
            text.append(f" ({_summary(records)})", "dim")
        self.console.print(text, soft_wrap=True)


def trials_table(study: Readable, records: Sequence[Record]) -> Table:
    """A row per trial."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("trial", "state", wording.metric_name(study.spec.metric), "progress"):
        table.add_column(heading, overflow="fold")
    for record in records:
        value = record.metrics.get(study.spec.metric)
        rest = record.reason or ", ".join(filter(None, _cells(record.progress, study.spec) if record.progress else []))
        state = Text(record.state, COLOURS[record.state])
        table.add_row(Text(_name(record, study.spec)), state, "" if value is None else f"{value:.4g}", Text(rest))
    return table


def outcome(task: type[Task], spec: Spec, records: Sequence[Record]) -> Iterator[RenderableType]:
    """What came of a study, in a table and a sentence, and what failed."""
    from backdrop.experiments.report import headline, tables

    results = Results(task, records)
    if any(record.metrics for record in records):
        yield _table(tables.search(results) if spec.kind == "tune" else tables.configurations(results, brief=True))
        yield Text(headline.sentence(results), "bold")
    if failed := tables.failures(results):
        yield _table(failed)


def _table(content: tables.Table) -> RenderableType:
    shown = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(content.headings):
        shown.add_column(heading, justify="left" if i < content.words else "right", overflow="fold")
    for row in content.rows:
        shown.add_row(*(Text("\n".join(filter(None, cell[:2])), "bold" if cell.best else "") for cell in row))
    return Group(shown, Text(content.note, "dim")) if content.note else shown
