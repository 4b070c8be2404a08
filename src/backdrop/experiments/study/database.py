"""A PostgreSQL database that other machines share, and that may restart, stop answering or be away for a while.

NOTE: who waits for what, and for how long.
1. No answer is waited for longer than `ANSWER` seconds, whether the server is gone, its machine is, or it was stopped.
   Where that is not known to the system (a server that was stopped keeps its connections), our connections see to it.
2. The thread that opened the database asks again, with growing pauses, for `PATIENCE` seconds, and then gives up with a
   message. Other threads, which give signs of life or show how far a study is, ask once: they will look again anyway.
3. Once somebody wants the process to end (`hurry`), nothing is asked again, nor waited for longer than `LAST` seconds.
4. A worker that was stopped in the middle of a change holds up others for `STALLED` seconds; then the server ends its
   session, and its change never happened.
What is asked again may have happened before its answer was lost. An attribute is set to the same; a trial is enqueued
twice, which is rule 5 of `study`; one whose claim nobody knows of is given back after a while, by rule 3.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from backdrop.experiments.study import alive

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["open_database"]

CONNECT = 10  # seconds to wait for a connection
ANSWER = 30.0
STALLED = 20.0
PATIENCE = 300.0
LAST = 3.0
PAUSES = (0.2, 10.0)  # the first one and the longest
ADVISORY = 0x6261636B64726F70  # the lock of a database that `exclusive` takes
DRIVER = "pip install 'psycopg[binary]'"

T = TypeVar("T")
Opened = tuple[BaseStorage, str, Callable[[], AbstractContextManager[object]], Callable[[], object]]


@contextlib.contextmanager
def open_database(given: str) -> Iterator[Opened]:
    """Opens a database, and says in one line what went wrong with it.

    Gives Optuna's storage, its address without passwords, a lock and `hurry`, as `Storage` has them.
    """
    url = _address(given)
    place = f"postgresql://{f'{url.username}@' if url.username else ''}{url.host or ''}"
    place += f"{f':{url.port}' if url.port else ''}/{url.database or ''}"
    patience = _Patience(place)
    engines: list[Engine] = []
    try:
        engines.append(engine := sqlalchemy.create_engine(url, **patience.options(url, stalled=0.0)))
        lock = functools.partial(_exclusive, engine)
        with lock():
            backend = _made(url, patience)
        engines.append(backend.engine)
        yield backend, place, lock, patience.hurried.set
    except (StorageInternalError, SQLAlchemyError, ImportError) as error:
        if isinstance(error, ImportError) and "psycopg" not in str(error):
            raise
        why = _why(error)
        for secret in filter(None, (url.password and str(url.password), *_secrets(url))):
            why = why.replace(secret, "***")
        advice = f"; its driver comes with: {DRIVER}" if isinstance(error, ImportError) else ""
        if isinstance(error, _GaveUpError):
            advice = f"; it was asked again for {PATIENCE:.0f} seconds; run the same command when it answers"
        raise OSError(f"the storage {place} cannot be used: {why}{advice}") from error
    finally:
        for engine in engines:
            engine.dispose()


@contextlib.contextmanager
def _exclusive(engine: Engine) -> Iterator[None]:
    end = time.monotonic() + alive.GRACE
    with engine.connect() as connection:  # the lock ends with the transaction, whatever ends that
        while not connection.execute(
            sqlalchemy.text("select pg_try_advisory_xact_lock(:lock)"), {"lock": ADVISORY}
        ).scalar():
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        try:
            yield
        finally:
            with contextlib.suppress(SQLAlchemyError):  # gone with its connection
                connection.rollback()


class _GaveUpError(StorageInternalError):
    pass


class _Patience:
    """How long this process waits for its database."""

    def __init__(self, place: str) -> None:
        self.place, self.owner, self.hurried = place, threading.get_ident(), threading.Event()
        self.failed = False  # the last attempt to connect
        self.random = random.Random()  # not the one that a task may have seeded

    def options(self, url: URL, stalled: float | None = None) -> dict[str, Any]:
        """For SQLAlchemy's engine; `stalled` seconds may pass between two statements of a change, or 0 for any."""
        limits = {"statement_timeout": STALLED}
        limits["idle_in_transaction_session_timeout"] = STALLED if stalled is None else stalled
        asked: dict[str, Any] = {"connect_timeout": CONNECT, "keepalives": 1, "keepalives_idle": 10}
        asked |= {"keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": round(ANSWER * 1000)}
        if url.get_driver_name() not in ("psycopg", "psycopg2"):
            return {"pool_pre_ping": True}
        dialect = url.get_dialect()()
        args, given = dialect.create_connect_args(url)
        named = {**asked, **given}
        connect = _connector(self) if url.get_driver_name() == "psycopg" else dialect.import_dbapi().connect

        def create() -> Any:
            if self.hurried.is_set() and self.failed:  # an OSError, which Optuna does not take for a reason to wait
                raise OSError(f"the storage {self.place} does not answer")
            limit = {"connect_timeout": round(LAST)} if self.hurried.is_set() else {}
            self.failed = True
            connection = connect(*args, **{**named, **limit})
            try:
                with connection.cursor() as cursor:
                    cursor.execute("; ".join(f"set {name} = {round(1000 * s)}" for name, s in limits.items()))
                connection.commit()
                self.failed = False
            except BaseException:
                connection.close()
                raise
            return connection

        return {"pool_pre_ping": True, "creator": create}

    def limit(self) -> float:
        return LAST if self.hurried.is_set() else ANSWER

    def ask(self, call: Callable[[], T]) -> T:
        """What a call returns, made again while the database is away (2, 3)."""
        end, pause, said = 0.0, PAUSES[0], False
        while True:
            try:
                return call()
            except (StorageInternalError, SQLAlchemyError) as error:
                if isinstance(error, _GaveUpError) or not _is_away(error):
                    raise
                if threading.get_ident() != self.owner or self.hurried.is_set():
                    raise
                now = time.monotonic()
                end = end or now + PATIENCE
                if now >= end:
                    raise _GaveUpError(str(error)) from error
                if not said:
                    print(f"the storage {self.place} does not answer; it is asked again for a while", file=sys.stderr)
                    said = True
            self.hurried.wait(min(pause * self.random.uniform(0.5, 1.0), max(0.0, end - now)))
            pause = min(2 * pause, PAUSES[1])


class _Database(RDBStorage):
    """Optuna's storage; every method that asks the server asks it patiently."""

    def __init__(self, url: URL, patience: _Patience) -> None:
        self._patience = patience
        try:
            super().__init__(url.render_as_string(hide_password=False), engine_kwargs=patience.options(url))
        except BaseException:
            if hasattr(self, "engine"):
                self.engine.dispose()
            raise


def _made(url: URL, patience: _Patience, more: int = 2) -> _Database:
    """The storage, with its tables. Two processes that make them at once are an error, and the second time none."""
    try:
        return patience.ask(lambda: _Database(url, patience))
    except (IntegrityError, ProgrammingError):
        if not more:
            raise
        time.sleep(1.0)
        return _made(url, patience, more - 1)


def _patiently(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(self: _Database, *args: Any, **kwargs: Any) -> T:
        return self._patience.ask(lambda: method(self, *args, **kwargs))

    return call


_ASKING = {name for name in vars(BaseStorage) if not name.startswith("_") and name in vars(RDBStorage)}
_ASKING |= {"_create_new_trial", "_get_trials", "_set_trial_param", "_get_best_trial_id"}  # for Optuna's cache
for _name in _ASKING - {"check_trial_is_updatable", "remove_session"}:
    setattr(_Database, _name, _patiently(getattr(RDBStorage, _name)))


def _connector(patience: _Patience) -> Callable[..., Any]:
    """Connects as psycopg does, to a connection that waits no longer than it may (1)."""
    import psycopg

    class Limited(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
            try:
                return psycopg.waiting.wait(_limited(gen, patience, self), self.pgconn.socket, *args, **kwargs)
            except KeyboardInterrupt:  # psycopg would wait for the server to take back what it was asked
                self.pgconn.finish()
                raise

    return Limited.connect


def _limited(gen: Generator[Any, Any, T], patience: _Patience, connection: Connection[Any]) -> Generator[Any, Any, T]:
    """The same generator of psycopg, which is called every tenth of a second and ends when it was long enough."""
    from psycopg import OperationalError

    begin = time.monotonic()
    try:
        wanted = next(gen)
        while True:
            sent = yield wanted
            wanted = gen.send(sent)
            if sent:
                begin = time.monotonic()
            elif time.monotonic() - begin > patience.limit():
                connection.pgconn.finish()
                raise OperationalError(f"the server has not answered for {patience.limit():.0f} seconds")
    except StopIteration as end:
        result: T = end.value
        return result


def _is_away(error: Exception) -> bool:
    """Whether an error says nothing about what was asked."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    return isinstance(cause, (OperationalError, InterfaceError, InternalError, PoolTimeoutError))


def _why(error: BaseException) -> str:
    while isinstance(error, StorageInternalError) and error.__cause__:
        error = error.__cause__
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _address(given: str) -> URL:
    """The address with the driver that we use, unless it names one."""
    scheme = given.partition(":")[0]
    if scheme.startswith("sqlite"):
        raise ValueError(
            "storage cannot be SQLite: Optuna advises against it where several processes write; give the path of a "
            "journal file, or the address of a PostgreSQL database, postgresql://USER@HOST/DATABASE"
        )
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        url = None
    if url is None or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise ValueError(
            "storage has to be the path of a journal file or of the form postgresql://USER@HOST/DATABASE, but got one "
            f"that starts with {scheme}:"
        )
    return url if "+" in scheme else url.set(drivername="postgresql+psycopg")


def _secrets(url: URL) -> list[str]:
    """Passwords that stand elsewhere than in their place."""
    found = [value for name, value in url.query.items() if "password" in name]
    return [str(value) for value in (*found, os.environ.get("PGPASSWORD")) if value]
