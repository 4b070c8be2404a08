"""docs/inside.md, CONTRIBUTING.md: files that they name are there, and a step passes through no more than it did."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import backdrop
from backdrop import Backdrop, Backdrop2d, skip_blocked

ROOT = Path(__file__).parent.parent
SOURCE = Path(backdrop.__file__).parent
CONVOLUTIONS = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), Backdrop2d(0.9)]

# Files of a step, which may become fewer and not more. The engine's are to be 8 once.
STEPS = {
    "layer": (lambda: Backdrop2d(0.9), (4, 1, 32, 32), 6),
    "positions": (lambda: skip_blocked(nn.Sequential(*CONVOLUTIONS), when="always"), (4, 1, 32, 32), 15),
    "samples": (
        lambda: skip_blocked(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), Backdrop(0.9)), when="always"),
        (64, 16),
        11,
    ),
}


def files_entered(call):
    """The files of the library in which a function begins while this runs."""
    entered = set()

    def note(frame, event, argument):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(name for name in entered if name.startswith(f"{SOURCE}/"))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_passes_through_few_files(name):
    make, shape, most = STEPS[name]
    model, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def step():
        model(x).square().mean().backward()

    for _ in range(3):  # what is captured and planned once
        step()
    found = files_entered(step)
    assert str(SOURCE / "layers.py") in found
    assert len(found) <= most, found


def test_the_page_and_its_picture_name_files_that_are_there():
    columns = runpy.run_path(str(ROOT / "docs" / "draw_inside.py"))["COLUMNS"]
    drawn = [where for steps in columns.values() for _, where, _ in steps]
    named = re.findall(r"[\w/]+\.py", " ".join([(ROOT / "docs" / "inside.md").read_text(), *drawn]))
    assert len(named) > 30
    there = [str(path.relative_to(ROOT)) for folder in ("src", "results") for path in (ROOT / folder).rglob("*.py")]
    missing = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert not missing


def test_the_map_names_every_file_and_no_other():
    """That of CONTRIBUTING.md; some folders have maps of their own, or are looked through by their names."""
    rows = re.findall(r"^\| (?:`([^`]+)`|) *\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named, where = {}, ""
    for folder, text in rows:
        where = folder or where
        named.setdefault(where, set()).update(re.findall(r"`([\w/]+\.py)`", text))
    for folder in ("_core", "graph", "losses", "skip", "experiments"):
        there = {path.name for path in (SOURCE / folder).glob("*.py")} - {"__init__.py"}
        told = {name for name in named[f"src/backdrop/{folder}/"] if "/" not in name} - {"__init__.py"}
        assert told <= there, folder
        assert told == {name for name in there if folder != "losses" or name.startswith("_")}, folder
    known = {*named, *(f"src/backdrop/{name}" for names in named.values() for name in names)}
    assert {f"src/backdrop/{path.name}" for path in SOURCE.glob("*.py")} - {"src/backdrop/__init__.py"} <= known
