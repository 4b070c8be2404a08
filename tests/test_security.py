"""What runs code and what never does: a test for each line of SECURITY.md that no other file has."""

import dataclasses
import faulthandler
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("optuna", reason="Optuna is not installed")

import backdrop
from backdrop import cli
from backdrop.experiments import cache, fetch, tasks, train
from backdrop.experiments.study import plan as plan_module
from backdrop.experiments.study import workers
from backdrop.experiments.study.archive import pack
from backdrop.experiments.study.plan import plan
from backdrop.experiments.study.storage import open_storage
from backdrop.experiments.study.study import Study
from backdrop.experiments.train import Options
from outside import small_uiuc, textures
from postgres import database, server  # noqa: F401
from tiny_task import FILE, Tiny

ROOT = Path(__file__).parent.parent
EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from tiny_task import Tiny
class Evil(Tiny):
    name = {name!r}
def model():
    from torch import nn
    return nn.Sequential(nn.Conv2d(1, 1, 3))
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(plan_module, "MOST_WORKERS", 1)
    monkeypatch.setattr(tasks, "NAMED", {})  # as in a process that has just begun
    monkeypatch.chdir(tmp_path)


def evil(folder, name="tiny"):
    """A task in a file, and the mark that running the file leaves."""
    path, mark = folder / "evil.py", folder / "run"
    path.write_text(EVIL.format(mark=str(mark), name=name))
    return f"{path}:Evil", mark


def run(*args, code=0):
    result = CliRunner().invoke(cli.app, list(map(str, args)))
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None)
    return result.output


def of_strangers(place, task, name="tiny", study="stranger"):
    """A study that says its task is in a file, with a trial that has a result and one that waits."""
    spec, points = plan(FILE, "quick", ["p=0.5"])
    tasks.NAMED.clear()
    spec = dataclasses.replace(spec, task=task, task_name=name, title="Of a stranger")
    with open_storage(place, create=True) as storage:
        found = Study.begin(storage, study, spec)
        found.add(found.spec, points)
        row = {"epoch": 1, "step": 3, "loss": 1.0, "lr": 0.1, "seconds": 1.0}
        outcome = {"metrics": {"score": -1.0}, "curve": [row], "seconds": 1.0, "machine": {"host": "x"}}
        assert found.finish(0, "COMPLETE", -1.0, **outcome)
        return spec, found.records()


# --- what runs code


def test_run_and_tune_run_the_file_that_is_named(tmp_path):
    task, mark = evil(tmp_path)
    run("run", task, "--seeds", "1", "--set", "p=0")
    assert mark.exists()
    tasks.NAMED.clear()
    del sys.modules[next(name for name in sys.modules if name.startswith("backdrop_named_") and mark_of(name) == mark)]
    mark.unlink()
    run("tune", task, "--trials", "1")
    assert mark.exists()


def mark_of(name):
    return Path(sys.modules[name].__file__).parent / "run"


def test_worker_and_report_run_the_file_that_is_named(tmp_path):
    task, mark = evil(tmp_path)
    of_strangers(tmp_path / "runs/stranger/journal.log", task)
    run("report", "stranger", "--task", task, "--format", "csv")
    assert mark.exists()
    assert "2 complete" in run("worker", "stranger", "--task", task)


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_inspect_and_doctor_run_the_file_that_is_named(tmp_path, command):
    task, mark = evil(tmp_path)
    run(command, task.replace("Evil", "model"), "--input", "1,1,16,16")
    assert mark.exists()


def test_npm_takes_no_settings_from_the_current_folder(tmp_path, monkeypatch):
    home, tools, here = (tmp_path / name for name in ("home", "tools", "here"))
    for folder in (home, tools, here):
        folder.mkdir()
    (tools / "npm").write_text("#!/bin/sh\npwd\n")
    (tools / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert Path(fetch.npm_tarball("a@1")).resolve() == home.resolve()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run"], "which is run"),
        (["tune"], "which is run"),
        (["worker"], "a file is not run because a study names it"),
        (["report"], "Nothing of the study is run"),
        (["status"], "Nothing of a study is run"),
        (["repair"], "Nothing of the study is run"),
        (["inspect"], "The module or the file is run"),
        (["doctor"], "The module or the file is run"),
        (["data", "fetch"], "Nothing in an archive is run"),
    ],
)
def test_help_says_what_is_run(args, words):
    assert words in " ".join(re.sub(r"[│|]", " ", run(*args, "--help")).split())


# --- what never does


@pytest.mark.parametrize("name", ["tiny", "gp"])
@pytest.mark.parametrize("kind", ["journal", "postgresql"])
def test_a_study_runs_nothing(tmp_path, request, kind, name):
    """Neither one of a task of its own, nor one that says that a task of ours lies in its file."""
    task, mark = evil(tmp_path, name)
    place = tmp_path / "runs/stranger/journal.log" if kind == "journal" else request.getfixturevalue("database")
    of_strangers(place, task, name)
    storage = ["--storage", place]
    run("status", *storage)
    assert "1 of 2 trials done" in run("status", "stranger", *storage)
    for format_ in ("html", "md", "csv", "png", "json"):
        run("report", "stranger", *storage, "--format", format_, "--out", tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert "Of a stranger" in page
    assert f"backdrop run {task} --preset quick" in page
    for more in ([], ["--folder", "elsewhere"], ["--no-wait"]):
        output = run("worker", "stranger", *storage, *more, code=1)
        assert (
            f"this study is of a task of its own, {name} in {task}; nothing is run because a study names it" in output
        )
    if kind == "journal":
        rows = place.read_bytes().splitlines(keepends=True)
        place.write_bytes(b"".join([*rows[:3], b"\n", *rows[3:]]))
        run("repair", "stranger")
        run("report", place.parent, "--format", "csv")
    if name == "tiny":  # what is named is run, and not what the study says
        run("run", FILE, "--set", "p=0.5", "--name", "stranger", *storage)
        assert "2 of 2 trials done" in run("status", "stranger", *storage)
    assert not mark.exists()


@pytest.mark.parametrize(
    "task", ["evil.py:Evil", "evil:Evil", "./evil.py:Evil", "os:system", "tiny_task:Tiny", "gp ", ""]
)
def test_a_study_in_a_json_file_runs_nothing(tmp_path, monkeypatch, task):
    _, mark = evil(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec, records = of_strangers(tmp_path / "made/journal.log", FILE)
    for name in ("tiny", "gp"):
        spec = dataclasses.replace(spec, task=task, task_name=name)
        (tmp_path / "study.json").write_bytes(pack("stranger", spec, records))
        for format_ in ("csv", "md", "json"):
            run("report", "study.json", "--format", format_, "--out", tmp_path / "out")
    assert not mark.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "text", ["__import__('os').mkdir('run')", "1+1", "[1]", "!!python/object/apply:os.mkdir [run]"]
)
def test_settings_are_not_evaluated(tmp_path, text):
    for name in ("lr", "epochs", "small", "exact", "optimizer"):
        assert f"setting {name} has to be" in run("run", "gp", "--set", f"{name}={text}", code=1)
    assert not (tmp_path / "run").exists()


def test_arrays_with_objects_are_refused(tmp_path, monkeypatch):
    class Runs:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    monkeypatch.setitem(cache.DATA_SETS, "uiuc", small_uiuc())
    for name, content in textures().items():
        path = tmp_path / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    run("data", "fetch", "uiuc", "--root", tmp_path, "--source", tmp_path / "given")
    labels = tmp_path / "uiuc" / "labels.npy"
    np.save(labels, np.array([Runs()] * 1000, dtype=object), allow_pickle=True)
    (tmp_path / "run").unlink(missing_ok=True)
    with pytest.raises(cache.CacheError, match=r"is damaged"):
        cache.check("uiuc", tmp_path, verify=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        cache.load("uiuc", tmp_path)
    assert not (tmp_path / "run").exists()
    np.load(labels, allow_pickle=True)  # does harm, so the test is one
    assert (tmp_path / "run").exists()


@pytest.fixture
def _noting():
    """Notes of faults are taken; beside pytest's own they are not."""
    before = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if before:
        faulthandler.enable(sys.__stderr__)


@pytest.mark.usefixtures("_noting")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["log.jsonl", ".journal.log.lock", "KEY", "KEY/log.jsonl", "KEY/crash.txt"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_goes_through_links_and_pipes(tmp_path, kind, name):
    """A stranger's study may bring a link to a file of yours, in the place of one that is written to."""
    _, records = of_strangers(tmp_path / "runs/stranger/journal.log", FILE)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("precious")
    (mine / "checkpoint.pt").write_text("precious")
    place = tmp_path / "runs/stranger" / name.replace("KEY", records[1].key)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(mine if name == "KEY" else mine / "file" if name != ".journal.log.lock" else mine / "new")
    result = CliRunner().invoke(cli.app, ["run", FILE, "--set", "p=0.5", "--name", "stranger"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    if name in ("log.jsonl", ".journal.log.lock", "KEY"):  # the others are replaced
        assert result.exit_code == 1, result.output
        assert str(place.relative_to(tmp_path)) in result.output
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"file": "precious", "checkpoint.pt": "precious"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["result.json", "checkpoint.pt", ".result.json.1.new"])
def test_pipes_in_the_folder_of_a_trial_are_not_waited_for(tmp_path, name):
    _, records = of_strangers(tmp_path / "runs/stranger/journal.log", FILE)
    place = tmp_path / "runs/stranger" / records[1].key / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    run("run", FILE, "--set", "p=0.5", "--name", "stranger")
    assert (place.parent / "result.json").is_file()
    assert {path.name for path in place.parent.iterdir()} == {"log.jsonl", "result.json"}


def test_a_pipe_is_no_journal(tmp_path):
    os.mkfifo(tmp_path / "journal.log")
    for command in (["status"], ["worker", "x"], ["report", "x"], ["run", FILE]):
        assert "is no journal" in run(*command, "--storage", tmp_path / "journal.log", code=1)


def shadow(folder, *names):
    """Modules in a folder that are called like ones that are needed, and the mark that importing one leaves."""
    for name in names:
        (folder / f"{name}.py").write_text(
            f"from pathlib import Path\nPath({str(folder / 'run')!r}).touch()\nraise SystemExit(3)\n"
        )
    return folder / "run"


def test_workers_do_not_import_from_the_current_folder(tmp_path, monkeypatch):
    mark = shadow(tmp_path, "json", "torch", "optuna", "numpy", "typing_extensions", "rich")
    environment = {**os.environ, "PYTHONPATH": str(Path(backdrop.__file__).parent.parent)}
    environment.pop("PYTHONSAFEPATH", None)
    started = []

    def start(command, **kwargs):
        started.append(command)
        raise OSError("enough is seen")

    with monkeypatch.context() as patched:
        patched.setattr(workers.subprocess, "Popen", start)
        with pytest.raises(OSError, match="enough is seen"):
            workers.Workers("journal.log", "tiny", tmp_path, Options(accelerator="cpu"), count=1, say=print)
    (command,) = started
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "JSONDecodeError" in done.stderr  # it has begun, and got no order
    assert not mark.exists()
    command = [
        sys.executable,
        "-m",
        "backdrop.experiments.study.workers",
    ]  # finds modules here: the test is one
    assert subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL).returncode == 3
    assert mark.exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder")
def test_processes_of_a_trial_do_not_import_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    mark, ended = shadow(tmp_path, "multiprocessing"), []

    class Fabric:
        """Starts a process as the one of Lightning does, and trains nothing."""

        world_size = 2

        def __init__(self, **kwargs):
            pass

        def launch(self, *args):
            process = multiprocessing.get_context("spawn").Process(target=os.getpid)
            process.start()
            process.join()
            ended.append(process.exitcode)
            return {"diverged": "enough is seen"}

    monkeypatch.setattr(train, "Fabric", Fabric)
    task = Tiny.with_preset("quick", {"epochs": 1})
    with pytest.raises(train.Diverged, match="enough is seen"):
        train.fit(task, tmp_path / "trial", Options(accelerator="cpu", devices=2, threads=1))
    assert ended == [0]
    assert not mark.exists()
    assert "PYTHONSAFEPATH" not in os.environ
    Fabric().launch()  # outside, so the test is one
    assert ended[1] != 0
    assert mark.exists()


def test_reports_do_not_follow_a_matplotlibrc(tmp_path):
    spec, records = of_strangers(tmp_path / "made/journal.log", FILE)
    (tmp_path / "study.json").write_bytes(pack("stranger", spec, records))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://evil\nfont.size: 70\n")
    evil(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(backdrop.__file__).parent.parent)}
    code = """
import subprocess, sys
from backdrop.experiments.report import drawing
import matplotlib as mpl
assert mpl.rcParams["text.usetex"]  # as the file says
with drawing.style():
    assert not mpl.rcParams["text.usetex"]
    assert mpl.rcParams["font.size"] < 20
subprocess.Popen = None  # nothing is started
from backdrop.cli import app
app(["report", "study.json", "--format", "png"])
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ".png" in done.stdout
    assert not (tmp_path / "run").exists()


# --- the page itself


def test_every_line_of_the_page_has_a_test():
    text = (ROOT / "SECURITY.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    promised = [section for section in sections if section.startswith(("What runs code", "What never runs code"))]
    assert len(promised) == 2
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for section in promised:
        lines = re.split(r"\n- ", section)[1:]
        assert len(lines) >= 4
        for line in lines:
            named = re.findall(r"`(test_\w+)`", line)
            assert named, line
            assert set(named) <= defined, line
