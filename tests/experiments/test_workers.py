"""Studies under fire: real processes that are killed, stopped, started at once, or run out of disk."""

import json
import signal
from pathlib import Path

import pytest

from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from postgres import database, server  # noqa: F401
from spawned import Command, wait_until
from tiny_task import FILE, noted

pytest.importorskip("optuna", reason="Optuna is not installed")

POINTS = {(p, seed) for p in (0.0, 0.5) for seed in (0, 1)}


class Stage:
    """A place for studies, with a file of what trials did and one that holds them up."""

    def __init__(self, path):
        self.path, self.log, self.hold = path, path / "noted.txt", path / "hold"
        self.commands = []

    def start(self, *args, folder="runs", limit=None):
        env = {"TINY_LOG": self.log, "TINY_HOLD": self.path}
        args = args if "--workers" in args else (*args, "--workers", 1)
        args = (*args, "--task", FILE) if args[0] == "worker" and "--task" not in args else args
        output = self.path / f"output-{len(self.commands)}.txt"
        self.commands.append(Command(*args, "--folder", self.path / folder, output=output, env=env, limit=limit))
        return self.commands[-1]

    def run(self, *args, **kwargs):
        return self.start("run", FILE, "--no-report", *args, **kwargs)

    def middle(self, *pids):
        """Whether each of these processes is in the middle of a trial."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return all(sum(line.startswith("epoch") and line.endswith(f" {pid}") for line in lines) >= 2 for pid in pids)

    def records(self, storage=None, name="tiny-quick"):
        with open_storage(storage or self.path / "runs" / name) as opened:
            return Study(opened, name).records()

    def journal(self):
        return self.path / "runs" / "tiny-quick" / "journal.log"


@pytest.fixture
def stage(tmp_path):
    found = Stage(tmp_path)
    yield found
    for command in found.commands:
        if command.process.is_alive():  # a test has failed
            command.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What comes of the study if nothing happens to it."""
    stage = Stage(tmp_path_factory.mktemp("undisturbed"))
    code, output = stage.run().wait()
    assert code == 0, output
    return results(stage.records())


def results(records):
    """Metrics and curves of complete trials, without times."""
    assert {record.state for record in records} == {"complete"}
    return {
        (record.settings["p"], record.settings["seed"]): (
            record.metrics,
            [{name: value for name, value in row.items() if name != "seconds"} for row in record.curve],
        )
        for record in records
    }


def test_a_killed_workers_trial_is_run_by_another(stage, undisturbed):
    stage.hold.touch()
    first = stage.run()
    wait_until(lambda: stage.middle(first.process.pid))
    second = stage.start("worker", "tiny-quick")
    wait_until(lambda: stage.middle(second.process.pid))
    first.kill()
    stage.hold.unlink()
    code, output = second.wait()
    assert code == 0, output
    assert "4 complete" in output
    assert results(stage.records()) == undisturbed
    assert noted(stage.log, "begin") == {point: 2 if point == (0.0, 0) else 1 for point in POINTS}
    # One epoch was on the disk when the worker was killed in its second one.
    assert noted(stage.log, "epoch") == {point: 4 if point == (0.0, 0) else 3 for point in POINTS}


def test_all_workers_killed_and_the_same_command_again(stage, undisturbed):
    assert stage.run("--seeds", "1").wait()[0] == 0
    stage.hold.touch()
    workers = [stage.run()]
    wait_until(lambda: stage.middle(workers[0].process.pid))
    workers.append(stage.start("worker", "tiny-quick"))
    wait_until(lambda: stage.middle(workers[1].process.pid))
    for worker in workers:
        worker.kill()
    stage.hold.unlink()
    code, output = stage.run().wait()
    assert code == 0, output
    assert results(stage.records()) == undisturbed
    assert noted(stage.log, "begin") == {(p, seed): 1 + seed for p, seed in POINTS}  # what was finished, once
    code, output = stage.run().wait()
    assert code == 0
    assert sum(noted(stage.log, "begin").values()) == 6  # nothing was left to do


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_command_that_started_them(stage, undisturbed, number):
    stage.hold.touch()
    command = stage.run("--workers", "2")
    wait_until(lambda: sum(noted(stage.log, "epoch").values()) >= 4)
    pids = {int(line.split()[-1]) for line in stage.log.read_text().splitlines()}
    assert len(pids) == 2
    assert command.process.pid not in pids
    command.signal(number)
    code, output = command.wait()
    if number == signal.SIGINT:
        assert code == 130
        assert "stopped; the same command goes on from here" in output
        assert not any(_runs(pid) for pid in pids)
    wait_until(lambda: not any(_runs(pid) for pid in pids))
    with open_storage(stage.journal()) as storage:
        reasons = [trial.user_attrs.get("reason") for trial in Study(storage, "tiny-quick").optuna.trials]
    assert reasons.count("interrupted") == 2  # given back in good order
    stage.hold.unlink()
    code, output = stage.run().wait()
    assert code == 0, output
    found = results(stage.records())
    assert found.keys() == undisturbed.keys()
    assert {row["step"] for _, curve in found.values() for row in curve} == {3, 6, 9}


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_how_to_go_on(stage, undisturbed, number):
    stage.hold.touch()
    command = stage.run()
    wait_until(lambda: stage.middle(command.process.pid))
    command.signal(number)
    code, output = command.wait()
    assert code == 130
    assert output.splitlines()[-1] == "stopped; the same command goes on from here"
    assert "Traceback" not in output
    assert {record.state for record in stage.records()} == {"waiting"}
    stage.hold.unlink()
    assert stage.run().wait()[0] == 0
    assert results(stage.records()) == undisturbed


def test_two_commands_at_once(stage, undisturbed):
    commands = [stage.run("--seeds", "2") for _ in range(3)]
    for command in commands:
        code, output = command.wait()
        assert code == 0, output
    assert results(stage.records()) == undisturbed
    assert noted(stage.log, "begin") == dict.fromkeys(POINTS, 1)


def test_a_full_disk_for_the_journal(stage, undisturbed):
    assert stage.run("--seeds", "1").wait()[0] == 0
    size = stage.journal().stat().st_size
    whole = stage.journal().read_bytes()
    code, output = stage.run(limit=size + 2100).wait()  # enough to enqueue, not enough to finish
    assert code == 1
    assert "no space is left to write to" in output
    assert "run the same command again" in output
    assert "Traceback" not in output
    after = stage.journal().read_bytes()
    assert after.startswith(whole)
    assert size < len(after) <= size + 2100
    assert [json.loads(line) for line in after.splitlines()]
    assert after.endswith(b"\n")
    code, output = stage.run().wait()
    assert code == 0, output
    assert results(stage.records()) == undisturbed


def test_a_full_disk_for_a_checkpoint(stage, undisturbed):
    args = ("--set", "p=0", "--seeds", "1", "--set", "width=2000", "--name", "wide")
    code, output = stage.run(*args, limit=50_000).wait()
    assert code == 1
    assert "no space is left to write to" in output
    assert "Traceback" not in output
    (record,) = stage.records(name="wide")
    assert record.state == "waiting"  # not its fault
    assert [path.name for path in (stage.path / "runs" / "wide").glob("*/*")] == []
    code, output = stage.run(*args).wait()
    assert code == 0, output
    (record,) = stage.records(name="wide")
    assert record.state == "complete"
    assert len(record.curve) == 3


def test_two_machines_share_a_database(stage, undisturbed, database):  # noqa: F811
    stage.hold.touch()
    commands = [stage.run("--storage", database, folder=f"machine-{i}") for i in range(2)]  # tables are made once
    wait_until(lambda: stage.middle(*(command.process.pid for command in commands)))
    commands[0].kill()
    stage.hold.unlink()
    code, output = commands[1].wait()
    assert code == 0, output
    assert "s3cret" not in output
    assert results(stage.records(database)) == undisturbed
    begun = noted(stage.log, "begin")
    assert begun.keys() == POINTS
    assert sorted(begun.values()) == [1, 1, 1, 2]
    finished = [len(list((stage.path / f"machine-{i}").glob("*/*/result.json"))) for i in range(2)]
    assert finished == [0, 4]

    code, output = stage.start("worker", "tiny-quick", "--storage", database, folder="machine-2").wait()
    assert code == 0, output
    assert "4 complete" in output
    assert sum(noted(stage.log, "begin").values()) == 5
