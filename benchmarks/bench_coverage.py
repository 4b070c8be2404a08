"""How much of models that others wrote is skipped, and whether their gradients stay right.

    python benchmarks/bench_coverage.py [--quick] [--only NAME] [--jobs N] [--json FILE] [--markdown FILE]
    python benchmarks/bench_coverage.py --again FILE [--markdown FILE]

Every model of zoo.py takes two training steps in float64 for each way: a mask of positions inside it and a mask of
samples behind it, both with `statistics="sampled"` in training mode and with "exact" and batch normalisation in eval
mode, always with `when="always"`. The report says which share of the multiplications before the mask was skipped and
what ended the segment. Outputs and buffers are compared with those of the plain masked model, and all gradients where
nothing is estimated: with the same draw of the mask, without dropout, and with what a model casts to float32 in
float64; for the share they stay as they are. Each model runs in a process of its own. `--only` takes one model, and
leaves the others in the file as they are; `--markdown` puts the tables between the markers of a page. Goals stand in
GOALS.
"""

import argparse
import copy
import json
import math
import platform
import re
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zoo
from backdrop import Backdrop, Skip, insert, skip_blocked
from backdrop.skip import engine
from bench_layer import machine

MODES = {  # what the mask drops, and what is done with batch statistics
    "positions, sampled": ("positions", "sampled"),
    "positions, exact": ("positions", "exact"),
    "samples, sampled": ("samples", "sampled"),
    "samples, exact": ("samples", "exact"),
}
P = {"positions": 0.97, "samples": 0.75}
STEPS = 2
LIMIT = 1200  # seconds for a model
MARKERS = "<!-- coverage -->", "<!-- end of coverage -->"
SHARE, ALL, ERROR = 0.95, 1 - 1e-9, 1e-10


class Goal(NamedTuple):
    """For which rows and modes it is set, and which of them meet it."""

    text: str
    modes: tuple[str, ...]
    asked: Callable[[dict, dict], bool]
    met: Callable[[dict], bool]


def plain_and_silent(result):
    return not result["share"] and not result["ends"] and not result["last"].startswith("plain")


GOALS = (
    Goal(
        f'positions, "sampled": a share of at least {SHARE} in convolutional networks with BatchNorm, LayerNorm over '
        "channels or no norm, squeeze-and-excite included",
        ("positions, sampled",),
        lambda row, result: row["convolutional"],
        lambda result: result.get("share", 0) >= SHARE,
    ),
    Goal(
        f'positions, "exact", BatchNorm in eval mode: a share of at least {SHARE} in those without pooled branches',
        ("positions, exact",),
        lambda row, result: row["convolutional"] and not row["pooled"],
        lambda result: result.get("share", 0) >= SHARE,
    ),
    Goal(
        "samples: a share of 1 in all models whose samples are not coupled",
        ("samples, sampled", "samples, exact"),
        lambda row, result: not row["couples"] and not result.get("batch_statistics"),
        lambda result: result.get("share", 0) >= ALL,
    ),
    Goal(
        f"gradients: an error of at most {ERROR:g} wherever nothing is estimated",
        tuple(MODES),
        lambda row, result: "error" in result,
        lambda result: result["error"] <= ERROR,
    ),
    Goal(
        f"outputs and buffers: an error of at most {ERROR:g}",
        tuple(MODES),
        lambda row, result: "output_error" in result,
        lambda result: result["output_error"] <= ERROR,
    ),
    Goal("no crash", tuple(MODES), lambda row, result: True, lambda result: "crash" not in result),
    Goal(
        "no plain step that the report does not explain",
        tuple(MODES),
        lambda row, result: "crash" not in result,
        lambda result: not plain_and_silent(result),
    ),
)


class Outer(nn.Module):
    """Something to insert a mask behind a whole model into, with the names of parameters that Skip has."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def pair(entry, model, drops, policy):
    """The plain masked model, and the one that skips."""
    if drops == "positions":
        plain = insert(model, {entry.mask: entry.positions(P[drops], torch.Generator())})
        return plain, skip_blocked(plain, statistics=policy, when="always")
    masks = (Backdrop(P[drops], exact=True, generator=torch.Generator()) for _ in range(2))
    plain = insert(Outer(model), {"module": next(masks)})
    return plain, Skip(copy.deepcopy(model), next(masks), statistics=policy, when="always")


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def step(model, inputs, seed, mask_seed=None):
    """One training step from given random numbers: outputs, gradients and buffers."""
    model.zero_grad()
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, Backdrop):
            layer.generator.manual_seed(seed if mask_seed is None else mask_seed)
    outputs = [leaf for leaf in tree_leaves(call(model, inputs)) if isinstance(leaf, Tensor)]
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for leaf in outputs:
        weights = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        loss = loss + (weights * leaf + leaf.square()).sum() / math.sqrt(leaf.numel())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (
        {str(i): leaf.detach() for i, leaf in enumerate(outputs)},
        {name: None if grad is None else grad.clone() for name, grad in gradients.items()},
        {name: buffer.double() for name, buffer in model.named_buffers()},
    )


def difference(expected, actual, together=False):
    """The largest, relative to each one's norm or to the largest of them; what is missing counts as zero."""
    sizes, differences = [], []
    for name, a in expected.items():
        b = actual[name]
        sizes.append(0.0 if a is None else a.norm().item())
        change = b if a is None else a if b is None else a - b
        differences.append(0.0 if change is None else change.norm().item())
    if not all(map(math.isfinite, (*sizes, *differences))):
        return math.inf
    largest = max(sizes, default=0.0)
    scales = [largest if together else size for size in sizes]
    return max((d / (scale or 1.0) for d, scale in zip(differences, scales, strict=True)), default=0.0)


def before_the_mask(plain, inputs, seed, gradients):
    """The parameters that get another gradient from another draw of the mask."""
    for other in range(seed + 100, seed + 110):
        again = step(plain, inputs, seed, other)[1]
        names = [n for n, grad in gradients.items() if difference({n: grad}, again) > 1e-9]
        if names:
            return names
    raise AssertionError("the mask changes no gradient, so that there is nothing to compare")


def gradient_error(plain, inputs, seed, expected, actual):
    """Of the parameters before the mask, and of those behind it, relative to the largest gradient of either."""
    assert expected.keys() == actual.keys(), sorted(expected.keys() ^ actual.keys())
    before = before_the_mask(plain, inputs, seed, expected)
    behind = [name for name in expected if name not in before]
    return max(difference({n: expected[n] for n in names}, actual, together=True) for names in (before, behind))


def reported(entries):
    """Of the mask in what the report says; a mask that it says nothing about counts as a plain step."""
    entries = list(entries)
    last = "; ".join(dict.fromkeys(entry.last for entry in entries))
    ends = [[name, located(str(reason))] for entry in entries for name, reason in entry.kept]
    share = min((float(entry.share) for entry in entries), default=0.0)
    skipped = sum(len(entry.skipped) for entry in entries)
    return {"share": share, "ends": ends, "last": located(last), "skipped": skipped}


def located(text):
    """With files as they lie in their library."""
    return re.sub(r"/\S*/(?:site-packages|foreign)/", "", text)


def take_steps(entry, model, drops, policy, shape, *, compare, gradients=False):
    """What the report says after the last step, and how far off the steps were."""
    plain, fast = pair(entry, model, drops, policy)
    errors, output_errors = [0.0], [0.0]
    for seed in range(1, STEPS + 1):
        inputs = entry.inputs(shape, seed)
        ours = step(fast, copy.deepcopy(inputs), seed)
        if compare:
            theirs = step(plain, copy.deepcopy(inputs), seed)
            output_errors += [difference(theirs[0], ours[0]), difference(theirs[2], ours[2])]
        if compare and gradients:
            errors.append(gradient_error(plain, copy.deepcopy(inputs), seed, theirs[1], ours[1]))
    result = reported(fast.skip_report if drops == "positions" else fast.report)
    if compare:
        result["output_error"] = max(output_errors)
    if compare and gradients:
        result["error"] = max(errors)
    return result


def is_estimated(entry, drops, policy, batch_statistics):
    """Whether some gradient is an estimate: what flows back through statistics over samples or positions."""
    if policy == "exact":
        return False
    couples = entry.pooled or entry.norm in ("group", "instance", "response")
    return batch_statistics or (drops == "positions" and couples)


def unrefused():
    """A mode as below makes the engine run a model plain, since it might do anything: this one is known."""
    return unittest.mock.patch.object(engine, "_changes_functions", return_value=False)


def measure(entry, drops, policy):
    model = entry.model()
    shape = entry.large if drops == "positions" else entry.small
    if policy == "exact":
        zoo.freeze_norms(model, lambda m: call(m, entry.inputs(shape)))
    batch_statistics = zoo.has_batch_statistics(model)
    estimated = is_estimated(entry, drops, policy, batch_statistics)
    silent = copy.deepcopy(model)
    has_dropout = zoo.silence(silent)
    settings = {"compare": True, "gradients": not estimated}
    with unrefused(), zoo.InFloat64():
        result = take_steps(entry, silent, drops, policy, shape, **settings)
    if has_dropout:  # the share is that of the model as it is
        torch._dynamo.reset()
        result |= take_steps(entry, model, drops, policy, shape, compare=False)
    return {**result, "batch_statistics": batch_statistics, "dropout": has_dropout}


def measured(entry):
    """All modes of one model."""
    results = {}
    for mode, (drops, policy) in MODES.items():
        if drops == "positions" and entry.mask is None:
            continue
        torch._dynamo.reset()
        begin = time.perf_counter()
        try:
            results[mode] = measure(entry, drops, policy)
        except Exception as error:  # which is a result too
            results[mode] = {"crash": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        results[mode]["seconds"] = round(time.perf_counter() - begin, 1)
    return results


def work(name, path):
    """Called in a process of its own."""
    torch.set_num_threads(1)
    entry = zoo.ENTRIES[name]
    try:
        entry.make()
    except ImportError as error:
        results, missing = {}, str(error)
    else:
        results, missing = measured(entry), None
    path.write_text(json.dumps({"results": results, "missing": missing}))


def row_of(name):
    """What is known of a model without running it, and what a process of its own finds."""
    entry = zoo.ENTRIES[name]
    described = {
        **{key: getattr(entry, key) for key in ("name", "library", "mask", "kind", "norm", "pooled", "couples")},
        "convolutional": entry.convolutional,
        "shapes": [entry.large if entry.mask else None, entry.small],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            died = f"the process ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
        except subprocess.TimeoutExpired:
            died = f"took more than {LIMIT} s"
        if path.exists():
            return {**described, **json.loads(path.read_text())}
    modes = [mode for mode, (drops, _) in MODES.items() if drops == "samples" or entry.mask]
    return {**described, "results": {mode: {"crash": died} for mode in modes}, "missing": None}


def results_of(rows, modes):
    for row in rows:
        for mode in modes:
            if mode in row["results"]:
                yield row, mode, row["results"][mode]


def checked(rows):
    """Each goal with how many have met it, of how many, and which have not."""
    for goal in GOALS:
        asked = [(row, mode, result) for row, mode, result in results_of(rows, goal.modes) if goal.asked(row, result)]
        missed = [(row["name"], mode) for row, mode, result in asked if not goal.met(result)]
        yield goal, len(asked) - len(missed), len(asked), missed


def names_of(missed, modes):
    """Which mode is only said where there are several."""
    by_name = {}
    for name, mode in missed:
        by_name.setdefault(name, []).append(mode)
    return ", ".join(f"{name} ({'; '.join(ms)})" if len(modes) > 1 else name for name, ms in by_name.items())


def missed_modes(rows):
    return {(name, mode) for *_, missed in checked(rows) for name, mode in missed}


def share_cell(result):
    if result is None:
        return "-"
    return "crash" if "crash" in result else f"{math.floor(100 * result['share']) / 100:.2f}"  # 0.999 is not all


def error_cell(row):
    errors = [result["error"] for result in row["results"].values() if "error" in result]
    return f"{max(errors):.0e}" if errors else "-"


def why(result):
    """What ended the segment, or what went wrong."""
    if "crash" in result:
        return result["crash"]
    ends = [f"{name}: {reason}" if name else reason for name, reason in result["ends"]]
    if not ends and result["share"] < ALL:
        return result["last"] or "the report is empty"
    return "; ".join([*ends[:2], *([f"and {len(ends) - 2} more"] if len(ends) > 2 else [])])


def ends_cell(row):
    """With the modes where it is not the same in all."""
    modes = {}
    for mode, result in row["results"].items():
        if text := why(result):
            modes.setdefault(text, []).append(mode)
    return ". ".join(f"{in_words(found, row['results'])}{text}" for text, found in modes.items())


def in_words(modes, tried):
    """Nothing for all that were tried, and no policy where it is the same in both."""
    if len(modes) == len(tried):
        return ""
    drops = dict.fromkeys(MODES[mode][0] for mode in modes)
    both = {name: [mode for mode in modes if MODES[mode][0] == name] for name in drops}
    return " and ".join(name if len(found) == 2 else found[0] for name, found in both.items()) + ": "


def before(row):
    """What lies before the mask, in words."""
    words = [row["kind"], "no norm" if row["norm"] == "none" else f"{row['norm']} norm"]
    return ", ".join([*words, *(["pooled branches"] if row["pooled"] else [])])


def summary(rows, missing):
    lines = ["| goal | met | missed by |", "|---|---:|---|"]
    for goal, met, asked, missed in checked(rows):
        lines.append(f"| {goal.text} | {met} of {asked} | {escaped(names_of(missed, goal.modes))} |")
    lines += ["", f"{len(rows)} models. Not among them: " + "; ".join(f"{a} ({b})" for a, b in missing.items()) + "."]
    return lines


def escaped(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def markdown(rows, missing):
    lines = summary(rows, missing)
    bad = missed_modes(rows)
    for library in dict.fromkeys(row["library"] for row in rows):
        name, count = library[0].upper() + library[1:], sum(row["library"] == library for row in rows)
        name = name if library.startswith("this") else library
        lines += ["", f'<details markdown="1"><summary>{name}: {count} models</summary>', ""]
        lines += [f"| model | mask behind | before it | {' | '.join(MODES)} | largest error | what ends the segment |"]
        lines += [f"|---|---|---|{'---:|' * len(MODES)}---:|---|"]
        for row in rows:
            if row["library"] != library:
                continue
            cells = []
            for mode in MODES:
                cell = share_cell(row["results"].get(mode))
                cells.append(f"**{cell}**" if (row["name"], mode) in bad else cell)
            mask = f"`{row['mask']}`" if row["mask"] else "-"
            words = [row["name"], mask, before(row), *cells, error_cell(row), escaped(ends_cell(row))]
            lines.append(f"| {' | '.join(words)} |")
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def put_between_markers(path, text, markers=MARKERS):
    begin, end = markers
    page = path.read_text() if path.exists() else f"# Coverage\n\n{begin}\n{end}\n"
    if begin not in page or end not in page:
        raise SystemExit(f"{path} has no {begin} and {end} to put the tables between")
    head, tail = page.split(begin)[0], page.split(end)[1]
    path.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")


def show(rows, missing):
    table = Table(title=f"Share of the multiplications before a mask that is skipped, torch {torch.__version__}")
    for heading in ("model", *MODES, "largest error", "what ends the segment"):
        table.add_column(heading, justify="right" if heading in MODES or "error" in heading else "left")
    bad = missed_modes(rows)
    for row in rows:
        cells = []
        for mode in MODES:
            cell = share_cell(row["results"].get(mode))
            cells.append(f"[bold red]{cell}[/]" if (row["name"], mode) in bad else cell)
        table.add_row(row["name"], *cells, error_cell(row), ends_cell(row).replace("[", r"\[")[:200])
    console = Console(width=170, highlight=False)
    console.print(table)
    for goal, met, asked, missed in checked(rows):
        text = f"{met} of {asked}: {goal.text}"
        console.print(text + (f"\n    missed by {names_of(missed, goal.modes)}" if missed else ""), markup=False)
    for name, reason in missing.items():
        console.print(f"not tried: {name}: {reason}", markup=False)


def gather(names, jobs, keep):
    """The rows in the order of the zoo; `keep` is given all of them after each."""
    found = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("models", total=len(names))
        running = {pool.submit(row_of, name): name for name in names}
        for done in as_completed(running):
            row = done.result()
            found[row["name"]] = row
            cells = [share_cell(row["results"].get(mode)) for mode in MODES]
            progress.console.print(f"{row['name']:<40}{'  '.join(cells)}  {row['missing'] or ''}", highlight=False)
            progress.advance(task)
            keep([found[name] for name in zoo.ENTRIES if name in found])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen models, one of each sort")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this model; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="so many models at a time, each with one thread")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    parser.add_argument("--again", type=Path, help="show the figures of this file instead of measuring")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], Path(args.worker[1]))
        return
    if unknown := set(args.only) - set(zoo.ENTRIES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(zoo.ENTRIES)}")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    old = {}
    if args.again or (args.only and args.json and args.json.exists()):
        old = {row["name"]: row for row in json.loads((args.again or args.json).read_text())["rows"]}

    def keep(rows):
        if args.json:
            new = old | {row["name"]: row for row in rows}
            rows = [new[name] for name in zoo.ENTRIES if name in new]
            figures = {"versions": versions, "device": machine("cpu"), "p": P, "rows": rows}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(figures, indent=1) + "\n")

    names = args.only or (list(zoo.QUICK) if args.quick else list(zoo.ENTRIES))
    found = old | ({} if args.again else gather(names, args.jobs, keep))
    rows = [found[name] for name in zoo.ENTRIES if name in found]
    missing = dict(zoo.AWAY)
    missing |= {row["name"]: row["missing"] for row in rows if row["missing"]}
    rows = [row for row in rows if not row["missing"]]
    show(rows, missing)
    if args.markdown:
        put_between_markers(args.markdown, markdown(rows, missing))


if __name__ == "__main__":
    main()
