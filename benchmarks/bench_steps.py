"""What `backdrop run --graphs` and `--compile` do for the time of a training step, on the paper's networks, in one run.

    python benchmarks/bench_steps.py [--device cuda] [--json FILE]

A trial is trained in each way, on textures or on images of noise. The time is that of its later epochs, divided by
their steps: the first has the compiling and the recording in it, the last the evaluation. On a CPU there are no graphs.
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
from backdrop.experiments.tasks import CIFAR10, GP
from backdrop.experiments.train import Options, fit
from bench_layer import machine

WAYS = {"plain": {}, "graphs": {"graphs": True}, "compiled": {"compile": True}}
EPOCHS, STEPS = 6, 20


class Noise(CIFAR10):
    """Without photographs, in epochs of 20 steps."""

    def sets(self, device):
        generator = torch.Generator().manual_seed(0)
        count = STEPS * self.settings.batch_size
        images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device)
        every = ImageSet(images, torch.arange(count, device=device) % 10, tuple("0123456789"))
        return every, ImageSet(images[:10], every.labels[:10], every.classes)


def cases(device):
    """Name, task and settings; on a CPU, small."""
    common = {"precision": "bf16-mixed" if device == "cuda" else "32-true", "epochs": EPOCHS, "evaluations": 1}
    for size in (16, 64, 256, 2048) if device == "cuda" else (16,):
        yield f"All-CNN, {size} images", Noise, {"batch_size": size, "p": 0.75, "passes": 1, **common}
    masks = {"p_small": 0.99, "p_large": 0.94, "adapt": False, "test_per_class": 1}
    for size, blocks in ((256, (2, 3)), (1024, (4, 3))) if device == "cuda" else ((64, (1, 2)),):
        yield (
            f"GP network, 4 images of {size}²",
            GP,
            {"size": size, "blocks": blocks, "passes": STEPS, **masks, **common},
        )


def measure(task, settings, options):
    """Milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        curve = fit(task.with_preset("paper", settings, seed=0), Path(folder), options).curve
    return 1e3 * (curve[-2]["seconds"] - curve[0]["seconds"]) / (curve[-2]["step"] - curve[0]["step"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    ways = {name: way for name, way in WAYS.items() if args.device == "cuda" or name != "graphs"}
    rows = []
    for name, task, settings in track(list(cases(args.device)), "training", transient=True):
        found = {way: measure(task, settings, Options(accelerator=args.device, **how)) for way, how in ways.items()}
        rows.append({"case": name, **{f"{way}_ms": ms for way, ms in found.items()}})
    table = Table(title=f"Milliseconds of a training step on {machine(args.device)}, and times as fast as plain")
    for heading in ("", *ways):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        times = [f"{row[f'{way}_ms']:.2f} ({row['plain_ms'] / row[f'{way}_ms']:.2f})" for way in ways]
        table.add_row(row["case"], *times)
    Console(width=120).print(table)
    if args.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        found = {"versions": versions, "device": machine(args.device), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
