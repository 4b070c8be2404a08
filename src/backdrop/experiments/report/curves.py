"""Training curves: what was logged after each epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from backdrop.experiments.records import Record, column
from backdrop.experiments.report import drawing, wording
from backdrop.experiments.report.drawing import INK, PALETTE, Picture
from backdrop.experiments.report.statistics import Configuration, Results, is_finite

__all__ = ["curves", "last_value"]

MOST = 8  # configurations in one figure


def last_value(record: Record, metric: str) -> float | None:
    """A metric at the end of a trial, or where a pruned one stopped."""
    if is_finite(record.metrics.get(metric)):
        return record.metrics[metric]
    name = column(metric)
    values = [row[name] for row in record.curve if is_finite(row.get(name))]
    return values[-1] if values else None


def curves(results: Results) -> list[Picture]:
    """Training loss and main metric over epochs, for no masks and the best configurations."""
    metric, labels = results.task.metric, _to_draw(results)
    note = "Thin lines are trials, thick ones means over seeds."
    if results.is_search:
        note = "The best trials, by their rank in the table."
    elif len(labels) < len(results.configurations):
        note += f" Of {len(results.configurations)} configurations, the best and what it has to beat are drawn."
    what = "test loss" if metric == "loss" else wording.metric_name(metric)
    drawn = []
    with drawing.style():
        for name, values, text in (("training", "loss", "training loss"), ("evaluation", column(metric), what)):
            found = {label: series for c, label in labels.items() if (series := _series(c, values))}
            if found:
                drawn.append(_curve_picture(found, f"curve-{name}", text, note))
    return drawn


def _to_draw(results: Results) -> dict[Configuration, str]:
    """At most as many configurations as can be told apart, and their names: no masks first, then the best."""
    known = results.measured or results.configurations
    sign = -1 if results.task.maximize else 1
    ranked = sorted(known, key=lambda c: sign * e.mean if (e := results.estimate(c)) else math.inf)
    if results.is_search:
        return {c: f"rank {i + 1}" for i, c in enumerate(ranked[:MOST])}
    control = results.control(ranked[0]) if ranked else None
    kept = [*([control] if control in known else []), *(c for c in ranked if c is not control)][:MOST]
    names = {c: wording.label(c.settings, results.axes, results.task.masks) for c in known}
    first = sorted(kept, key=results.is_masked) if len(known) <= MOST else kept
    return {c: names[c] or "all trials" for c in first if c is not None}


def _series(configuration: Configuration, column: str) -> list[list[tuple[float, float]]]:
    """For each trial, epochs and values; complete trials if there are any."""
    found = []
    for record in configuration.complete or configuration.records:
        rows = [(float(row.get("epoch", i)), row.get(column)) for i, row in enumerate(record.curve)]
        found.append([(x, float(y)) for x, y in rows if y is not None and is_finite(y)])
    return [points for points in found if points]


def _curve_picture(
    found: Mapping[str, Sequence[Sequence[tuple[float, float]]]], name: str, what: str, note: str
) -> Picture:
    figure, axes = drawing.new_figure(4.0 + 0.25 * math.ceil(len(found) / 2))
    ends = []
    for (label, trials), colour in zip(found.items(), (INK, *PALETTE), strict=False):
        by_epoch: dict[float, list[float]] = {}
        for points in trials:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.3)
            for x, y in points:
                by_epoch.setdefault(x, []).append(y)
        # An epoch that some trials have not reached would make the mean jump.
        common = sorted(x for x, values in by_epoch.items() if len(values) == len(trials)) or sorted(by_epoch)
        means = [math.fsum(by_epoch[x]) / len(by_epoch[x]) for x in common]
        marker = "o" if len(common) == 1 else ""
        axes.plot(common, means, color=colour, linewidth=2.4, marker=marker, label=drawing.short(label))
        ends.append(f"{label} {wording.number(means[-1], wording.decimals(means))}")
    values = [y for trials in found.values() for points in trials for _, y in points]
    if min(values) > 0 and max(values) > 30 * min(values):
        drawing.logarithmic(axes.yaxis)
    axes.set_xlabel("epoch")
    axes.set_ylabel(what)
    drawing.legend(figure, list(found))
    alt = f"{what} over epochs, {wording.count(len(found), 'configuration')}. Means at the end: {'; '.join(ends)}."
    return Picture(name, f"{wording.capital(what)} over epochs", alt, figure, note)
