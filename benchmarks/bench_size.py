"""Samples and batches that do not fit: what a training step takes as images, volumes, series and tables grow.

    python benchmarks/bench_size.py [--only TEXT] [--long] [--json FILE] [--plot FILE]
    python benchmarks/bench_size.py --again FILE [--plot FILE] [--pages]

Every case is a process of its own, whose memory is limited to what it has before the step and so much more (LIMIT).
Inputs of "tiles" and "parts" lie on the disk, in files of random bytes that this script writes into a temporary folder,
and are read with plain reads; those of "plain" and "engine" (skipping without tiles) are tensors that are there before.
Memory is the peak above what lay there before the step, by the operating system; time is that of one step, or of the
second one where a step is short. Slopes are those between the two largest sides: how many times as much memory or time
twice the side takes.

Networks: a ResNet-18 and a ResNet-34 with batch normalisations in eval mode, as lightstream has them, and the paper's
network for textures with statistics="running". `--long` adds a side of 32768. lightstream stands beside where it is
installed; it is made to run on a CPU, for which it was not written.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, Source, skip_blocked
from backdrop.experiments import models
from backdrop.losses import rank_statistic_loss
from backdrop.skip.positions import Positions

GIB = 2**30
LIMIT = 8 * GIB  # above what a case has before its step
PATIENCE = 3600  # seconds for a case


class Case(NamedTuple):
    name: str
    way: str  # tiles, parts, engine, plain, lightstream
    side: int
    p: float
    memory: str = ""
    tile: int = 0
    more: str = ""
    goal: float = math.inf  # GiB above base


def cases(long):
    resnet = "ResNet-18, mask behind layer3"
    for side in (2048, 4096, 8192, 16384, *((32768,) if long else ())):
        goal = 2.5 if side == 8192 else math.inf
        yield Case(resnet, "tiles", side, 0.9995, "1.5GB" if side <= 8192 else "4GB", goal=goal)
    for side in (2048, 4096, 8192):
        yield Case(resnet, "engine", side, 0.9995)
        yield Case(resnet, "plain", side, 0.9995)
    for side in (2048, 4096, 8192):
        yield Case("GP network", "tiles", side, 0.999, "4GB", goal=8 if side == 8192 else math.inf)
    for side in (2048, 4096, 8192):
        yield Case("GP network", "engine", side, 0.999)
    for side in (10**7, 4 * 10**7, 16 * 10**7):
        yield Case("series", "tiles", side, 0.9999, "500MB", goal=1 if side == 16 * 10**7 else math.inf)
    for side in (10**7, 4 * 10**7):
        yield Case("series", "plain", side, 0.9999)
    for side in (128, 256, 512):
        yield Case("volume", "tiles", side, 0.999, "2GB", goal=4 if side == 512 else math.inf)
    for side in (128, 256):
        yield Case("volume", "plain", side, 0.999)
    for way in ("plain", "lean"):
        yield Case(resnet, way, 768, 0.99)
        yield Case("U-Net, mask at its output", way, 512, 0.999)
        yield Case("3-D network, batch statistics", way, 80, 0.99)
    yield Case("U-Net, mask at its output", "tiles", 512, 0.999, "60MB")
    for side in (62_500, 250_000, 1_000_000):
        yield Case("rank statistic, rows", "parts", side, 0.99)
        yield Case("rank statistic, rows", "parts", side, 0.99, more="gradient")
        yield Case("rank statistic, rows", "plain", side, 0.99)
    for way, p in (("tiles", 0.0), ("tiles", 0.99), ("tiles", 0.999), ("lightstream", 0.0), ("plain", 0.0)):
        yield Case("against lightstream: ResNet-18, layer3", way, 1280, p, tile=640 if way == "tiles" else 0)


# Networks.


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.relu, self.short = nn.ReLU(), nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return self.relu(self.body(x) + self.short(x))


def stage(inputs, outputs, blocks, stride):
    return nn.Sequential(*(Residual(outputs if i else inputs, outputs, 1 if i else stride) for i in range(blocks)))


def resnet(mask, blocks=(2, 2, 2, 2), behind=3):
    """A ResNet-18 (or 34) for two classes; its normalisations keep to their running statistics."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    stages = [stage(widths[i], widths[i + 1], n, 1 if i == 0 else 2) for i, n in enumerate(blocks)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 2)]
    model = nn.Sequential(*stem, *stages[:behind], mask, *stages[behind:], *head)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


class Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Wide(nn.Module):
    """A block of a ConvNeXt: positions by a depthwise convolution, then channels by a network of two layers."""

    def __init__(self, width):
        super().__init__()
        self.space, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(self.space(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext(mask, behind=4):
    """A ConvNeXt-T for two classes."""
    stages, before = [], 3
    for width, blocks in zip((96, 192, 384, 768)[:behind], (3, 3, 9, 3), strict=False):
        first = [nn.Conv2d(3, width, 4, 4), Norm(width)] if before == 3 else [Norm(before)]
        first += [] if before == 3 else [nn.Conv2d(before, width, 2, 2)]
        stages.append(nn.Sequential(*first, *(Wide(width) for _ in range(blocks))))
        before = width
    return nn.Sequential(*stages, mask, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 2))


def series(p):
    layers = [nn.Conv1d(1, 16, 7, 4, 3), nn.ReLU(), nn.Conv1d(16, 16, 7, 4, 3), nn.ReLU()]
    layers += [nn.Conv1d(16, 16, 7, 4, 3), nn.ReLU(), nn.Conv1d(16, 16, 7, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, Backdrop1d(p), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 2))


def volume(p):
    layers = [nn.Conv3d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv3d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv3d(32, 32, 3, 1, 1)]
    layers += [nn.ReLU(), nn.Conv3d(32, 64, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, Backdrop3d(p), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 2))


class UNet(nn.Module):
    def __init__(self, mask, inputs=3, width=24):
        super().__init__()

        def block(inputs, outputs):
            convs = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
            return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))

        self.down = nn.ModuleList([block(inputs, width), block(width, 2 * width)])
        self.middle, self.mask = block(2 * width, 4 * width), mask
        self.up = nn.ModuleList([nn.ConvTranspose2d(n * width, n * width // 2, 2, 2) for n in (4, 2)])
        self.join = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.middle(nn.functional.max_pool2d(second, 2))
        x = self.join[0](torch.cat([self.up[0](x), second], 1))
        return self.mask(self.head(self.join[1](torch.cat([self.up[1](x), first], 1))))


def normed(p):
    """A network for volumes with batch normalisation in training."""
    layers = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [nn.Conv3d(inputs, outputs, 3, stride, 1), nn.BatchNorm3d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, Backdrop3d(p), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 2))


def rows(p, choose):
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    return nn.Sequential(*layers, Backdrop(p, exact=True, choose=choose or "uniform"))


def settings_of(case):
    """The model, the shape of its input, and how it is skipped."""
    if case.name == "GP network":
        model = models.gp_network(Backdrop2d(case.p, exact=True), Backdrop2d(0.94, exact=True), padded=True)
        return model, (1, 1, case.side, case.side), {"statistics": "running"}
    if case.name == "series":
        return series(case.p), (1, 1, case.side), {}
    if case.name == "volume":
        return volume(case.p), (1, 1, *[case.side] * 3), {}
    if case.name.startswith("U-Net"):
        return UNet(Backdrop2d(case.p)), (1, 3, case.side, case.side), {}
    if case.name.startswith("3-D"):
        return normed(case.p), (1, 1, *[case.side] * 3), {"statistics": "sampled"}
    if case.name.startswith("rank"):
        return rows(case.p, case.more), (case.side, 32), {"at_once": 20_000}
    return resnet(Backdrop2d(case.p)), (1, 3, case.side, case.side), {}


# Inputs.


class Raw(Source):
    """Bytes in a file, in the order of the array, as numbers around zero; no part of it stays in memory."""

    dtype = torch.float32

    def __init__(self, path, shape):
        self.shape, self.file = shape, os.open(path, os.O_RDONLY)

    def _bytes(self, first, count):
        return torch.frombuffer(bytearray(os.pread(self.file, count, first)), dtype=torch.uint8)

    def read(self, sample, low, high):
        channels, *space = self.shape[1:]
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        made = torch.empty(channels, *sizes, dtype=torch.uint8)
        lines = made.view(-1, sizes[-1])
        starts = torch.arange(sample * channels, (sample + 1) * channels)
        for a, b, size in zip(low[:-1], high[:-1], space[:-1], strict=True):
            starts = (starts[:, None] * size + torch.arange(a, b)).flatten()
        for line, start in zip(lines, starts.tolist(), strict=True):
            line.copy_(self._bytes(start * space[-1] + low[-1], sizes[-1]))
        return made.float().sub_(127.5).div_(74)

    def rows(self, indices):
        width = math.prod(self.shape[1:])
        first, last = min(indices), max(indices)
        if last - first < 4 * len(indices):
            found = self._bytes(first * width, (last - first + 1) * width).view(-1, width)
            found = found[torch.tensor(indices) - first]
        else:
            found = torch.stack([self._bytes(index * width, width) for index in indices])
        return found.float().sub_(127.5).div_(74).view(-1, *self.shape[1:])


def write(path, count):
    block = os.urandom(2**24)
    with path.open("wb") as file:
        for _ in range(count // len(block)):
            file.write(block)
        file.write(block[: count % len(block)])


# Measuring, in a process of its own.


def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def begin(limit):
    """From here on memory is limited, and the peak is counted."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    most = kilobytes("VmSize:") * 1024 + limit
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return kilobytes("VmRSS:")


def lightstream_step(model, tile):
    """Exact streaming of what lies before the mask, and the rest as it is."""
    from lightstream.core.scnn.scnn import StreamingCNN

    at = next(i for i, layer in enumerate(model) if isinstance(layer, Backdrop))
    front, tail = model[:at], model[at + 1 :]
    with contextlib.redirect_stdout(sys.stderr):
        stream = StreamingCNN(front, (1, 3, tile, tile), copy_to_gpu=False, statistics_on_cpu=False)

    def step(x):
        out = stream.forward(x)
        out.requires_grad_()
        tail(out).square().sum().backward()
        stream.backward(x, out.grad)

    return step


def measured(case, folder):
    torch.manual_seed(0)
    model, shape, how = settings_of(case)
    if case.tile:
        how = {**how, "tile": case.tile}
    if case.memory:
        how = {**how, "tile": "auto", "memory": case.memory}
    labels = torch.arange(shape[0]) % 100 == 0
    loss = (lambda y: rank_statistic_loss(y.flatten(), labels)) if case.name.startswith("rank") else None
    if case.way == "lightstream":
        step, model = lightstream_step(model, 640), model
    else:
        if case.way != "plain":
            whens = {"lean": "lean", "engine": "always"}  # tiles choose between windows and tiles backward
            model = skip_blocked(model, when=whens.get(case.way, "pays"), **how)

        def step(x):
            out = model(x)
            (out.square().sum() if loss is None else loss(out)).backward()

    source = Raw(folder / "input", shape)
    step(_warm_up(case, shape))
    model.zero_grad()
    whole = case.way not in ("tiles", "parts")
    if whole:  # the input itself is there before, whoever it is that brought it
        x = torch.empty(shape)
        for part in x.view(-1).split(2**22):
            part.uniform_(-1.7, 1.7)
    else:
        x = source
    base, times = begin(LIMIT), []
    while not times or (len(times) < 3 and sum(times) < 20):
        start = time.perf_counter()
        step(x)
        times.append(time.perf_counter() - start)
        model.zero_grad()
    report = str(getattr(model, "skip_report", ""))
    return {"gib": (kilobytes("VmHWM:") - base) / 2**20, "seconds": times[-1], "steps": len(times), "report": report}


def _warm_up(case, shape):
    """A small input, so that what torch loads with the first step is there before."""
    if case.name.startswith("rank"):
        return torch.zeros(shape)
    small = {1: 4096, 2: 1280 if case.way == "lightstream" else 256, 3: 32}[len(shape) - 2]
    return torch.randn(*shape[:2], *[small] * (len(shape) - 2))


def in_turns(side=2048, tile=1024, rounds=3):
    """Tiles against no tiles: a forward pass over a bare one, a step over that of the engine, in one run."""
    torch.manual_seed(0)
    plain, x = resnet(Backdrop2d(0.9995)), torch.randn(1, 3, side, side)
    engine, tiles = skip_blocked(plain, when="always"), skip_blocked(plain, when="always", tile=tile)

    def bare():
        with torch.no_grad():
            plain(x)

    def step(model):
        model(x).square().sum().backward()

    ways = {
        "bare forward": bare,
        "forward in tiles": lambda: tiles(x),
        "step of the engine": lambda: step(engine),
        "step in tiles": lambda: step(tiles),
    }
    times = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name] += [time.perf_counter() - start] if i else []
    found = {name: statistics.median(each) for name, each in times.items()}
    forward = found["forward in tiles"] / found["bare forward"]
    whole = found["step in tiles"] / found["step of the engine"]
    return {"side": side, "tile": tile, "seconds": found, "forward": forward, "step": whole}


def in_a_process(case, folder):
    _, shape, _ = settings_of(case)
    write(folder / "input", math.prod(shape))
    command = [sys.executable, __file__, "--case", json.dumps(case._asdict()), "--folder", str(folder)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {PATIENCE} s"}
    finally:
        (folder / "input").unlink()
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        said = lines[-1] if lines else f"ended with {done.returncode}"
        full = "allocate memory" in said or "MemoryError" in said or "can't allocate" in done.stderr
        return {"failed": "does not fit" if full else said[:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


# What is reported.

RATIOS = {  # memory of a way over that of plain, at most
    ("ResNet-18, mask behind layer3", "lean", 768): 0.5,
    ("U-Net, mask at its output", "lean", 512): 0.35,
    ("U-Net, mask at its output", "tiles", 512): 0.35,
    ("3-D network, batch statistics", "lean", 80): 0.5,
}


SMALL = {(name, side) for name, _, side in RATIOS}  # rows for these alone


def ratios(rows):
    """Memory and time over those of plain, and the goal for memory."""
    known = {(row["name"], row["way"], row["side"]): row for row in rows if "gib" in row}
    found = []
    for at, goal in RATIOS.items():
        own, plain = known.get(at), known.get((at[0], "plain", at[2]))
        if own and plain:
            both = {what: own[what] / plain[what] for what in ("gib", "seconds")}
            found.append({"name": at[0], "way": at[1], "side": at[2], **both, "goal": goal})
    return found


def halos():
    """Work over the image's own, for deep networks at a budget of 4 GB: counted, nothing runs."""
    found = []
    networks = {"ResNet-18, mask behind layer3": ((2, 2, 2, 2), 3), "ResNet-34, layer4": ((3, 4, 6, 3), 4)}
    plain = {name: resnet(Backdrop2d(0.9995), *how) for name, how in networks.items()}
    plain |= {f"ConvNeXt-T, stage {n}": convnext(Backdrop2d(0.9995), n) for n in (3, 4)}
    for name, each in plain.items():
        model = skip_blocked(each, tile="auto", memory="4GB")
        row = {"network": name, "side": 8192, "memory": "4GB"}
        try:
            found.append({**row, "work": halo_work(model, (1, 3, 8192, 8192))})
        except ValueError as error:  # it says the least that would do
            found.append({**row, "failed": str(error).rpartition("(")[2].rstrip(")")})
    return found


class Nothing(Source):
    """For a plan alone."""

    dtype = torch.float32

    def __init__(self, shape):
        self.shape = shape

    def read(self, sample, low, high):
        raise NotImplementedError


def halo_work(model, shape):
    with contextlib.suppress(RuntimeError):
        model(Nothing(shape))
    plans = [plan for graph in model.forward.graphs for plan in graph.plans.values()]
    ways = [part.way for plan in plans for part in plan.parts if isinstance(part.way, Positions)]
    return ways[0].tiling.forward.work


def key(row):
    return tuple(row[name] for name in ("name", "way", "side", "p", "more"))


def slopes(rows):
    """Between the two largest sides of each network and way."""
    found = []
    for name, way in dict.fromkeys((row["name"], f"{row['way']} {row['more']}".strip()) for row in rows):
        own = [r for r in rows if r["name"] == name and f"{r['way']} {r['more']}".strip() == way and "gib" in r]
        own.sort(key=lambda row: row["side"])
        if len({row["side"] for row in own}) > 1:
            a, b = own[-2:]
            doublings = math.log2(b["side"] / a["side"])
            ratios = [(b[what] / a[what]) ** (1 / doublings) for what in ("gib", "seconds")]
            found.append({"name": name, "way": way, "gib": ratios[0], "seconds": ratios[1]})
    return found


def show(figures, console):
    table = Table(title=f"One training step ({figures['machine']}, torch {figures['torch']})")
    for column in ("network", "way", "side or rows", "p", "GiB", "goal", "s"):
        table.add_column(column, justify="left" if column in ("network", "way") else "right")
    for row in figures["rows"]:
        goal = f"{row['goal']:g}" if row["goal"] is not None else ""
        way = " ".join(filter(None, (row["way"], row["memory"], row["more"])))
        values = [f"{row['gib']:.2f}", goal, f"{row['seconds']:.1f}"] if "gib" in row else [row["failed"], goal, ""]
        table.add_row(row["name"], way, f"{row['side']:,}", f"{row['p']:g}", *values)
    console.print(table)
    table = Table(title="Twice the side or rows")
    for column in ("network", "way", "memory", "time"):
        table.add_column(column, justify="left" if column in ("network", "way") else "right")
    for row in figures.get("slopes", ()):
        table.add_row(row["name"], row["way"], f"{row['gib']:.2f}", f"{row['seconds']:.2f}")
    console.print(table)
    for row in figures.get("ratios", ()):
        console.print(
            f"{row['name']}, {row['side']}, {row['way']}: {row['gib']:.2f} times the memory of plain (goal "
            f"{row['goal']:g}), {row['seconds']:.2f} times the time"
        )
    if "turns" in figures:
        turns = figures["turns"]
        console.print(
            f"ResNet-18, {turns['side']}^2, tiles of {turns['tile']}: forward {turns['forward']:.2f} times a bare one "
            f"(goal 1.3), step {turns['step']:.2f} times the engine's without tiles (goal 1.1)"
        )
    for row in figures.get("halos", ()):
        console.print(f"{row['network']}, {row['side']}^2, {row['memory']}: {halo(row)}")


def halo(row):
    return f"{row['work']:.2f} times the work of the image" if "work" in row else f"needs {row['failed']}"


WAYS = {
    "tiles": "tiles",
    "parts": "in parts",
    "engine": "skipping, no tiles",
    "lean": 'skipping, `when="lean"`',
    "plain": "plain",
    "lightstream": "lightstream",
}


def pages(figures):
    """Write tables into the page on large images."""
    page = Path(__file__).parent.parent / "docs" / "large.md"
    before, _, rest = page.read_text().partition("<!-- size -->")
    page.write_text(f"{before}{block(figures)}{rest.partition('<!-- end of size -->')[2]}")


def block(figures):
    """What stands between the marks on that page."""
    head = ["network", "way", "side, length or rows", "p", "GiB", "goal", "seconds"]
    lines = [head, ["---", "---", "---:", "---:", "---:", "---:", "---:"]]
    for row in figures["rows"]:
        way = WAYS[row["way"]]
        way += f" of {row['tile']}" if row["tile"] else f", {row['memory']}" if row["memory"] else ""
        way += ", chosen by gradients" if row["more"] == "gradient" else ""
        goal = f"at most {row['goal']:g}" if row["goal"] is not None else ""
        if "gib" in row:
            took = f"{row['seconds']:.1f}" if row["seconds"] >= 1 else f"{row['seconds']:.2f}"
            values = [f"{row['gib']:.2f}", goal, took]
        else:
            values = [row["failed"], goal, ""]
        lines.append([row["name"], way, f"{row['side']:,}", f"{row['p']:g}", *values])
    said = [f"| {' | '.join(line)} |" for line in lines]
    said += ["", "Twice the side, length or rows takes so many times as much:", ""]
    said += ["| network | way | memory | time |", "|---|---|---:|---:|"]
    for row in figures["slopes"]:
        way, _, more = row["way"].partition(" ")
        said.append(f"| {row['name']} | {_label(way, more)} | {row['gib']:.2f} | {row['seconds']:.2f} |")
    said += ["", "Over a plain step:", "", "| network | way | memory | goal | time |", "|---|---|---:|---:|---:|"]
    for row in figures["ratios"]:
        name = f"{row['name']}, {row['side']}"
        said.append(f"| {name} | {WAYS[row['way']]} | {row['gib']:.2f} | {row['goal']:g} | {row['seconds']:.2f} |")
    if "turns" in figures:
        turns = figures["turns"]
        said += [
            "",
            f"ResNet-18, {turns['side']} x {turns['side']} from memory in tiles of {turns['tile']}, in turns with the "
            f"same without tiles: the forward pass takes {turns['forward']:.2f} times a bare one without gradients "
            f"(goal 1.3), a step {turns['step']:.2f} times one of the engine without tiles (goal 1.1).",
        ]
    said += ["", "Work with halos over that without, at 8192 x 8192 and a budget of 4 GB (goal: 1.3), counted:", ""]
    said += ["| network | |", "|---|---|"]
    said += [f"| {row['network']} | {halo(row)} |" for row in figures.get("halos", ())]
    table = "\n".join(said)
    return f"<!-- size -->\n\n{figures['machine']}, torch {figures['torch']}:\n\n{table}\n\n<!-- end of size -->"


def _label(way, more):
    return WAYS[way] + (", chosen by gradients" if more else "")


def plot(figures, path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = [r for r in figures["rows"] if not r["name"].startswith("against") and (r["name"], r["side"]) not in SMALL]
    shown = [row["name"] for row in rows]
    names = [name for name in dict.fromkeys(shown) if shown.count(name) > 3]
    _, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6), squeeze=False)
    for i, name in enumerate(names):
        for key, axis in zip(("gib", "seconds"), axes[:, i], strict=True):
            for way in dict.fromkeys((r["way"], r["more"]) for r in rows if r["name"] == name):
                own = [r for r in rows if (r["name"], r["way"], r["more"]) == (name, *way)]
                points = sorted((r["side"], r[key]) for r in own if "gib" in r)
                axis.loglog(*zip(*points, strict=True), "o-", label=_label(*way)) if points else None
                failed = [r["side"] for r in own if "failed" in r]
                if failed and points:
                    axis.axvline(min(failed), ls=":", color="grey", lw=1)
            axis.set(xlabel="rows" if "rows" in name else "side", ylabel="GiB" if key == "gib" else "seconds")
            axis.grid(alpha=0.3)
            low, high = axis.get_ylim()
            axis.set_ylim(low / max(1.0, 10 * low / high) ** 0.5, high * max(1.0, 10 * low / high) ** 0.5)
            sides = sorted({r["side"] for r in rows if r["name"] == name})
            axis.set_xticks(sides, [f"{side // 10**6}M" if side >= 10**6 else f"{side:,}" for side in sides])
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axes[0, i].set_title(name, fontsize=9)
        axes[0, i].legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name or way holds this text")
    parser.add_argument("--least", type=int, default=0, help="no side below this")
    parser.add_argument("--most", type=int, default=10**12, help="no side above this")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--turns", action="store_true", help="tiles against no tiles on 2048 x 2048 alone")
    parser.add_argument("--halos", action="store_true", help="the work of halos alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--pages", action="store_true", help="write the tables into docs/large.md")
    parser.add_argument("--again", type=Path)
    parser.add_argument("--case", type=json.loads)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.case is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(Case(**arguments.case), arguments.folder)))
        return
    console = Console(width=120)
    if arguments.again is not None:
        figures = json.loads(arguments.again.read_text())
    else:
        figures = {"machine": f"CPU, {torch.get_num_threads()} threads", "torch": torch.__version__, "rows": []}
        if arguments.json is not None and arguments.json.exists():  # cases that are measured now replace those there
            figures = {**json.loads(arguments.json.read_text()), **{k: figures[k] for k in ("machine", "torch")}}
        known, wanted = figures["rows"], list(cases(arguments.long))
        if arguments.turns or arguments.halos:
            wanted = []
        wanted = [case for case in wanted if arguments.only in f"{case.name}, {case.way}"]
        for case in (case for case in wanted if arguments.least <= case.side <= arguments.most):
            with tempfile.TemporaryDirectory() as folder:
                row = {**case._asdict(), "goal": case.goal if case.goal < math.inf else None}
                row |= in_a_process(case, Path(folder))
            console.print({key: value for key, value in row.items() if key != "report"})
            known = [*(r for r in known if key(r) != key(row)), row]
            order = {key(case._asdict()): i for i, case in enumerate(cases(True))}
            known.sort(key=lambda r: order.get(key(r), len(order)))
            figures |= {"rows": known, "slopes": slopes(known), "ratios": ratios(known)}
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(figures, indent=1))
        if arguments.turns or not (arguments.halos or arguments.only):
            figures["turns"] = in_turns()
        if arguments.halos or not (arguments.turns or arguments.only):
            figures["halos"] = halos()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=1))
    show(figures, console)
    if arguments.pages:
        pages(figures)
    if arguments.plot is not None:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
