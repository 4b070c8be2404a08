"""What skipping saves: a training step with plain masks, with Skip, and with two ways to save memory alone, in one run.

    python benchmarks/bench_skip.py [--device cuda] [--sweep] [--only TEXT] [--json FILE] [--plot FILE]
    python benchmarks/bench_skip.py --again FILE [--plot FILE] [--markdown docs/skip/speed.md]
    python benchmarks/bench_skip.py --foreign [--compiled] [--only TEXT] [--json FILE]

Each step is a forward pass, the mean of the outputs squared, and a backward pass: of the plain masked model, of
`skip_blocked(model)`, of both compiled by Inductor, of the plain model checkpointed in segments, of the plain model
recomputed part by part as GradCache does it, and the forward pass alone without gradients, which is the limit. Time
is the median over rounds in which they take turns, each with a step that is not measured, because the caches hold
what ran last, and one that is. Memory is the peak above what lay there before the step. Goals stand in GOALS.
*Best* is the better of both plain ways over the better of both that skip: below one, skipping was no gain.
`--sweep` adds other p and image sizes, which `--plot` draws, and small steps, where skipping would not pay; `--again`
draws the figures of an earlier run. `--foreign` measures models that others wrote instead (foreign.py), and whole
batches of text in parts. `--only` takes the cases whose names hold a text, and leaves the others in the file as they
are; `--markdown` puts the table between the markers of a page that have the name of the file.
"""

import argparse
import copy
import json
import math
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from backdrop import Backdrop, Backdrop2d, skip_blocked
from backdrop.experiments import models
from bench_coverage import put_between_markers
from bench_layer import machine, peak_bytes

GOALS = {  # case: (times faster than plain, memory over plain's, memory over that of the forward pass)
    "All-CNN, GroupNorm, 256 images, p=0.94, cpu": (2.5, None, None),
    "All-CNN, GroupNorm, 256 images, p=0.5, cpu": (1.6, None, None),
    "All-CNN, BatchNorm sampled, 2048 images, p=0.94, cuda": (2.1, 0.25, None),
    "All-CNN, no norm, 2048 images, p=0.97, cuda": (2.4, 0.15, None),
    "GP, BatchNorm sampled, 4 x 1024^2, p=(0.999, 0.94), cuda": (2.5, None, 1.1),
    "GP, BatchNorm sampled, 4 x 1024^2, p=(0.99, 0.94), cuda": (1.6, None, 1.1),
    "GP, BatchNorm sampled, 4 x 1024^2, p=(0.999, 0.94), Bernoulli, cuda": (2.5 / 1.1, None, 1.1),
    "GP, BatchNorm sampled, 4 x 1024^2, p=(0.99, 0.94), Bernoulli, cuda": (1.6 / 1.1, None, 1.1),
    "GP, BatchNorm sampled, 1 x 512^2, p=(0.999, 0.94), cpu": (2.0, None, None),
}
AT_LEAST = 3  # seconds for a case: short steps take more rounds
SEGMENTS = 5  # of the checkpointed model: about the square root of its layers
NORMS = {"BatchNorm": "batch", "GroupNorm": "group", "no norm": "none"}


def all_cnn_case(norm, images, p, device):
    policy = "sampled" if norm == "BatchNorm" else "exact"
    name = f"All-CNN, {norm}{' sampled' if policy == 'sampled' else ''}, {images} images, p={p:g}, {device}"
    model, x = models.all_cnn(after=Backdrop(p, exact=True), norm=NORMS[norm]), torch.randn(images, 3, 32, 32)
    return {"case": name, "network": f"All-CNN, {norm}", "p": p, "size": 32}, model, x, policy


def gp_case(images, size, p, device, exact=True):
    small, large = (Backdrop2d(value, exact=exact) for value in p)
    drawn = "" if exact else ", Bernoulli"
    name = f"GP, BatchNorm sampled, {images} x {size}^2, p=({p[0]:g}, {p[1]:g}){drawn}, {device}"
    model, x = models.gp_network(small, large, padded=True), torch.randn(images, 1, size, size)
    return {"case": name, "network": f"GP{drawn}", "p": p[0], "size": size}, model, x, "sampled"


def small_cases(device):
    """Steps so short, or masks so weak, that skipping may not pay: these have to be about as fast as plain ones."""
    for images in (64, 256, 512) if device == "cuda" else (4, 16):
        for norm in ("BatchNorm", "GroupNorm", "no norm"):
            yield all_cnn_case(norm, images, 0.5, device)
    for rows in (256, 65536, 262144) if device == "cuda" else (256, 65536):
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
        model = nn.Sequential(*layers, Backdrop(0.95, exact=True))
        yield {"case": f"linear layers, {rows} rows, p=0.95, {device}"}, model, torch.randn(rows, 64), "exact"


def cases(device, sweep):
    """Those with goals, and the sweeps over p and image size for the plots."""
    if device == "cpu":
        yield all_cnn_case("GroupNorm", 256, 0.94, device)
        yield all_cnn_case("GroupNorm", 256, 0.5, device)
        yield gp_case(1, 512, (0.999, 0.94), device)
        for p in (0.1, 0.25, 0.75, 0.9, 0.97) if sweep else ():
            yield all_cnn_case("GroupNorm", 256, p, device)
        for size in (256, 1024) if sweep else ():
            yield gp_case(1, size, (0.999, 0.94), device)
        for p in (0.9, 0.97, 0.99) if sweep else ():
            yield gp_case(1, 512, (p, 0.94), device)
        return
    yield all_cnn_case("BatchNorm", 2048, 0.94, device)
    yield all_cnn_case("no norm", 2048, 0.97, device)
    for p in (0.999, 0.99):
        for exact in (True, False):
            yield gp_case(4, 1024, (p, 0.94), device, exact)
    for p in (0.25, 0.5, 0.75, 0.9, 0.97) if sweep else ():
        yield all_cnn_case("BatchNorm", 2048, p, device)
    for p in (0.5, 0.75, 0.9, 0.94) if sweep else ():
        yield all_cnn_case("no norm", 2048, p, device)
    for size in (256, 512, 2048) if sweep else ():
        yield gp_case(4, size, (0.999, 0.94), device)
    for p in (0.9, 0.95, 0.97, 0.98, 0.995) if sweep else ():
        yield gp_case(4, 1024, (p, 0.94), device)


def step(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


def checkpointed_step(model, x):
    model.zero_grad()
    checkpoint_sequential(model, SEGMENTS, x, use_reentrant=False).square().mean().backward()


def cached_step(model, x, parts=8):
    """Outputs without gradients, their gradient, then the forward pass again part by part."""
    model.zero_grad()
    with torch.no_grad():
        outputs = model(x)
    outputs.requires_grad_()
    outputs.square().mean().backward()
    for rows, grad in zip(x.tensor_split(parts), outputs.grad.tensor_split(parts), strict=True):
        model(rows).backward(grad)


def forward_only(model, x):
    with torch.no_grad():
        model(x)


def seconds(run, cuda):
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(case, model, x, policy, device, rounds):
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()  # which earlier cases have cut up
    model, x = model.to(device), x.to(device)
    fast = skip_blocked(model, statistics=policy)
    both = {"compiled": torch.compile(copy.deepcopy(model)), "compiled_skip": torch.compile(copy.deepcopy(fast))}
    parts = min(8, len(x))
    runs = {
        "plain": lambda: step(model, x),
        "skip": lambda: step(fast, x),
        **{key: partial(step, made, x) for key, made in both.items()},
        "checkpoint": lambda: checkpointed_step(model, x),
        "gradcache": lambda: cached_step(model, x, parts),
        "forward": lambda: forward_only(model, x),
    }
    for _ in range(2):  # to warm up
        once = sum(seconds(run, cuda) for run in runs.values())
    times = {key: [] for key in runs}
    for _ in track(range(max(rounds, int(AT_LEAST / once))), case["case"], transient=True):
        for key, run in runs.items():
            run()
            times[key].append(seconds(run, cuda))
    medians = {key: statistics.median(values) for key, values in times.items()}
    memory = {key: peak_bytes(run, x) for key, run in runs.items()}
    row = {**case, "device": machine(device)}
    for key in runs:
        row[f"{key}_ms"] = medians[key] * 1e3
        row[f"{key}_mb"] = None if memory[key] is None else memory[key] / 1e6
    row["report"] = [entry.last for entry in fast.skip_report]
    return row


def ratio(row, key, to, unit):
    a, b = row.get(f"{key}_{unit}"), row.get(f"{to}_{unit}")
    return "-" if a is None or not b else f"{a / b:.2f}"


def of_best(row):
    """How many times faster the better of both Skips is than the better of both plain ways, compiled or not.

    Marked where it is no faster although the report says that something was skipped.
    """
    plain, skipping = (("plain_ms", "compiled_ms"), ("skip_ms", "compiled_skip_ms"))
    best = min(row[key] for key in plain if key in row) / min(row[key] for key in skipping if key in row)
    reports = row["report"] if isinstance(row["report"], list) else [row["report"]]
    paid = any(not said.startswith("plain") for said in reports)
    return f"{best:.2f}{' < 1' if paid and best < 1 else ''}"


def show(rows):
    table = Table(title=f"One training step, {rows[0]['device']}, torch {torch.__version__}")
    headings = (
        "case|plain ms|faster|goal|compiled|compiled Skip|best|of forward|checkpoint|GradCache|plain MB|memory|goal"
    )
    headings += "|of forward"
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        faster, memory, over_forward = GOALS.get(row["case"], (None, None, None))
        goal = f"{memory:g}" if memory else f"{over_forward:g} of forward" if over_forward else ""
        table.add_row(
            row["case"],
            f"{row['plain_ms']:.1f}",
            ratio(row, "plain", "skip", "ms"),
            f"{faster:.2f}" if faster else "",
            ratio(row, "plain", "compiled", "ms"),
            ratio(row, "plain", "compiled_skip", "ms"),
            of_best(row),
            ratio(row, "skip", "forward", "ms"),
            ratio(row, "plain", "checkpoint", "ms"),
            ratio(row, "plain", "gradcache", "ms"),
            f"{row['plain_mb'] or 0:.0f}",
            ratio(row, "skip", "plain", "mb"),
            goal,
            ratio(row, "skip", "forward", "mb"),
        )
    Console(width=170).print(table)


COLUMNS = [
    *("case", "plain ms", "faster", "goal", "of forward", "checkpoint", "GradCache", "plain MB", "memory / plain"),
    *("/ forward", "checkpoint / plain", "goal"),
]
COMPILED = ["compiled", "compiled Skip", "best"]  # where both were measured


def cells(row):
    """Of the table on the page."""
    faster, memory, over_forward = GOALS.get(row["case"], (None, None, None))
    goal = f"{memory:g}" if memory else f"{over_forward:g} of forward" if over_forward else ""
    return [
        row["case"].rsplit(", ", 1)[0],
        f"{row['plain_ms']:.1f}",
        ratio(row, "plain", "skip", "ms"),
        f"{faster:.2f}" if faster else "",
        ratio(row, "skip", "forward", "ms"),
        ratio(row, "plain", "checkpoint", "ms"),
        ratio(row, "plain", "gradcache", "ms"),
        f"{row['plain_mb'] or 0:.0f}",
        ratio(row, "skip", "plain", "mb"),
        ratio(row, "skip", "forward", "mb"),
        ratio(row, "checkpoint", "plain", "mb"),
        goal,
        *(compiled_cells(row) if "compiled_ms" in row else ()),
    ]


def compiled_cells(row):
    return [*(ratio(row, "plain", f"compiled{key}", "ms") for key in ("", "_skip")), of_best(row).replace("<", "&lt;")]


def put(arguments, lines):
    """A table between the markers of the page that have the name of the file."""
    if arguments.markdown:
        name = arguments.again.stem
        ruler = "|".join(["---", *("---" if heading == "last step" else "---:" for heading in lines[0][1:])])
        text = [f"| {' | '.join(line)} |" for line in lines]
        markers = f"<!-- {name} -->", f"<!-- end of {name} -->"
        put_between_markers(arguments.markdown, "\n".join([text[0], f"|{ruler}|", *text[1:], ""]), markers)


WAYS = {"plain": "plain masks", "checkpoint": "checkpoint", "gradcache": "GradCache", "skip": "Skip"}


def draw(rows, file):
    """Time and memory, each over that of the forward pass alone, against p and against the size of the image."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "small" not in row]
    networks = list(dict.fromkeys(row["network"] for row in rows if "Bernoulli" not in row["network"]))
    at = max((row["p"] for row in rows if row["network"] == "GP" and row["size"] != 1024), default=None)
    panels = [(name, "p", [row for row in rows if row["network"] == name and _usual(row, rows)]) for name in networks]
    panels.append(("GP", "size", [row for row in rows if row["network"] == "GP" and row["p"] == at]))
    figure, axes = plt.subplots(2, len(panels), figsize=(3.4 * len(panels), 6), squeeze=False, layout="constrained")
    for column, (name, key, chosen) in enumerate(panels):
        chosen = sorted(chosen, key=lambda row: row[key])
        title = f"{name}, {chosen[0]['size']} pixels" if key == "p" else f"{name}, p = {at:g}"
        for axis, unit, label in ((axes[0][column], "ms", "time"), (axes[1][column], "mb", "peak memory")):
            for way, legend in WAYS.items():
                values = [row[f"{way}_{unit}"] / row[f"forward_{unit}"] for row in chosen]
                x = [-_decades(row["p"]) if key == "p" else row["size"] for row in chosen]
                axis.plot(x, values, marker="o", label=legend, linewidth=2.5 if way == "skip" else 1.2)
            axis.axhline(1, color="grey", linewidth=0.8, linestyle=":")
            axis.set(title=title, ylabel=f"{label} / forward pass alone", ylim=(0, None))
            if key == "p":
                axis.set_xticks(
                    [-_decades(row["p"]) for row in chosen], [f"{row['p']:g}" for row in chosen], rotation=60
                )
            else:
                axis.set_xscale("log", base=2)
            axis.set_xlabel("p" if key == "p" else "pixels along a side")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    figure.suptitle(f"One training step, {rows[0]['device']}")
    figure.savefig(file, dpi=110)


def _usual(row, rows):
    """Whether a row has the size that most rows of its network have."""
    sizes = [other["size"] for other in rows if other["network"] == row["network"]]
    return row["size"] == statistics.mode(sizes)


def _decades(p):
    return math.log10(1 - p)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sweep", action="store_true", help="also over p and image size, for the plots")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this file")
    parser.add_argument("--foreign", action="store_true", help="models that others wrote, instead")
    parser.add_argument("--compiled", action="store_true", help="with --foreign: also compiled by Inductor")
    parser.add_argument("--only", help="the cases whose names hold this")
    parser.add_argument("--again", type=Path, help="take the figures from this file instead of measuring")
    parser.add_argument("--markdown", type=Path, help="with --again: put the table into this page")
    arguments = parser.parse_args()
    if arguments.foreign:
        import foreign

        foreign.run(arguments)
        return
    rows = json.loads(arguments.again.read_text())["rows"] if arguments.again else run(arguments)
    show(rows)
    if arguments.plot:
        draw(rows, arguments.plot)
    if arguments.again:
        put(arguments, [COLUMNS + COMPILED * ("compiled_ms" in rows[0]), *map(cells, rows)])


def run(arguments):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    small = small_cases(arguments.device) if arguments.sweep else ()
    every = (*cases(arguments.device, arguments.sweep), *(({**case, "small": True}, *rest) for case, *rest in small))
    names = [case["case"] for case, *_ in every]
    found = earlier(arguments)
    for case, *rest in every:
        if arguments.only is None or arguments.only in case["case"]:
            found[case["case"]] = measure(case, *rest, arguments.device, arguments.rounds)
            torch._dynamo.reset()
            write([found[name] for name in names if name in found], arguments)
    return [found[name] for name in names if name in found]


def earlier(arguments):
    """The rows that stay, where not all cases are measured."""
    if arguments.only is None or not arguments.json or not arguments.json.exists():
        return {}
    return {row["case"]: row for row in json.loads(arguments.json.read_text())["rows"]}


def write(rows, arguments):
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        text = json.dumps({"versions": versions, "rounds": arguments.rounds, "rows": rows}, indent=1)
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
