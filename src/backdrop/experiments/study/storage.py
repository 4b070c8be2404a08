"""Where studies live: in a journal file, or in a PostgreSQL database that many machines share.

    with open_storage("runs/gp-quick") as storage: ...                           # runs/gp-quick/journal.log
    with open_storage("postgresql://user@host/database") as storage: ...

Passwords are in no message: `place` is the address without them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backdrop.experiments import fetch

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from sqlalchemy import URL, Engine

__all__ = ["JOURNAL", "Storage", "is_address", "open_storage", "storage_errors"]

JOURNAL = "journal.log"
CONNECT = 10  # seconds to wait for a database
ADVISORY = 0x6261636B64726F70  # the lock of a database that `exclusive` takes
DRIVER = "pip install 'psycopg[binary]'"


@dataclass(frozen=True)
class Storage:
    """An open storage.

    Args:
        backend: Optuna's.
        given: opens it again; may hold a password.
        place: where it is, for messages.
        lock: lets one process in at a time, on any machine that can have such locks.
    """

    backend: BaseStorage
    given: str
    place: str
    lock: Any

    def exclusive(self) -> AbstractContextManager[object]:
        """For changes of several steps. Nothing depends on it alone: see the rules in `study`."""
        result: AbstractContextManager[object] = self.lock()
        return result


def is_address(place: str | Path) -> bool:
    return re.match(r"[\w+]+:", str(place)) is not None and not Path(place).drive


@contextlib.contextmanager
def open_storage(place: str | Path, *, create: bool = False) -> Iterator[Storage]:
    """Opens a storage, and says in one line what went wrong with it.

    Args:
        place: the path of a journal file, or of a folder for one, or the address of a database.
        create: make a journal file that is not there.
    """
    quieten()
    if is_address(place):
        with _database(str(place)) as storage:
            yield storage
        return
    path = Path(place).expanduser().resolve()
    path = path / JOURNAL if path.is_dir() or not path.suffix else path
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise FileNotFoundError(f"there is no study in {path}")
    from optuna.storages import JournalStorage

    from backdrop.experiments.study.journal import Journal

    lock = path.with_name(f".{path.name}.lock")
    try:
        backend = JournalStorage(Journal(path))
    except (KeyError, TypeError, AttributeError, IndexError, AssertionError) as error:  # lines of another program
        raise ValueError(f"{path} is not a journal that Optuna can read: {type(error).__name__} {error}") from None
    yield Storage(backend, str(path), str(path), lambda: fetch.lock(lock, waiting=lambda: None))


def storage_errors() -> tuple[type[Exception], ...]:
    """What a database that cannot be reached raises."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError


def quieten() -> None:
    """Keeps Optuna from telling about every trial: we do."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


@contextlib.contextmanager
def _database(given: str) -> Iterator[Storage]:
    import sqlalchemy
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    url = _address(given)
    place = f"postgresql://{f'{url.username}@' if url.username else ''}{url.host or ''}"
    place += f"{f':{url.port}' if url.port else ''}/{url.database or ''}"
    options = {"connect_args": {"connect_timeout": CONNECT}, "pool_pre_ping": True}
    engines: list[Engine] = []
    try:
        engines.append(engine := sqlalchemy.create_engine(url, **options))

        @contextlib.contextmanager
        def exclusive() -> Iterator[None]:
            with engine.begin() as connection:  # ends with the transaction, whatever ends that
                connection.execute(sqlalchemy.text("select pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY})
                yield

        with exclusive():  # two processes that make the same tables are an error
            backend = RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)
        engines.append(backend.engine)
        yield Storage(backend, given, place, exclusive)
    except (StorageInternalError, SQLAlchemyError, ImportError) as error:
        if isinstance(error, ImportError) and "psycopg" not in str(error):
            raise
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        why = " ".join(str(getattr(cause, "orig", None) or cause).split())
        for secret in filter(None, (url.password and str(url.password), *_secrets(url))):
            why = why.replace(secret, "***")
        advice = f"; its driver comes with: {DRIVER}" if isinstance(error, ImportError) else ""
        raise OSError(f"the storage {place} cannot be used: {why}{advice}") from error
    finally:
        for engine in engines:
            engine.dispose()


def _address(given: str) -> URL:
    """The address with the driver that we use, unless it names one."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

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
