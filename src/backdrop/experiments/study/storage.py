"""Where studies live: in a journal file, or in a PostgreSQL database that many machines share.

    with open_storage("runs/gp-quick") as storage: ...                           # runs/gp-quick/journal.log
    with open_storage("postgresql://user@host/database") as storage: ...

Passwords are in no message: `place` is the address without them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backdrop.experiments.study import alive

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

__all__ = ["JOURNAL", "Storage", "is_address", "open_storage", "storage_errors"]

JOURNAL = "journal.log"


@dataclass(frozen=True)
class Storage:
    """An open storage.

    Args:
        backend: Optuna's.
        given: opens it again; may hold a password.
        place: where it is, for messages.
        lock: lets one process in at a time, on any machine that can have such locks.
        hurry: somebody wants this process to end, so that it waits for nothing any more; for signal handlers.
    """

    backend: BaseStorage
    given: str
    place: str
    lock: Any
    hurry: Callable[[], object] = lambda: None

    def exclusive(self) -> AbstractContextManager[object]:
        """For changes of several steps. Nothing depends on it: see the rules in `study`.

        So who waits for it for `GRACE` seconds goes on without it: whoever has it may have been stopped.
        """
        result: AbstractContextManager[object] = self.lock()
        return result


def is_address(place: str | Path) -> bool:
    return re.match(r"[\w+]+:", str(place)) is not None and not Path(place).drive


@contextlib.contextmanager
def open_storage(place: str | Path, *, create: bool = False) -> Iterator[Storage]:
    """Opens a storage, and says in one line what went wrong with it; `create` makes a journal that is not there.

    A place is the path of a journal file, or of a folder for one, or the address of a database.
    """
    quieten()
    if is_address(place):
        from backdrop.experiments.study.database import open_database

        with open_database(str(place)) as (backend, where, exclusive, hurry):
            yield Storage(backend, str(place), where, exclusive, hurry)
        return
    path = Path(place).expanduser().resolve()
    path = path / JOURNAL if path.is_dir() or not path.suffix else path
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no journal: it is not even a file")
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise FileNotFoundError(f"there is no study in {path}")
    from optuna.storages import JournalStorage

    from backdrop._core.files import held
    from backdrop.experiments.study.journal import Damaged, Journal

    lock = path.with_name(f".{path.name}.lock")
    try:
        backend = JournalStorage(Journal(path))
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError) as error:  # another program's
        raise ValueError(f"{path} is not a journal that Optuna can read: {type(error).__name__} {error}") from None
    yield Storage(backend, str(path), str(path), lambda: held(lock, alive.GRACE))


def storage_errors() -> tuple[type[Exception], ...]:
    """What a database that cannot be reached raises."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError


def quieten() -> None:
    """Keeps Optuna from telling about every trial: we do."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
