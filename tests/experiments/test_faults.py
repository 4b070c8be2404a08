"""What workers leave behind that were killed, crashed or stopped, and who clears it up."""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="Optuna is not installed")

from optuna.storages import JournalStorage
from optuna.study import StudyDirection

from backdrop._core import files
from backdrop.experiments import checkpoint
from backdrop.experiments.study import alive, journal, remains
from backdrop.experiments.study.alive import Watch, identity, is_dead
from backdrop.experiments.study.interrupts import Interrupts
from backdrop.experiments.study.plan import plan
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.study.worker import work
from backdrop.experiments.tasks import find_task
from backdrop.experiments.train import Options
from backdrop.experiments.training import told
from spawned import CONTEXT, DEADLINE, Command, wait_until
from tiny_task import FILE, noted

OPTIONS = Options(accelerator="cpu")
needs_flock = pytest.mark.skipif(files.fcntl is None, reason="there are no locks that end with their process")


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def say_what_is_there(pipe):
    pipe.send("warmed" in sys.modules)


def test_processes_of_tests_have_imported_everything():
    """Else a process that is to be killed at its work is killed while it imports torch, and nothing is tried."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=say_what_is_there, args=(theirs,))
    process.start()
    assert ours.recv()
    process.join(DEADLINE)


# --- processes that were stopped


def say_who(pipe):
    pipe.send(identity())
    pipe.recv()


def test_a_process_that_was_stopped_is_neither_dead_nor_alive():
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=say_who, args=(theirs,))
    process.start()
    worker = ours.recv()
    assert is_dead(worker) is False
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: state(process.pid) == "T")
    assert is_dead(worker) is None
    now = [0.0]
    watch = Watch(clock=lambda: now[0])
    for now[0], beat, lost in ((0, 1, False), (59, 1, False), (60, 2, False), (119, 2, False), (121, 2, True)):
        assert watch.is_lost(0, worker, {"count": beat}) is lost
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: state(process.pid) != "T")
    assert watch.is_lost(0, worker, {"count": 2}) is False
    process.kill()
    process.join(DEADLINE)
    assert is_dead(worker) is True


# --- the journal


def stopping(path, when, done):
    """Writes to a journal and is stopped: before, in the middle of or after its write."""
    append = journal._write

    def stopped(file, data):
        if when == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        if when == "middle":
            file.seek(0, os.SEEK_END)
            file.write(data[:20])
            os.kill(os.getpid(), signal.SIGSTOP)
        append(file, data)
        journal._write = append
        if when == "after":
            os.kill(os.getpid(), signal.SIGSTOP)

    opened = JournalStorage(journal.Journal(path))
    journal._write = stopped
    opened.set_study_user_attr(0, "theirs", 1)
    done.set()


@needs_flock
@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("goes_on", ["late", "at once", "never"])
def test_a_process_that_was_stopped_while_it_wrote(tmp_path, monkeypatch, when, goes_on):
    """It goes on after the journal was taken over, between the copy and its taking the old one's place, or never."""
    path = tmp_path / "journal.log"
    opened = JournalStorage(journal.Journal(path))
    opened.create_new_study([StudyDirection.MAXIMIZE], "one")
    reader = JournalStorage(journal.Journal(path))
    done = CONTEXT.Event()
    other = CONTEXT.Process(target=stopping, args=(path, when, done))
    other.start()
    wait_until(lambda: state(other.pid) == "T")
    monkeypatch.setattr(alive, "GRACE", 0.3)
    replace = type(path).replace

    def in_between(self, target):
        os.kill(other.pid, signal.SIGCONT)
        assert done.wait(DEADLINE)
        return replace(self, target)

    if goes_on == "at once":
        monkeypatch.setattr(type(path), "replace", in_between)
    opened.set_study_user_attr(0, "ours", 2)
    monkeypatch.undo()
    if goes_on == "late":
        os.kill(other.pid, signal.SIGCONT)
    if goes_on == "never":
        other.kill()
    other.join(DEADLINE)
    assert other.exitcode == (0 if goes_on != "never" else -signal.SIGKILL)
    expected = {"ours": 2, **({} if goes_on == "never" and when != "after" else {"theirs": 1})}
    for storage in (opened, reader, JournalStorage(journal.Journal(path))):
        assert storage.get_study_user_attrs(0) == expected
    assert [json.loads(line) for line in path.read_text().splitlines()]
    assert [file.name for file in tmp_path.iterdir()] == ["journal.log"]


@needs_flock
def test_a_journal_that_cannot_be_had_is_an_error_in_the_end(tmp_path, monkeypatch):
    path = tmp_path / "journal.log"
    opened = JournalStorage(journal.Journal(path))
    monkeypatch.setattr(alive, "GRACE", 0.05)
    monkeypatch.setattr(journal.Journal, "_take_over", lambda self, old: None)
    with path.open("rb") as file:
        files.fcntl.flock(file, files.fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"has been locked for \d+ seconds, by a process that may have been stopped"):
            opened.create_new_study([StudyDirection.MAXIMIZE], "one")
    assert opened.create_new_study([StudyDirection.MAXIMIZE], "one") == 0


@needs_flock
def test_a_lock_lets_one_in_and_others_when_they_waited_long_enough(tmp_path):
    path = tmp_path / "lock"
    with files.held(path, 0.0) as first, files.held(path, 0.1) as second:
        assert (first, second) == (True, False)
        assert path.exists()
    assert not path.exists()
    with pytest.raises(KeyError), files.held(path, 0.0):
        raise KeyError
    assert not path.exists()


# --- faults


@pytest.fixture
def begun(tmp_path):
    spec, points = plan(FILE, "quick", ["p=0"], seeds="1")
    with open_storage(tmp_path / "journal.log", create=True) as storage:
        found = Study.begin(storage, "tiny", spec)
        found.add(spec, points)
        yield found


def _crash(home, number):
    with remains.Faults(home):
        signal.raise_signal(number)


def crash(home, number, times=1):
    """Has processes crash that work at a trial; how they ended."""
    ended = []
    for _ in range(times):
        process = CONTEXT.Process(target=_crash, args=(home, number))
        process.start()
        process.join(DEADLINE)
        ended.append(process.exitcode)
    return ended


def test_a_process_leaves_a_note_of_its_fault(tmp_path):
    home = tmp_path / "trial"
    assert crash(home, signal.SIGSEGV) + crash(home, signal.SIGABRT) == [-signal.SIGSEGV, -signal.SIGABRT]
    assert crash(home, signal.SIGKILL) + crash(home, signal.SIGTERM) == [-signal.SIGKILL, -signal.SIGTERM]
    with remains.Faults(home) as faults:
        assert faults.notes == ["Segmentation fault", "Aborted"]
        assert faults.verdict() is None
        faults.forgive()
    assert list(home.iterdir()) == []


def test_a_trial_that_crashes_its_workers_fails_and_can_be_retried(begun, tmp_path):
    key = begun.records()[0].key
    home = tmp_path / key
    assert crash(home, signal.SIGSEGV, remains.STRIKES) == [-signal.SIGSEGV] * remains.STRIKES
    work(begun, tmp_path, OPTIONS)
    (record,) = begun.records()
    assert record.state == "failed"
    assert record.reason == (
        f"its worker crashed 4 times before it got any further: Segmentation fault; see {home / 'crashes.txt'}"
    )
    assert (home / "crashes.txt").read_text().count("Fatal Python error: Segmentation fault") == 4
    work(begun, tmp_path, OPTIONS)
    assert begun.records()[0].state == "failed"
    assert begun.retry() == 1
    work(begun, tmp_path, OPTIONS)
    assert begun.records()[0].state == "complete"
    assert {path.name for path in home.iterdir()} == {"log.jsonl", "result.json", "crashes.txt"}


def test_an_epoch_takes_the_strikes_away(begun, tmp_path):
    home = tmp_path / begun.records()[0].key
    crash(home, signal.SIGBUS, remains.STRIKES - 1)

    def look(key, row):
        if row is not None:
            assert (home / "crash.txt").read_bytes() == b""

    work(begun, tmp_path, OPTIONS, on_progress=look)
    assert begun.records()[0].state == "complete"
    assert {path.name for path in home.iterdir()} == {"log.jsonl", "result.json"}


def test_workers_that_were_killed_or_preempted_are_no_strikes(tmp_path):
    """Real ones, more often than a trial may crash."""
    env = {"TINY_LOG": tmp_path / "noted.txt", "TINY_HOLD": tmp_path}
    args = ("run", FILE, "--no-report", "--set", "p=0", "--seeds", "1", "--folder", tmp_path / "runs", "--workers", "1")
    (tmp_path / "hold").touch()
    for number in [signal.SIGKILL] * (remains.STRIKES + 1) + [signal.SIGTERM] * 2:
        (tmp_path / "noted.txt").unlink(missing_ok=True)
        command = Command(*args, output=tmp_path / "output.txt", env=env)
        wait_until(lambda: noted(tmp_path / "noted.txt", "begin") == {(0.0, 0): 1})
        command.signal(number)
        command.process.join(DEADLINE)
        assert command.process.exitcode in (-signal.SIGKILL, 130)
    (tmp_path / "hold").unlink()
    code, output = Command(*args, output=tmp_path / "last.txt", env=env).wait()
    assert code == 0, output


def test_someone_elses_faulthandler_is_left_alone(tmp_path):
    before = faulthandler.is_enabled()
    with (tmp_path / "theirs").open("w") as file:
        faulthandler.enable(file)
        with remains.Faults(tmp_path / "trial"):
            assert faulthandler.is_enabled()
        assert faulthandler.is_enabled()
        faulthandler.disable()
    assert list((tmp_path / "trial").iterdir()) == []
    if before:
        faulthandler.enable(sys.__stderr__)


def test_a_trial_that_ends_its_process_fails(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(find_task(FILE), "data", lambda self, device: sys.exit(3))
    work(begun, tmp_path, OPTIONS)
    assert begun.records()[0].reason == "SystemExit: 3"


# --- files


def test_files_of_workers_that_were_killed_are_cleared(begun, tmp_path):
    key = begun.records()[0].key
    home = tmp_path / key
    home.mkdir()
    for name in (".checkpoint.pt.123.new", ".log.jsonl.123.new", ".result.json.123.new"):
        (home / name).write_text("half")
    work(begun, tmp_path, OPTIONS)
    assert {path.name for path in home.iterdir()} == {"log.jsonl", "result.json"}
    whole = (home / "log.jsonl").read_text()
    # What a worker leaves that went on with it after another had finished it, and was killed then.
    (home / "checkpoint.pt").write_bytes(b"old")
    (home / ".checkpoint.pt.9.new").write_bytes(b"older")
    (home / "log.jsonl").write_text(whole.splitlines(keepends=True)[0])
    work(begun, tmp_path, OPTIONS)
    assert {path.name for path in home.iterdir()} == {"log.jsonl", "result.json"}
    assert (home / "log.jsonl").read_text() == whole


def test_what_a_trial_needs_is_left(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"state")
    (tmp_path / "log.jsonl").write_text("{}\n")
    remains.clear(tmp_path, "key")
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "result.json").write_text('{"key": "ano')  # what cannot be read is no result
    remains.clear(tmp_path, "key")
    assert (tmp_path / "checkpoint.pt").exists()
    checkpoint.write_result(tmp_path / "result.json", {"key": "another"})
    remains.clear(tmp_path, "key")
    assert (tmp_path / "checkpoint.pt").exists()
    remains.sweep(tmp_path.parent, ["not there", tmp_path.name])  # complete, on another machine
    assert not (tmp_path / "checkpoint.pt").exists()
    remains.clear(tmp_path / "nowhere", "key")


def test_told_is_what_the_log_says(begun, tmp_path):
    work(begun, tmp_path, OPTIONS)
    home = tmp_path / begun.records()[0].key
    result = json.loads((home / "result.json").read_text())
    rows = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    assert rows == [told(row, 3) for row in result["curve"]]
    assert rows[-1]["left"] == 0


def test_errors_in_a_folder_that_is_not_its_own_any_more_are_of_no_concern(begun, tmp_path):
    """Somebody has finished the trial and cleared its folder while this worker was writing."""
    taken = []

    def take(key, row):
        if row is not None and not taken:
            taken.append(begun.close(0, "lost"))
            raise FileNotFoundError(".checkpoint.pt.1.new")

    work(begun, tmp_path, OPTIONS, on_progress=take)
    assert taken == [True]
    assert begun.records()[0].state == "complete"
    assert begun.trial(0).user_attrs["reason"] == "lost"


def test_an_error_of_the_disk_is_still_one(begun, tmp_path):
    def broken(key, row):
        if row is not None:
            raise FileNotFoundError(".checkpoint.pt.1.new")

    with pytest.raises(FileNotFoundError):
        work(begun, tmp_path, OPTIONS, on_progress=broken)
    assert begun.records()[0].state == "waiting"


# --- signals


def test_what_goes_wrong_on_the_way_out_is_no_news():
    hurried = []

    def fail(asked):
        with Interrupts(lambda: hurried.append(True)):
            if asked:
                signal.raise_signal(signal.SIGINT)
            raise OSError("the database is away")

    with pytest.raises(KeyboardInterrupt):
        fail(asked=True)
    assert hurried == [True]
    with pytest.raises(OSError, match="away"):
        fail(asked=False)


def test_identities_differ():
    assert identity()["id"] != identity()["id"]
    assert is_dead(identity()) is False
