"""A study in one sentence and three numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backdrop.experiments.records import counts
from backdrop.experiments.report import wording
from backdrop.experiments.report.statistics import ENOUGH, Configuration, Estimate, Results
from backdrop.experiments.tasks import TASKS

__all__ = ["Tile", "sentence", "tiles"]


class Tile(NamedTuple):
    """A number to put in large print."""

    title: str
    number: str
    detail: str
    spread: str = ""


def leader(results: Results) -> Configuration | None:
    """The best configuration with masks that can be compared with no masks; one that is surely better goes first."""
    compared = [c for c in results.measured if results.is_masked(c) and results.gain(c)]
    sure = [c for c in compared if (gain := results.gain(c)) and gain.beyond()]
    return results.best(sure) or results.best(compared)


def sentence(results: Results) -> str:
    """What came out, said no stronger than it is."""
    if results.is_search:
        return _searched(results)
    if not results.measured:
        told = ", ".join(f"{number} {state}" for state, number in counts(results.records).items() if number)
        return f"No trial has a result yet: {told}." if told else "There are no trials yet."
    name = wording.metric_name(results.task.metric)
    best = leader(results)
    gain = results.gain(best) if best else None
    if best is None or gain is None:
        best = results.best(results.measured)
        found = results.estimate(best) if best else None
        assert best is not None
        assert found is not None
        missing = "without" if results.is_masked(best) else "with"
        digits = wording.decimals([found.mean])
        reached = f"{wording.capital(name)} is {wording.number(found.mean, digits)}{_interval(found, digits)}"
        return f"{reached}{_at(best, results.axes)}; there is no trial {missing} masks yet to compare with."
    digits = gain_digits(results)
    masks = f"Masks ({wording.label(best.settings, results.task.masks)})"
    number = wording.number(abs(gain.mean), digits)
    unit = f" points of {name}" if in_percent(results, results.task.metric) else f" in {name}"
    rivals = sum(results.is_masked(c) for c in results.measured)
    among = f" Compared were {rivals} configurations with masks." if rivals > 1 else ""
    verdict, where = gain.beyond(), _at(best, _others(results))
    if verdict:
        return f"{masks} beat no masks by {number}{unit}{where}{_interval(gain, digits)}.{among}"
    if verdict is False:
        return f"Masks do not help: the best, {masks[6:]}, are {number}{unit} behind{where}{_interval(gain, digits)}."
    signed = wording.number(gain.mean, digits, signed=True)
    told = f"{masks} make a difference of {signed}{unit}{where}{_interval(gain, digits)}"
    if gain.n < ENOUGH:
        return f"Too few seeds for a verdict: {told}.{among}"
    return f"No configuration is significantly better than no masks: {told}.{among}"


def _searched(results: Results) -> str:
    best = results.best(results.measured)
    found = results.estimate(best) if best else None
    if best is None or found is None:
        return f"No trial has a result yet, of {wording.count(len(results.records), 'trial')}."
    digits, pruned = wording.decimals([found.mean]), results.count("pruned")
    name = wording.metric_name(results.task.metric)
    told = f"The best of {wording.count(len(results.records), 'trial')} has {name} {wording.number(found.mean, digits)}"
    stopped = f"; {pruned} were stopped early" if pruned else ""
    return f"{told}, with {wording.label(best.settings, results.varied)}{stopped}."


def tiles(results: Results) -> list[Tile]:
    """Without masks, with masks, and the gain; none where there is nothing to compare."""
    best = None if results.is_search else leader(results)
    control, gain = (results.control(best), results.gain(best)) if best else (None, None)
    if best is None or control is None or gain is None:
        return []
    digits = wording.decimals(e.mean for c in results.measured if (e := results.estimate(c)))
    shown = []
    for title, c in (("without masks", control), ("with masks", best)):
        found = results.estimate(c)
        assert found is not None
        names = results.task.masks if c is best else _others(results)
        detail = wording.label(c.settings, names) or wording.count(found.n, "seed")
        spread = "" if found.sd is None else wording.number(found.sd, digits)
        shown.append(Tile(title, wording.number(found.mean, digits), detail, spread))
    name, places = wording.metric_name(results.task.metric), gain_digits(results)
    ends = wording.interval(gain, places)
    seeds = wording.count(gain.n, "paired seed")
    detail = f"{ends}, {seeds}" if ends else seeds
    better = "higher" if results.task.maximize else "lower"
    shown.append(Tile(f"{name} {better} by", wording.number(gain.mean, places), detail))
    return shown


def in_percent(results: Results, metric: str) -> bool:
    return results.task.name in TASKS and metric in ("accuracy", "small", "large")


def gain_digits(results: Results) -> int:
    """As many decimals as the metric has."""
    return wording.decimals(e.mean for c in results.measured if (e := results.estimate(c)))


def _interval(found: Estimate, digits: int) -> str:
    ends, seeds = wording.interval(found, digits), wording.count(found.n, "seed")
    return f" (95% interval {ends}, {seeds})" if ends else f" ({seeds})"


def _others(results: Results) -> list[str]:
    return [name for name in results.axes if name not in results.task.masks]


def _at(configuration: Configuration, names: Sequence[str]) -> str:
    told = wording.label(configuration.settings, names)
    return f" at {told}" if told else ""
