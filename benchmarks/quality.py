"""With the same seconds, what do I get? Learning curves over wall-clock time, for nine tasks and up to nine ways.

    python benchmarks/quality.py --export quality.npz          once: what is needed of CIFAR-10, 16 MB
    python benchmarks/quality.py --data quality.npz --json FILE [--workers N] [--minutes M] [--task NAME ...]
    python benchmarks/quality.py --again FILE

Ways: "whole" takes all training samples in every step. "small" and "medium" are minibatches of two sizes, "balanced"
small ones with as many of each class, "subsample" all of the rare class and as many others, "crops" a random part of
every sample. "uniform" and "informed" are masks over the whole batch, with the engine; "budget" is a uniform mask on
random quarters of the samples, whose p `VarianceBudget(share=1)` finds: a whole batch has no variance to go by.

A training is AdamW at one learning rate for a fixed number of seconds on one core: those of the processor, which on a
machine with nothing else to do are those of the clock; both are kept. What is measured is the weighted
mean of the weights so far (polynomial averaging), so every point of a curve is what stopping there would have given. At
each point the validation samples choose among the points so far. Evaluation and torch's capture are not counted;
capture is told. All ways of one task and seed take turns in one process, a part of the curve each, so they share
whatever the machine does. Rates are the best of six by the mean over two search seeds on validation samples, for every
way alike; then follow new seeds, ten of them, for which test samples count. Last, "bias" compares the mean gradient of
a way's batches with that of the whole batch, at the beginning, the middle and the end of a training without masks.

Gradient boosting (scikit-learn, where it is installed) stands beside the table. The file is written after every unit
and gone on with. Trainings on other machines in it are an error; rates and biases may have been found elsewhere.
LEFT_OUT in quality_tasks.py says which ways make no sense where.
"""

import argparse
import copy
import json
import math
import os
import platform
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from backdrop import Skip
from backdrop.schedules import VarianceBudget
from quality_base import area_below, finite, generator_of
from quality_photographs import export
from quality_tasks import TASKS

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
POINTS = 12
SEARCH = (1001, 1002)  # seeds
BIAS = (0, 1, 2)
MASKED = ("uniform", "informed", "budget")
SAMPLED = ("small", "medium", "balanced", "subsample", "crops")
DRAWS = 300  # of batches, for the mean of their gradients


# Ways.


class Turns:
    """So many of these places at a time, each once before any comes again, or else chosen anew each time."""

    def __init__(self, places, generator, anew=False):
        self.places, self.generator, self.anew, self.at = places, generator, anew, len(places)

    def take(self, count):
        if count >= len(self.places):
            return self.places
        if self.anew or self.at + count > len(self.places):
            self.places, self.at = self.places[torch.randperm(len(self.places), generator=self.generator)], 0
        self.at += count
        return self.places[self.at - count : self.at]


def sampler(task, way, generator, anew=False):
    """A function that says which training samples the next step takes; None for all."""
    count = len(task.training[0])
    if way in ("small", "medium", "budget"):
        size = {"small": task.sizes[0], "medium": task.sizes[1], "budget": count // 4}[way]
        turns = Turns(torch.arange(count), generator, anew)
        return lambda: turns.take(size)
    if way in ("balanced", "subsample"):
        strata = task.strata()
        groups = [Turns((strata == i).nonzero().flatten(), generator, anew) for i in strata.unique()]
        rare = min(len(group.places) for group in groups)
        each = rare if way == "subsample" else max(1, task.sizes[0] // len(groups))
        return lambda: torch.cat([group.take(each) for group in groups])
    return lambda: None


def batch(task, way, draw, generator):
    these = draw()
    part = task.training if these is None else tuple(x[these] for x in task.training)
    return task.prepare(part, generator, crop=way == "crops")


class Model(nn.Module):
    """What lies below a mask, or would, and what lies above."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, *args):
        return self.head(self.body(*args))


class Training:
    """One way of one task, that can be gone on with for some seconds at a time."""

    def __init__(self, task, way, rate, seed, threads=1):
        self.task, self.way, self.rate = task, way, rate
        self.generator = generator_of(seed, 5)
        self.draw = sampler(task, way, self.generator)
        torch.manual_seed(seed)
        body, head = task.body(), task.head()
        self.averaged = copy.deepcopy(Model(body, head)).eval()
        self.skip = None
        if way in MASKED:
            choose = "gradient" if way == "informed" else "uniform"
            self.skip = body = Skip(body, task.mask(choose, 1 - task.kept))
        self.model = Model(body, head)
        self.pairs = [list(self.averaged.parameters()), list(self.model.parameters())]
        self.warm_up()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, fused=True)
        self.schedule = VarianceBudget(self.model, share=1.0, memory=100) if way == "budget" else None
        self.steps = self.seconds = self.clock = 0
        self.curve = {"seconds": [], "validation": [], "test": []}

    def warm_up(self):
        """Capture and first calls, which are not training."""
        begin = time.perf_counter()
        for _ in range(3):
            args, targets = batch(self.task, self.way, self.draw, self.generator)
            self.task.loss(self.model(*args), *targets).backward()
        self.model.zero_grad()
        self.capture = time.perf_counter() - begin

    def until(self, seconds):
        begin, clock = time.process_time() - self.seconds, time.perf_counter() - self.clock
        while time.process_time() - begin < seconds:
            args, targets = batch(self.task, self.way, self.draw, self.generator)
            self.task.loss(self.model(*args), *targets).backward()
            self.optimizer.step()
            if self.schedule:
                self.schedule.step()
            self.optimizer.zero_grad()
            self.steps += 1
            with torch.no_grad():
                torch._foreach_lerp_(*self.pairs, 9 / (self.steps + 8))
        self.seconds, self.clock = time.process_time() - begin, time.perf_counter() - clock

    def evaluate(self):
        self.curve["seconds"].append(round(self.seconds, 3))
        for part in ("validation", "test"):
            self.curve[part].append(finite(self.task.measure(self.averaged, getattr(self.task, part))))

    def told(self):
        row = {"rate": self.rate, "steps": self.steps, "capture": round(self.capture, 2), "clock": round(self.clock, 2)}
        row |= self.curve
        row["also"] = {name: finite(value) for name, value in self.task.also(self.averaged).items()}
        if self.skip is not None:
            row["skipped"] = round(min(entry.share for entry in self.skip.report), 3)
            row["p"] = round(float(self.skip.mask.p), 4)
        return row


def trained(task, rates, seed, scale):
    """All ways in turn, each with its own rate."""
    runs = [Training(task, way, rate, seed) for way, rate in rates.items()]
    for point in range(1, POINTS + 1):
        for run in runs:
            run.until(task.seconds * scale * (point / POINTS) ** 1.5)
            run.evaluate()
    return {run.way: run.told() for run in runs}


# How far batches mislead.


def gradient(task, model, args, targets):
    model.zero_grad()
    loss = task.loss(model(*args), *targets)
    loss.backward()
    return torch.cat([(x.grad if x.grad is not None else torch.zeros_like(x)).flatten() for x in model.parameters()])


def biases(task, rate, seed, scale):
    """For each way of drawing batches: the bias of its gradient over the size of the whole one, without the part that
    chance adds; the cosine of both, likewise; and the noise of one batch, on the same scale."""
    args, targets = task.prepare(task.training, generator_of(seed, 6))  # the same views and flips throughout
    task.training, task.augmented, task.inputs = (*args, *targets), False, len(args)
    run, rows = Training(task, "whole", rate, seed), []
    for share in (0.02, 0.3, 1.0):
        run.until(task.seconds * scale * share)
        model = run.model
        whole = gradient(task, model, args, targets).double()
        for way in SAMPLED:
            if way not in task.ways:
                continue
            generator = generator_of(seed, 8)
            draw, total, squares = sampler(task, way, generator, anew=True), torch.zeros_like(whole), 0.0
            begin, draws = time.process_time(), 0
            while draws < DRAWS and (draws < 20 or time.process_time() - begin < 0.5 * task.seconds * scale):
                one = gradient(task, model, *batch(task, way, draw, generator)).double()
                total, squares, draws = total + one, squares + one.square().sum().item(), draws + 1
            mean = total / draws
            variance = max(0.0, (squares - draws * mean.square().sum().item()) / (draws - 1))
            size = whole.square().sum().item()
            bias = (mean - whole).square().sum().item() - variance / draws
            length = mean.square().sum().item() - variance / draws
            known = length > variance / draws  # more than chance
            rows.append(
                {
                    "at": share,
                    "way": way,
                    "draws": draws,
                    "bias": finite(math.copysign(math.sqrt(abs(bias) / size), bias)),
                    "chance": finite(math.sqrt(variance / draws / size)),  # what was taken off
                    "cosine": finite((mean @ whole).item() / math.sqrt(length * size)) if known else None,
                    "noise": finite(math.sqrt(variance / size)),
                }
            )
    return rows


# An outsider.


def boosting(seed, data):
    """Gradient boosting on the table; `step` is what a step of "whole" takes there, to compare seconds by."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    task = TASKS["table"](seed, data)
    model = HistGradientBoostingClassifier(warm_start=True, early_stopping=False, random_state=seed)
    seconds, row = 0.0, {"seconds": [], "validation": [], "test": []}
    for trees in (5, 10, 20, 40, 80, 160, 320):
        begin = time.process_time()
        model.set_params(max_iter=trees).fit(*(part.numpy() for part in task.training))
        seconds += time.process_time() - begin
        row["seconds"].append(round(seconds, 3))
        for part in ("validation", "test"):
            x, y = getattr(task, part)
            row[part].append(finite(area_below(torch.from_numpy(model.predict_proba(x.numpy())[:, 1]), y == 1)))
    run = Training(task, "whole", 0.01, seed)
    run.until(3.0)
    return {**row, "trees": trees, "step": run.seconds / run.steps}


# Units of work, and the workers that do them.


def machine():
    """In words: seconds of different machines do not mix."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{(names or [platform.processor() or platform.machine()])[0]}, torch {torch.__version__}"


def best_of(curve, until=math.inf):
    """The test measure where the validation measure is best, of the points up to some second."""
    points = zip(curve["seconds"], curve["validation"], curve["test"], strict=True)
    known = [(v, t) for s, v, t in points if s <= until and v is not None and t is not None]
    return min(known, default=(math.inf, math.inf), key=lambda pair: pair[0])


def rates_of(rows, name):
    """The best rate of every way; None while the search is not done."""
    found = {(row["rate"], row["seed"]): row["ways"] for row in rows if (row["task"], row["kind"]) == (name, "search")}
    if len(found) < len(RATES) * len(SEARCH):
        return None
    return {way: min(RATES, key=lambda rate: searched(found, way, rate)) for way in TASKS[name].ways}


def searched(found, way, rate):
    return sum(best_of(found[rate, seed][way])[0] for seed in SEARCH) / len(SEARCH)


def units(rows, names, seeds):
    """What is to be done now, task by task, and how much can begin only when the search is done."""
    done = {(row["task"], row["kind"], row["seed"], row.get("rate")) for row in rows}
    ready, later = [], 0
    for name in names:
        wanted = [(name, "train", seed, None) for seed in range(seeds)] + [(name, "bias", seed, None) for seed in BIAS]
        if name == "table" and find_spec("sklearn"):
            wanted += [(name, "outsider", seed, None) for seed in range(seeds)]
        if rates_of(rows, name) is None:
            later += len(wanted)
            wanted = [(name, "search", seed, rate) for seed in SEARCH for rate in RATES]
        ready += [one for one in wanted if one not in done]
    return ready, later


def unit(arguments):
    """In a process of its own; a line of JSON says what came of it."""
    torch.set_num_threads(arguments.threads)
    name, kind, seed, rates = json.loads(arguments.unit)
    task = TASKS[name](seed, arguments.data)
    row = {"task": name, "kind": kind, "seed": seed, "machine": machine(), "scale": arguments.scale}
    begin = time.perf_counter()
    if kind == "outsider":
        row |= boosting(seed, arguments.data)
    elif kind == "bias":
        row["rows"] = biases(task, rates["whole"], seed, arguments.scale)
    else:
        row["ways"] = trained(task, rates, seed, arguments.scale)
        if kind == "search":
            row["rate"] = rates["whole"]
            for one in row["ways"].values():  # the best on validation samples is all that is looked at
                best = best_of({**one, "test": [0.0] * POINTS})[0]
                one |= {"seconds": one["seconds"][-1:], "validation": [finite(best)], "test": [0.0]}
                del one["also"]
    row["took"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(row))


def expected(name, kind, scale):
    """Seconds that a unit takes, roughly, with what is not counted."""
    ways = len(TASKS[name].ways)
    return 12 + TASKS[name].seconds * scale * (8 if kind == "bias" else 1.3 * ways)


def start(chosen, core, rows, arguments):
    name, kind, seed, rate = chosen
    rates = dict.fromkeys(TASKS[name].ways, rate) if kind == "search" else rates_of(rows, name)
    told = ["--unit", json.dumps([name, kind, seed, rates]), "--data", arguments.data, "--scale", str(arguments.scale)]
    told += ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "CUDA_VISIBLE_DEVICES": ""}
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    return subprocess.Popen(
        [sys.executable, __file__, *told], stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=pin
    )


def work(arguments, figures):
    """Keeps the workers busy until all is done or time is over."""
    rows, begin, busy, failed = figures["rows"], time.time(), {}, []
    cores = sorted(os.sched_getaffinity(0))
    pinned = arguments.threads == 1 and len(cores) <= arguments.workers  # of many cores the system knows the free ones
    cores = cores[: arguments.workers]
    while True:
        left = 60 * arguments.minutes - (time.time() - begin)
        ready, _ = units(rows, arguments.task, arguments.seeds)
        taken = [chosen for chosen, _ in busy.values()] + failed
        ready = [one for one in ready if one not in taken and expected(one[0], one[1], arguments.scale) < left]
        for core in cores:
            if core not in busy and ready:
                chosen = ready.pop(0)
                busy[core] = chosen, start(chosen, core if pinned else None, rows, arguments)
        if not busy:
            return failed
        time.sleep(0.2)
        for core, (chosen, process) in list(busy.items()):
            if process.poll() is None:
                continue
            del busy[core]
            said = process.stdout.read()
            if process.returncode:
                failed.append(chosen)
                print(f"failed: {chosen}", file=sys.stderr)
                continue
            rows.append({**json.loads(said.splitlines()[-1]), "workers": len(cores)})
            if arguments.json:
                save(arguments.json, figures)
            print(f"{time.time() - begin:5.0f} s  {chosen}  took {rows[-1]['took']} s", file=sys.stderr, flush=True)


def save(path, figures):
    lines = ",\n".join(json.dumps(row) for row in figures["rows"])
    part = path.with_suffix(".part")
    part.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    part.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, help="write what is needed of CIFAR-10 to this file, and stop")
    parser.add_argument("--data", default="quality.npz", help="that file")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write figures to this file, or go on with it")
    parser.add_argument("--workers", type=int, default=1, help="units at a time, each on a core of its own")
    parser.add_argument("--threads", type=int, default=1, help="of each unit")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing that would end later")
    parser.add_argument("--scale", type=float, default=1.0, help="longer or shorter trainings")
    parser.add_argument("--again", type=Path, help="show the figures of this file")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.export:
        return export(arguments.export)
    if arguments.unit:
        return unit(arguments)
    figures, failed = {"rows": []}, []
    kept = arguments.again or arguments.json
    if kept and kept.exists():
        figures = json.loads(kept.read_text())
    if not arguments.again:
        others = {(row["machine"], row["scale"]) for row in figures["rows"] if row["kind"] == "train"}
        others -= {(machine(), arguments.scale)}
        if others:
            sys.exit(f"{kept} holds figures of {sorted(others)}: give another file for {machine()}, {arguments.scale}")
        failed = work(arguments, figures)
    import quality_pages  # which imports this file

    quality_pages.show(figures["rows"])
    left, later = units(figures["rows"], arguments.task, arguments.seeds)
    print(f"{len(figures['rows'])} units done, {len(left) + later} left, {len(failed)} failed")
    return 1 if failed else None


if __name__ == "__main__":
    sys.exit(main())
