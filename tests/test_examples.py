"""The examples run, small where the real thing takes long, and say what they should; notebooks are scripts that ran."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backdrop.functional import draw_mask
from foreign import import_or_skip

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def run(name, folder, *options, start=(sys.executable, "-W", "error")):
    """What an example prints, made small, in one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINY": "1", "MPLBACKEND": "Agg"}
    command = [*start, str(EXAMPLES / name), *options]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def load(name, monkeypatch, folder):
    """What an example defines; those in cells run, small."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TINY", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return runpy.run_path(str(EXAMPLES / name))


def windows(p, shape, seed, stride, before, size):
    """The pixels that the kept units of the first example's masks see."""
    mask = draw_mask(shape, p, (0, 2, 3), exact=True, generator=torch.Generator().manual_seed(seed))[0, 0]
    pixels = torch.zeros(1024, 1024, dtype=torch.bool)
    for i, j in mask.nonzero().tolist():
        rows, columns = (slice(max(0, k * stride - before), k * stride - before + size) for k in (i, j))
        pixels[rows, columns] = True
    return pixels


def test_where_gradients_go(tmp_path, monkeypatch, capsys):
    example = load("01_where_gradients_go.py", monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert (tmp_path / "where_gradients_go.png").stat().st_size > 50_000
    assert "bit for bit" in said
    rows = {line[:18].strip(): [float(x) for x in line[18:].split()] for line in said.splitlines()[1:7]}
    plain = [n / 4 for n in range(1, 9)]
    assert rows["no mask"] == rows["in eval()"] == plain
    assert rows["mean of 10000"] == pytest.approx(plain, abs=0.2)
    for i in (1, 2, 3):
        kept = [x for x in rows[f"mask {i}"] if x]
        assert rows[f"mask {i}"] == [
            pytest.approx(8 / len(kept) * x, abs=0.01) if y else 0
            for x, y in zip(plain, rows[f"mask {i}"], strict=True)
        ]

    fine = windows(0.99, (1, 32, 64, 64), seed=1, stride=16, before=5, size=26)
    coarse = windows(0.75, (1, 4, 4, 4), seed=2, stride=256, before=5, size=266)
    expected = {"no mask": torch.ones_like(fine), "fine mask": fine, "coarse mask": coarse}
    for title, gradient in example["gradients"].items():
        if title == "both masks":
            assert 0 < gradient.count_nonzero() < fine.sum()
            assert not gradient[~(fine & coarse)].any()
        else:
            assert torch.equal(gradient > 0, expected[title])


def test_many_processes(tmp_path):
    lines = run("02_auc_ddp.py", tmp_path, "--steps=5").splitlines()
    assert lines[0].startswith("1 process, p = 0.0: area under the ROC curve 0.")
    assert lines[1].startswith("1 process, p = 0.9: area under the ROC curve 0.")
    assert [line.removeprefix("2 processes") for line in lines[2:]] == [
        line.removeprefix("1 process") for line in lines[:2]
    ]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    assert run("02_auc_ddp.py", tmp_path, "--steps=5", start=torchrun).splitlines() == lines[2:]


def test_what_skip_computes(tmp_path, monkeypatch, capsys):
    example = load("03_what_skip_computes.py", monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "argv", ["example", "--output", str(tmp_path / "picture.png")])
    example["main"]()
    assert (tmp_path / "picture.png").stat().st_size > 50_000
    assert "82 of 4096 positions kept" in capsys.readouterr().out
    _, alive = example["gradients"](example["network"](), example["texture"]())
    shares = [cells.float().mean().item() for cells in alive]
    assert shares == sorted(shares, reverse=True)  # windows grow towards the image
    assert shares[-1] == pytest.approx(82 / 4096)


def test_areas_in_a_table(tmp_path):
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    said = run("07_auc_tabular.py", tmp_path)
    assert [line[:35].strip() for line in said.splitlines()[2:]] == [
        "cross-entropy, minibatches of 32",
        "the same, as many of each class",
        "rank statistic, whole batch",
        "rank statistic, whole batch, mask",
        "average precision, whole batch",
    ]
    assert all(0.5 < float(line[35:].split()[0]) < 1 for line in said.splitlines()[2:])

    example = runpy.run_path(str(EXAMPLES / "07_auc_tabular.py"))
    x, labels = example["table"]()
    assert (len(x), labels.sum()) == (442, 47)
    parts = example["split"](x, labels, seed=0)
    assert [(len(part), known.sum().item()) for part, known in parts] == [(220, 23), (109, 11), (113, 13)]
    assert len(torch.cat([part for part, _ in parts]).unique(dim=0)) == 442  # nobody is in two parts
    scores = torch.randn(442)
    assert example["area"](scores, labels) == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=1e-4)
    expected = sklearn.average_precision_score(labels, scores)
    assert example["precision"](scores, labels) == pytest.approx(expected, abs=1e-4)


def test_few_large_images(tmp_path, monkeypatch, capsys):
    example = load("08_few_large_images.py", monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert "The fine mask stands on 32 x 32 positions; each sees 43 pixels." in said
    assert "The coarse mask stands on 4 x 4 positions; " in said
    assert re.search(r"^masks +\(0.95, 0.75\) .*%.* \+-", said, re.MULTILINE)
    assert (tmp_path / "few_large_images.png").stat().st_size > 50_000
    plain, masked = example["gradients"].values()
    assert (plain > 0).float().mean() > 0.99
    assert 0 < (masked > 0).sum() <= 51 * 43**2  # windows of kept positions


def test_long_series(tmp_path, monkeypatch, capsys):
    load("10_long_series.py", monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert "The mask stands on 256 positions; each sees 41 time steps." in said
    assert [line.split()[0] for line in said.splitlines()[-4:-1]] == ["0", "0.75", "0.9"]
    assert (tmp_path / "long_series.png").stat().st_size > 20_000


def test_a_model_of_timm(monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    import_or_skip("timm")
    monkeypatch.setenv("TINY", "1")
    runpy.run_path(str(EXAMPLES / "09_timm_model.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "a mask belongs behind layer1, which sees 31 pixels" in said
    assert "same state_dict keys, and gives the same scores bit for bit" in said
    assert re.search(r"^layer1, p = 0.9 +\d+%", said, re.MULTILINE)


def test_without_timm_the_example_says_what_to_do(monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it could not be found
    with pytest.raises(SystemExit, match="pip install timm"):
        runpy.run_path(str(EXAMPLES / "09_timm_model.py"))


def test_a_text_encoder(tmp_path):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    said = run("11_text_contrastive.py", tmp_path)
    same = dict(re.findall(r"^(GradCache|Skip) and .*: the same gradient, to (\S+) of the largest", said, re.MULTILINE))
    assert same.keys() == {"GradCache", "Skip"}
    assert all(float(far) < 1e-4 for far in same.values())
    kept = {name: float(mb) for name, mb in re.findall(r"^(plain|GradCache|Skip) +\d+ +(\d+\.\d)$", said, re.MULTILINE)}
    assert kept["Skip"] < kept["plain"] / 4
    assert kept["GradCache"] < kept["plain"] / 4
    assert re.search(r"^ +\d+ .* plain too large, with Skip fits$", said, re.MULTILINE)


def test_survival(tmp_path, monkeypatch):
    said = run("12_survival.py", tmp_path)
    rows = re.findall(r"^(\w[\w, ]+?) +(\d+) +\d+ +(\d+\.\d) \((\d+\.\d), (\d+\.\d)\)$", said, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("cohort", "3"),
        ("cohort, mask", "3"),
        ("minibatches", "3"),
        ("cohort of patches", "3"),
        ("cohort, mask", "9"),
        ("minibatches", "9"),
    ]
    assert all(float(mean) == pytest.approx((float(one) + float(two)) / 2, abs=0.11) for *_, mean, one, two in rows)
    assert (tmp_path / "survival.png").stat().st_size > 50_000

    example = load("12_survival.py", monkeypatch, tmp_path)
    times, events = torch.tensor([1.0, 2.0, 2.0, 3.0, 4.0]), torch.tensor([True, True, False, False, True])
    at, alive = example["kaplan_meier"](times, events)
    assert at.tolist() == [1, 2, 4]
    assert alive.tolist() == pytest.approx([4 / 5, 4 / 5 * 3 / 4, 0])
    assert example["concordance"](-times, times, events) == 100
    assert example["concordance"](torch.zeros(5), times, events) == 50
    images = torch.arange(2.0 * 64 * 64).view(2, 1, 64, 64)
    patches = example["crops"](images, torch.Generator().manual_seed(0))
    for patch, image in zip(patches, images, strict=True):
        i, j = divmod(int((patch[0, 0, 0] - image[0, 0, 0]).item()), 64)
        assert torch.equal(patch[0], image[0, i : i + example["PATCH"], j : j + example["PATCH"]])
    data = example["cohort"](400, 7)
    finer = data[0].diff(dim=-1).square().mean((1, 2, 3)) / data[0].var((1, 2, 3))  # what the risk lies in
    assert torch.corrcoef(torch.stack([finer, data[3]]))[0, 1] > 0.8
    assert torch.equal(data[1], example["cohort"](400, 7)[1])


def test_an_image_from_the_disk(tmp_path, monkeypatch):
    pytest.importorskip("tifffile", reason="tifffile is not installed")
    said = run("13_image_from_disk.py", tmp_path)
    steps = re.findall(
        r"^pass \d: 2 x \d+ x \d+, loss \S+, (\d+) tiles forward, (\d+) windows backward", said, re.MULTILINE
    )
    assert len(steps) == 4
    assert all(int(tiles) > 1 for tiles, _ in steps)
    assert [int(windows) for _, windows in steps[1:]] == [pytest.approx(90, abs=50) for _ in steps[1:]]
    assert re.search(r"^[0-4] of 4 new slides are told right$", said, re.MULTILINE)
    assert (tmp_path / "image_from_disk.png").stat().st_size > 50_000

    example = load("13_image_from_disk.py", monkeypatch, tmp_path)
    whole = torch.cat([torch.cat([example["texture"](5, 1, i, j) for j in range(3)], 1) for i in range(3)])
    assert whole.std().item() == pytest.approx(1, abs=0.2)
    steps = whole.diff(dim=1).square().mean(0)  # no seams where tiles meet
    assert steps[63::64].mean().item() == pytest.approx(steps.mean().item(), rel=0.3)


def test_rows_on_the_disk(tmp_path, monkeypatch):
    said = run("14_million_rows.py", tmp_path)
    assert "5,000 rows, 50 of them positive" in said
    assert re.findall(r"^  last step: (\d+) of 5000 samples ran with gradients", said, re.MULTILINE) == ["500", "500"]
    areas = [float(x) for x in re.findall(r"^(?:uniform|gradient): .* ROC AUC of new rows (\S+),", said, re.MULTILINE)]
    assert len(areas) == 2
    assert min(areas) > 0.6
    example = load("14_million_rows.py", monkeypatch, tmp_path)
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])
    assert example["area"](scores, labels) == 0.75


def cells(script):
    """Of a script in the percent form: (kind, text) of each cell."""
    found = []
    for part in re.split(r"^# %%", script.read_text(), flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        found.append(("markdown", text.strip().strip('"').strip()) if "[markdown]" in head else ("code", text.strip()))
    return found


def test_there_are_notebooks():
    assert [notebook.stem for notebook in NOTEBOOKS] == [
        "01_where_gradients_go",
        "08_few_large_images",
        "10_long_series",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_their_scripts(path):
    notebook = json.loads(path.read_text())
    own = [cell for cell in notebook["cells"] if cell["metadata"].get("tags") != ["front"]]
    shown = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in own]
    assert shown == cells(EXAMPLES / f"{path.stem}.py"), "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_were_run(path):
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < 300_000
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}  # so no errors
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # nor warnings
    assert all("print(" not in "".join(cell["source"]) or cell["outputs"] for cell in code)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert all(cell["metadata"] in ({}, {"tags": ["front"]}) for cell in notebook["cells"])
    words = "".join(str(output.get("text", "")) for output in outputs) + str(notebook["metadata"])
    assert not re.search(r"/\w+/\w+", words)  # no paths of the machine that made it


def test_every_example_is_in_the_list():
    page = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"({script.name})" in page
    for notebook in NOTEBOOKS:
        assert f"(notebooks/{notebook.name})" in page


@pytest.mark.skipif(importlib.util.find_spec("nbformat") is None, reason="nbformat is not installed")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid(path):
    import nbformat

    nbformat.validate(nbformat.read(path, as_version=4))


def test_notebooks_install_what_they_need_and_open_in_colab():
    for path in NOTEBOOKS:
        first = next(cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code")
        assert "%pip install" in "".join(first["source"])
        assert not first["outputs"]
    pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("jupytext", reason="jupytext is not installed")
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    make = runpy.run_path(str(EXAMPLES / "notebooks" / "make.py"))
    badge, install = make["front"]("10_long_series", "https://github.com/somebody/torch-backdrop")
    there = "https://colab.research.google.com/github/somebody/torch-backdrop/blob/main/examples/notebooks/"
    assert f"({there}10_long_series.ipynb)" in badge.source
    assert '"torch-backdrop @ git+https://github.com/somebody/torch-backdrop"' in install.source
