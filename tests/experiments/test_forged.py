"""Journals that others have written, every checksum right: worked on, or refused with an error that names them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("optuna", reason="Optuna is not installed")

from backdrop import cli
from backdrop.experiments.study import alive, journal, lookup
from backdrop.experiments.study import plan as plan_module
from backdrop.experiments.study.plan import again, plan
from backdrop.experiments.study.repair import repair
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from outside import changed
from tiny_task import FILE

NAME = "study"
SAME = [FILE, "--set", "epochs=1", "--seeds", "2", "--name", NAME]  # what it was begun with


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """Those of a trial that is complete, one that failed, one that lost its worker, and one that waits."""
    path = tmp_path_factory.mktemp("genuine") / "journal.log"
    spec, points = plan(FILE, "quick", ["epochs=1"], seeds="2")
    row = {"epoch": 1, "step": 3, "loss": 1.0, "lr": 0.1, "seconds": 1.0, "score": 1.0}
    with open_storage(path, create=True) as storage:
        study = Study.begin(storage, NAME, spec)
        study.add(spec, points)
        worker = {**alive.identity(), "pid": 2**22}  # one more than any process has
        study.claim(worker)
        study.finish(0, "COMPLETE", 1.0, metrics={"score": 1.0}, curve=[row], seconds=1.0, machine={"host": "x"})
        study.claim(worker)
        study.finish(1, "FAIL", reason="why", curve=[row])
        study.claim(worker)
        study.store(2, beat={"count": 3, "epoch": 1, "epochs": 1, "loss": 0.5})
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [{name: value for name, value in change.items() if name not in ("after", "crc32")} for change in found]


def write(path, changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, checksum = [], journal.NONE
    for change in changes:
        line, checksum = journal._line(change, checksum)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    return path


def forged(changes, random):
    """One to three of them changed, and now and then one said twice or not at all."""
    found = list(changes)
    for _ in range(int(random.integers(1, 4))):
        i = int(random.integers(len(found)))
        kind = random.integers(20)
        if kind == 0:
            found.insert(i, found[int(random.integers(len(found)))])
        elif kind == 1:
            del found[i]
        else:
            deep = {name: value for name, value in found[i].items() if isinstance(value, dict) and value}
            found[i] = {**found[i], **changed(deep, random)} if deep else changed(found[i], random)
    return found


def test_a_forged_journal_is_worked_on_or_refused(tmp_path, changes):
    fine, errors = 0, []
    for seed in range(150):
        path = write(tmp_path / str(seed) / NAME / "journal.log", forged(changes, np.random.default_rng(seed)))
        try:
            with lookup.open_study(NAME, None, path.parent.parent) as study:
                again(study.name, study.spec, study.records())
                study.tidy(alive.Watch())
                study.retry()
                while study.claim(alive.identity()) is not None:
                    pass
                study.records()
            fine += 1
        except ValueError as error:
            errors.append((path, error))
        try:
            repair(path)
        except (ValueError, RuntimeError) as error:
            errors.append((path, error))
    assert fine > 25
    assert len(errors) > 50
    assert not [str(error) for path, error in errors if str(path) not in str(error)]


def test_one_study_that_cannot_be_does_not_hide_the_others(tmp_path, changes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    write(tmp_path / "good" / "journal.log", changes)
    bad = [json.loads(json.dumps(change).replace('"seconds": 1.0, "score": 1.0', '"score": "x"')) for change in changes]
    path = write(tmp_path / "bad" / "journal.log", bad)
    result = CliRunner().invoke(cli.app, ["status", "--folder", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 of 4 trials done" in result.output
    assert f"the study {NAME} in {path}: a trial has a curve that cannot be" in result.output
    for command in (["status", "bad"], ["report", "bad"], ["run", *SAME, "--storage", str(path)]):
        result = CliRunner().invoke(cli.app, [*command, "--folder", str(tmp_path)])
        assert result.exit_code == 1
        assert str(path) in result.output


def test_trials_of_other_programs_are_left_alone(tmp_path, changes):
    path = write(tmp_path / "journal.log", changes)
    with open_storage(path) as storage:
        study = Study(storage, NAME)
        study.optuna.enqueue_trial({"p": 0.5})
        numbers = [study.claim(alive.identity()) for _ in range(3)]
        assert numbers == [3, None, None]
        assert len(study.records()) == 4


@pytest.mark.parametrize("pid", ["1", -1, 0, 2**31, 2**70, None, 1.5, [1], True])
def test_a_worker_that_cannot_be_is_dead(pid):
    worker = alive.identity()
    assert alive.is_dead(worker) is False
    assert alive.is_dead({**worker, "pid": pid}) is True
    assert alive.is_dead({name: value for name, value in worker.items() if name != "pid"}) is True
    assert alive.is_dead(pid) is None


def test_more_threads_than_a_process_can_have_are_refused(tmp_path, changes):
    text = json.dumps(changes).replace('"threads": 1', f'"threads": {plan_module.MOST_THREADS + 1}')
    path = write(tmp_path / NAME / "journal.log", json.loads(text))
    with pytest.raises(ValueError, match="the threads of a study cannot be '4097'"), open_storage(path) as storage:
        Study(storage, NAME)
