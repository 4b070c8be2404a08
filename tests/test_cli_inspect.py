"""`backdrop inspect`: a model of one's own, found by its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backdrop import cli
from backdrop.placement.suggest import suggest

ROOT = Path(__file__).parent.parent
NETS = """
from torch import nn
from backdrop import Backdrop2d
from neighbour import WIDTH

def network(classes=3):
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 5, stride=4), nn.ReLU(), Backdrop2d(0.9, exact=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(WIDTH, classes))

def needs(width, *, depth, classes=2):
    return network()

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 2, 3), Backdrop2d(0.5))

ready = network()
number = 3

def gives_number():
    return 3

def gives_nothing():
    pass

def fails():
    return network(classes="three")
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "broken.py").write_text("import torch\n\n1 / 0\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "unfinished.py").write_text("def network(:\n")
    yield
    for name in set(sys.modules) - before:  # so that the next test imports its own
        if name in ("my_nets", "neighbour", "broken", "lacking", "unfinished"):
            del sys.modules[name]


def run(*args):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, args)])


def looked_at(name, *more):
    result = run(name, "--input", "2,1,64,64", *more)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "name", ["my_nets:network", "my_nets.py:network", "./my_nets.py:network", "my_nets:ready", "my_nets.py:ready"]
)
def test_a_function_or_a_model_is_found_in_a_module_or_a_file(name):
    shown = looked_at(name)
    assert "Sequential on an input of 2 x 1 x 64 x 64: 6 layers, one of them a mask" in shown
    assert "22 of 225" in shown


def test_a_class_is_made():
    assert "Net on an input of 2 x 1 x 64 x 64: 2 layers" in looked_at("my_nets:Net")


def test_a_file_elsewhere_finds_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "6 layers" in looked_at(f"{tmp_path}/my_nets.py:network")


def test_layers_are_folded_unless_all_are_asked_for():
    folded, every = looked_at("my_nets:network"), looked_at("my_nets:network", "--all")
    assert "conv, relu" in folded
    assert "ReLU" in every
    assert "conv, relu" not in every


def test_statistics_and_device_are_those_of_the_estimate():
    shown = looked_at("my_nets:network", "--statistics", "sampled", "--device", "cuda")
    assert 'for cuda with statistics="sampled"' in shown


def test_suggestions_are_those_of_suggest(monkeypatch):
    shown = looked_at("my_nets:network", "--sizes", "5,20")
    import my_nets

    words = str(suggest(my_nets.network(), (2, 1, 64, 64), [5, 20]))
    assert " ".join(words.split()) in " ".join(shown.split())


@pytest.mark.parametrize("name", ["page.html", "picture.png", "picture.svg"])
def test_a_page_or_a_picture_is_written(name, tmp_path):
    pytest.importorskip("matplotlib")
    assert looked_at("my_nets:network", "--out", tmp_path / name).rstrip().endswith(name)
    assert (tmp_path / name).stat().st_size > 5000
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:network", "there is no module 'no_such_module'"),
        ("my_nets.sub:network", "there is no module 'my_nets.sub'"),
        ("missing.py:network", "there is no file"),
        ("my_nets:netwrok", "my_nets has no 'netwrok'; the nearest are network"),
        ("my_nets:xyz", "my_nets has no 'xyz'; it has "),
        ("my_nets", "has to be given as MODULE:NAME or FILE.py:NAME, but got 'my_nets'"),
        ("my_nets:", "has to be given as MODULE:NAME"),
        (":network", "has to be given as MODULE:NAME"),
        ("my_nets:number", "has to be a model or a function that returns one, but is a value of type int"),
        ("my_nets:gives_number", "has to return a torch.nn.Module, but returned a value of type int"),
        ("my_nets:gives_nothing", "has to return a torch.nn.Module, but returned None"),
        ("my_nets:needs", "my_nets:needs needs arguments (width, depth); name a function without any"),
    ],
)
def test_what_is_no_model_is_said_in_one_line(name, words):
    result = run(name, "--input", "2,1,64,64")
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "2,1,64,x"], "--input has to be numbers with commas between them, such as 1,3,224,224, but got"),
        (["--input", "2"], "input_shape has to be the shape of a batch"),
        (["--input", "2,1,0,64"], "input_shape has to be at least 1, but got 0"),
        (["--input", "2,3,64,64"], "Sequential cannot take an input of shape (2, 3, 64, 64): 0 says: "),
        (["--input", "2,1,64,64", "--sizes", "big"], "--sizes has to be numbers"),
        (["--input", "2,1,64,64", "--statistics", "some"], "statistics has to be one of"),
        (["--input", "2,1,64,64", "--device", "abacus"], "device has to be one that torch knows"),
        (["--input", "2,1,64,64", "--out", "page.pdf"], "has to end in .html, .png or .svg"),
        (["--input", "2,1,64,64", "--out", "missing/page.html"], "there is no folder missing"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = run("my_nets:network", *options)
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken:network", ["broken cannot be imported:", 'broken.py", line 3', "1 / 0", "ZeroDivisionError"]),
        ("broken.py:network", ["broken.py cannot be imported:", 'broken.py", line 3', "ZeroDivisionError"]),
        ("lacking:network", ['lacking.py", line 1', "No module named 'no_such_library'"]),
        ("unfinished.py:network", ['unfinished.py", line 1', "SyntaxError"]),
        ("my_nets:fails", ["my_nets:fails gave no model:", 'classes="three"', "TypeError"]),
    ],
)
def test_errors_in_the_users_code_show_where(name, words):
    result = run(name, "--input", "2,1,64,64")
    assert result.exit_code == 1
    for expected in words:
        assert expected in result.output
    assert "importlib" not in result.output
    assert "command.py" not in result.output
    assert "[experiments]" not in result.output  # which does not bring the user's own libraries


def test_the_command_runs_as_a_program_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-c", "from backdrop.cli import main; main()"]
    command += ["inspect", str(ROOT / "examples" / "06_networks.py") + ":textures", "--input", "4,1,1024,1024"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [*command, "--out", "page.html"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "\x1b" not in done.stdout  # no colours in a pipe
    (line,) = (line for line in done.stdout.splitlines() if line.split()[:2] == ["28", "units"])
    assert "41 of 4,096" in line  # nothing is folded for want of width
    assert (tmp_path / "page.html").stat().st_size > 50_000
