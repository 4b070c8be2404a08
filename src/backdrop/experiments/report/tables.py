"""The tables of a report, as pages and Markdown files show them, and the one that the paper prints, its Table 2."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from backdrop.experiments.report import wording
from backdrop.experiments.report.statistics import Configuration, Estimate, Results, is_finite, last_value

__all__ = [
    "GP_TABLE",
    "Cell",
    "Table",
    "TableRow",
    "configurations",
    "failures",
    "gp_table",
    "machines",
    "metrics",
    "search",
]

NOTHING = "\N{EN DASH}"
MOST_TRIALS = 15


class TableRow(NamedTuple):
    """A row of the paper's Table 2: masks, crop, and accuracies in percent."""

    p_small: float
    p_large: float
    crop: int | None
    accuracy: float
    small: float
    large: float


GP_TABLE = (
    TableRow(0.0, 0.0, None, 45.9, 64.7, 74.1),
    TableRow(0.0, 0.75, None, 54.1, 67.4, 82.9),
    TableRow(0.0, 0.94, None, 49.1, 55.3, 88.2),
    TableRow(0.99, 0.0, None, 57.1, 77.9, 73.8),
    TableRow(0.999, 0.0, None, 57.4, 68.2, 84.1),
    TableRow(0.99, 0.75, None, 53.5, 55.0, 98.2),
    TableRow(0.99, 0.94, None, 66.2, 78.7, 84.6),
    TableRow(0.999, 0.75, None, 54.7, 61.5, 88.8),
    TableRow(0.999, 0.94, None, 55.0, 58.5, 95.0),
    TableRow(0.0, 0.0, 512, 45.3, 50.9, 87.9),
    TableRow(0.0, 0.0, 256, 34.3, 53.9, 55.3),
)


class Cell(NamedTuple):
    """A text, small print below it, and whether it is the best of its column."""

    text: str
    detail: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells, one for each heading."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int = 1  # the first columns that hold words, not numbers
    note: str = ""  # how to read it


def _estimate(found: Estimate | None, digits: int, *, signed: bool = False, best: bool = False) -> Cell:
    if found is None:
        return Cell(NOTHING)
    ends = wording.interval(found, digits)
    mean = wording.number(found.mean, digits, signed=True) if signed else wording.plus_minus(found, digits)
    return Cell(mean, f"[{ends}]" if ends else "", best)


def metrics(results: Results) -> list[str]:
    """What was measured, the main metric first."""
    found = dict.fromkeys([results.task.metric])
    for record in results.records:
        found |= dict.fromkeys(record.metrics)
    return [name for name in found if any(c.values(name) for c in results.configurations)]


def _digits(results: Results, metric: str) -> int:
    return wording.decimals(e.mean for c in results.configurations if (e := results.estimate(c, metric)))


def configurations(results: Results, *, brief: bool = False) -> Table:
    """A row per configuration: every metric, or the main one alone, the gain over no masks, seeds and time."""
    names, best = metrics(results)[: 1 if brief else None], results.best(results.measured)
    others = [name for name in results.axes if name not in results.masks]
    chosen = [name for name in results.varied if name not in results.axes]
    settings = [*others, *results.masks, *chosen]
    gains, ratios = ({c: of(c) for c in results.configurations} for of in (results.gain, results.ratio))
    has_gain, has_ratio = any(gains.values()), results.task.name == "cifar10" and any(ratios.values())
    rows = []
    for c in results.configurations:
        row = [Cell(wording.value(c.settings.get(name))) for name in settings]
        for name in names:
            is_best = c is best and name == results.task.metric
            row.append(_estimate(results.estimate(c, name), _digits(results, name), best=is_best))
        if has_gain:
            row.insert(len(settings) + 1, _estimate(gains[c], _digits(results, results.task.metric), signed=True))
        if has_ratio:
            row.insert(len(settings) + 2, _estimate(ratios[c], 3))
        seeds, seconds = len(c.values(results.task.metric)), [record.seconds for record in c.complete]
        row.append(Cell(str(seeds) if seeds == len(c.records) else f"{seeds} of {len(c.records)}"))
        row.append(Cell(wording.duration(math.fsum(seconds) / len(seconds)) if seconds else NOTHING))
        rows.append(row)
    headings = [wording.metric_name(name) for name in names]
    headings[1:1] = ["gain"] * has_gain + ["loss ratio"] * has_ratio
    headings = [*(wording.setting_name(name) for name in settings), *headings, "seeds", "time each"]
    note = (
        "Mean ± standard deviation over seeds, and below it the 95% bootstrap interval of the mean. "
        "Gain: improvement over the same settings without masks, paired by seed; above 0 is better."
    )
    if chosen:
        note += f" Every configuration has its own {' and '.join(map(wording.setting_name, chosen))}."
    return Table(headings, rows, len(settings), note)


def gp_table(results: Results) -> Table | None:
    """Table 2, in the paper's order, with its numbers beside ours; after them what the paper does not have."""
    metrics, setting = ("accuracy", "small", "large"), TableRow._fields[:3]
    known = {row[:3]: row for row in GP_TABLE}
    planned = {tuple(record.settings.get(name) for name in setting) for record in results.records}
    found: dict[Any, Configuration] = {}
    for c in results.measured:
        found.setdefault(tuple(c.settings.get(name) for name in setting), c)
    if not found:
        return None
    shown: list[Any] = [*(key for key in known if key in planned), *(key for key in found if key not in known)]
    ours = {name: [results.estimate(at, name) if (at := found.get(key)) else None for key in shown] for name in metrics}
    highest = {name: max((e.mean for e in ours[name] if e), default=math.nan) for name in metrics}
    rows = []
    for i, key in enumerate(shown):
        p_small, p_large, crop = key
        row = [Cell(f"{crop} \N{MULTIPLICATION SIGN} {crop} crop" if crop else f"({p_small:g}, {p_large:g})")]
        for metric in metrics:
            here, there = ours[metric][i], getattr(known.get(key), metric, None)
            row.append(_estimate(here, 1, best=here is not None and here.mean == highest[metric]))
            is_best = there == max(getattr(other, metric) for other in GP_TABLE)
            row.append(Cell(NOTHING) if there is None else Cell(f"{there:.1f}", "", is_best))
        row.insert(3, _estimate(results.gain(found[key]) if key in found else None, 1, signed=True))
        rows.append(row)
    headings = ["(p_small, p_large)", "total", "paper", "gain", "small", "paper", "large", "paper"]
    note = "Accuracy in percent. Guessing gives 25 in total, and 50 for the small and the large scale alone."
    if not known.keys() <= set(shown):
        note += f" The paper has {len(GP_TABLE)} rows; those that are not in this study are left out."
    return Table(headings, rows, 1, note)


def search(results: Results) -> Table:
    """The best trials of a search, and after them those that were stopped early."""
    sign = -1 if results.task.maximize else 1
    known = [(value, r) for r in results.records if (value := last_value(r, results.task.metric)) is not None]
    ended = [pair for pair in known if pair[1].state in ("complete", "pruned")]
    ended.sort(key=lambda pair: (pair[1].state != "complete", sign * pair[0]))
    digits = wording.decimals(value for value, _ in ended)
    settings = [*results.masks, *(name for name in results.varied if name not in results.masks)]
    rows = []
    for i, (value, record) in enumerate(ended[:MOST_TRIALS]):
        shown = [Cell(wording.value(record.settings.get(name))) for name in settings]
        is_best = i == 0 and record.state == "complete"
        rows.append([Cell(str(i + 1)), Cell(record.state), Cell(wording.number(value, digits), "", is_best), *shown])
    headings = ["rank", "state", wording.metric_name(results.task.metric), *map(wording.setting_name, settings)]
    note = f"The first {len(rows)} of {len(ended)}, best first." if len(rows) < len(ended) else "Best first."
    return Table(headings, rows, 2, f"{note} Pruned trials were stopped early; their last value is shown.")


def failures(results: Results) -> Table | None:
    """Trials that failed, and those that have no number to show for it."""
    rows = []
    for record in results.records:
        value = record.metrics.get(results.task.metric)
        reason = record.reason or "no reason was recorded" if record.state == "failed" else ""
        if record.state == "complete" and not is_finite(value):
            reason = f"complete, but {results.task.metric} is {'missing' if value is None else value}"
        if reason:
            name = wording.label(record.settings, results.axes, results.task.masks) or record.key
            rows.append([Cell(name), Cell(wording.value(record.settings.get("seed"))), Cell(reason)])
    return Table(["configuration", "seed", "reason"], rows, 3) if rows else None


def machines(results: Results) -> Table | None:
    """A row for each kind of machine and set of versions."""
    found = Counter(tuple(record.machine.items()) for record in results.records if record.machine)
    if not found:
        return None
    names = list(dict.fromkeys(name for machine in found for name, _ in machine))
    rows = []
    for machine, number in found.items():
        rows.append([*(Cell(dict(machine).get(name, NOTHING)) for name in names), Cell(str(number))])
    return Table([*names, "trials"], rows, len(names))
