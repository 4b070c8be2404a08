"""The package as a user meets it: its imports and its documentation."""

import ast
import csv
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import backdrop
from backdrop.experiments.tasks import TASKS

ROOT = Path(__file__).parent.parent
TUPLES = ("_asdict", "_fields", "_replace")  # what all named tuples have


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


def test_the_page_on_large_images_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench_size = pytest.importorskip("bench_size", reason="it needs the extra experiments")
    figures = json.loads((ROOT / "benchmarks" / "results" / "size-cpu.json").read_text())
    page = (ROOT / "docs" / "large.md").read_text()
    assert bench_size.block(figures) in page
    assert figures["slopes"] == bench_size.slopes(figures["rows"])
    assert figures["ratios"] == bench_size.ratios(figures["rows"])


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


@pytest.mark.parametrize("name", ["skip-cpu", "skip-compiled-cpu", "skip-h200", "skip-compiled-h200"])
def test_the_page_on_skipping_shows_the_measured_figures(name):
    page = (ROOT / "docs" / "skip" / "speed.md").read_text()
    figures = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for row in figures["rows"]:
        case = row["case"].rsplit(", ", 1)[0]
        faster, of_forward = row["plain_ms"] / row["skip_ms"], row["skip_ms"] / row["forward_ms"]
        memory = row["skip_mb"] / row["plain_mb"]
        line = next(line for line in page.splitlines() if line.startswith(f"| {case} | {row['plain_ms']:.1f} |"))
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert (cells[2], cells[4], cells[8]) == (f"{faster:.2f}", f"{of_forward:.2f}", f"{memory:.2f}")


def test_the_page_on_skipping_shows_models_that_others_wrote():
    page = (ROOT / "docs" / "skip" / "speed.md").read_text()
    words = " ".join(page.split())
    for row in json.loads((ROOT / "benchmarks" / "results" / "skip-foreign-cpu.json").read_text())["rows"]:
        case, faster = row["case"], row.get("faster")
        if "possible" in row:
            line = next(line for line in page.splitlines() if line.startswith(f"| {case} | {row['plain_ms']:.0f} |"))
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            assert cells[2:4] == [f"{faster:.2f}", f"{row['possible']:.2f}"]
            assert ("&lt;" in cells[4]) == (faster < 0.85 * row["possible"])
        elif faster is not None:
            assert f"{faster:.1f} times as fast as plain" in words
        else:
            assert f"{row['faster_than_gradcache']:.2f} times its speed" in words
            assert f"{row['memory_of_gradcache']:.2f} of its memory" in words


def test_the_readme_quotes_what_skipping_saves():
    readme = " ".join((ROOT / "README.md").read_text().split())
    shares = []
    for name, case in (("skip-cpu", "All-CNN, GroupNorm"), ("skip-compiled-h200", "All-CNN, BatchNorm sampled")):
        rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        (row,) = (row for row in rows if row["case"].startswith(case) and ", p=0.94" in row["case"])
        shares.append((row["plain_ms"] / row["skip_ms"], row["skip_mb"] / row["plain_mb"]))
    (faster, memory), (faster_there, memory_there) = shares
    assert f"with 6% of the samples is {faster:.1f} times as fast and takes a third of the memory" in readme
    assert memory == pytest.approx(1 / 3, abs=0.03)
    assert f"[{faster_there:.1f} times and a third on an H200]" in readme
    assert memory_there == pytest.approx(1 / 3, abs=0.03)


def test_the_page_on_losses_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench_losses.py"))
    page = (ROOT / "docs" / "losses" / "costs.md").read_text()
    figures = json.loads((ROOT / "benchmarks" / "results" / "losses-cpu.json").read_text())
    for row in figures["rows"]:
        cells = bench["cells"](row)
        assert f"| {' | '.join(cells)} |" in page
    slopes = {row["loss"]: bench["slope"](figures["rows"], row["loss"]) for row in figures["rows"]}
    assert len(slopes) == 11
    for name, slope in slopes.items():
        if name == "contrastive":  # all pairs have to be looked at, so no large sizes are measured
            assert slope is None
        else:
            assert f"{name} {slope:.2f}" in page


@pytest.mark.parametrize(
    ("script", "name"), [("bench_informed", "informed-cpu"), ("train_informed", "train-informed-cpu")]
)
def test_the_page_on_masks_shows_the_measured_figures(monkeypatch, script, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"))
    page = (ROOT / "docs" / "masks.md").read_text()
    figures = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    if script == "bench_informed":
        for table in (part for part in module["TABLES"] if part in figures):
            assert module["table"](figures, table) in page
    else:
        for cells in module["table"](figures):
            assert f"| {' | '.join(cells)} |" in page


def test_the_page_on_data_sets_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cells = runpy.run_path(str(ROOT / "benchmarks" / "bench_data.py"))["cells"]
    page = (ROOT / "docs" / "data.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "results" / "data-cpu.json").read_text())["rows"]:
        assert f"| {' | '.join(cells(row))} |" in page


def test_the_page_on_textures_shows_the_measured_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench_textures.py"))
    page = (ROOT / "docs" / "textures.md").read_text()
    for device in ("cpu", "h200"):
        figures = json.loads((ROOT / "benchmarks" / "results" / f"textures-{device}.json").read_text())
        for kind in bench["HEADINGS"]:
            for row in figures[kind]:
                assert f"| {' | '.join(bench['cells'](kind, row))} |" in page


@pytest.mark.parametrize("task", ["ponce", "cifar10", "latent"])
def test_the_page_shows_what_the_other_quick_studies_gave(task):
    kind = TASKS[task]
    with (ROOT / "results" / "quick" / f"{task}-configurations.csv").open(newline="") as file:
        control, *others = csv.DictReader(file)
    digits = 1 if kind.metric == "accuracy" else 3
    for masked in others:
        masks = ", ".join(f"{mask} {float(masked[mask]):g}" for mask in kind.masks)
        without, with_masks = (f"{float(row[f'{kind.metric} mean']):.{digits}f}" for row in (control, masked))
        gain, low, high = (float(masked[f"gain {part}"]) for part in ("mean", "low", "high"))
        shown = f"{gain:+.{digits}f} [{low:.{digits}f} to {high:.{digits}f}]"
        line = f"| `{task}` | {masks} | {without} | {with_masks} | {shown} | {masked['gain n']} |"
        assert line in (ROOT / "docs" / "experiments.md").read_text()


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


def test_no_package_knows_the_private_names_of_another():
    """What begins with an underscore is known in its own module alone, and `backdrop._core` in all of ours."""
    source, found = ROOT / "src", []
    for path in sorted(source.rglob("*.py")):
        own, imported, said = path.relative_to(source).with_suffix("").parts, {}, []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                where = (getattr(node, "module", None) or "").split(".") if isinstance(node, ast.ImportFrom) else []
                named = {alias.asname or alias.name: (*where, *alias.name.split(".")) for alias in node.names}
                imported |= named
                said += [(node.lineno, parts) for parts in named.values()]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr not in TUPLES:
                said.append((node.lineno, (node.value.id, node.attr)))
        for line, (first, *rest) in said:
            parts = (*imported.get(first, (first,)), *rest)
            owners = [parts[:i] for i, part in enumerate(parts) if re.match(r"_(?!_)", part)]
            if parts[0] == "backdrop" and any(own[: len(owner)] != owner for owner in owners):
                found.append(f"{path.relative_to(source)}, line {line}: {'.'.join(parts)}")
    assert not found


def test_no_package_takes_the_private_attributes_of_anothers_objects():
    source = ROOT / "src" / "backdrop"
    known, taken = {}, []
    for path in sorted(source.rglob("*.py")):
        package = path.relative_to(source).parts[0]
        own = known.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
                taken.append((package, node.attr, f"{path.relative_to(source)}, line {node.lineno}: {node.attr}"))
    theirs = {name for own in known.values() for name in own}
    assert not [where for package, name, where in taken if name in theirs - known[package]]
