"""Cost of a masking layer: Backdrop2d against nn.Dropout and a layer that clones and multiplies, in one run.

    python benchmarks/bench_layer.py [--device cuda] [--json FILE]

Time is that of one forward and one backward pass, the median over rounds in which the layers take turns; on a GPU the
steps of a round are queued without waiting in between, and "graph" replays them as a CUDA graph, which leaves out the
time the host needs to launch them. A second table compares the backward multiply alone with a copy of the gradient and
with torch's own multiply. Extra memory is the peak above the input and the incoming gradient. Goals: at most
0.6 of the time of nn.Dropout; extra memory at most the mask and the returned gradient.
"""

import argparse
import ctypes
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

from backdrop import Backdrop2d
from backdrop._core.product import multiply
from backdrop.functional import draw_weight

P = 0.9
SHAPES = {
    "cpu": [(16, 64, 256, 256)],
    "cuda": [(16, 64, 256, 256), (16, 64, 512, 512), (64, 64, 512, 512)],
}  # 1/4, 1, 4 GiB


class CloneAndMultiply(nn.Module):
    """The direct way to write the layer, as published with the paper: copy forward, copy and multiply backward."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return _CloneAndMultiply.apply(x, self.p)


class _CloneAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        mask = (torch.rand_like(grad[:, :1]) >= ctx.p).to(grad.dtype)
        mask *= mask[0].numel() / mask.sum((1, 2, 3), keepdim=True)
        return grad.clone() * mask, None


LAYERS = {
    "Backdrop2d": lambda: Backdrop2d(P),
    "Backdrop2d exact": lambda: Backdrop2d(P, exact=True),
    "nn.Dropout": lambda: nn.Dropout(P),
    "clone and multiply": lambda: CloneAndMultiply(P),
}


def tensors(shape, device, dtype):
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape, device=device, dtype=dtype)


def step(layer, x, upstream):
    return torch.autograd.grad(layer(x), x, upstream)[0]


def seconds(run, steps, cuda):
    if cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / steps
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    return (time.perf_counter() - begin) / steps


def captured(run):
    """The same step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def medians(runs, rounds, steps, cuda, label):
    times = {name: [] for name in runs}
    for i in track(range(2 + rounds), label, transient=True):
        for name, run in runs.items():
            elapsed = seconds(run, steps, cuda)
            if i >= 2:  # two rounds to warm up
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(run, x):
    """Peak memory of a step on the device of `x` above what was there before; None where the system does not tell."""
    run()
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def kilobytes(field):
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed and the C library still holds
    clear.write_text("5")  # Linux: sets the peak back to what is resident now
    before = kilobytes("VmRSS:")
    run()
    return (kilobytes("VmHWM:") - before) * 1024


def measure(shape, device, dtype, rounds, steps):
    x, upstream = tensors(shape, device, dtype)
    cuda = device == "cuda"
    layers = {name: make() for name, make in LAYERS.items()}
    runs = {name: partial(step, layer, x, upstream) for name, layer in layers.items()}
    label = f"{shape} {dtype}"
    eager = medians(runs, rounds, steps, cuda, label)
    graph = medians({name: captured(run) for name, run in runs.items()}, rounds, steps, cuda, label) if cuda else {}
    extra = {name: peak_bytes(run, x) for name, run in runs.items()}
    size = x.numel() * dtype.itemsize
    mask = x[:, :1].numel() * 4
    return [
        {
            "device": machine(device),
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "megabytes": size / 1e6,
            "layer": name,
            "milliseconds": eager[name] * 1e3,
            "time_over_dropout": eager[name] / eager["nn.Dropout"],
            "graph_milliseconds": graph[name] * 1e3 if graph else None,
            "graph_time_over_dropout": graph[name] / graph["nn.Dropout"] if graph else None,
            "extra_megabytes": None if extra[name] is None else extra[name] / 1e6,
            "gradient_and_mask_megabytes": (size + mask) / 1e6,
        }
        for name in layers
    ]


def measure_multiply(shape, device, dtype, rounds, steps):
    """The backward pass alone: gradient times float32 weight, rounded to the gradient's dtype."""
    cuda = device == "cuda"
    grad = torch.randn(shape, device=device, dtype=dtype)
    weight = draw_weight(shape, P, (0, 2, 3), device=device)
    runs = {
        "copy": grad.clone,
        "torch": (lambda: grad * weight) if dtype == torch.float32 else (lambda: grad.clone().mul_(weight)),
        "Backdrop2d": lambda: multiply(grad, weight),
    }
    with torch.no_grad():
        times = medians(runs, rounds, steps, cuda, f"multiply {shape} {dtype}")
    return {
        "megabytes": grad.numel() * dtype.itemsize / 1e6,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_milliseconds": times["copy"] * 1e3,
        "torch_over_copy": times["torch"] / times["copy"],
        "backdrop_over_copy": times["Backdrop2d"] / times["copy"],
    }


LAYER_COLUMNS = {
    "tensor": "{megabytes:.0f} MB {dtype}",
    "layer": "{layer}",
    "ms": "{milliseconds:.3f}",
    "/ Dropout": "{time_over_dropout:.2f}",
    "graph ms": "{graph_milliseconds:.3f}",
    "graph / Dropout": "{graph_time_over_dropout:.2f}",
    "extra MB": "{extra_megabytes:.1f}",
    "gradient + mask MB": "{gradient_and_mask_megabytes:.1f}",
}
MULTIPLY_COLUMNS = {
    "tensor": "{megabytes:.0f} MB {dtype}",
    "copy ms": "{copy_milliseconds:.3f}",
    "torch / copy": "{torch_over_copy:.2f}",
    "Backdrop2d / copy": "{backdrop_over_copy:.2f}",
}


def show(title, columns, rows, section):
    """Print a table, with a line after every `section` rows and "-" for what could not be measured."""
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("tensor", "layer") else "right")
    for i, row in enumerate(rows, start=1):
        known = {key: math.nan if value is None else value for key, value in row.items()}
        cells = [text.format(**known).replace("nan", "-") for text in columns.values()]
        table.add_row(*cells, end_section=i % section == 0)
    Console(width=130).print(table)


def options(description):
    """What the benchmarks can be told on the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def machine(device):
    """What is measured, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def main():
    arguments = options(__doc__).parse_args()
    steps = 20 if arguments.device == "cuda" else 1
    rows = [
        row
        for shape in SHAPES[arguments.device]
        for dtype in (torch.float32, torch.bfloat16)
        for row in measure(shape, arguments.device, dtype, arguments.rounds, steps)
    ]
    multiply = [
        measure_multiply(SHAPES[arguments.device][0], arguments.device, dtype, arguments.rounds, steps)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    title = f"Forward + backward, p={P}, {rows[0]['device']}, torch {torch.__version__}"
    show(title, LAYER_COLUMNS, rows, section=len(LAYERS))
    show("Backward multiply alone, against a copy of the gradient", MULTIPLY_COLUMNS, multiply, section=len(multiply))
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        arguments.json.write_text(
            json.dumps({"versions": versions, "rounds": arguments.rounds, "rows": rows, "multiply": multiply}, indent=1)
        )


if __name__ == "__main__":
    main()
