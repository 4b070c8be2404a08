"""What skipping samples saves in JAX: a training step with a plain mask, with `skip`, and the forward pass alone.

    python benchmarks/bench_jax.py [--rounds N] [--json FILE]

Each step is compiled: the network, the mean of its outputs squared, and the gradient of all parameters, with an exact
mask on samples. Time is the median over rounds in which the steps take turns. Memory is what the compiler sets aside
for intermediate results, which does not vary. The device is the one JAX finds.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backdrop.integrations.jax import backdrop, skip


def random(*shapes):
    """Kernels that keep the size of what passes them."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape) * (2 / math.prod(shape[:-1])) ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    ]


def linear_layers(params, x):
    for kernel in params[:-1]:
        x = jax.nn.relu(x @ kernel)
    return x @ params[-1]


def convolutions(params, x):
    for i, kernel in enumerate(params[:-1]):
        step = (2, 2) if i % 2 else (1, 1)
        x = jax.lax.conv_general_dilated(x, kernel, step, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    return x.mean((1, 2)) @ params[-1]


def cases():
    key = jax.random.key(0)
    rows = random((64, 256), (256, 256), (256, 1)), jax.random.normal(key, (65536, 64))
    shapes = (3, 3, 3, 32), (3, 3, 32, 32), (3, 3, 32, 64), (3, 3, 64, 64), (64, 10)
    images = random(*shapes), jax.random.normal(key, (256, 32, 32, 3))
    for p in (0.5, 0.75, 0.9):
        yield "linear layers, 65536 rows", linear_layers, *rows, p
    for p in (0.5, 0.75, 0.9):
        yield "convolutions, 256 images", convolutions, *images, p


def plain(function, p, params, x, key):
    return backdrop(function(params, x), key, p, exact=True)


def skipped(function, p, params, x, key):
    return skip(function, p)(params, x, key=key)


def step_of(run):
    return jax.grad(lambda params, x, key: (run(params, x, key) ** 2).mean())


def measure(name, function, params, x, p, rounds):
    ways = {
        "plain": step_of(partial(plain, function, p)),
        "skip": step_of(partial(skipped, function, p)),
        "forward": lambda params, x, key: function(params, x),
    }
    compiled = {way: jax.jit(run).lower(params, x, jax.random.key(0)).compile() for way, run in ways.items()}
    times = {way: [] for way in ways}
    for i in track(range(2 + rounds), f"{name}, p={p:g}", transient=True):
        for way, run in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(params, x, jax.random.key(i)))
            if i >= 2:  # two rounds to warm up
                times[way].append(time.perf_counter() - begin)
    row = {"network": name, "p": p}
    for way in ways:
        row[f"{way}_ms"] = statistics.median(times[way]) * 1e3
        row[f"{way}_mb"] = compiled[way].memory_analysis().temp_size_in_bytes / 1e6
    return row


HEADINGS = ("network", "p", "plain ms", "/ forward pass", "skip ms", "/ forward pass", "times faster", "memory / plain")


def cells(row):
    """A row of the table, as text."""
    return (
        row["network"],
        f"{row['p']:g}",
        f"{row['plain_ms']:.0f}",
        f"{row['plain_ms'] / row['forward_ms']:.2f}",
        f"{row['skip_ms']:.0f}",
        f"{row['skip_ms'] / row['forward_ms']:.2f}",
        f"{row['plain_ms'] / row['skip_ms']:.2f}",
        f"{row['skip_mb'] / row['plain_mb']:.2f}",
    )


def show(figures):
    table = Table(title=f"One training step, {figures['device']}, jax {figures['jax']}")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for row in figures["rows"]:
        table.add_row(*cells(row))
    Console(width=120).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    name = f"CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    figures = {"device": name, "jax": jax.__version__, "python": platform.python_version(), "rows": []}
    for case in cases():
        figures["rows"].append(measure(*case, arguments.rounds))
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
