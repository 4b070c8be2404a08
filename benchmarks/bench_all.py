"""All benchmarks at laptop size, and what they say in one table and one picture.

    python benchmarks/bench_all.py [--device cuda] [--out bench]
    python benchmarks/bench_all.py --again benchmarks/results [--out bench]

Runs each of the others, which write NAME-cpu.json or NAME-gpu.json into the folder, and then table.md and a picture for
each device. `--again` takes the figures of a folder instead of measuring. Every figure is the ratio of two things
measured in one run: how many times as much time or memory the other way takes. Below 1, the other way is better.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markdown import Markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Figure(NamedTuple):
    """A ratio, and how it is found in what a benchmark wrote; None where it was not measured."""

    name: str
    benchmark: str
    find: Callable[[dict], float | None]


def row(figures, *, largest=None, **wanted):
    """The row with these values, of several the one with the largest of something."""
    found = [r for r in figures["rows"] if all(r.get(name) == value for name, value in wanted.items())]
    return max(found, key=lambda r: r[largest]) if found and largest else found[0] if found else None


def layer(what):
    def find(figures):
        wanted = {"dtype": "float32", "largest": "megabytes"}
        ours, other = (row(figures, layer=name, **wanted) for name in ("Backdrop2d", "nn.Dropout"))
        return other[what] / ours[what]

    return find


def skip(begin, p, other, what):
    """Of the case whose name begins so and has this p, on the largest images."""

    def find(figures):
        cases = [r for r in figures["rows"] if r["case"].startswith(begin) and f"p={p}," in r["case"]]
        best = max((r for r in cases if "Bernoulli" not in r["case"]), key=lambda r: r["size"], default=None)
        return best[f"{other}_{what}"] / best[f"skip_{what}"] if best else None

    return find


def loss(name, way, what):
    def find(figures):
        ours, other = (row(figures, loss=name, n=10_000, way=w) for w in ("backdrop", way))
        return other[what] / ours[what] if other else None

    return find


def textures(figures):
    return next((other["times_faster"] for other in figures["others"] if other["library"] == "GSTools"), None)


SAMPLES = {"cpu": "All-CNN, GroupNorm, 256 images", "gpu": "All-CNN, BatchNorm sampled, 2048 images"}
POSITIONS = "GP, BatchNorm sampled", "(0.999, 0.94)"


def in_jax(what):
    def find(figures):
        step = row(figures, network="convolutions, 256 images", p=0.9)
        return step[f"plain_{what}"] / step[f"skip_{what}"]

    return find


def figures_of(device):
    """In the order of the table."""
    samples = SAMPLES[device], "0.94"
    return [
        Figure("masking layer against `nn.Dropout`, time", "layer", layer("milliseconds")),
        Figure("masking layer against `nn.Dropout`, memory", "layer", layer("extra_megabytes")),
        Figure("samples skipped, p = 0.94, against plain masks, time", "skip", skip(*samples, "plain", "ms")),
        Figure("samples skipped, p = 0.94, against plain masks, memory", "skip", skip(*samples, "plain", "mb")),
        Figure("samples skipped, p = 0.94, against GradCache's way, time", "skip", skip(*samples, "gradcache", "ms")),
        Figure(
            "positions skipped, p = (0.999, 0.94), against plain masks, time", "skip", skip(*POSITIONS, "plain", "ms")
        ),
        Figure(
            "positions skipped, p = (0.999, 0.94), against plain masks, memory", "skip", skip(*POSITIONS, "plain", "mb")
        ),
        Figure("rank statistic against all pairs, time", "losses", loss("rank statistic", "matrix", "milliseconds")),
        Figure("rank statistic against all pairs, memory", "losses", loss("rank statistic", "matrix", "megabytes")),
        Figure(
            "rank statistic against LibAUC, time", "losses", loss("rank statistic", "LibAUC, logistic", "milliseconds")
        ),
        Figure("squared hinge against all pairs, time", "losses", loss("squared hinge", "matrix", "milliseconds")),
        Figure("squared hinge against LibAUC, time", "losses", loss("squared hinge", "LibAUC", "milliseconds")),
        Figure("1024 x 1024 texture against GSTools, time", "textures", textures),
        Figure("samples skipped in JAX, p = 0.9, against a plain mask, time", "jax", in_jax("ms")),
        Figure("samples skipped in JAX, p = 0.9, against a plain mask, memory", "jax", in_jax("mb")),
    ]


def found_in(folder, device):
    """Each figure with its ratio, for one device; none where its benchmark was not run."""
    ratios = {}
    for figure in figures_of("cpu" if device == "cpu" else "gpu"):
        path = folder / f"{figure.benchmark}-{device}.json"
        if path.exists() and (ratio := figure.find(json.loads(path.read_text()))) is not None:
            ratios[figure.name] = ratio
    return ratios


def table(folder, devices):
    """In Markdown: a row for each figure, a column for each device."""
    ratios = {title: found_in(folder, device) for device, title in devices.items()}
    lines = [f"| | {' | '.join(ratios)} | measured by |", f"|---|{'---:|' * len(ratios)}---|"]
    for figure in figures_of("cpu"):
        cells = [f"{number(r[figure.name])}" if figure.name in r else "" for r in ratios.values()]
        if any(cells):
            lines.append(f"| {figure.name} | {' | '.join(cells)} | `bench_{figure.benchmark}.py` |")
    return "\n".join(lines) + "\n"


def number(ratio):
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def draw(ratios, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, values = [name.replace("`", "") for name in ratios][::-1], list(ratios.values())[::-1]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.36 * len(names)), layout="constrained")
    colours = ["#6a3fa0" if value >= 1 else "#b3541e" for value in values]
    axes.barh(names, [value - 1 for value in values], left=1, color=colours, height=0.6)
    for name, value in zip(names, values, strict=True):
        side, shift = ("left", 4) if value >= 1 else ("right", -4)
        axes.annotate(number(value), (value, name), (shift, 0), textcoords="offset points", va="center", ha=side)
    axes.axvline(1, color="#37323e", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, 0.5 * min(values)), 3 * max(values))
    axes.set_xlabel(f"times ours, {title}; left of 1 the other is better", loc="right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measure(device, out):
    """Runs the benchmarks one after the other; data sets and JAX only where they are."""
    short = "cpu" if device == "cpu" else "gpu"
    names = ["layer", "skip", "losses", "textures", "data", *(["jax"] if importlib.util.find_spec("jax") else [])]
    for name in names:
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", str(out / f"{name}-{short}.json")]
        command += ["--device", device] if name not in ("data", "jax") else []
        Console().rule(" ".join(["python", f"benchmarks/bench_{name}.py", *command[2:]]))
        if subprocess.run(command).returncode:
            raise SystemExit(f"bench_{name}.py failed; what was measured before is in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="the folder to write to")
    parser.add_argument("--again", type=Path, help="take the figures from this folder instead of measuring")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.again:
        measure(given.device, given.out)
    folder = given.again or given.out
    known = {"cpu": "CPU", "gpu": "GPU", "h200": "H200"}
    devices = {device: title for device, title in known.items() if found_in(folder, device)}
    text = table(folder, devices)
    (given.out / "table.md").write_text(text)
    for device, title in devices.items():
        draw(found_in(folder, device), title, given.out / f"bench-{device}.png")
    Console().print(Markdown(text))
    print(f"figures, table.md and pictures are in {given.out}")


if __name__ == "__main__":
    main()
