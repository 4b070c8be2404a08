"""A study without Optuna: one configuration, in this process, with one seed after the other.

Its folder holds study.json, which says what it is, and a folder with a result.json for each trial that is done.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backdrop._core.files import replace
from backdrop._core.installed import how_to_install
from backdrop.experiments import checkpoint
from backdrop.experiments.records import Record, checked
from backdrop.experiments.settings import as_text
from backdrop.experiments.study.plan import Spec, check_extends

__all__ = ["SPEC", "PlainStudy", "check_one"]

SPEC = "study.json"


def check_one(points: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> None:
    """An error if there are several configurations."""
    axes = {
        name: dict.fromkeys(as_text(point[name]) for point in points) for name in varied if name != "seed" and points
    }
    axes = {name: values for name, values in axes.items() if len(values) > 1}
    if axes:
        several = " and ".join(f"{name}={','.join(values)}" for name, values in axes.items())
        one = " ".join(f"--set {name}={list(values)[-1]}" for name, values in axes.items())
        raise RuntimeError(
            f"a study of several configurations ({several}) needs Optuna: {how_to_install('experiments')}; "
            f"or choose one of them, such as {one}"
        )


class PlainStudy:
    """What is in a folder, whose name is the study's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        try:
            self.spec = Spec.from_json(json.loads((folder / SPEC).read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{folder / SPEC} does not say what the study is about: {error}; remove it and run the same command "
                "again: trials that are done are not run again"
            ) from None
        self.here: dict[str, Record] = {}  # trials that are not done, as far as this process knows

    @classmethod
    def begin(cls, folder: Path, spec: Spec, points: Sequence[Mapping[str, Any]]) -> PlainStudy:
        """The study in this folder, made if it is not there."""
        for left in folder.glob(f".{SPEC}.*.new"):  # by a process that was killed
            left.unlink(missing_ok=True)
        if (folder / SPEC).exists():
            check_extends(cls(folder).spec, folder.name, spec, points)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(dataclasses.asdict(spec), indent=1) + "\n"
            replace(folder / SPEC, lambda file: file.write(text.encode()))
        return cls(folder)

    def run(
        self,
        points: Sequence[Mapping[str, Any]],
        fit: Callable[[Mapping[str, Any], Path, Callable[[Mapping[str, Any]], None]], object],
    ) -> None:
        """Runs what is missing: `fit` trains a point in a folder, and tells about each epoch."""
        from backdrop.experiments.study import remains

        keys = {self.spec.key(point): point for point in points}
        done = {record.key for record in self.records()}
        self.here = {key: Record(key, "waiting", point) for key, point in keys.items() if key not in done}
        for key, record in list(self.here.items()):
            running = self.here[key] = dataclasses.replace(record, state="running")

            def on_epoch(row: Mapping[str, Any], running: Record = running) -> None:
                self.here[running.key] = dataclasses.replace(running, progress=row)

            remains.clear(self.folder / key, key)
            try:
                fit(record.settings, self.folder / key, on_epoch)
            except RuntimeError as error:  # diverged, out of memory: the other seeds may do better
                self.here[key] = dataclasses.replace(record, state="failed", reason=str(error))
        remains.sweep(self.folder, {record.key for record in self.records() if record.state == "complete"})

    def records(self) -> list[Record]:
        found = {}
        for path in sorted(self.folder.glob("*/result.json")):
            try:
                result = checkpoint.read_result(path)
            except checkpoint.Unusable:  # as if it were not there: the same command runs the trial again, and says so
                continue
            if result is None:  # removed meanwhile
                continue
            fields = {name: result[name] for name in ("key", "settings", "metrics", "curve", "seconds", "machine")}
            found[result["key"]] = checked(Record(state="complete", **fields))
        records = [*found.values(), *(record for key, record in self.here.items() if key not in found)]
        return sorted(records, key=lambda record: record.settings["seed"])
