"""Databases that restart, stop answering or are away, and processes that are stopped in the middle of a change."""

import contextlib
import signal
import threading
import time

import pytest

pytest.importorskip("optuna", reason="Optuna is not installed")
pytest.importorskip("psycopg", reason="psycopg is not installed")

import psycopg
import sqlalchemy
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DataError, OperationalError

from backdrop.experiments.study import database as patient
from backdrop.experiments.study.plan import plan
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from postgres import database, server  # noqa: F401
from spawned import Command, wait_until
from tiny_task import FILE


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    for name, seconds in {"ANSWER": 1.0, "LAST": 0.5, "PATIENCE": 60.0, "PAUSES": (0.01, 0.1)}.items():
        monkeypatch.setattr(patient, name, seconds)


@pytest.fixture
def stopped(server):  # noqa: F811
    """Stops the server, until the end of the test."""
    yield lambda: server.send(signal.SIGSTOP)
    server.send(signal.SIGCONT)


def begin(storage, seeds="1"):
    spec, points = plan(FILE, "quick", seeds=seeds)
    found = Study.begin(storage, "tiny-quick", spec)
    found.add(spec, points)
    return found


class Away:
    """A call that fails some times."""

    def __init__(self, times, error=None):
        self.times, self.calls = times, 0
        self.error = error or OperationalError("select", {}, Exception("gone"))

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "answer"


def test_who_opened_a_database_asks_again(capsys):
    call = Away(5)
    assert patient._Patience("postgresql://host/db").ask(call) == "answer"
    assert call.calls == 6
    said = "the storage postgresql://host/db does not answer; it is asked again for a while\n"
    assert capsys.readouterr().err == said


def test_after_a_while_it_gives_up(monkeypatch):
    monkeypatch.setattr(patient, "PATIENCE", 0.3)
    call = Away(10_000)
    with pytest.raises(patient._GaveUpError):
        patient._Patience("").ask(call)
    assert 3 <= call.calls < 1000  # with pauses
    inner, nested = Away(10_000), patient._Patience("")
    with pytest.raises(patient._GaveUpError):
        nested.ask(lambda: nested.ask(inner))
    assert inner.calls < 1000  # patience is not multiplied


def test_other_threads_and_who_is_in_a_hurry_ask_once():
    asked, found = patient._Patience(""), []

    def ask(call):
        try:
            found.append(asked.ask(call))
        except OperationalError as error:
            found.append(error)

    thread = threading.Thread(target=ask, args=(Away(1),))
    thread.start()
    thread.join()
    assert isinstance(found[0], OperationalError)
    asked.hurried.set()
    ask(Away(1))
    assert isinstance(found[1], OperationalError)


def test_a_hurry_ends_the_waiting(monkeypatch):
    monkeypatch.setattr(patient, "PAUSES", (3600.0, 3600.0))
    asked, call = patient._Patience(""), Away(10_000)
    timer = threading.Timer(0.2, asked.hurried.set)
    timer.start()
    with pytest.raises(OperationalError):
        asked.ask(call)
    timer.join()
    assert call.calls <= 2


@pytest.mark.parametrize(
    "error", [DataError("select", {}, Exception("too long")), KeyError("x"), StorageInternalError("no cause")]
)
def test_what_is_wrong_with_the_question_is_not_asked_again(error):
    call = Away(1, error)
    with pytest.raises(type(error)):
        patient._Patience("").ask(call)
    assert call.calls == 1


def test_every_method_that_asks_the_server_is_patient():
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.storages._cached_storage import _CachedStorage

    abstract = BaseStorage.__abstractmethods__
    used = {"_create_new_trial", "_get_trials", "_set_trial_param", "_get_best_trial_id"}  # by the cache around it
    assert used <= vars(RDBStorage).keys()
    assert all(hasattr(getattr(patient._Database, name), "__wrapped__") for name in abstract | used)
    called = {name for name in dir(_CachedStorage) if name in vars(RDBStorage)}
    without = {"get_heartbeat_interval", "get_heartbeat_stale_trial_callback", "get_failed_trial_callback"}
    without |= {"record_heartbeat", "_get_stale_trial_ids", "remove_session"}  # we have our own signs of life
    for name in called - without:
        if not name.startswith("__") and callable(getattr(RDBStorage, name)):
            assert hasattr(getattr(patient._Database, name), "__wrapped__"), name


def test_a_server_that_restarts(server, database):  # noqa: F811
    with open_storage(database) as storage:
        found = begin(storage)
        restart = threading.Thread(target=server.restart)
        restart.start()
        numbers = []
        while restart.is_alive() or len(numbers) < 100:
            found.store(0, beat={"count": len(numbers)})
            numbers.append(found.trial(0).user_attrs["beat"]["count"])
        restart.join()
        assert numbers == list(range(len(numbers)))
        assert len(found.records()) == 2


def look(database, stopped, asks_again=True):  # noqa: F811
    with open_storage(database) as storage:
        found = begin(storage)
        stopped()
        if not asks_again:
            storage.backend._patience.owner = None
        found.records()


def test_a_server_that_does_not_answer(database, monkeypatch, stopped):  # noqa: F811
    monkeypatch.setattr(patient, "PATIENCE", 2.0)
    monkeypatch.setattr(patient, "CONNECT", 2)
    expected = r"tester@.* cannot be used: .*; it was asked again for 2 seconds; run the same command when it answers$"
    with pytest.raises(OSError, match=expected) as caught:
        look(database, stopped)
    assert "s3cret" not in str(caught.value)


def test_an_answer_is_not_waited_for_longer_than_it_may(database, stopped):  # noqa: F811
    with open_storage(database) as storage, storage.backend.engine.connect() as connection:
        sleep = sqlalchemy.text("select pg_sleep(15)")
        with pytest.raises(OperationalError, match="the server has not answered for 1 seconds"):
            connection.execute(sleep)
    with pytest.raises(OSError, match=r"not answered|timeout expired"):
        look(database, stopped, asks_again=False)


def test_a_client_that_stops_in_the_middle_of_a_change_holds_nobody_up(database, monkeypatch):  # noqa: F811
    monkeypatch.setattr(patient, "STALLED", 0.5)
    with open_storage(database) as storage:
        found = begin(storage)
        lock = sqlalchemy.text("select * from trials where trial_id = 1 for update")
        with storage.backend.engine.connect() as other:
            other.execute(lock)
            number = found.claim({"id": "me"})
            assert found.trial(number).state.name == "RUNNING"
            with pytest.raises(sqlalchemy.exc.DBAPIError):
                other.execute(lock)


def test_a_lock_that_is_held_for_ever_is_gone_without(database, monkeypatch):  # noqa: F811
    monkeypatch.setattr(patient.alive, "GRACE", 0.3)
    monkeypatch.setattr(patient, "STALLED", 1.0)
    with open_storage(database) as one, one.exclusive():
        time.sleep(2.0)  # longer than any other change may take
        with open_storage(database) as other, other.exclusive():
            assert len(begin(other).records()) == 2


def test_processes_that_make_the_tables_at_once(database, monkeypatch):  # noqa: F811
    """Where the lock lets them, since somebody has held it for too long."""
    monkeypatch.setattr(patient, "_exclusive", lambda engine: contextlib.nullcontext())
    found, start = [], threading.Barrier(4)

    def open_it():
        start.wait()
        with open_storage(database) as storage:
            found.append(storage.backend.get_all_studies())

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[]] * 4


def test_settings_of_a_session(database):  # noqa: F811
    with open_storage(database) as storage, storage.backend.engine.connect() as connection:
        for name, found in {"statement_timeout": "20s", "idle_in_transaction_session_timeout": "20s"}.items():
            assert connection.execute(sqlalchemy.text(f"show {name}")).scalar() == found
    asked = f"{database}?keepalives_idle=77&connect_timeout=5"
    with open_storage(asked) as storage, storage.backend.engine.connect() as connection:
        given = psycopg.conninfo.conninfo_to_dict(connection.connection.dbapi_connection.info.dsn)
        assert (given["keepalives_idle"], given["connect_timeout"]) == ("77", "5")
        assert given["keepalives_interval"] == "5"


@pytest.mark.parametrize("where", ["trial", "waiting"])
def test_a_worker_of_a_server_that_was_stopped_ends_when_it_is_asked_to(
    server,  # noqa: F811
    database,  # noqa: F811
    stopped,
    tmp_path,
    where,
):
    """Where it is in the middle of a trial, and where it waits for the server."""
    env = {"TINY_LOG": tmp_path / "noted.txt", "TINY_HOLD": tmp_path}
    (tmp_path / "hold").touch()
    args = ("run", FILE, "--no-report", "--storage", database, "--folder", tmp_path / "runs", "--workers", "1")
    command = Command(*args, output=tmp_path / "output.txt", env=env)
    log = tmp_path / "noted.txt"
    wait_until(lambda: log.exists() and log.read_text().count("epoch") >= 2)
    stopped()
    if where == "waiting":  # the trial goes on without the server, and ends
        (tmp_path / "hold").unlink()
        wait_until(lambda: list(tmp_path.glob("runs/tiny-quick/*/result.json")))
        time.sleep(0.5)
    command.signal(signal.SIGINT)
    begin = time.monotonic()
    code, output = command.wait()
    assert code == 130, output
    assert output.splitlines()[-1] == "stopped; the same command goes on from here"
    assert time.monotonic() - begin < 60  # LAST, 3 seconds, for a few calls; not ANSWER, 30, for each, nor PATIENCE
    server.send(signal.SIGCONT)
    (tmp_path / "hold").unlink(missing_ok=True)
    code, output = Command(*args, output=tmp_path / "again.txt", env=env).wait()
    assert code == 0, output


def test_trials_go_on_while_the_server_restarts(server, database, tmp_path):  # noqa: F811
    env = {"TINY_LOG": tmp_path / "noted.txt", "TINY_HOLD": tmp_path}
    (tmp_path / "hold").touch()
    args = ("run", FILE, "--no-report", "--storage", database, "--folder", tmp_path / "runs", "--workers", "1")
    command = Command(*args, output=tmp_path / "output.txt", env=env)
    log = tmp_path / "noted.txt"
    wait_until(lambda: log.exists() and log.read_text().count("epoch") >= 2)
    server.restart()
    (tmp_path / "hold").unlink()
    code, output = command.wait()
    assert code == 0, output
    with open_storage(database) as storage:
        assert [record.state for record in Study(storage, "tiny-quick").records()] == ["complete"] * 4
    assert log.read_text().count("begin") == 4  # none was run again
