"""A study as one page: `backdrop report STUDY` writes it, from the records alone.

The page is one HTML file that needs no network and no scripts. The same content comes as Markdown with PNG pictures, as
CSV files (a row per trial, a row per configuration), or as the pictures alone; and the trials as JSON, from which the
report can be made again.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import backdrop
from backdrop._core.files import put
from backdrop.experiments.records import Record, counts
from backdrop.experiments.report import exports, headline, tables, wording
from backdrop.experiments.report.drawing import Picture
from backdrop.experiments.report.figures import curves, pictures
from backdrop.experiments.report.statistics import Results
from backdrop.experiments.report.tables import Cell, Table
from backdrop.experiments.study.archive import pack
from backdrop.experiments.study.plan import Spec
from backdrop.experiments.task import Task
from backdrop.experiments.tasks import TASKS

__all__ = ["Format", "markdown_table", "write_report"]

Format = Literal["html", "md", "csv", "png", "json"]
Claims = Callable[[Results], Table | None]
FORMATS = ("html", "md", "csv", "png", "json")
PAPER = "Siavash Golkar and Kyle Cranmer, Backdrop: Stochastic Backpropagation, 2018"
ADDRESS = "https://arxiv.org/abs/1806.01337"
INTERVALS = (
    "Intervals are percentile bootstraps of the mean over seeds (10,000 resamples). With few seeds they are too "
    "narrow: with normal noise they hold the true mean in 80 of 100 cases for 4 seeds, 85 for 5, 88 for 8, 93 for 25. "
    "The best of several configurations is chosen by the same trials that measure it, which flatters it a little."
)


def write_report(
    task: type[Task],
    study: str,
    records: Sequence[Record],
    out: Path,
    *,
    format: Format,  # noqa: A002  # the option's name
    command: str | None = None,
    spec: Spec | None = None,
    notes: Sequence[str] = (),
    claims: Claims | None = None,
) -> list[Path]:
    """Writes a report, and returns its files: those are put in place whole.

    Args:
        task: what the study is of.
        study: its name.
        records: its trials, in any state.
        out: a folder, or a file that ends in the format; where there are several files, their names begin like it.
        format: "html", "md" (with pictures beside it), "csv" (two files), "png" (a file per picture) or "json".
        command: how to run the study again.
        spec: what the study is about; for "json" alone, which cannot do without.
        notes: remarks to put at the top.
        claims: a table of what others say of such a study, and whether it says the same.
    """
    if format not in FORMATS:
        raise ValueError(f"format has to be one of {', '.join(FORMATS)}, but got {format!r}")
    folder, stem = _where(Path(out).expanduser(), format)
    results = Results(task, records)
    if format == "json":
        if spec is None:
            raise ValueError("spec has to be given for the format json, but got None")
        files = {f"{stem}.json": pack(study, spec, records)}
    elif format == "csv":
        files = {
            f"{stem}-trials.csv": exports.trials(results),
            f"{stem}-configurations.csv": exports.configurations(results),
        }
    else:
        page = _page(results, study, command, notes, claims)
        if format == "html":
            files = {f"{stem}.html": _html(page)}
        else:
            files = {f"{stem}-{picture.name}.png": picture.png() for picture in page.figures + page.curves}
            if format == "md":
                files[f"{stem}.md"] = _markdown(page, stem)
            elif not files:
                raise ValueError(f"there is nothing to draw of study {study} yet: no trial has a result")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        put(folder / name, content, "the report")
    return [folder / name for name in files]


def _where(out: Path, kind: str) -> tuple[Path, str]:
    """The folder, and what names of files begin with."""
    if out.is_dir():
        return out, "report"
    if out.suffix.lower() == f".{kind}":
        folder, stem = out.parent, out.stem
    elif out.suffix or out.exists():
        raise ValueError(f"out has to be a folder or a file that ends in .{kind}, but got {out}")
    else:
        folder, stem = out, "report"
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise NotADirectoryError(f"{out} cannot be written: {path} is a file, not a folder")
            break
    return folder, stem


@dataclass(frozen=True)
class Page:
    """All that a page shows, from top to bottom."""

    title: str
    study: str
    lead: str
    tiles: list[headline.Tile]
    counts: dict[str, int]
    notes: list[str]
    figures: list[Picture]
    paper_table: Table | None
    claims: Table | None
    all: Table | None
    search: Table | None
    curves: list[Picture]
    varied: list[tuple[str, str]]
    shared: list[tuple[str, str]]
    failures: Table | None
    machines: Table | None
    time: str
    command: str | None
    intervals: str = INTERVALS
    paper: str = PAPER
    address: str = ADDRESS
    version: str = backdrop.__version__


def _page(
    results: Results, study: str, command: str | None, notes: Sequence[str], claims: Claims | None = None
) -> Page:
    task, records = results.task, results.records
    is_gp = task.name == "gp" and not results.is_search
    values = {
        name: dict.fromkeys(wording.value(c.settings.get(name)) for c in results.configurations)
        for name in results.varied
    }
    remarks = list(notes)
    if results.shared.get("judge") == "validation":
        remarks.append("Judged on validation data, held out from the training data; the test data was not used.")
    if unlike := _unlike_paper(results):
        remarks.append(f"Other settings than those of preset paper: {_several(unlike)}.")
    unfinished = results.count("running") + results.count("waiting")
    if unfinished:
        remarks.append(f"Preliminary: {len(records) - unfinished} of {len(records)} trials have ended.")
    return Page(
        title=task.title.rstrip("."),
        study=study,
        lead=headline.sentence(results),
        tiles=headline.tiles(results),
        counts={state: number for state, number in counts(records).items() if number},
        notes=remarks,
        figures=pictures(results),
        paper_table=tables.gp_table(results) if is_gp else None,
        claims=claims(results) if claims and results.measured else None,
        all=tables.configurations(results) if results.measured and not results.is_search else None,
        search=tables.search(results) if results.is_search else None,
        curves=curves(results),
        varied=[(wording.setting_name(name), _several(list(found))) for name, found in values.items()],
        shared=[(wording.setting_name(name), wording.value(v)) for name, v in results.shared.items()],
        failures=tables.failures(results),
        machines=tables.machines(results),
        time=wording.duration(math.fsum(record.seconds for record in records)),
        command=command,
    )


def _unlike_paper(results: Results) -> list[str]:
    """Which settings of all trials are not those of preset "paper", where they can change a result."""
    if results.task.name not in TASKS or "paper" not in results.task.presets:
        return []
    paper = dataclasses.asdict(results.task.with_preset("paper").settings)
    free = {*results.varied, *results.task.masks, "precision", "skip", "evaluations", "eval_batch", "judge"}
    names = [name for name in results.shared if name in paper and name not in free]
    here, there = ({name: wording.value(source[name]) for name in names} for source in (results.shared, paper))
    return [
        f"{wording.setting_name(name)} {here[name]} (there {there[name]})"
        for name in names
        if here[name] != there[name]
    ]


def _several(values: Sequence[str], most: int = 12) -> str:
    return ", ".join(values[:most]) + (f" and {len(values) - most} more" if len(values) > most else "")


def _html(page: Page) -> bytes:
    from jinja2 import Environment, StrictUndefined

    def data(picture: Picture) -> list[str]:
        return [f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}" for content in picture.svg()]

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["data"] = data
    template = resources.files("backdrop.experiments.report").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page).encode()


def _markdown(page: Page, stem: str) -> bytes:
    parts = [f"# {_escaped(page.title)}", f"Study `{_plain(page.study)}`. **{_escaped(page.lead)}**"]
    parts.append(f"Trials: {', '.join(f'{number} {state}' for state, number in page.counts.items()) or 'none'}.")
    parts += [f"> {_escaped(note)}" for note in page.notes]

    def section(title: str, *content: Table | Sequence[Picture] | None) -> None:
        blocks: list[str] = []
        for item in content:
            if isinstance(item, Table):
                blocks += [markdown_table(item), *([_escaped(item.note)] if item.note else [])]
            elif item:
                for picture in item:
                    blocks.append(f"![{_escaped(picture.alt)}]({stem}-{picture.name}.png)")
                    blocks.append(f"*{_escaped(picture.title)}.* {_escaped(picture.note)}".strip())
        if blocks:
            parts.extend([f"## {title}", *blocks])

    section("Results", page.paper_table, page.figures, page.search)
    section("What the paper says", page.claims)
    section("All configurations", page.all)
    section("Training curves", page.curves)
    section("Failed trials", page.failures)
    pairs = [[Cell(name), Cell(values)] for name, values in [*page.varied, *page.shared]]
    section("Settings", Table(["setting", "value"], pairs, 2) if pairs else None)
    section("Machines", page.machines)
    parts.append(f"Time of all trials together: {page.time}. backdrop {page.version}. {_escaped(page.intervals)}")
    if page.command:
        parts.append(f"Made again by: `{_plain(page.command)}`")
    parts.append(f"The paper: {_escaped(page.paper)}, <{page.address}>")
    return ("\n\n".join(parts) + "\n").encode()


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _escaped(text: str) -> str:
    """Text in which Markdown finds nothing of its own."""
    return "".join(f"\\{sign}" if sign in "\\`*[]<>|#" else sign for sign in " ".join(text.split()))


def markdown_table(table: Table) -> str:
    """A table as Markdown has it, without its note."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def text(cell: Cell) -> str:
        words = _escaped(f"{cell.text} {cell.detail}".strip())
        return f"**{words}**" if cell.best else words

    rule = ["---" if i < table.words else "---:" for i in range(len(table.headings))]
    rows = [line([text(cell) for cell in row]) for row in table.rows]
    return "\n".join([line(list(map(_escaped, table.headings))), line(rule), *rows])
