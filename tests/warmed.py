"""Imported by the server from which processes are forked: what each of them would import and look up for itself."""

import contextlib
import io
import tempfile

import optuna.storages  # noqa: F401
from lightning.fabric import fabric

import backdrop.experiments.report.tables
import backdrop.experiments.study.workers
from backdrop.cli import app
from backdrop.experiments import runs  # noqa: F401
from backdrop.experiments.study import plan
from backdrop.experiments.tasks import find_task
from tiny_task import FILE

find_task(FILE)
fabric._load_external_callbacks = lambda group: []  # looks through all that is installed, for every trial
plan._cores = lambda: 1  # threads that wait for each other burn most of the time on a machine that is busy

with contextlib.suppress(ImportError):
    import psycopg  # noqa: F401
    import sqlalchemy.dialects.postgresql  # noqa: F401

    import backdrop.experiments.study.database  # noqa: F401

with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.suppress(SystemExit),
):
    app(["status", "--folder", folder])  # no training: threads of torch do not survive a fork
