"""Plans, storages and the rules by which no trial is lost or run twice, in one process and on both kinds of storage."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("optuna", reason="Optuna is not installed")

import optuna
from optuna.storages import JournalStorage
from optuna.study import StudyDirection
from sqlalchemy.exc import SQLAlchemyError

from backdrop._core import files
from backdrop._core.files import locked
from backdrop.experiments.logs import log_event
from backdrop.experiments.steps import RecordingError
from backdrop.experiments.study import alive, journal, study, tune
from backdrop.experiments.study.alive import Watch, identity, is_dead
from backdrop.experiments.study.plan import again, check_extends, plan
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.study.worker import work
from backdrop.experiments.tasks import find_task
from backdrop.experiments.train import Options
from postgres import database, server  # noqa: F401
from spawned import CONTEXT, DEADLINE
from tiny_task import FILE, noted

OPTIONS = Options(accelerator="cpu")


# --- plans


def configurations(points):
    return [(point["p"], point["width"], point["epochs"], point["seed"]) for point in points]


def test_a_plan_is_the_grid_seed_by_seed():
    spec, points = plan(FILE, "paper", seeds="2")
    grid = [(0.0, 4), (0.0, 8), (0.5, 4), (0.5, 8)]
    assert configurations(points) == [(p, width, 4, seed) for seed in (0, 1) for p, width in grid]
    assert spec.varied == ("seed", "p", "width")
    assert spec.base["epochs"] == 4
    assert not {"p", "width", "seed"} & spec.base.keys()
    assert spec.name == "tiny-paper"


def test_overrides_replace_an_axis_and_duplicates_drop_out():
    spec, points = plan(FILE, "paper", ["p=0.25,0.75", "epochs=2"], seeds="3,")
    assert configurations(points) == [(p, width, 2, 3) for width in (4, 8) for p in (0.25, 0.75)]
    assert spec.base["epochs"] == 2
    spec, points = plan(FILE, "paper", ["width=16"], seeds="1")
    assert configurations(points) == [(0.0, 16, 4, 0), (0.5, 16, 4, 0)]
    assert spec.base["width"] == 16  # one value for all is no axis


@pytest.mark.parametrize(
    ("overrides", "seeds", "message"),
    [
        (["epoch=3"], None, "there is no setting 'epoch'; did you mean 'epochs'"),
        (["seed=3"], None, "seeds are given with --seeds"),
        (["p=2"], None, "setting p: "),
        (["p"], None, "key=value"),
        ([], "0", "seeds have to be how many"),
        ([], "a,b", "seeds have to be how many"),
        ([], "-1", "seeds have to be how many"),
    ],
)
def test_plans_that_are_refused(overrides, seeds, message):
    with pytest.raises(ValueError, match=message):
        plan(FILE, "quick", overrides, seeds=seeds)


def test_a_preset_that_is_not_there():
    with pytest.raises(ValueError, match="one of quick, paper for tiny, but got 'papr'; did you mean 'paper'"):
        plan(FILE, "papr")


def test_the_command_to_make_a_study_again_makes_the_same_points(tmp_path):
    for args in (
        {},
        {"overrides": ["p=0.25", "epochs=5"], "seeds": "7,"},
        {"overrides": ["width=4,16"], "seeds": "1,3"},
    ):
        spec, points = plan(FILE, "paper", **args)
        records = [study.Record(spec.key(point), "complete", point) for point in points]
        for task in (find_task(FILE), None):  # without the presets of the task, all settings are said
            words = again("tiny-paper", spec, records, task).split()
            sets = [word for word, before in zip(words[1:], words, strict=False) if before == "--set"]
            seeds = words[words.index("--seeds") + 1] if "--seeds" in words else None
            other, same = plan(FILE, "paper", sets, seeds=seeds)
            assert {spec.key(point) for point in same} == {spec.key(point) for point in points}
            assert other.base == spec.base
    # What is skipped is said even where it is as in the preset: on a GPU, a command that does not say it skips.
    assert (
        again("tiny-paper", *_planned("paper"), find_task(FILE)) == f"backdrop run {FILE} --preset paper --set skip=off"
    )
    assert again("tiny-quick", *_planned("quick"), find_task(FILE)) == f"backdrop run {FILE} --preset quick"


def _planned(preset):
    spec, points = plan(FILE, preset)
    return spec, [study.Record(spec.key(point), "complete", point) for point in points]


# --- storages


@pytest.fixture(params=["journal", "postgresql"])
def storage(request, tmp_path):
    place = tmp_path / "journal.log" if request.param == "journal" else request.getfixturevalue("database")
    with open_storage(place, create=True) as opened:
        yield opened


@pytest.mark.parametrize("torn", [b'{"op_code": 4, "wor', b"x" * (journal.CHUNK + 5), b"{}"])
def test_a_torn_last_line_never_happened(tmp_path, torn):
    path = tmp_path / "journal.log"
    before = JournalStorage(journal.Journal(path))
    number = before.create_new_study([StudyDirection.MAXIMIZE], "one")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    reader = JournalStorage(journal.Journal(path))
    assert [found.study_name for found in reader.get_all_studies()] == ["one"]
    assert path.read_bytes() == whole + torn  # who only reads, changes nothing
    reader.set_study_user_attr(number, "a", 1)
    assert path.read_bytes().startswith(whole + b'{"op_code":2')
    for opened in (before, reader, JournalStorage(journal.Journal(path))):
        assert opened.get_study_user_attrs(number) == {"a": 1}


def test_a_write_that_fails_leaves_no_trace(tmp_path, monkeypatch):
    path = tmp_path / "journal.log"
    opened = JournalStorage(journal.Journal(path))
    number = opened.create_new_study([StudyDirection.MAXIMIZE], "one")
    whole = path.read_bytes()

    class Full:
        """A disk that takes half a line."""

        def __init__(self, file):
            self.file, self.left = file, 10

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            written, self.left = self.file.write(data[: self.left]), 0
            return written

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    original = type(path).open
    monkeypatch.setattr(type(path), "open", lambda self, *args, **kwargs: Full(original(self, *args, **kwargs)))
    with pytest.raises(OSError, match="No space left"):
        opened.set_study_user_attr(number, "a", 1)
    monkeypatch.undo()
    assert path.read_bytes() == whole
    opened.set_study_user_attr(number, "a", 2)
    assert JournalStorage(journal.Journal(path)).get_study_user_attrs(number) == {"a": 2}


def test_a_lock_ends_with_its_process(tmp_path):
    path = tmp_path / "journal.log"
    opened = JournalStorage(journal.Journal(path))
    ready = CONTEXT.Event()
    holder = CONTEXT.Process(target=_hold_lock, args=(path, ready))
    holder.start()
    assert ready.wait(DEADLINE)
    holder.kill()
    holder.join()
    assert opened.create_new_study([StudyDirection.MAXIMIZE], "one") == 0


def _hold_lock(path, ready):
    kept = journal.Journal(path)
    with kept._locked():
        ready.set()
        CONTEXT.Event().wait()


def test_a_system_without_such_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    path = tmp_path / "journal.log"
    opened = JournalStorage(journal.Journal(path))
    assert opened.create_new_study([StudyDirection.MAXIMIZE], "one") == 0
    assert [file.name for file in tmp_path.iterdir()] == ["journal.log"]  # its lock is gone


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("sqlite:///studies.db", "cannot be SQLite: Optuna advises against it"),
        ("mysql://root:s3cret@host/db", "has to be the path of a journal file or of the form postgresql://"),
        ("postgresql://u:s3cret@127.0.0.1:port/db", "has to be the path of a journal file or of the form"),
        ("postgresql://u:s3cret@127.0.0.1:1/db", "postgresql://u@127.0.0.1:1/db cannot be used: .*refused"),
        ("postgresql://u@127.0.0.1:1/db?password=s3cret", "postgresql://u@127.0.0.1:1/db cannot be used: .*refused"),
        ("postgresql+psycopg3://u:s3cret@127.0.0.1:1/db", "cannot be used: "),
    ],
)
def test_storages_that_are_refused(place, message):
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with pytest.raises((OSError, ValueError), match=message) as caught, open_storage(place):
        pass
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_driver_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with (
        pytest.raises(OSError, match=r"comes with: pip install 'psycopg\[binary\]'") as caught,
        open_storage("postgresql://u:s3cret@127.0.0.1:1/db"),
    ):
        pass
    assert "s3cret" not in str(caught.value)


def test_a_wrong_password_is_not_told(database):  # noqa: F811
    place = database.replace("s3cret", "wr0ng")
    with pytest.raises(OSError, match="password authentication failed") as caught, open_storage(place):
        pass
    assert "wr0ng" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_database_says_later_is_one_line_without_the_password(database):  # noqa: F811
    with (
        pytest.raises(OSError, match=r"tester@127.0.0.1:\d+/\w+ cannot be used: tester:\*\*\* is gone$"),
        open_storage(database),
    ):
        raise SQLAlchemyError("tester:s3cret\nis gone")


def test_a_storage_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no study in"), open_storage(tmp_path / "nothing"):
        pass
    assert not (tmp_path / "nothing").exists()


# --- the rules


@pytest.fixture
def begun(storage):
    """A study of two points."""
    spec, points = plan(FILE, "quick", seeds="1")
    found = Study.begin(storage, "tiny", spec)
    found.add(spec, points)
    return found


def states(found):
    return [record.state for record in found.records()]


def reasons(found):
    return [trial.user_attrs.get("reason") for trial in found.optuna.trials]


@pytest.fixture(scope="module")
def dead():
    """A worker whose process has ended."""
    code = "import json; from backdrop.experiments.study.alive import identity; print(json.dumps(identity()))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


FOREIGN = {"host": "elsewhere", "machine": "another", "pid": os.getpid(), "started": "1", "id": "foreign"}


def test_a_trial_is_claimed_once(begun):
    others = Study(begun.storage, "tiny")
    assert [begun.claim(identity()), others.claim(identity()), begun.claim(identity())] == [0, 1, None]
    assert states(begun) == ["running", "running"]


def test_what_is_there_is_not_enqueued_again(begun):
    spec, points = plan(FILE, "quick", seeds="2")
    assert begun.add(spec, points) == 2
    assert begun.add(spec, points) == 0
    assert len(begun.records()) == 4
    assert [trial.params["seed"] for trial in begun.optuna.trials] == [0, 0, 1, 1]
    assert [trial.params["p"] for trial in begun.optuna.trials] == [0.0, 0.5] * 2


def test_duplicates_are_closed_and_not_shown(begun):
    first = begun.optuna.trials[0]
    begun.enqueue(first.user_attrs["key"], first.user_attrs["settings"], first.params)
    assert len(begun.records()) == 2
    assert [begun.claim(identity()) for _ in range(3)] == [0, 1, None]
    assert reasons(begun) == [None, None, "duplicate of 0"]
    assert states(begun) == ["running", "running"]
    begun.tidy(Watch())
    assert len(begun.optuna.trials) == 3


def test_duplicates_are_closed_when_nothing_else_is_left(begun, dead, tmp_path):
    """By a process that was stopped while it enqueued, say, and goes on when the others are done."""
    work(begun, tmp_path, OPTIONS)
    assert not begun.is_unfinished()
    for trial in begun.optuna.trials:
        begun.enqueue(trial.user_attrs["key"], trial.user_attrs["settings"], trial.params)
    begun._backend.set_trial_state_values(begun.trial_id(3), optuna.trial.TrialState.RUNNING)
    begun.store(3, **{f"claim {dead['id']}": dead})  # who died before it could close it
    assert states(begun) == ["complete", "complete"]
    assert begun.is_unfinished()
    work(begun, tmp_path, OPTIONS)
    assert not begun.is_unfinished()
    assert reasons(begun) == [None, None, "duplicate of 0", "lost"]


def test_a_duplicate_counts_when_the_first_was_given_back(begun, dead):
    first = begun.optuna.trials[0]
    begun.claim(dead)
    begun.enqueue(first.user_attrs["key"], first.user_attrs["settings"], first.params)
    begun.tidy(Watch())
    assert reasons(begun) == ["lost", None, None]  # there is one already, so none is enqueued
    assert [begun.claim(identity()) for _ in range(3)] == [1, 2, None]


def test_the_trial_of_a_dead_worker_is_enqueued_again(begun, dead):
    assert is_dead(dead) is True
    assert is_dead(identity()) is False
    assert is_dead({**identity(), "started": "1"}) is True  # the number of a process, used again
    begun.claim(dead)
    begun.claim(identity())
    begun.tidy(Watch())
    assert states(begun) == ["waiting", "running"]
    assert reasons(begun) == ["lost", None, None]
    again = begun.claim(identity())
    assert again == 2
    assert begun.trial(2).user_attrs["settings"] == begun.trial(0).user_attrs["settings"]
    assert begun.trial(2).params == begun.trial(0).params


def test_a_worker_that_dies_with_its_claim_is_known(begun, dead, monkeypatch):
    monkeypatch.setattr(begun, "store", lambda number, **values: None if "worker" in values else real(number, **values))
    real = Study.store.__get__(begun)
    begun.claim(dead)
    assert "worker" not in begun.trial(0).user_attrs
    begun.tidy(Watch())
    assert states(begun) == ["waiting", "waiting"]


def test_dying_between_closing_and_enqueuing_loses_nothing(begun, dead):
    begun.close(begun.claim(dead), "lost")
    assert states(begun) == ["waiting", "waiting"]
    Study(begun.storage, "tiny").tidy(Watch())
    assert [trial.state.name for trial in begun.optuna.trials] == ["FAIL", "WAITING", "WAITING"]


def test_a_worker_elsewhere_is_dead_after_a_while_without_a_sign(begun):
    now = [0.0]
    watch = Watch(clock=lambda: now[0])
    number = begun.claim(FOREIGN)
    for moment, beat in ((0, None), (59, None), (61 - 1, 1), (100, 1), (120, 1)):
        now[0] = moment
        if beat:
            begun.store(number, beat={"count": beat})
        begun.tidy(watch)
        assert states(begun)[0] == "running"
    now[0] = 121.0
    begun.tidy(watch)
    assert states(begun)[0] == "waiting"
    assert reasons(begun)[0] == "lost"


@pytest.fixture
def single(storage):
    """A study of one point."""
    spec, points = plan(FILE, "quick", ["p=0"], seeds="1")
    found = Study.begin(storage, "single", spec)
    found.add(spec, points)
    return found


def test_a_trial_that_loses_its_worker_often_is_given_back_each_time(single, dead):
    for _ in range(20):
        assert states(single) == ["waiting"]
        single.store(single.claim(dead), beat={"count": 1, "epoch": 1})
        single.tidy(Watch())
    assert reasons(single) == ["lost"] * 20 + [None]


def test_a_finished_trial_is_never_changed(begun):
    number = begun.claim(identity())
    assert begun.finish(number, "COMPLETE", 1.0, metrics={"score": 1.0})
    assert not begun.finish(number, "COMPLETE", 2.0, metrics={"score": 2.0})
    assert not begun.close(number, "lost")
    assert begun.records()[0].metrics == {"score": 1.0}
    assert begun.optuna.best_value == 1.0


def test_failed_trials_are_run_again_only_if_asked(begun):
    begun.finish(begun.claim(identity()), "FAIL", reason="bad")
    begun.tidy(Watch())
    assert states(begun) == ["failed", "waiting"]
    assert begun.records()[0].reason == "bad"
    assert begun.retry() == 1
    assert begun.retry() == 0
    assert states(begun) == ["waiting", "waiting"]
    begun.finish(begun.claim(identity()), "COMPLETE", 0.0)
    assert begun.claim(identity()) == 2
    # One that was enqueued before the failure is a duplicate even of a failed trial.
    settings = begun.trial(2).user_attrs["settings"]
    begun.enqueue(begun.trial(2).user_attrs["key"], settings, {}, after=0)
    begun.finish(2, "FAIL", reason="bad again")
    assert begun.claim(identity()) is None
    assert reasons(begun)[-1] == "duplicate of 2"
    assert begun.records()[0].reason == "bad again"


def test_a_study_takes_more_points_but_no_other_settings(begun):
    with pytest.raises(ValueError, match=r"epochs is 3 there and 5 here; lr is 0.001 there and 0.5,0.1 here.*--name"):
        begun.add(*plan(FILE, "quick", ["epochs=5", "lr=0.5,0.1"]))
    with pytest.raises(ValueError, match=r"of another kind \(grid, task tiny\)"):
        check_extends(begun.spec, "tiny", tune.plan_search(FILE, "quick", []), [])
    assert begun.add(*plan(FILE, "quick", ["p=0.25"], seeds="1")) == 1
    assert len(begun.records()) == 3


def test_a_study_that_is_not_there(begun):
    with pytest.raises(ValueError, match=r"there is no study 'tini' in .*; did you mean 'tiny'.*; there are tiny"):
        Study(begun.storage, "tini")


def test_a_study_of_others_is_left_alone(storage):
    spec, _ = plan(FILE, "quick")
    optuna.create_study(storage=storage.backend, study_name="theirs").add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(ValueError, match=r"the study theirs in .* is not one of ours; choose another --name"):
        Study.begin(storage, "theirs", spec)
    assert study.studies(storage) == []


def test_work_goes_on_while_something_was_given_back(begun, tmp_path, monkeypatch):
    """Another worker closes a trial and dies before it enqueues it again, just when this one finds nothing to do."""
    claim, closed = begun.claim, []

    def last_moment(worker):
        number = claim(worker)
        if number is None and not closed:
            closed.append(begun.close(lost, "lost"))
        return number

    lost = begun.claim(FOREIGN)
    monkeypatch.setattr(begun, "claim", last_moment)
    work(begun, tmp_path, OPTIONS)
    assert closed == [True]
    assert states(begun) == ["complete", "complete"]


def test_curves_are_thinned():
    curve = [{"epoch": i, "loss": 0.1, **({"score": 1.0} if i % 100 == 0 else {})} for i in range(1, 1001)]
    thin = study._thinned(curve, "score")
    assert len(thin) == study.CURVE
    assert sum("score" in row for row in thin) == 10
    assert thin[-1] == curve[-1]
    assert thin == sorted(thin, key=lambda row: row["epoch"])
    gaps = [b["epoch"] - a["epoch"] for a, b in itertools.pairwise(thin)]
    assert max(gaps) < 12
    every = [{**row, "score": 1.0} for row in curve]
    assert len(study._thinned(every, "score")) == study.CURVE
    assert study._thinned(curve[:200], "score") == curve[:200]


# --- work


@pytest.fixture
def note(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "noted.txt"))
    return tmp_path / "noted.txt"


def test_trials_that_fail_do_not_stop_the_others(storage, tmp_path, note):
    spec, points = plan(FILE, "quick", ["bad_seed=1", "broken_seed=2"], seeds="4")
    other = Study.begin(storage, "failing", spec)
    other.add(spec, points)
    work(other, tmp_path, OPTIONS)
    assert states(other) == ["complete"] * 2 + ["failed"] * 4 + ["complete"] * 2
    why = [record.reason for record in other.records()]
    assert why[2].startswith("the loss was nan in epoch 1 of 3")
    assert why[4] == "ValueError: this seed is broken"
    work(other, tmp_path, OPTIONS)
    assert set(noted(note, "begin").values()) == {1}
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("failed") == 4
    assert [event["event"] for event in events].count("finished") == 4
    assert [event["event"] for event in events].count("epoch") == 12


def test_a_worker_whose_trial_was_taken_records_nothing(begun, tmp_path, note):
    other, taken = Study(begun.storage, "tiny"), []

    def take(key, row):
        if row is not None and not taken:
            taken.append(other.close(0, "lost"))

    work(begun, tmp_path, OPTIONS, on_progress=take)
    assert taken == [True]
    assert [trial.state.name for trial in begun.optuna.trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert "metrics" not in begun.trial(0).user_attrs
    assert states(begun) == ["complete", "complete"]
    assert noted(note, "begin") == {(0.0, 0): 2, (0.5, 0): 1}
    assert '"taken by another worker"' in (tmp_path / "log.jsonl").read_text()


def test_signs_of_life_come_with_progress(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "HEARTBEAT", 0.01)
    seen = []

    def look(key, row):
        if row is not None and row["epoch"] == 2 and not seen:
            before = begun.trial(0).user_attrs["beat"]
            end = alive.time.monotonic() + DEADLINE
            while begun.trial(0).user_attrs["beat"]["count"] < before["count"] + 2:
                assert alive.time.monotonic() < end
            seen.append(begun.records()[0])

    work(begun, tmp_path, OPTIONS, on_progress=look, wait=False)
    assert seen[0].state == "running"
    assert seen[0].progress.keys() >= {"epoch", "epochs", "loss", "score", "left"}
    assert seen[0].progress["epoch"] == 1
    worker = begun.trial(0).user_attrs["worker"]
    assert worker["pid"] == os.getpid()
    assert is_dead(worker) is False


@pytest.mark.parametrize("error", [OSError, RecordingError])
def test_an_error_of_this_machine_stops_the_worker_and_not_the_trial(begun, tmp_path, monkeypatch, error):
    def data(self, device):
        raise error("it cannot be done here")

    monkeypatch.setattr(find_task(FILE), "data", data)
    with pytest.raises(error, match="it cannot be done here"):
        work(begun, tmp_path, OPTIONS)
    assert reasons(begun)[0] == "interrupted"
    assert states(begun) == ["waiting", "waiting"]


def test_an_interrupt_within_a_write_is_no_failure(begun, tmp_path, monkeypatch):
    def save(state, file):
        file.write(b"half a checkpoint")
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")  # as torch's writer does

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        work(begun, tmp_path, OPTIONS)
    assert states(begun) == ["waiting", "waiting"]
    assert not list(tmp_path.rglob("*.pt*"))


def test_a_metric_that_is_no_number_is_a_failure(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(find_task(FILE), "evaluate", lambda self, outputs, labels: {"score": float("nan")})
    work(begun, tmp_path, OPTIONS)
    assert [record.reason for record in begun.records()] == ["score was nan at the end"] * 2


def test_records_hold_what_fit_returned(begun, tmp_path):
    work(begun, tmp_path, OPTIONS)
    for record in begun.records():
        result = json.loads((tmp_path / record.key / "result.json").read_text())
        for name in ("metrics", "curve", "seconds", "machine", "settings"):
            assert getattr(record, name) == result[name]
        assert record.machine["threads"] == str(begun.spec.threads)


def lines_of(folder):
    """What the log of a study says; each line has to be an object, with the numbers that JSON has."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / "log.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    assert all(isinstance(line, dict) for line in found)
    return found


def test_lines_of_the_log_stay_whole_after_a_full_disk(tmp_path):
    log_event(tmp_path, "one", value=float("nan"), metrics={"loss": float("inf"), "parts": [float("-inf"), 1.5]})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"time": 1, "ev')
    log_event(tmp_path, "two")
    first, second = lines_of(tmp_path)
    assert (first["value"], first["metrics"]) == (None, {"loss": None, "parts": [None, 1.5]})
    assert second["event"] == "two"


def test_a_line_that_cannot_be_written_whole_is_not_there(tmp_path):
    resource = pytest.importorskip("resource")
    log_event(tmp_path, "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log.jsonl").stat().st_size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            log_event(tmp_path, "two", text="x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [line["event"] for line in lines_of(tmp_path)] == ["one"]


def _log_many(folder, number):
    for i in range(150):
        log_event(folder, "many", worker=number, i=i, text="x" * (i * 37 % 5000))
        if i % 50 == 49:  # a worker is killed within a line
            with (folder / "log.jsonl").open("ab") as file, locked(file):
                file.write(b'{"torn": ')
                file.flush()


def test_lines_of_many_workers_do_not_mix(tmp_path):
    workers = [CONTEXT.Process(target=_log_many, args=(tmp_path, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE)
    log_event(tmp_path, "last")
    found = lines_of(tmp_path)
    assert sorted((x["worker"], x["i"]) for x in found[:-1]) == [(n, i) for n in range(4) for i in range(150)]


# --- tune


def searched(storage, tmp_path, trials, overrides=("epochs=6", "evaluations=6")):
    spec = tune.plan_search(FILE, "quick", list(overrides))
    found = Study.begin(storage, "tiny-tune", spec)
    tune.add_slots(found, spec, trials)
    work(found, tmp_path, OPTIONS)
    return found


def test_tune_finds_the_neighbourhood_of_a_planted_optimum(tmp_path):
    with open_storage(tmp_path, create=True) as storage:
        found = searched(storage, tmp_path, 40)
        records = found.records()
        assert len(records) == 40
        counted = {state: states(found).count(state) for state in ("complete", "pruned")}
        assert counted["complete"] + counted["pruned"] == 40
        assert counted["pruned"] >= 5
        best = tune.best(found.spec, records)
        assert 0.05 < 1 - best[0].settings["p"] < 0.2  # planted: 0.1, searched: 0.001 to 1
        assert [r.metrics["score"] for r in best] == sorted((r.metrics["score"] for r in best), reverse=True)
        first = records[0].settings
        assert (first["p"], first["lr"], first["weight_decay"]) == (0.0, 1e-3, 0.01)
        assert {record.settings["judge"] for record in records} == {"validation"}
        for record in records:
            assert 1e-4 <= record.settings["lr"] <= 1e-2
            assert 1e-5 <= record.settings["weight_decay"] <= 0.3
        pruned = next(record for record in records if record.state == "pruned")
        assert "worse than the median" in pruned.reason
        assert 2 <= len(pruned.curve) < 6  # not in the first third
        tune.add_slots(found, found.spec, 40)
        assert len(found.optuna.trials) == 40


def test_a_killed_slot_keeps_its_settings(storage, dead, tmp_path):
    spec = tune.plan_search(FILE, "quick", [])
    found = Study.begin(storage, "tiny-tune", spec)
    tune.add_slots(found, spec, 2)
    assert [found.claim(dead), found.claim(dead)] == [0, 1]
    tune.choose(found, 0, tune.ask(found, 0))
    chosen = tune.choose(found, 1, tune.ask(found, 1))
    assert chosen["p"] > 0
    work(found, tmp_path, OPTIONS)
    slots = {record.key: record for record in found.records()}
    assert slots.keys() == {"slot-0", "slot-1"}
    assert {record.state for record in slots.values()} == {"complete"}
    assert slots["slot-1"].settings == chosen
    assert reasons(found)[:2] == ["lost", "lost"]


def test_the_same_search_whoever_runs_it(tmp_path):
    chosen = []
    for name in ("a", "b"):
        with open_storage(tmp_path / name, create=True) as storage:
            chosen.append([record.settings for record in searched(storage, tmp_path / name, 12).records()])
    assert chosen[0] == chosen[1]
    assert len({settings["p"] for settings in chosen[0]}) == 12


@pytest.mark.parametrize("overrides", [["p=0.5"], ["epochs=2,3"]])
def test_what_tune_searches_for_cannot_be_set(overrides):
    with pytest.raises(ValueError, match="cannot be set so: tune looks for the best p, lr and weight_decay"):
        tune.plan_search(FILE, "quick", overrides)


def test_a_search_around_a_given_learning_rate():
    spec = tune.plan_search(FILE, "quick", ["lr=0.5"])
    assert tune._spaces(spec)["lr"] == pytest.approx((0.05, 5.0))
    assert tune._spaces(spec)["keep p"] == (1 / 1000, 1.0)


def test_a_search_looks_often_enough_to_prune():
    assert tune.plan_search("gp", "quick", []).base["evaluations"] == 5  # once in the preset
    assert tune.plan_search("cifar10", "paper", []).base["evaluations"] == 10
    assert tune.plan_search("gp", "quick", ["evaluations=2"]).base["evaluations"] == 2


def test_specifications_survive_their_storage(begun):
    stored = begun.storage.backend.get_study_user_attrs(begun._id)["spec"]
    assert begun.spec == plan(FILE, "quick", seeds="1")[0]
    assert dataclasses.asdict(begun.spec)["base"] == stored["base"]
    assert stored["backdrop"]
