"""A worker: claims trials of a study and trains them, one after the other, until none is left to do."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backdrop.experiments.cache import CacheError
from backdrop.experiments.fetch import DownloadError
from backdrop.experiments.logs import log_event
from backdrop.experiments.settings import build
from backdrop.experiments.steps import RecordingError
from backdrop.experiments.study import alive, remains
from backdrop.experiments.study.interrupts import Interrupts
from backdrop.experiments.study.storage import storage_errors
from backdrop.experiments.study.study import HEARTBEAT, INTERRUPTED, Study
from backdrop.experiments.train import Diverged, Options, fit

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["OnProgress", "advice_if_full", "is_full", "work"]

POLL = 1.0  # seconds between two looks at a study on which only others work
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OnProgress = Callable[[str, Mapping[str, Any] | None], None]


class _Taken(Exception):  # noqa: N818
    """The trial is no longer this worker's: rule 3 of `study`."""


class _Pruned(Exception):  # noqa: N818
    pass


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is that of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def advice_if_full() -> Iterator[None]:
    """Says what to do about a full disk."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise OSError(
            f"no space is left to write to: {error}; nothing is damaged, so free some space and run the same command "
            "again"
        ) from error


def work(
    study: Study,
    folder: Path,
    options: Options,
    *,
    task: str | None = None,
    wait: bool = True,
    on_progress: OnProgress = lambda key, row: None,
) -> None:
    """Works until no trial waits and, with `wait`, until none runs elsewhere whose worker may yet die.

    Trials have their folders in that of the study, and as many threads as the study says. `task` is what the user names
    the task by; `on_progress` is told the key of a trial and what was logged after an epoch, and at its end None.
    """
    kind = study.spec.find_task(task)
    me, watch = alive.identity(), alive.Watch()
    options = replace(options, threads=study.spec.threads)
    with advice_if_full(), Interrupts(study.storage.hurry) as interrupts:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            study.tidy(watch)
            number = study.claim(me)
            if number is not None:
                attempt = _Attempt(study, number, folder, options, interrupts, on_progress)
                attempt.run(lambda settings: kind(build(kind.Settings, settings), data_root=options.data_root))
            elif wait and study.is_unfinished():
                with interrupts.allowed():
                    time.sleep(POLL)
            else:
                remains.sweep(folder, study.folders_done())
                return


class _Attempt:
    """One trial in the hands of this worker."""

    def __init__(
        self,
        study: Study,
        number: int,
        folder: Path,
        options: Options,
        interrupts: Interrupts,
        on_progress: OnProgress,
    ) -> None:
        self.study, self.number, self.folder, self.options = study, number, folder, options
        self.interrupts, self.on_progress = interrupts, on_progress
        self.thread = threading.current_thread()
        self.key = ""
        self.faults: remains.Faults | None = None
        self.trial: Trial | None = None
        self.rows: list[dict[str, Any]] = []

    def run(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        try:
            self._train(make)
        except _Taken:
            self._log("taken by another worker")
            self._clear()
        except BaseException:
            # What stops this worker stops no other: the trial goes back, unless not even that can be written.
            with contextlib.suppress(Exception):
                self.study.close(self.number, INTERRUPTED)
                self._log("interrupted")
            raise
        finally:
            self.on_progress(self.key, None)

    def _train(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        with _Heartbeat(self.study, self.number) as self.heartbeat:
            settings = self._settings()
            self.key = self.study.spec.key(settings)
            self._log("started", settings=settings)
            self._clear()
            try:
                with remains.Faults(self.folder / self.key) as self.faults:
                    if reason := self.faults.verdict():
                        self._fail(reason)
                        return
                    with self.interrupts.allowed():
                        outcome = fit(
                            make(settings), self.folder / self.key, self.options, self._on_epoch, self._on_damage
                        )
            except _Pruned:
                self._prune()
                return
            except (Exception, SystemExit) as error:
                if self.interrupts.heard:  # torch.save makes an error of its own of what is raised within it
                    raise KeyboardInterrupt from error
                if isinstance(error, _Taken) or self._is_taken():
                    raise _Taken from error
                if isinstance(error, _elsewhere()) or is_full(error):
                    raise
                self._fail(str(error) if isinstance(error, Diverged) else f"{type(error).__name__}: {error}")
                return
        self._complete(asdict(outcome))
        self._clear()

    def _is_taken(self) -> bool:
        """Whether somebody else has closed the trial; then what goes wrong in its folder is of no concern."""
        with contextlib.suppress(*_elsewhere()):
            return self.study.trial(self.number).state.name != "RUNNING"
        return False

    def _clear(self) -> None:
        if self.key:
            remains.clear(self.folder / self.key, self.key)

    def _settings(self) -> dict[str, Any]:
        if self.study.spec.kind == "grid":
            settings: dict[str, Any] = self.study.trial(self.number).user_attrs["settings"]
            return settings
        from backdrop.experiments.study import tune

        self.trial = tune.ask(self.study, self.number)
        settings = tune.choose(self.study, self.number, self.trial)
        self.study.store(self.number, settings=settings)
        return settings

    def _on_damage(self, text: str) -> None:
        self._log("damaged file", reason=text)

    def _on_epoch(self, row: Mapping[str, Any]) -> None:
        if threading.current_thread() is not self.thread:  # several devices: what is raised here would end nothing
            with contextlib.suppress(Exception):
                self._note(row)
            return
        with self.interrupts.deferred():
            self._note(row)

    def _note(self, row: Mapping[str, Any]) -> None:
        column = self.study.spec.column
        if self.faults:
            self.faults.forgive()
        self.rows.append({name: value for name, value in row.items() if name not in ("epochs", "left")})
        self.on_progress(self.key, row)
        known = ("epoch", "epochs", "loss", column, "left")
        self.heartbeat.tell({name: row[name] for name in known if name in row})
        self._log("epoch", **row)
        if self.trial is not None and column in row:
            from backdrop.experiments.study import tune

            if tune.should_prune(self.trial, row, column):
                raise _Pruned

    def _prune(self) -> None:
        metric, column = self.study.spec.metric, self.study.spec.column
        last = [row for row in self.rows if column in row][-1]
        reason = f"pruned after epoch {last['epoch']}: its {metric} was worse than the median"
        value, seconds = float(last[column]), last["seconds"]
        if not self.study.finish(
            self.number, "PRUNED", value, metrics={metric: value}, curve=self.rows, seconds=seconds, reason=reason
        ):
            raise _Taken
        self._log("pruned", reason=reason)

    def _complete(self, outcome: dict[str, Any]) -> None:
        value = float(outcome["metrics"][self.study.spec.metric])
        if not math.isfinite(value):
            self._fail(f"{self.study.spec.metric} was {value} at the end")
        elif self.study.finish(self.number, "COMPLETE", value, **outcome):
            self._log("finished", metrics=outcome["metrics"], seconds=outcome["seconds"])
        else:
            raise _Taken

    def _fail(self, reason: str) -> None:
        if not self.study.finish(self.number, "FAIL", reason=reason, curve=self.rows):
            raise _Taken
        self._log("failed", reason=reason)

    def _log(self, event: str, **values: Any) -> None:
        log_event(self.folder, event, trial=self.number, key=self.key, **values)


def _elsewhere() -> tuple[type[Exception], ...]:
    """Errors that say something about this machine, this process or the storage, and nothing about the trial."""
    return OSError, ImportError, CacheError, DownloadError, RecordingError, *storage_errors()


class _Heartbeat:
    """Signs of life of a trial, with how far it is, from a thread."""

    def __init__(self, study: Study, number: int) -> None:
        self.study, self.number = study, number
        self.progress: dict[str, Any] = {}
        self.count = 0
        self.problem: Exception | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Heartbeat:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def tell(self, progress: dict[str, Any]) -> None:
        """Takes note of progress; raises what has happened to the trial meanwhile."""
        first, self.progress = not self.progress, progress
        if first:
            self._write()
        if self.problem is not None:
            raise self.problem

    def _run(self) -> None:
        while not self.stop.wait(alive.HEARTBEAT) and self.problem is None:
            self._write()

    def _write(self) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        self.count += 1
        try:
            self.study.store(self.number, **{HEARTBEAT: {"count": self.count, **self.progress}})
        except UpdateFinishedTrialError:
            self.problem = _Taken()
        except OSError as error:
            self.problem = error
        except Exception:  # a database that is away for a moment: it is asked again, and at the end in earnest
            pass
