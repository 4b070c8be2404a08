"""How long a training step takes when it is recorded, compiled or skipped in, on the paper's networks, in one run.

    python benchmarks/bench_steps.py [--device cuda] [--only TASK] [--json FILE]

A trial is trained in each way, on textures or on images of noise: plain, with `backdrop run --graphs`, with `--compile`
and with both, and with every policy of `--skip`. The time is that of its later epochs, divided by their steps: the
first has the compiling and the recording in it, the last the evaluation. On a CPU there are no graphs, and networks are
small. `--only` measures the cases of one task, and leaves the others in the file as they are.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backdrop.experiments.data import ImageSet
from backdrop.experiments.tasks import AUC, CIFAR10, GP
from backdrop.experiments.train import Options, fit
from bench_layer import machine

OPTIONS = {
    "plain": {},
    "graphs": {"graphs": True},
    "compiled": {"compile": True},
    "both": {"graphs": True, "compile": True},
}
SKIP = ("exact", "sampled", "frozen")
EPOCHS, STEPS = 6, 20


class Noise:
    """Images of noise in place of photographs, for 20 steps."""

    classes = 10

    def sets(self, device):
        generator = torch.Generator().manual_seed(0)
        count = STEPS * self.settings.batch_size
        images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device)
        every = ImageSet(images, torch.arange(count, device=device) % self.classes, tuple("0123456789"[: self.classes]))
        return every, ImageSet(images[:10], every.labels[:10], every.classes)


class NoisyCIFAR10(Noise, CIFAR10):
    pass


class NoisyAUC(Noise, AUC):
    classes = 2


def cases(device):
    """Name, task and settings."""
    on_gpu = device == "cuda"
    common = {"precision": "bf16-mixed" if on_gpu else "32-true", "epochs": EPOCHS, "evaluations": 1, "lr": 1e-4}
    images = {"passes": 1, "width": 96 if on_gpu else 16, **common}
    for size in (16, 2048) if on_gpu else (16,):
        yield f"cifar10, {size} images, p 0.75", NoisyCIFAR10, {"batch_size": size, "p": 0.75, **images}
    size = 2048 if on_gpu else 128
    yield f"auc, {size} images, p 0.97", NoisyAUC, {"batch_size": size, "p": 0.97, **images}
    textures = {"p_small": 0.99, "p_large": 0.94, "adapt": False, "test_per_class": 1, "passes": STEPS, **common}
    size, channels, blocks = (1024, 64, (4, 3)) if on_gpu else (64, 16, (1, 2))
    name = f"gp, 4 images of {size} pixels squared, p 0.99 and 0.94"
    yield name, GP, {"size": size, "blocks": blocks, "channels": channels, **textures}


def measure(task, settings, options):
    """Milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        curve = fit(task.with_preset("paper", settings, seed=0), Path(folder), options).curve
    return 1e3 * (curve[-2]["seconds"] - curve[0]["seconds"]) / (curve[-2]["step"] - curve[0]["step"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", choices=["cifar10", "auc", "gp"], help="the cases of this task alone")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    ways = {name: how for name, how in OPTIONS.items() if args.device == "cuda" or "graphs" not in how}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    rows = []
    before = json.loads(args.json.read_text())["rows"] if args.only and args.json and args.json.exists() else []
    wanted = [case for case in cases(args.device) if case[0].startswith(args.only)]
    for name, task, settings in track(wanted, "training", transient=True):
        found = {way: measure(task, settings, Options(accelerator=args.device, **how)) for way, how in ways.items()}
        found |= {skip: measure(task, settings | {"skip": skip}, Options(accelerator=args.device)) for skip in SKIP}
        rows.append({"case": name, **{f"{way}_ms": ms for way, ms in found.items()}})
        if args.json:
            others = [row for row in before if not row["case"].startswith(args.only)]
            figures = {"versions": versions, "device": machine(args.device), "rows": [*others, *rows]}
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    table = Table(
        title=f"Milliseconds of a training step on {machine(args.device)}, and how many times as fast as plain"
    )
    table.add_column("")
    for way in (*ways, *SKIP):
        table.add_column(f"skip {way}" if way in SKIP else way, justify="right")
    for row in rows:
        times = [row[f"{way}_ms"] for way in (*ways, *SKIP)]
        table.add_row(row["case"], *(f"{ms:.2f} ({times[0] / ms:.2f})" for ms in times))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
