"""`backdrop data`: what it does and says, and how it fails."""

import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from backdrop import cli
from backdrop.experiments import cache, sources
from backdrop.experiments.sources import DATA_SETS
from outside import small_uiuc, textures, zipped


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")


def run(*args):
    return CliRunner().invoke(cli.app, ["data", *map(str, args)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Small textures, as a user may have them."""
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    for name, content in textures().items():
        path = tmp_path / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "given"


def test_fetch_and_info(folder, tmp_path):
    root = tmp_path / "the root"
    result = run("fetch", "uiuc", "--root", root, "--source", folder)
    assert result.exit_code == 0
    assert f"uiuc: 1,000 images from the folder {folder}, now in {root / 'uiuc'}" in result.output
    stamp = (root / "uiuc" / "images.npy").stat()

    result = run("fetch", "uiuc", "--root", root)
    assert result.exit_code == 0
    assert f"uiuc is already in {root / 'uiuc'}" in result.output
    assert (root / "uiuc" / "images.npy").stat() == stamp

    result = run("info", "--root", root)
    assert result.exit_code == 0
    (row,) = (line for line in result.output.splitlines() if "1,000" in line)
    assert [cell.strip() for cell in row.strip("│|").split("│")] == [
        *("uiuc", "1,000", "0.0 MB", f"the folder {folder}", "yes", str(root / "uiuc"))
    ]
    assert f"cifar10 is not in {root}; get it with: backdrop data fetch cifar10 --root '{root}'" in result.output


def test_damage_and_repair(folder, tmp_path):
    run("fetch", "uiuc", "--root", tmp_path, "--source", folder)
    np.save(tmp_path / "uiuc" / "images.npy", np.load(tmp_path / "uiuc" / "images.npy")[::-1])
    result = run("info", "--root", tmp_path)
    assert result.exit_code == 0
    assert " NO " in result.output
    assert " yes " not in result.output
    repair = ["fetch", "uiuc", "--root", tmp_path, "--force"]
    assert f"get it anew with: backdrop data {' '.join(map(str, repair))}" in result.output
    assert run(*repair, "--source", folder).exit_code == 0
    assert " yes " in run("info", "--root", tmp_path).output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mnist"], "a data set has to be one of cifar10, uiuc, but got 'mnist'"),
        (["uiuc", "--source", "nowhere"], "there is nothing at nowhere"),
        (["cifar10", "--source", __file__], "source has to be cifar-10-python.tar.gz (sha256:"),
        (["uiuc", "--source", __file__], "cannot be read"),
        (["uiuc", "--root", __file__], "File exists"),
    ],
)
def test_errors_are_one_message(tmp_path, monkeypatch, args, message):
    monkeypatch.setenv("BACKDROP_DATA", str(tmp_path))
    result = run("fetch", *args)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # not what went wrong inside
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_errors_are_red(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run("fetch", "[bold]mnist", "--root", tmp_path).output.startswith("\x1b[31ma data set has to be")


def test_a_download_that_fails_names_the_way_out(monkeypatch, tmp_path):
    archive = sources.Archive("a.zip", "sha256:0", "http://127.0.0.1:9/closed")
    known = sources.Source("the authors' archives", (archive,), sources._read_jpegs)
    monkeypatch.setitem(DATA_SETS, "uiuc", sources.DataSet((), (1, 3, 4), (40,), (known,)))
    result = run("fetch", "uiuc", "--root", tmp_path)
    assert result.exit_code == 1
    assert "--source" in result.output
    assert "Traceback" not in result.output


def test_help_names_the_commands():
    for args, words in (([], ["fetch", "info"]), (["fetch", "--help"], ["cifar10", "--root", "--source", "--force"])):
        output = run(*args).output
        for word in words:
            assert word in output


def test_importing_the_command_imports_no_experiments():
    code = "import sys, backdrop.cli; print([m for m in ('numpy', 'PIL') if m in sys.modules and m not in before])"
    code = f"import sys, backdrop; before = set(sys.modules); {code}; print('backdrop.experiments' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "False"]


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import backdrop.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install '.[experiments]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_cache_of_another_data_set_is_not_taken(tmp_path, folder):
    run("fetch", "uiuc", "--root", tmp_path, "--source", folder)
    (tmp_path / "uiuc").rename(tmp_path / "cifar10")
    assert run("fetch", "cifar10", "--root", tmp_path).exit_code == 1
    with pytest.raises(cache.CacheError, match="of uiuc"):
        cache.check("cifar10", tmp_path)


def test_a_mutated_archive_is_one_message_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(DATA_SETS, "uiuc", small_uiuc())
    content = zipped(textures(per_class=1))
    for seed in range(40):
        random = np.random.default_rng(seed)
        changed = bytearray(content)
        start = int(random.integers(len(content)))
        changed[start : start + 64] = random.bytes(len(changed[start : start + 64]))
        (tmp_path / "given.zip").write_bytes(changed)
        result = run("fetch", "uiuc", "--root", tmp_path / "root", "--source", tmp_path / "given.zip")
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert str(tmp_path / "given.zip") in result.output
        assert "Traceback" not in result.output
        assert [path.name for path in tmp_path.iterdir()] == ["given.zip"]
