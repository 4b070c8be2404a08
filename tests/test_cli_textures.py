"""`backdrop textures`: data sets on the disk, whole or not at all."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from backdrop import cli
from backdrop.experiments import generate as module
from backdrop.experiments.generate import generate
from backdrop.textures import Texture, TextureDataset

GROUPS = [(2, 3), (8, 12)]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")


def run(*args):
    return CliRunner().invoke(cli.app, ["textures", *map(str, args)])


def small(out, *more):
    return run("--small", 2, 3, "--large", 8, 12, "--size", 24, "--per-class", 3, "--seed", 5, "--out", out, *more)


def expected(split="train"):
    return TextureDataset(Texture.grid(GROUPS, (0.75, 1.25)), 3, 24, 5, split=split)


def check(folder, data):
    images, labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    assert images.dtype == np.float32
    assert torch.equal(torch.from_numpy(images.copy()), data.images[:, 0])
    assert labels.tolist() == data.labels.tolist()
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("images.npy", "labels.npy"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert manifest["files"][name]["checksum"] == f"sha256:{digest}"
    assert sorted(path.name for path in folder.iterdir()) == ["images.npy", "labels.npy", "manifest.json"]
    assert not list(folder.parent.glob(".*"))
    return manifest


def test_what_is_written_is_what_a_data_set_draws(tmp_path):
    result = small(tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "images: 12, classes: 4" in result.output
    manifest = check(tmp_path / "out", expected())
    assert manifest["settings"] == {
        "groups": [[2, 3], [8, 12]],
        "weights": [0.75, 1.25],
        "combine": "sum",
        "patchwork": False,
        "periodic": False,
        "size": [24, 24],
        "per_class": 3,
        "seed": 5,
        "split": "train",
        "device": "cpu",
    }
    assert manifest["classes"] == [[2, 8], [3, 8], [2, 12], [3, 12]]
    assert manifest["backdrop"]
    assert small(tmp_path / "test", "--split", "test").exit_code == 0
    check(tmp_path / "test", expected("test"))


def test_any_number_of_scales_and_every_setting(tmp_path):
    options = ["--small", "1,2", "--scale", 4, "--scale", 6, 7, "--large", 9, "--weights", 1, -2, 0.5, ".25"]
    more = ["--size", 20, 16, "--combine", "product", "--periodic", "--patchwork", "--per-class", 1]
    result = run(*options, *more, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    textures = Texture.grid([(1, 2), (4,), (6, 7), (9,)], (1, -2, 0.5, 0.25), "product", patchwork=True)
    check(tmp_path / "out", TextureDataset(textures, 1, (20, 16), 0, periodic=True))


def test_nothing_is_overwritten_unless_forced(tmp_path):
    out = tmp_path / "out"
    assert small(out).exit_code == 0
    before = (out / "images.npy").read_bytes()
    again = small(out)
    assert again.exit_code == 1
    assert "--force" in again.output
    assert (out / "images.npy").read_bytes() == before
    shutil.copytree(out, tmp_path / ".out.old")  # as a run leaves it that is killed while it removes what it replaced
    other = run("--small", 5, "--size", 8, "--out", out, "--force")
    assert other.exit_code == 0, other.output
    check(out, TextureDataset(Texture.grid([(5,)]), 1, 8, 0))


def test_other_peoples_files_are_never_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    for force in ([], ["--force"]):
        result = small(out, *force)
        assert result.exit_code == 1
        assert "something else" in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]
    (out / "thesis.tex").unlink()
    assert small(out).exit_code == 0  # an empty folder will do


KILLED = """
import os, signal, sys
from backdrop.experiments.generate import generate

def progress(indices):
    for i in indices:
        if i == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield i

generate(sys.argv[1], [(2, 3), (8, 12)], per_class=3, size=24, seed=5, progress=progress)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system that can kill a process at once")
def test_a_killed_run_leaves_no_half_data_set_and_is_continued(tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    begun = 0
    for stop in (0, 5, 9):
        process = subprocess.run([sys.executable, "-c", KILLED, str(out), str(stop)])
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
        size = (partial / "images.npy").stat().st_size
        assert begun <= size <= 128 + stop * 24 * 24 * 4
        begun = size // (24 * 24 * 4) * 24 * 24 * 4
    assert begun
    drawn = []
    generate(
        out, GROUPS, per_class=3, size=24, seed=5, progress=lambda indices: (drawn.append(i) or i for i in indices)
    )
    assert drawn[0] > 0
    assert drawn[-1] == 11
    check(out, expected())


def test_a_half_written_image_is_drawn_again(tmp_path, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"

    def stop(indices):
        yield from list(indices)[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(out, GROUPS, per_class=3, size=24, seed=5, progress=stop)
    with (partial / "images.npy").open("r+b") as file:
        file.truncate(128 + 3 * 24 * 24 * 4 + 1000)
    said = []
    generate(out, GROUPS, per_class=3, size=24, seed=5, say=said.append)
    assert said[0] == "3 of 12 images are there already, going on"
    check(out, expected())


def test_what_was_begun_with_other_settings_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        generate(out, GROUPS, per_class=3, size=24, seed=6, progress=lambda indices: (1 // 0 for _ in indices))
    result = small(out)
    assert result.exit_code == 1
    assert "other settings" in result.output
    assert not out.exists()
    assert small(out, "--force").exit_code == 0
    check(out, expected())


def test_a_full_disk_is_noticed_before_drawing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    result = small(tmp_path / "out")
    assert result.exit_code == 1
    assert "12 images need 0.0 GB" in result.output
    assert not (tmp_path / "out").exists()


def test_the_preview_shows_every_class(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "preview.png"
    assert small(tmp_path / "out", "--preview", picture).exit_code == 0
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "at least one scale"),
        (["--small"], "a list of numbers"),
        (["--small", "ten"], "'ten'"),
        (["--small", "nan"], "positive and finite, but got nan"),
        (["--small", -3], "positive and finite, but got -3"),
        (["--small", 0], "positive and finite, but got 0"),
        (["--small", 3, "--weights", 1, 2], "one number for each of the 1 kernels"),
        (["--small", 3, "--size", 1], "at least 2 pixels"),
        (["--small", 3, "--size", 8, 8, 8, 8], "one to three axes"),
        (["--small", 3, "--size", 8.5], "8.5"),
        (["--small", 3, "--size", 10**7], "GB free"),
        (["--small", 3, "--size", 8, "--per-class", 0], "per_class has to be at least 1"),
        (["--small", 3, "--size", 8, "--combine", "mix"], "'mix'"),
        (["--small", 3, "--size", 8, "--device", "meta"], "CUDA device"),
        (["--small", 3, "--size", 8, "--preview", "/not/there/x.png"], "--preview"),
        (["--small", 3, "--size", 8, "--preview", "picture.xyz"], "--preview has to name a picture"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_any_work(options, words, tmp_path):
    result = run(*options, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output
    assert not any(tmp_path.iterdir())


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    command = [sys.executable, "-c", "from backdrop.cli import main; main()"]
    command += ["textures", "--small", "2", "3", "--large", "8", "12"]
    command += ["--size", "24", "--per-class", "3", "--seed", "5", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[1] for process in runs]
    assert sorted(process.returncode for process in runs) == [0, 1], said  # one of them finds it done
    check(tmp_path / "out", expected())
