"""Rebuilding a journal of which lines are damaged or missing: `backdrop repair STUDY`.

Trials have numbers, in the order of the lines that began them. So a bad line in which none can have begun is left out,
and the others still hold. Where one may have begun, all from there on is left out, because nobody knows any more which
trials it is about. A trial of which a part is gone has not ended, and is run again.

The command that began the study makes up for the rest: a trial with a `result.json` in its folder is not trained again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backdrop._core.files import held
from backdrop.experiments.study import alive
from backdrop.experiments.study.journal import NONE, Journal, lines, links, read_line

__all__ = ["Repaired", "repair"]

FLIPPED = 8  # bytes that are no text, in a line that is still believed to be one
BEGIN_STUDY, DESCRIBE_STUDY, BEGIN, CHANGE_STATE, DESCRIBE = 0, 2, 4, 6, 8  # Optuna's codes
NEEDED = {  # of a trial that has ended so, by Optuna's number
    1: {"settings", "metrics", "curve", "seconds", "machine"},  # complete
    2: {"settings", "metrics", "curve", "seconds", "reason"},  # pruned
    3: {"reason"},  # failed
}

Change = Mapping[str, Any]


@dataclass
class Repaired:
    """What became of a journal.

    Args:
        lost: the numbers of the lines that could not be read, or before which some are missing.
        since: the number of the line from which on nothing was kept, if there is one.
        kept: the old file, if there was something to repair.
    """

    lost: list[int]
    since: int | None = None
    kept: Path | None = None


def repair(path: Path) -> Repaired:
    """Puts a new journal in the place of one that is damaged; one that is not stays as it is."""
    with held(path.with_name(f".{path.name}.lock"), alive.GRACE):
        changes, lost, since = _changes(path.read_bytes())
        if not lost:
            return Repaired([])
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            _check_stopped(path, changes)
            known = _ended(changes[: None if since is None else since[0]])
            _check_known(path, known, lost)
            fresh.unlink(missing_ok=True)
            Journal(fresh).append_logs([dict(change) for change in known])
            kept = _keep(path)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    return Repaired(lost, since and since[1], kept)


def _changes(content: bytes) -> tuple[list[Change], list[int], tuple[int, int] | None]:
    """All changes that can be read, and the numbers of bad lines.

    Then how many of the changes come before the first place where a trial may have begun, and the number of the line
    there, if there is such a place.
    """
    changes: list[Change] = []
    lost: list[int] = []
    since: tuple[int, int] | None = None
    before, bad = NONE, list[bytes]()
    for number, line in enumerate(lines(content), 1):
        try:
            change = read_line(line)
        except ValueError:
            lost.append(number)
            bad.append(line)
            continue
        after, checksum = links(line)
        missing = not bad and after not in (None, before)
        if missing:
            lost.append(number)
        if since is None and (missing or (bad and not _is_harmless(bad, before, after))):
            since = len(changes), number - len(bad)
        changes.append({name: value for name, value in change.items() if name not in ("after", "crc32")})
        before, bad = checksum, []
    return changes, lost, since


def _is_harmless(bad: Sequence[bytes], before: bytes, after: bytes | None) -> bool:
    """Whether no trial can have begun in bad lines, by them and the checksums of the lines around them."""
    if after == before != NONE:
        return True  # nothing is missing between those
    line = bad[0]
    is_one = len(bad) == 1 and line.count(b'"op_code":') <= 1 and line.count(b'"worker_id":') <= 1
    return is_one and b'"trial_id":' in line and sum(not 32 <= byte < 127 for byte in line[:-1]) <= FLIPPED


def _ended(changes: Sequence[Change]) -> list[Change]:
    """The changes without those that end a trial of which something is gone."""
    known: list[set[str]] = []  # the names of what there is of each trial
    kept = []
    for change in changes:
        if change["op_code"] == BEGIN:
            found = change.get("user_attrs")
            known.append(set(found) if isinstance(found, dict) else set())
        elif change["op_code"] == DESCRIBE and 0 <= change["trial_id"] < len(known):
            known[change["trial_id"]] |= change["user_attr"].keys()
        elif (
            change["op_code"] == CHANGE_STATE
            and 0 <= change["trial_id"] < len(known)
            and not NEEDED.get(change["state"], set()) <= known[change["trial_id"]]
        ):
            continue
        kept.append(change)
    return kept


def _check_known(path: Path, changes: Sequence[Change], lost: Sequence[int]) -> None:
    """An error unless it is known of every study what it is about."""
    begun = {change["study_name"] for change in changes if change["op_code"] == BEGIN_STUDY}
    said = {c["study_id"] for c in changes if c["op_code"] == DESCRIBE_STUDY and "spec" in c["user_attr"]}
    if not begun or said != set(range(len(begun))):
        raise ValueError(
            f"{path} cannot be repaired: what its study is about stood in line {', '.join(map(str, lost))}, which "
            "cannot be read; move the file away and give the command again with which the study was begun: trials that "
            "have a result.json in their folder are not trained again"
        )


def _check_stopped(path: Path, changes: Sequence[Change]) -> None:
    workers: dict[int, Any] = {}  # of trials that have not ended
    for change in changes:
        if change["op_code"] == DESCRIBE and "worker" in change["user_attr"]:
            workers[change["trial_id"]] = change["user_attr"]["worker"]
        elif change["op_code"] == CHANGE_STATE and change["state"] in NEEDED:
            workers.pop(change["trial_id"], None)
    for worker in workers.values():
        if isinstance(worker, dict) and type(worker.get("pid")) is int and alive.is_dead(worker) is False:
            raise RuntimeError(f"process {worker['pid']} works on {path}: stop it first")


def _keep(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        os.link(path, kept)
    except OSError:  # a file system without links
        shutil.copy2(path, kept)
    return kept
