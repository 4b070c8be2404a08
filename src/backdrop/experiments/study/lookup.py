"""Finding studies again: in a storage, or in the folder where runs are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from backdrop.experiments.settings import nearest
from backdrop.experiments.study.archive import Archive
from backdrop.experiments.study.plan import Readable
from backdrop.experiments.study.storage import JOURNAL, open_storage
from backdrop.experiments.study.study import Study, studies

__all__ = ["listed", "noted", "open_all", "open_study", "unknown"]


def listed(folder: Path) -> list[Path]:
    """The folders of studies in a folder."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in inside if _is_study(path)]


def unknown(name: str, folder: Path) -> ValueError:
    """The error that a study is not there."""
    names = [path.name for path in listed(folder)]
    known = f"; there are {', '.join(names)}" if names else ""
    return ValueError(f"there is no study {name!r} in {folder}{nearest(name, names)}{known}")


@contextlib.contextmanager
def open_study(name: str, storage: str | None, folder: Path) -> Iterator[Readable]:
    """A study that is there, by its name, or by the path of its folder or of a JSON file that holds it.

    It is in this storage, or by default in its own folder, in the one that has the folders of studies.
    """
    if storage is not None:
        with open_storage(storage) as opened:
            yield Study(opened, name)
        return
    if name.endswith(".json") and Path(name).is_file():
        yield Archive(Path(name))
        return
    homes = [home for home in (folder / name, Path(name)) if _is_study(home)]
    if not homes:
        raise unknown(name, folder)
    home = homes[0]
    with _open_storage(home / JOURNAL) as studies:
        wanted = [study for study in studies if study.name == home.resolve().name] or studies
        if not wanted:
            raise ValueError(f"{home / JOURNAL} says of no study what it is about, so none of ours is in it")
        if len(wanted) != 1:
            names = [study.name for study in studies]
            raise ValueError(f"{home} has {len(names)} studies ({', '.join(names)}); give one and --storage {home}")
        yield wanted[0]


@contextlib.contextmanager
def open_all(storage: str | None, folder: Path) -> Iterator[tuple[list[Readable], list[Exception]]]:
    """All studies in a storage or a folder, and what is wrong with those that cannot be read."""
    with contextlib.ExitStack() as stack:
        if storage is not None:
            yield stack.enter_context(_open_storage(storage)), []
            return
        found: list[Readable] = []
        problems: list[Exception] = []
        for home in listed(folder):
            with noted(problems):
                found += stack.enter_context(_open_storage(home / JOURNAL))
        yield found, problems


@contextlib.contextmanager
def noted(problems: list[Exception]) -> Iterator[None]:
    """Adds to the problems what is wrong with one study, so that the others are shown."""
    try:
        yield
    except (OSError, ValueError) as error:
        problems.append(error)


def _is_study(home: Path) -> bool:
    return (home / JOURNAL).is_file()


@contextlib.contextmanager
def _open_storage(place: str | Path) -> Iterator[list[Readable]]:
    with open_storage(place) as storage:
        yield [Study(storage, name) for name in studies(storage)]
