"""A study in one file, with a line for each trial: to keep beside what is said of it, and to make its report again.

Of a trial's curve only the rows with an evaluation are kept. What all trials share is written once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backdrop.experiments.records import Record, checked
from backdrop.experiments.study.plan import Spec, check_name

__all__ = ["Archive", "pack"]

FORMAT = "backdrop study 1"
TRAINING = {"epoch", "step", "loss", "lr", "seconds"}  # what every row of a curve has


def pack(name: str, spec: Spec, records: Sequence[Record]) -> bytes:
    """The file's content."""
    machines: list[Mapping[str, str]] = []
    for record in records:
        if record.machine and record.machine not in machines:
            machines.append(record.machine)
    known = [record.settings for record in records] or [{}]
    shared = {setting: v for setting, v in known[0].items() if all(setting in s and s[setting] == v for s in known)}
    names = list(dict.fromkeys(setting for settings in known for setting in settings))
    head = {"format": FORMAT, "study": name, "spec": dataclasses.asdict(spec), "machines": machines}
    head |= {"settings": names, "shared": shared}
    lines = [json.dumps(_trial(record, shared, machines)) for record in records]
    return f'{json.dumps(head, indent=1)[:-2]},\n "trials": [\n{_joined(lines)} ]\n}}\n'.encode()


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"  {line}{',' if i + 1 < len(lines) else ''}\n" for i, line in enumerate(lines))


def _trial(record: Record, shared: Mapping[str, Any], machines: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """What is not to be found elsewhere in the file."""
    found = dataclasses.asdict(record)
    del found["progress"]
    found["settings"] = {setting: value for setting, value in record.settings.items() if setting not in shared}
    found["curve"] = [row for row in record.curve if not TRAINING.issuperset(row)]
    found["machine"] = machines.index(record.machine) if record.machine else None
    return {name: value for name, value in found.items() if value not in (None, [], {})}


class Archive:
    """A study from such a file."""

    def __init__(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            is_known = found["format"] == FORMAT
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} has to be a study as `backdrop report --format json` writes it: {error}"
            ) from None
        if not is_known:
            raise ValueError(f"{path} has to be of the format {FORMAT!r}, but is of {found['format']!r}")
        try:
            self.name = check_name(found["study"])
            self.spec = Spec.from_json(found["spec"])
            self._records = list(_records(found, self.spec.shown_task().masks))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} is not a study as `backdrop report --format json` writes it: {error}") from None

    def records(self) -> list[Record]:
        """Its trials, all settings in their order."""
        return self._records


def _records(found: Mapping[str, Any], masks: Sequence[str]) -> Iterator[Record]:
    for trial in found["trials"]:
        settings = {**found["shared"], **trial.get("settings", {})}
        settings = {name: settings[name] for name in found["settings"] if name in settings}
        machine = found["machines"][trial["machine"]] if "machine" in trial else {}
        record = checked(Record(**{**trial, "settings": settings, "machine": machine}))
        if record.state != "waiting" and not all(isinstance(settings.get(mask), (int, float)) for mask in masks):
            raise ValueError(f"a trial has to have numbers for {', '.join(masks)}")
        yield record
