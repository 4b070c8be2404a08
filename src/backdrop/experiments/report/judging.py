"""How a sentence of the paper is held against the records of a study.

Every claim comes down to a number per seed that has to be above 0, such as a difference between two configurations.
"yes" and "no" are for means whose 95% interval leaves no other answer; everything else is "not clear". What is said of
every batch size and holds for some of them is "partly" so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from backdrop.experiments.report import wording
from backdrop.experiments.report.statistics import Configuration, Estimate, Results, estimate, paired

__all__ = [
    "Claim",
    "Effects",
    "averaged",
    "by_size",
    "changes",
    "ends",
    "everywhere",
    "judge",
    "leading",
    "named",
    "reduction",
    "values",
    "where",
]

Effects = Mapping[Any, float]  # a number per seed


class Claim(NamedTuple):
    """A sentence of the paper, its numbers, ours, and whether these agree: yes, partly, no, not clear, not measured."""

    claim: str
    paper: str
    here: str = "\N{EN DASH}"
    verdict: str = "not measured"


def told(found: Estimate, unit: str, digits: int) -> str:
    """A mean, its standard deviation, its interval and the number of seeds."""
    ends, seeds = wording.interval(found, digits), wording.count(found.n, "seed")
    number = f"{wording.plus_minus(found, digits)} {unit}".strip()
    return f"{number} ({f'{ends}, ' if ends else ''}{seeds})"


def judge(
    claim: str,
    paper: str,
    effects: Effects,
    here: str,
    unit: str = "points",
    digits: int = 1,
    amount: float | None = None,
) -> Claim:
    """A claim that holds where the mean effect is above 0, and partly where it is surely less than the paper says.

    Args:
        claim: the sentence.
        paper: the paper's numbers.
        effects: a number per seed.
        here: ours, with {} for their mean.
        unit: of the effects.
        digits: after the point.
        amount: of the effect in the paper.
    """
    found = estimate(effects.values())
    if found is None:
        return Claim(claim, paper)
    verdict = {True: "yes", False: "no", None: "not clear"}[found.beyond()]
    if verdict == "yes" and amount is not None and found.beyond(amount) is False:
        verdict = "partly"
    return Claim(claim, paper, here.replace("{}", told(found, unit, digits)), verdict)


def values(configuration: Configuration | None, metric: str) -> Effects:
    return configuration.values(metric) if configuration else {}


def changes(
    results: Results,
    configuration: Configuration | None,
    metric: str,
    compare: Callable[[float, float], float] = lambda value, other: value - other,
) -> Effects:
    """By seed, what masks make of a metric."""
    control = results.control(configuration) if configuration else None
    return paired(values(configuration, metric), values(control, metric), compare)


def reduction(value: float, other: float) -> float:
    """In percent."""
    return 100 * (1 - value / other) if other > 0 else math.nan


def averaged(arms: Iterable[Effects]) -> Effects:
    """By seed, the mean over arms, for the seeds that all of them have."""
    arms = [arm for arm in arms if arm]
    common = [seed for seed in arms[0] if all(seed in arm for arm in arms)] if arms else []
    return {seed: math.fsum(arm[seed] for arm in arms) / len(arms) for seed in common}


def where(results: Results, **wanted: Any) -> list[Configuration]:
    """Configurations with these settings, for which the main metric is known."""
    return [c for c in results.measured if all(c.settings.get(name) == v for name, v in wanted.items())]


def named(results: Results, configuration: Configuration | None) -> str:
    if configuration is None:
        return ""
    others = [name for name in results.axes if name not in results.task.masks]
    return wording.label(configuration.settings, [*others, *results.task.masks])


def leading(results: Results, best: Configuration, name: str, digits: int = 1) -> str:
    """Which configuration has the best mean, and what it is."""
    found = results.estimate(best)
    return f"best mean: {name} ({wording.plus_minus(found, digits)}, n = {found.n})" if found else ""


class Size(NamedTuple):
    """What was measured with one batch size: the best without masks, the best with them, the one with the highest p."""

    plain: Configuration
    best: Configuration
    highest: Configuration
    masked: list[Configuration]


def by_size(results: Results) -> dict[int, Size]:
    """In rising order; batch sizes that have not both, masks and none, are left out."""
    found = {}
    for size in sorted({c.settings["batch_size"] for c in results.measured if "batch_size" in c.settings}):
        here = where(results, batch_size=size)
        masked = [c for c in here if results.is_masked(c)]
        plain, best = results.best(c for c in here if not results.is_masked(c)), results.best(masked)
        p = [max(c.settings.get(name) or 0.0 for name in results.task.masks) for c in masked]
        highest = results.best(c for c, value in zip(masked, p, strict=True) if value == max(p))
        if plain and best and highest:
            found[size] = Size(plain, best, highest, masked)
    return found


def everywhere(claim: str, paper: str, effects: Mapping[int, Effects], digits: int = 1) -> Claim:
    """A claim of every batch size."""
    gains = {size: found for size, effect in effects.items() if (found := estimate(effect.values()))}
    if not gains:
        return Claim(claim, paper)
    signs = {size: gain.beyond() for size, gain in gains.items()}
    words = {True: "better", False: "worse", None: "not clear"}
    means = {size: f"{size} ({wording.plus_minus(gain, digits, signed=True)})" for size, gain in gains.items()}
    here = "; ".join(
        f"{word} at {', '.join(means[size] for size, found in signs.items() if found is sign)}"
        for sign, word in words.items()
        if sign in signs.values()
    )
    here += f"; {wording.count(min(gain.n for gain in gains.values()), 'seed')}"
    if True in signs.values():
        return Claim(claim, paper, here, "yes" if all(signs.values()) else "partly")
    return Claim(claim, paper, here, "no" if False in signs.values() else "not clear")


def ends(sizes: Mapping[int, Size]) -> tuple[int, int] | None:
    """The smallest and the largest batch size, if there are two."""
    return (min(sizes), max(sizes)) if len(sizes) > 1 else None
