"""The records of a study as CSV files, with all digits, and without formulas."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Any

from backdrop.experiments.report import tables, wording
from backdrop.experiments.report.statistics import Configuration, Estimate, Results

__all__ = ["configurations", "trials"]

FORMULA = ("=", "+", "-", "@", "\t", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and their wide forms
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf", re.ASCII)


def trials(results: Results) -> bytes:
    """A row per trial."""
    settings = list(dict.fromkeys(name for record in results.records for name in record.settings))
    metrics = list(dict.fromkeys(name for record in results.records for name in record.metrics))
    head = ["key", "state", *settings, *(f"metric {name}" for name in metrics), "seconds", "host", "device", "reason"]
    rows = [
        [
            record.key,
            record.state,
            *(_raw(record.settings.get(name)) for name in settings),
            *(_raw(record.metrics.get(name)) for name in metrics),
            _raw(record.seconds),
            record.machine.get("host", ""),
            record.machine.get("device", ""),
            record.reason or "",
        ]
        for record in results.records
    ]
    return _csv(head, rows)


def configurations(results: Results) -> bytes:
    """A row per configuration: its settings, and for every metric mean, standard deviation, interval and seeds."""
    names, settings = tables.metrics(results), [*results.varied, *results.shared]
    head = [
        *settings,
        *(f"{name} {part}" for name in [*names, "gain", "ratio"] for part in Estimate._fields),
        "seconds",
    ]

    def row(c: Configuration) -> list[str]:
        found = [*(results.estimate(c, name) for name in names), results.gain(c), results.ratio(c)]
        numbers = [_raw(part) for e in found for part in (e or [None] * len(Estimate._fields))]
        seconds = math.fsum(record.seconds for record in c.complete)
        return [*(_raw(c.settings.get(name)) for name in settings), *numbers, _raw(seconds)]

    return _csv(head, [row(c) for c in results.configurations])


def _raw(value: Any) -> str:
    """With all digits."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else wording.value(value)


def _safe(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: text gets an apostrophe in front, numbers stay as they are."""
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")  # which readers take for the end of a row
    return f"'{cell}" if cell.lstrip(" \xa0\ufeff").startswith(FORMULA) and not NUMBER.fullmatch(cell) else cell


def _csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([_safe(cell) for cell in row] for row in (head, *rows))
    return file.getvalue().encode()
