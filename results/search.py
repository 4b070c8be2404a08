"""What all stages have in common: what a stage is, and what a search has found best on validation data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backdrop.experiments.report.statistics import CHOSEN, Results
from backdrop.experiments.study.archive import Archive
from backdrop.experiments.tasks import TASKS

ROOT = Path(__file__).parent
POLICIES = ("exact", "sampled", "frozen")
Settings = dict[str, Any]


class Stage(NamedTuple):
    """Points, without their seeds, and where their trials are kept."""

    points: list[Settings]
    seeds: Sequence[int]
    file: str


def chosen(task: str, count: int = 1, search: str = "choice", **wanted: Any) -> list[Settings]:
    """What the search has found best, for the points with these settings."""
    results = Results(TASKS[task], Archive(ROOT / task / f"{search}.json").records())
    tried = [c for c in results.measured if all(c.settings[name] == value for name, value in wanted.items())]
    found = []
    for _ in range(count):
        if best := results.best(tried):
            tried.remove(best)
            found.append({name: best.settings[name] for name in CHOSEN if name in best.settings})
    return found
