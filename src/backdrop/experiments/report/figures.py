"""The figures of the paper, remade from the records of a study, those that any task has, and training curves."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backdrop.experiments.records import column
from backdrop.experiments.report import drawing, wording
from backdrop.experiments.report.drawing import INK, MARKERS, MUTED, PALETTE, Line, Picture
from backdrop.experiments.report.statistics import Configuration, Estimate, Results, is_finite, last_value, paired
from backdrop.experiments.report.tables import GP_TABLE, TableRow

__all__ = ["curves", "pictures"]

MOST = 8  # lines, or configurations, in one figure
MOST_ROWS = 16

Measure = Callable[[Configuration], Estimate | None]


def pictures(results: Results) -> list[Picture]:
    """What a study is about; none if nothing was measured."""
    with drawing.style():
        if results.is_search:
            return _search(results)
        if not results.measured:
            return []
        own = {"gp": _gp, "latent": _latent, "cifar10": _cifar10}.get(results.task.name)
        return (own(results) if own else []) or _any_task(results)


def _any_task(results: Results) -> list[Picture]:
    """Two configurations seed by seed; more against p, with two masks as a heat map too; else a row for each."""
    name = wording.metric_name(results.task.metric)
    found = _by_seed(results)
    if found:
        return found
    if results.masks:
        found += _against_p(results, results.estimate, "metric", name)
    if len(results.masks) == 2:
        found += _heat_map(results, results.task.metric)
    return found or [_by_configuration(results, {name: results.estimate})]


def _by_seed(results: Results) -> list[Picture]:
    """A line for each seed, from its trial without masks to that with them; none unless there are just these two."""
    masked = [c for c in results.measured if results.is_masked(c)]
    control = results.control(masked[0]) if len(masked) == 1 and len(results.measured) == 2 else None
    if control is None or results.estimate(control) is None:
        return []
    metric, name = results.task.metric, wording.metric_name(results.task.metric)
    before, after = control.values(metric), masked[0].values(metric)
    gains = paired(after, before)
    if len(gains) < 2:
        return []
    sign = 1 if results.task.maximize else -1
    figure, axes = drawing.new_figure(4.0)
    for seed, gain in gains.items():
        colour = PALETTE[0] if sign * gain > 0 else PALETTE[1]
        axes.plot([0, 1], [before[seed], after[seed]], color=colour, linewidth=1.2, marker="o", markersize=4)
    means = [sum(values[seed] for seed in gains) / len(gains) for values in (before, after)]
    axes.plot([0, 1], means, color=INK, linewidth=4, marker="o", markersize=10)
    with_masks = wording.label(masked[0].settings, results.task.masks)
    axes.set_xticks([0, 1], ["no masks", with_masks.replace(", ", "\n")])
    axes.set_xlim(-0.25, 1.25)
    axes.set_ylabel(name)
    better, digits = sum(sign * gain > 0 for gain in gains.values()), wording.decimals(means)
    told = f"{better} of {wording.count(len(gains), 'seed')} are better with masks"
    ends = " to ".join(wording.number(mean, digits) for mean in means)
    return [
        Picture(
            "by-seed",
            f"{wording.capital(name)} seed by seed",
            f"{name} without and with masks, a line for each seed: {told}; the mean goes from {ends}.",
            figure,
            f"A line for each seed: {told}. The thick line is the mean.",
        )
    ]


def _against_p(
    results: Results, measure: Measure, name: str, what: str, *, level: float | None = None, note: str = ""
) -> list[Picture]:
    """One line per value of the other axes."""
    counts = {mask: len({c.settings.get(mask) for c in results.measured}) for mask in results.masks}
    mask = max(counts, key=lambda key: counts[key])
    others = [key for key in results.axes if key != mask]
    groups: dict[str, list[tuple[float, Estimate]]] = {}
    for c in results.measured:
        found = measure(c)
        if found is not None:
            groups.setdefault(wording.label(c.settings, others), []).append((float(c.settings[mask]), found))
    if counts[mask] < 2 or not groups:
        return []
    labels = _spread(list(groups), MOST)
    drawn = [
        Line(label, [(drawing.place(p), e) for p, e in sorted(groups[label])], colour, MARKERS[i])
        for i, (label, colour) in enumerate(zip(labels, drawing.shades(len(labels)), strict=True))
    ]
    figure, axes = drawing.new_figure(4.0 + 0.25 * math.ceil(len(labels) / 3))
    if level is not None:
        axes.axhline(level, color=MUTED, linewidth=1.2, linestyle=":")
    drawing.lines(axes, drawn)
    drawing.p_axis(axes, sorted({p for group in groups.values() for p, _ in group}), mask)
    axes.set_ylabel(textwrap.fill(what, 30))
    drawing.legend(figure, labels)
    if len(labels) < len(groups):
        note = f"{note} {len(labels)} of {len(groups)} lines are drawn; the table has them all.".strip()
    every = [(label, p, e.mean) for label in labels for p, e in groups[label]]
    alt = f"{what} against {mask}, {wording.count(len(labels), 'line')}. {_extremes(every, mask, what)}"
    shown = "Bands and bars are 95% bootstrap intervals of the mean over seeds."
    return [Picture(name, f"{wording.capital(what)} against {mask}", alt, figure, f"{shown} {note}".strip())]


def _extremes(points: Sequence[tuple[str, float, float]], mask: str, what: str) -> str:
    digits = wording.decimals(mean for *_, mean in points)

    def told(point: tuple[str, float, float]) -> str:
        label, p, mean = point
        return f"{wording.number(mean, digits)} at {f'{label}, ' if label else ''}{mask} {wording.value(p)}"

    low, high = min(points, key=lambda point: point[2]), max(points, key=lambda point: point[2])
    return f"Lowest {told(low)}; highest {told(high)}."


def _heat_map(results: Results, metric: str) -> list[Picture]:
    """Over the two masks, where the other settings are those with most cells, and among these the last."""
    first, second = results.task.masks[:2]
    others = [name for name in results.axes if name not in (first, second)]
    groups: dict[str, dict[tuple[float, float], float]] = {}
    for c in results.measured:
        found = results.estimate(c, metric)
        if found is not None:
            cells = groups.setdefault(wording.label(c.settings, others), {})
            cells[float(c.settings[first]), float(c.settings[second])] = found.mean
    if not groups:
        return []
    label, cells = max(reversed(groups.items()), key=lambda item: len(item[1]))
    if len(cells) < 3 or len({x for x, _ in cells}) < 2 or len({y for _, y in cells}) < 2:
        return []
    best = (max if results.task.maximize else min)(cells, key=lambda pair: cells[pair])
    what, digits = wording.metric_name(metric), min(3, wording.decimals(cells.values()))
    figure, axes = drawing.new_figure(4.2)
    drawing.heat_map(figure, axes, (first, second), cells, best, digits)
    place = f"{first} {wording.value(best[0])}, {second} {wording.value(best[1])}"
    alt = f"Heat map of {what} over {first} and {second}: best {cells[best]:.{digits}f} at {place}."
    at = f" at {label}" if label else ""
    note = f"Means over seeds; {'higher' if results.task.maximize else 'lower'} is better, the frame marks the best."
    return [
        Picture(
            f"{re.sub(r'[^a-z0-9]+', '-', metric.lower())}-map",
            f"{wording.capital(what)} over both masks{at}",
            alt,
            figure,
            note,
        )
    ]


def _by_configuration(results: Results, measures: Mapping[str, Measure], name: str = "configurations") -> Picture:
    """A row per configuration."""
    rows = _spread(results.measured, MOST_ROWS)
    labels = [wording.label(c.settings, results.axes, results.task.masks) or "all trials" for c in rows]
    series = {what: [measure(c) for c in rows] for what, measure in measures.items()}
    figure, axes = drawing.new_figure(1.5 + 0.36 * len(rows) * max(1, 0.6 * len(series)))
    drawing.dots(axes, labels, series)
    axes.set_xlabel(" and ".join(series))
    if len(series) > 1:
        drawing.legend(figure, list(series))
    note = "Lines are 95% bootstrap intervals of the mean over seeds."
    if len(rows) < len(results.measured):
        note += f" {len(rows)} of {len(results.measured)} configurations are drawn; the table has them all."
    digits = wording.decimals(e.mean for found in series.values() for e in found if e)
    seen = [
        f"{label}: {', '.join(wording.number(e[i].mean, digits) for e in series.values() if e[i])}"  # type: ignore[union-attr]
        for i, label in enumerate(labels)
    ]
    what = " and ".join(series)
    return Picture(name, f"{wording.capital(what)} by configuration", f"{what}. {'; '.join(seen)}.", figure, note)


def _gp(results: Results) -> list[Picture]:
    """Table 2 as a picture, our numbers and the paper's."""
    found: dict[Any, Configuration] = {}
    for c in results.measured:
        found.setdefault(tuple(c.settings.get(name) for name in TableRow._fields[:3]), c)
    rows = [row for row in GP_TABLE if row[:3] in found]
    if len(found) != len(results.measured) or not rows or len(rows) != len(found):
        return []  # other settings vary too, or other masks than the paper's: no row has its one number
    labels = [f"crop {row.crop}" if row.crop else f"({row.p_small:g}, {row.p_large:g})" for row in rows]
    drawn = []
    for name, title, metrics in (
        ("accuracy", "Accuracy by masks (p_small, p_large)", {"accuracy": "all four classes"}),
        ("scales", "Accuracy at each scale alone", {"small": "small scale", "large": "large scale"}),
    ):
        estimates = [[results.estimate(found[row[:3]], metric) for row in rows] for metric in metrics]
        series = dict(zip(metrics.values(), estimates, strict=True))
        paper = {text: [getattr(row, metric) for row in rows] for metric, text in metrics.items()}
        figure, axes = drawing.new_figure(1.9 + 0.34 * len(rows) * (1 if len(metrics) == 1 else 1.35))
        chance = 25 if name == "accuracy" else 50
        axes.axvline(chance, color=MUTED, linewidth=1.2, linestyle=":")
        drawing.dots(axes, labels, series, paper)
        axes.set_xlabel("accuracy in percent (dotted: guessing)")
        drawing.legend(figure, [f"{text}, the paper" for text in series for _ in range(2)])
        told = [
            f"{label} {' and '.join(wording.number(e[i].mean, 1) for e in series.values() if e[i])}"  # type: ignore[union-attr]
            f" (the paper: {' and '.join(map(str, (values[i] for values in paper.values())))})"
            for i, label in enumerate(labels)
        ]
        alt = f"{title}, percent: {'; '.join(told)}."
        note = "Filled: here, with 95% bootstrap intervals of the mean over seeds. Hollow: the paper."
        drawn.append(Picture(name, title, alt, figure, note))
    return drawn


def _cifar10(results: Results) -> list[Picture]:
    def ratio(c: Configuration) -> Estimate | None:
        one = Estimate(1.0, None, None, None, 1)
        return results.ratio(c, "loss") if results.is_masked(c) else one

    if not any(results.ratio(c, "loss") for c in results.measured) or not results.masks:
        return []
    note = "Below the dotted line, masks lower the loss; ratios are paired by seed."
    what = "ratio of test loss with masks to without"
    return _against_p(results, ratio, "loss-ratio", what, level=1.0, note=note)


def _latent(results: Results) -> list[Picture]:
    drawn = _by_batch_size(results)
    if len(results.masks) == 2:
        drawn += _heat_map(results, "xe") + _heat_map(results, "dist")
    if drawn:
        return drawn
    measures = {wording.metric_name(m): lambda c, m=m: results.estimate(c, m) for m in ("xe", "dist")}
    return [_by_configuration(results, measures)]


def _by_batch_size(results: Results) -> list[Picture]:
    sizes = sorted({c.settings["batch_size"] for c in results.measured if "batch_size" in c.settings})
    drawn, seen = [], []
    for i, (label, masked) in enumerate((("no masks", False), ("best masks", True))):
        arm = {
            size: results.best(
                c for c in results.measured if c.settings["batch_size"] == size and results.is_masked(c) == masked
            )
            for size in sizes
        }
        for metric, dashed in (("dist", False), ("dist_minibatch", True)):
            points = [
                (math.log2(size), e) for size, c in arm.items() if c and (e := results.estimate(c, metric)) is not None
            ]
            if points:
                text = f"{label}, minibatches" if dashed else f"{label}, test set"
                drawn.append(Line(text, points, PALETTE[i], MARKERS[i], dashed))
                numbers = ", ".join(f"{wording.number(e.mean, 4)} at {2**x:.0f}" for x, e in points)
                seen.append(f"{text}: {numbers}")
    if len(sizes) < 2 or not drawn:
        return []
    figure, axes = drawing.new_figure(4.3)
    drawing.lines(axes, drawn)
    means = [e.mean for line in drawn for _, e in line.points]
    if min(means) > 0 and max(means) > 10 * min(means):
        drawing.logarithmic(axes.yaxis)
    axes.set_xticks([math.log2(size) for size in sizes], list(map(str, sizes)))
    axes.set_xlabel("batch size")
    axes.set_ylabel("L_dist")
    drawing.legend(figure, [line.label for line in drawn])
    note = (
        "Solid: whole test set. Dashed: average over its minibatches. Best masks: lowest mean loss at each batch size."
    )
    alt = f"L_dist against batch size. {'; '.join(seen)}."
    return [Picture("dist", "L_dist against batch size", alt, figure, note)]


def _search(results: Results) -> list[Picture]:
    """A point per trial, against what each mask keeps."""
    metric, drawn = results.task.metric, []
    what = wording.metric_name(metric)
    for mask in results.masks:
        figure, axes = drawing.new_figure()
        counts = []
        for state, label, colour, marker in (
            ("complete", "complete", PALETTE[0], "o"),
            ("pruned", "pruned, last value", PALETTE[1], "x"),
        ):
            points = [
                (1 - float(r.settings[mask]), value)
                for r in results.records
                if r.state == state and mask in r.settings and (value := last_value(r, metric)) is not None
            ]
            counts.append(f"{len(points)} {state}")
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=8, alpha=0.85, label=label)
        if not axes.lines:
            continue
        drawing.logarithmic(axes.xaxis)
        axes.set_xlabel(f"kept fraction 1 \N{MINUS SIGN} {mask} (logarithmic)")
        axes.set_ylabel(what)
        drawing.legend(figure, [str(line.get_label()) for line in axes.lines])
        best = results.best(results.measured)
        found = results.estimate(best) if best else None
        told = f" Best {wording.number(found.mean, wording.decimals([found.mean]))}" if found else ""
        told += f" at {mask} {wording.value(best.settings.get(mask))}." if best and found else ""
        alt = f"{what} against the kept fraction 1 - {mask}: {', '.join(counts)} trials.{told}"
        drawn.append(Picture(f"search-{mask}", f"{wording.capital(what)} against what {mask} keeps", alt, figure))
    return drawn


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


def _series(configuration: Configuration, name: str) -> list[list[tuple[float, float]]]:
    """For each trial, epochs and values; complete trials if there are any."""
    found = []
    for record in configuration.complete or configuration.records:
        rows = [(float(row.get("epoch", i)), row.get(name)) for i, row in enumerate(record.curve)]
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


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
