"""The package as a user meets it: its imports, its documentation, its example."""

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backdrop
from backdrop.experiments.tasks import TASKS
from backdrop.functional import draw_mask

ROOT = Path(__file__).parent.parent


def test_importing_the_core_imports_torch_and_nothing_else():
    code = """
import sys, torch, torch.utils.checkpoint, torch.utils.data
before = set(sys.modules)
import backdrop, backdrop.distributed, backdrop.integrations, backdrop.losses, backdrop.textures
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - sys.stdlib_module_names - {"backdrop", "torch"}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_readme_names_both_commands_and_ci_runs_the_tests():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 50


def test_versions_agree():
    assert f"version: {backdrop.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {backdrop.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_benchmark_page_opens_with_all_of_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_all

    table = bench_all.table(bench_all.RESULTS, {"cpu": "CPU", "h200": "H200"})
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"<!-- all -->\n\n{table}\n<!-- end of all -->" in page
    layers = json.loads((bench_all.RESULTS / "layer-cpu.json").read_text())["rows"]
    (ratio,) = (r["time_over_dropout"] for r in layers if (r["layer"], r["dtype"]) == ("Backdrop2d", "float32"))
    assert bench_all.found_in(bench_all.RESULTS, "cpu")["masking layer against `nn.Dropout`, time"] == pytest.approx(
        1 / ratio
    )


@pytest.mark.parametrize("name", ["layer-cpu", "layer-h200"])
def test_the_benchmark_page_shows_the_measured_figures(name):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    figures = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for row in figures["rows"]:
        cells = [f"{row['megabytes']:.0f} MB {row['dtype']}", row["layer"]]
        cells += [f"{row['milliseconds']:.3f}", f"{row['time_over_dropout']:.2f}"]
        if row["graph_milliseconds"] is not None:
            cells += [f"{row['graph_milliseconds']:.3f}", f"{row['graph_time_over_dropout']:.2f}"]
        cells += [f"{row['extra_megabytes']:.1f}", f"{row['gradient_and_mask_megabytes']:.1f}"]
        assert f"| {' | '.join(cells)} |" in page
    for row in figures["multiply"]:
        cells = [f"{row['megabytes']:.0f} MB {row['dtype']}", f"{row['copy_milliseconds']:.3f}"]
        cells += [f"{row['torch_over_copy']:.2f}", f"{row['backdrop_over_copy']:.2f}"]
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.parametrize("name", ["skip-cpu", "skip-h200"])
def test_the_page_on_skipping_shows_the_measured_figures(name):
    page = (ROOT / "docs" / "skip.md").read_text()
    figures = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    readme = (ROOT / "README.md").read_text()
    for row in figures["rows"]:
        case = row["case"].rsplit(", ", 1)[0]
        faster, of_forward = row["plain_ms"] / row["skip_ms"], row["skip_ms"] / row["forward_ms"]
        memory = row["skip_mb"] / row["plain_mb"]
        line = next(line for line in page.splitlines() if line.startswith(f"| {case} | {row['plain_ms']:.1f} |"))
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert (cells[2], cells[4], cells[8]) == (f"{faster:.2f}", f"{of_forward:.2f}", f"{memory:.2f}")
        if cells[3]:
            assert f"| {case} | {faster:.2f} | {of_forward:.2f} | {memory:.2f} |" in readme


def test_the_page_on_losses_shows_the_measured_figures():
    page, readme = ((ROOT / name).read_text() for name in ("docs/losses.md", "README.md"))
    for device in ("cpu", "h200"):
        figures = json.loads((ROOT / "benchmarks" / "results" / f"losses-{device}.json").read_text())
        for row in figures["rows"]:
            pairs = f"{row['positives']:,} x {row['negatives']:,}"
            cells = [row["loss"], pairs, row["way"], f"{row['milliseconds']:.1f}", f"{row['megabytes']:.1f}"]
            assert f"| {' | '.join(cells)} |" in page
            assert device == "h200" or row["positives"] == 1 or f"| {' | '.join(cells)} |" in readme


def test_the_page_on_data_sets_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cells = runpy.run_path(str(ROOT / "benchmarks" / "bench_data.py"))["cells"]
    page = (ROOT / "docs" / "data.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "results" / "data-cpu.json").read_text())["rows"]:
        assert f"| {' | '.join(cells(row))} |" in page


def test_the_page_on_textures_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench_textures.py"))
    page, readme = ((ROOT / name).read_text() for name in ("docs/textures.md", "README.md"))
    for device in ("cpu", "h200"):
        figures = json.loads((ROOT / "benchmarks" / "results" / f"textures-{device}.json").read_text())
        for kind in bench["HEADINGS"]:
            for row in figures[kind]:
                cells = bench["cells"](kind, row)
                assert f"| {' | '.join(cells)} |" in page
                gauss = row.get("texture") == "SquaredExponential 10"
                alone = gauss and row.get("size") == [1024, 1024] and row.get("fields") == 1
                memory, rate = gauss and kind == "memory", gauss and kind == "rates"
                if row.get("library") == "GSTools" or (device == "cpu" and (alone or memory)) or rate:
                    assert f"| {cells[-1]} |" in readme


def quick_results(task):
    """The configurations of a quick study, as `backdrop report TASK-quick --format csv` writes them."""
    with (ROOT / "results" / "quick" / f"{task}-configurations.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_demo_shows_the_measured_figures():
    control, masked = quick_results("gp")
    rows = []
    for row in (control, masked):
        mean, sd, low, high = (float(row[f"accuracy {part}"]) for part in ("mean", "sd", "low", "high"))
        rows.append(
            f"| {float(row['p_small']):g} | {float(row['p_large']):g} | {mean:.1f} ± {sd:.1f} [{low:.1f} to {high:.1f}]"
        )
    gain, low, high = (float(masked[f"gain {part}"]) for part in ("mean", "low", "high"))
    rows[1] += f" | {gain:+.1f} [{low:.1f} to {high:.1f}]"
    assert low > 0
    for page in ("README.md", "docs/experiments.md"):
        for row in rows:
            assert row in (ROOT / page).read_text()


@pytest.mark.parametrize("task", TASKS)
def test_the_pages_show_what_the_quick_studies_gave(task):
    kind, results = TASKS[task], quick_results(task)
    (control,) = (row for row in results if not any(float(row[mask]) for mask in kind.masks))
    digits = 1 if kind.metric == "accuracy" else 3
    for masked in (row for row in results if row is not control):
        masks = ", ".join(f"{mask} {float(masked[mask]):g}" for mask in kind.masks)
        without, with_masks = (f"{float(row[f'{kind.metric} mean']):.{digits}f}" for row in (control, masked))
        gain, low, high = (float(masked[f"gain {part}"]) for part in ("mean", "low", "high"))
        shown = f"{gain:+.{digits}f} [{low:.{digits}f} to {high:.{digits}f}]"
        line = f"| `{task}` | {masks} | {without} | {with_masks} | {shown} | {masked['gain n']} |"
        for page in ("README.md", "docs/experiments.md"):
            assert line in (ROOT / page).read_text()


def test_the_page_on_choosing_shows_what_is_printed():
    page = (ROOT / "docs/choosing.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    names = {"__name__": "page"}
    exec(code, names)
    shape = (4, 1, 256, 256)
    for words in (
        backdrop.inspect(names["network"](), shape),
        backdrop.suggest(names["network"](), shape, sizes=[16, 40]),
    ):
        assert f"```text\n{words}\n```" in page


def test_the_example_over_many_processes_runs():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    example = [str(ROOT / "examples" / "02_auc_ddp.py"), "--steps=5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    one, two = (
        subprocess.run([*start, *example], env=environment, check=True, capture_output=True, text=True).stdout
        for start in ([sys.executable], [*command, "--standalone"])
    )
    (alone, *_), (together, masked) = one.splitlines(), two.splitlines()
    assert alone.startswith("1 process, p = 0.0: area under the ROC curve 0.")
    assert together.removeprefix("2 processes") == alone.removeprefix("1 process")  # without a mask
    assert masked.startswith("2 processes, p = 0.9: area under the ROC curve 0.")


def windows(p, shape, seed, stride, before, size):
    """The pixels that the kept units of the example's masks see."""
    mask = draw_mask(shape, p, (0, 2, 3), exact=True, generator=torch.Generator().manual_seed(seed))[0, 0]
    pixels = torch.zeros(1024, 1024, dtype=torch.bool)
    for i, j in mask.nonzero().tolist():
        rows, columns = (slice(max(0, k * stride - before), k * stride - before + size) for k in (i, j))
        pixels[rows, columns] = True
    return pixels


def test_the_example_shows_what_is_computed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["example", "--output", str(tmp_path / "picture.png")])
    example = runpy.run_path(str(ROOT / "examples" / "03_what_skip_computes.py"))
    example["main"]()
    assert (tmp_path / "picture.png").stat().st_size > 50_000
    assert "82 of 4096 positions kept" in capsys.readouterr().out
    _, alive = example["gradients"](example["network"](), example["texture"]())
    shares = [cells.float().mean().item() for cells in alive]
    assert shares == sorted(shares, reverse=True)  # windows grow towards the image
    assert shares[-1] == pytest.approx(82 / 4096)


def test_the_example_shows_patches_at_both_scales(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["example", "--output", str(tmp_path / "picture.png")])
    example = runpy.run_path(str(ROOT / "examples" / "01_where_gradients_go.py"))
    example["main"]()
    assert (tmp_path / "picture.png").stat().st_size > 50_000
    assert "bit for bit" in capsys.readouterr().out

    image = torch.randn(1, 1, 1024, 1024)
    fine = windows(0.99, (1, 32, 64, 64), seed=1, stride=16, before=5, size=26)
    coarse = windows(0.75, (1, 4, 4, 4), seed=2, stride=256, before=5, size=266)
    expected = {"no mask": torch.ones_like(fine), "fine mask": fine, "coarse mask": coarse}
    for title, p_fine, p_coarse in example["CASES"]:
        _, gradient = example["input_gradient"](image, p_fine, p_coarse)
        if title == "both masks":
            assert 0 < gradient.count_nonzero() < fine.sum()
            assert not gradient[~(fine & coarse)].any()
        else:
            assert torch.equal(gradient > 0, expected[title])
