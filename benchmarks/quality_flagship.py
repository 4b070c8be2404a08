"""Survival from large images that stay on the disk: what is reached within the same memory and the same time?

    python benchmarks/quality_flagship.py [--side N] [--images N] [--seconds S] [--memory 1GB] [--json FILE]
    python benchmarks/quality_flagship.py --again FILE

Every patient has one image of grey noise, fine or coarse in cells of 32 pixels. Within a disc that takes the share
`--lesion` of the image, the more cells are fine, the sooner the event; outside, cells are fine at random. The network
is three convolutions, a mean over each patch of 64 pixels, and attention pooling over the patches. What differs is how
it is trained; all ways have the same network, time, threads and limit of memory above what a process has before:

- "engine": Cox's loss over the whole cohort, end to end: images are read tile by tile, and the mask keeps some patches
  of each, whose windows alone are read and computed again. "engine, informed" chooses them by their gradients.
- "crops": Cox's loss over a random crop of 512 pixels of each image.
- "one": batches of one whole image, for which Cox's loss is nothing; so the time is cut in four, and the network tells
  how likely an event is in each part, as is done (discrete time).
- "frozen": a third of the time goes into the network of "crops"; then features of all patches are computed once, and
  attention pooling is trained on them by Cox's loss over the whole cohort.

A learning rate is chosen for every way on a cohort of its own, by the concordance on its validation images. Each way of
each seed is a process of its own. What is measured is the weighted mean of the weights so far; evaluation is not
counted, writing images neither. Sizes: the default takes 20 minutes on two cores for one seed and two rates;
`--side 4096 --images 64 --seconds 1200` is the flagship, and takes hours.
"""

import argparse
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop2d, skip_blocked
from backdrop.losses import cox_loss
from bench_size import Raw, begin, kilobytes

WAYS = ("engine", "engine, informed", "crops", "one", "frozen")
CELL, PATCH, TILE, CROP = 32, 64, 512, 512
LENGTHS = (0.8, 1.8)  # of fine and coarse noise, in pixels
KEPT = 16  # patches of each image
PERIODS = 4  # of discrete time
POINTS = 6


# Cohorts.


def noise(length, generator):
    """A tile of smooth noise."""
    reach = 8
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / length) ** 2)
    bell /= bell.square().sum().sqrt()
    x = torch.randn(1, 1, TILE + 2 * reach, TILE + 2 * reach, generator=generator)
    return F.conv2d(F.conv2d(x, bell.view(1, 1, -1, 1)), bell.view(1, 1, 1, -1))[0, 0]


def write(path, number, side, lesion, seed):
    """Images into a file, tile by tile; times and events are returned."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(number, generator=generator)
    radius = side * math.sqrt(lesion / math.pi)
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.ftruncate(file, number * side * side)
    for n in range(number):
        centre = radius + torch.rand(2, generator=generator) * max(0.0, side - 2 * radius)
        cells = (torch.arange(side // CELL) + 0.5) * CELL
        inside = ((cells[:, None] - centre[0]) ** 2 + (cells - centre[1]) ** 2) < radius**2
        inside |= torch.tensor(lesion >= 1)
        outside = 0.2 + 0.2 * torch.rand((), generator=generator)
        chance = torch.where(inside, share[n], outside)
        fine = torch.rand(side // CELL, side // CELL, generator=generator) < chance
        lit = torch.where(inside, 20.0, 0.0)  # a lesion is a little brighter
        for i in range(0, side, TILE):
            for j in range(0, side, TILE):
                both = [noise(length, generator) for length in LENGTHS]
                part = slice(i // CELL, (i + TILE) // CELL), slice(j // CELL, (j + TILE) // CELL)
                where, light = (x[part].repeat_interleave(CELL, 0).repeat_interleave(CELL, 1) for x in (fine, lit))
                tile = (127.5 + light + 40 * torch.where(where, *both)).clamp(0, 255).byte().numpy()
                for row, line in enumerate(tile):
                    os.pwrite(file, line.tobytes(), (n * side + i + row) * side + j)
    os.close(file)
    log_hazards = 4 * (share - 0.5)
    due = -torch.rand(number, generator=generator).log() / log_hazards.exp()
    censored = -torch.rand(number, generator=generator).log() / 0.5
    return {"times": torch.minimum(due, censored), "events": due <= censored}


def concordance(risk, times, events):
    """In percent (Harrell's C)."""
    known = events[:, None] & (times[:, None] < times)
    apart = risk[:, None] - risk
    return 100 * ((apart > 0).double() + 0.5 * (apart == 0).double())[known].mean().item()


# The network.


class Pooling(nn.Module):
    """Attention over patches (N, C, H, W), and numbers for each image."""

    def __init__(self, width, outputs):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1))
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        return self.last((x * self.score(x).softmax(1)).sum(1))


def network(mask, outputs=1):
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()),
        nn.AvgPool2d(PATCH // 4),
        mask,
        Pooling(24, outputs),
    )


def image(source, n):
    return source.read(n, (0, 0), source.shape[2:])[None]


def features(model, source):
    """Of all patches of all images, one image at a time."""
    with torch.no_grad():
        return torch.cat([model[:-1](image(source, n)) for n in range(source.shape[0])])


def risks(model, source):
    out = model[-1](features(model, source))
    return out.flatten() if out.shape[1] == 1 else out.sigmoid().sum(1)


# Ways: each is a function that does one step, with the gradients in the model.


def engine(model, source, told, generator):
    cox_loss(model(source), **told).backward()


def crops(model, source, told, generator):
    side, size = source.shape[2], min(CROP, source.shape[2])
    starts = (torch.randint((side - size) // PATCH + 1, (source.shape[0], 2), generator=generator) * PATCH).tolist()
    parts = [source.read(n, (i, j), (i + size, j + size)) for n, (i, j) in enumerate(starts)]
    cox_loss(model(torch.stack(parts)), **told).backward()


def one(model, source, told, generator):
    """Did the event come in each part of the time, if it was still to come?"""
    n = int(torch.randint(source.shape[0], (), generator=generator))
    bounds = told["times"].quantile(torch.linspace(0, 1, PERIODS + 1)[1:-1])
    period = int((told["times"][n] > bounds).sum())
    reached = torch.arange(PERIODS) <= period
    event = (torch.arange(PERIODS) == period) & told["events"][n]
    loss = F.binary_cross_entropy_with_logits(model(image(source, n))[0], event.float(), reached.float())
    loss.backward()


def on_features(model, source, told, generator):
    cox_loss(model[-1](source), **told).backward()


class Averaged:
    """The weighted mean of the weights so far."""

    def __init__(self, model):
        self.model, self.steps = model, 0
        self.values = [x.detach().clone() for x in model.parameters()]

    def add(self):
        self.steps += 1
        with torch.no_grad():
            torch._foreach_lerp_(self.values, list(self.model.parameters()), 9 / (self.steps + 8))

    def into(self, model):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), self.values)
        return model.eval()


def train(step, model, shown, source, told, rate, seconds, generator, evaluate, before=0.0):
    """Steps for so many seconds; the curve of what `evaluate` says of the mean of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    averaged, spent, curve = Averaged(model), 0.0, []
    for point in range(1, POINTS + 1):
        start = time.process_time() - spent
        while time.process_time() - start < seconds * point / POINTS:
            optimizer.zero_grad()
            step(model, source, told, generator)
            optimizer.step()
            averaged.add()
        spent = time.process_time() - start
        curve.append({"seconds": round(before + spent, 1), "steps": averaged.steps})
        curve[-1] |= evaluate(averaged.into(shown))
        if spent >= seconds:
            break
    return curve


def trained(way, rate, folder, seconds, memory, seed):
    """In a process of its own."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.load(folder / f"{name}.pt") for name in ("training", "validation", "test")}
    sources = {name: Raw(folder / name, tuple(part.pop("shape"))) for name, part in parts.items()}
    source, told = sources["training"], parts["training"]
    count = (source.shape[2] // PATCH) ** 2
    masked = way.startswith("engine")
    choose = "gradient" if way.endswith("informed") else "uniform"
    mask = Backdrop2d(max(0.0, 1 - KEPT / count), exact=True, choose=choose) if masked else nn.Identity()
    model = plain = network(mask, PERIODS if way == "one" else 1)
    shown = copy.deepcopy(plain)
    shown[-2] = nn.Identity()
    limit = int(float(memory.removesuffix("GB")) * 1e9)
    if masked:
        model = skip_blocked(plain, tile="auto", memory=limit // 2)
    base = begin(limit)
    peak = 0

    def evaluate(model):
        nonlocal peak
        peak = max(peak, kilobytes("VmHWM:"))
        return {name: concordance(risks(model, sources[name]), **parts[name]) for name in ("validation", "test")}

    steps = {"crops": crops, "one": one}
    if way == "frozen":
        start = time.process_time()
        train(crops, model, shown, source, told, 0.003, seconds / 3, generator, lambda model: {})
        kept = features(shown, source)
        before = time.process_time() - start
        model = copy.deepcopy(shown).train()
        model[-1] = Pooling(24, 1)
        shown = copy.deepcopy(model)
        curve = train(on_features, model, shown, kept, told, rate, seconds - before, generator, evaluate, before)
    else:
        curve = train(steps.get(way, engine), model, shown, source, told, rate, seconds, generator, evaluate)
    report = str(getattr(model, "skip_report", ""))
    return {"curve": curve, "gb": round((peak - base) * 1024 / 1e9, 3), "report": report}


# All of it.


def make(folder, arguments, seed):
    counts = {"training": arguments.images, "validation": arguments.test, "test": arguments.test}
    for i, (name, count) in enumerate(counts.items()):
        told = write(folder / name, count, arguments.side, arguments.lesion, 10 * seed + i)
        torch.save({**told, "shape": (count, 1, arguments.side, arguments.side)}, folder / f"{name}.pt")


def in_a_process(way, rate, folder, arguments, seed):
    told = json.dumps([way, rate, str(folder), arguments.seconds, arguments.memory, seed])
    command = [sys.executable, __file__, "--unit", told, "--threads", str(arguments.threads)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        full = "allocate memory" in done.stderr or "MemoryError" in done.stderr
        return {"failed": "does not fit" if full else (done.stderr.strip().splitlines() or ["ended"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def best_of(row):
    """Test concordance where validation is best."""
    return max(row["curve"], key=lambda point: point["validation"])["test"] if "curve" in row else math.nan


def valid(row):
    return max(point["validation"] for point in row["curve"]) if "curve" in row else -math.inf


def chosen(rows, way):
    own = [row for row in rows if row["way"] == way and row["kind"] == "search"]
    return max(own, key=valid)["rate"]


def show(figures):
    print({name: figures[name] for name in ("side", "images", "seconds", "memory", "lesion")})
    for way in WAYS:
        rows = [row for row in figures["rows"] if row["way"] == way and row["kind"] == "train"]
        done = [row for row in rows if "curve" in row]
        if not done:
            print(f"{way:18} {rows[0]['failed'] if rows else 'not run'}")
            continue
        ends = [best_of(row) for row in done]
        steps, most = (statistics.median(x) for x in ([r["curve"][-1]["steps"] for r in done], [r["gb"] for r in done]))
        said = ", ".join(f"{end:.1f}" for end in ends)
        print(
            f"{way:18} rate {done[0]['rate']:g}, {steps:.0f} steps, {most:.2f} GB, "
            f"concordance {statistics.fmean(ends):.1f} ({said})"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--test", type=int, default=64, help="images for validation, and for the test")
    parser.add_argument("--lesion", type=float, default=0.05, help="share of the image that tells; 1 for all of it")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--memory", default="1GB", help="of each way, above what its process has before")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write figures to this file, or go on with it")
    parser.add_argument("--again", type=Path, help="show the figures of this file")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.unit:
        way, rate, folder, seconds, memory, seed = json.loads(arguments.unit)
        print(json.dumps(trained(way, rate, Path(folder), seconds, memory, seed)))
        return
    kept = arguments.again or arguments.json
    settings = ("side", "images", "test", "lesion", "seconds", "memory", "threads")
    figures = {name: getattr(arguments, name) for name in settings} | {"torch": torch.__version__, "rows": []}
    if kept and kept.exists():
        before = json.loads(kept.read_text())
        if not arguments.again and any(before[name] != figures[name] for name in settings):
            sys.exit(f"{kept} holds figures of { ({name: before[name] for name in settings}) }: give another file")
        figures = before
    for seed in () if arguments.again else (1000, *range(arguments.seeds)):
        kind = "search" if seed == 1000 else "train"
        for_all = [(way, rate) for way in arguments.ways for rate in (arguments.rates if seed == 1000 else [None])]
        done = {(row["way"], row.get("asked"), row["seed"]) for row in figures["rows"]}
        wanted = [(way, rate) for way, rate in for_all if (way, rate, seed) not in done]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            make(Path(folder), arguments, seed)
            print(f"images of seed {seed} written in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            for way, asked in wanted:
                rate = asked or chosen(figures["rows"], way)
                row = in_a_process(way, rate, Path(folder), arguments, seed)
                figures["rows"].append({"way": way, "kind": kind, "seed": seed, "rate": rate, "asked": asked, **row})
                print(
                    f"{way}, {rate:g}, seed {seed}: {row.get('failed') or row['curve'][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
                if arguments.json:
                    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
