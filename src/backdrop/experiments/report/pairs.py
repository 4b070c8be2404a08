"""No masks against masks, seed by seed: what a study of two configurations has to show."""

from __future__ import annotations

from backdrop.experiments.report import drawing, wording
from backdrop.experiments.report.drawing import INK, PALETTE, Picture
from backdrop.experiments.report.statistics import Results, paired

__all__ = ["by_seed"]


def by_seed(results: Results) -> list[Picture]:
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
