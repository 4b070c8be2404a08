"""Textures: time and memory of Gaussian random fields, against what they are made of and against other libraries.

    python benchmarks/bench_textures.py [--device cuda] [--json FILE]

"Bare" is one normal draw and one forward and one inverse real FFT of the torus that the field is cut from, with nothing
around them. GSTools (its default generator) and george (exact, with a matrix of all pairs of pixels, as the paper's
authors used it) are in the table where they are installed: `pip install gstools george`. All in one run; times are
medians over rounds in which ours and the bare cost take turns, of whole calls of `Texture.sample` with all they set up;
memory is the peak above what lay there before. Goals: 500 times faster than GSTools at 1024 x 1024; 1.5 times the bare
cost; memory 5 times the result at 4096 x 4096 and 256^3; 1,000 fields of 1024 x 1024 per second on an H200.
"""

import json
import math
import platform
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backdrop.textures import Matern, SquaredExponential, Texture
from backdrop.textures.sampler import Sampler
from bench_layer import machine, options, peak_bytes

GAUSS, MATERN = Texture(SquaredExponential(10)), Texture(Matern(10, 1.5))
TIMES = [  # texture, size, fields per call
    (Texture(SquaredExponential(1)), (1024, 1024), 1),
    (GAUSS, (1024, 1024), 1),
    (Texture(SquaredExponential(80)), (1024, 1024), 1),
    (MATERN, (1024, 1024), 1),
    (GAUSS, (1024, 1024), 16),
    (MATERN, (1024, 1024), 16),
    (Texture.paper()[0], (1024, 1024), 16),
    (GAUSS, (256, 256), 16),
    (GAUSS, (128, 128, 128), 1),
    (GAUSS, (2**20,), 1),
]
MEMORY = [(texture, size) for texture in (GAUSS, MATERN) for size in ((4096, 4096), (256, 256, 256))]
RATES = [(GAUSS, 500), (MATERN, 500), (Texture.paper()[0], 500)]


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run, device):
    begin = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - begin


def bare(toruses, device):
    """One normal draw and a forward and an inverse real FFT for each torus."""
    for torus in toruses:
        noise = torch.randn(torus, device=device)
        torch.fft.irfftn(torch.fft.rfftn(noise), s=torus)


def times(texture, size, count, device, rounds):
    toruses = [field.torus for field in Sampler(texture, size, device=device).fields]
    ours, theirs = [], []
    for i in track(range(1 + rounds), f"{name(texture)} {size}", transient=True):
        a = timed(lambda: texture.sample(count, size, seed=0, device=device), device) / count
        b = timed(lambda: [bare(toruses, device) for _ in range(count)], device) / count
        if i:  # one round to warm up
            ours.append(a)
            theirs.append(b)
    row = {"texture": name(texture), "size": size, "fields": count, "torus": toruses[-1]}
    ours, theirs = statistics.median(ours), statistics.median(theirs)
    return {**row, "milliseconds": ours * 1e3, "bare_milliseconds": theirs * 1e3, "over_bare": ours / theirs}


def memory(texture, size, device):
    result = 4 * math.prod(size)
    peak = peak_bytes(lambda: texture.sample(1, size, seed=0, device=device), torch.empty(0, device=device))
    row = {"texture": name(texture), "size": size, "result_megabytes": result / 1e6}
    return {**row, "peak_megabytes": peak and peak / 1e6, "over_result": peak and peak / result}


def rate(texture, count, rounds):
    texture.sample(count, 1024, seed=0, device="cuda")
    runs = [timed(lambda: texture.sample(count, 1024, seed=0, device="cuda"), "cuda") for _ in range(rounds)]
    return {"texture": name(texture), "fields": count, "per_second": count / statistics.median(runs)}


def gstools():
    """Its default generator on the field that ours is timed on."""
    try:
        import gstools
    except ImportError:
        return None
    # Its Gaussian model is exp(-pi/4 (r / length)^2).
    field = gstools.SRF(gstools.Gaussian(dim=2, var=1, len_scale=10 * math.sqrt(math.pi / 2)), seed=0)
    return "GSTools", (1024, 1024), lambda: field.structured([range(1024), range(1024)])


def george():
    try:
        import george
        import numpy as np
    except ImportError:
        return None
    axis = np.arange(64.0)
    points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)

    process = george.GP(george.kernels.ExpSquaredKernel(10.0**2, ndim=2))
    return "george", (64, 64), lambda: process.sample(points)


def others(rounds):
    rows = []
    for other in filter(None, (gstools(), george())):
        library, size, run = other
        with Console().status(f"{library} {size}"):
            theirs = statistics.median(timed(run, "cpu") for _ in range(1 if library == "GSTools" else 3))
        ours = statistics.median(timed(lambda s=size: GAUSS.sample(1, s, seed=0), "cpu") for _ in range(rounds))
        rows.append({"library": library, "size": size, "milliseconds": theirs * 1e3, "ours_milliseconds": ours * 1e3})
        rows[-1]["times_faster"] = theirs / ours
    return rows


def name(texture):
    kernels = [f"{type(kernel).__name__} {kernel.length:g}" for kernel in texture.kernels]
    return " + ".join(kernels)


def cells(kind, row):
    """A row of a table, as text."""
    size = " x ".join(map(str, row["size"])) if "size" in row else "1024 x 1024"
    if kind == "times":
        of = (f"{row['milliseconds']:.2f}", f"{row['bare_milliseconds']:.2f}", f"{row['over_bare']:.2f}")
        return row["texture"], size, str(row["fields"]), " x ".join(map(str, row["torus"])), *of
    if kind == "memory":
        return (
            row["texture"],
            size,
            *(f"{row[key]:.1f}" for key in ("result_megabytes", "peak_megabytes", "over_result")),
        )
    if kind == "rates":
        return row["texture"], size, str(row["fields"]), f"{row['per_second']:.0f}"
    of = (f"{row['milliseconds']:.0f}", f"{row['ours_milliseconds']:.2f}", f"{row['times_faster']:.0f}")
    return row["library"], size, *of


HEADINGS = {
    "times": ("texture", "size", "fields per call", "torus", "ms per field", "bare, ms", "times bare"),
    "memory": ("texture", "size", "result, MB", "peak, MB", "times result"),
    "rates": ("texture", "size", "fields per call", "fields per second"),
    "others": ("library", "size", "its ms", "our ms", "times faster"),
}


def show(figures):
    console = Console(width=140)
    for kind, headings in HEADINGS.items():
        if figures.get(kind):
            table = Table(*headings, title=f"{figures['device']}, torch {figures['torch']}")
            for row in figures[kind]:
                table.add_row(*cells(kind, row))
            console.print(table)


def main():
    arguments = options(__doc__).parse_args()
    device, rounds = arguments.device, arguments.rounds
    figures = {
        "device": machine(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "times": [times(*case, device, rounds) for case in TIMES],
        "memory": [memory(*case, device) for case in MEMORY],
        "rates": [rate(*case, rounds) for case in RATES] if device == "cuda" else [],
        "others": others(rounds) if device == "cpu" else [],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
