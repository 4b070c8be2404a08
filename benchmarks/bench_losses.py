"""Losses over all pairs of a positive and a negative score: time and memory of one forward and backward pass.

    python benchmarks/bench_losses.py [--device cuda] [--json FILE]

Beside the losses of this library: the same as a matrix of all pairs, and LibAUC's pairwise losses, where that is
installed (`pip install --no-deps libauc` is enough here; its logistic loss stands beside the rank statistic, which it
does not have). All in one run; time is the median over rounds in which they take turns, memory the peak above what
lay there before. Goals: the rank statistic no slower than LibAUC at 5,000 x 5,000 and below 1 GB at 100,000 x 100,000;
the squared hinge of a million scores below 2 s on two cores, and both equal to the matrix to 1e-6.
"""

import json
import platform
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backdrop.losses import rank_statistic_loss, squared_hinge_auc_loss
from bench_layer import machine, options, peak_bytes


def matrix(function):
    def loss(scores, labels):
        positive = labels == 1
        return function(scores[~positive] - scores[positive][:, None]).mean()

    return loss


def libauc():
    try:
        from libauc.losses import PairwiseAUCLoss
    except ImportError:
        return {}
    return {
        "rank statistic": {"LibAUC logistic": PairwiseAUCLoss("logistic")},
        "squared hinge": {"LibAUC": PairwiseAUCLoss("squared_hinge")},
    }


LOSSES = {
    "rank statistic": {"backdrop": rank_statistic_loss, "matrix": matrix(torch.sigmoid)},
    "squared hinge": {
        "backdrop": squared_hinge_auc_loss,
        "matrix": matrix(lambda apart: (1 + apart).clamp(min=0).square()),
    },
}
CASES = [  # loss, positives, negatives, whether anything else is able to do it
    ("rank statistic", 5_000, 5_000, True),
    ("squared hinge", 5_000, 5_000, True),
    ("rank statistic", 1, 1_000_000, True),
    ("squared hinge", 500_000, 500_000, False),
    ("rank statistic", 100_000, 100_000, False),
]


def step(loss, scores, labels):
    scores.grad = None
    loss(scores, labels).backward()
    if scores.is_cuda:
        torch.cuda.synchronize()


def measure(name, positives, negatives, all_of_them, device, rounds):
    torch.manual_seed(0)
    labels = (torch.arange(positives + negatives, device=device) < positives).long()
    scores = (torch.randn(len(labels), device=device) + labels).requires_grad_()
    ways = {**LOSSES[name], **libauc().get(name, {})} if all_of_them else {"backdrop": LOSSES[name]["backdrop"]}
    rounds = rounds if all_of_them else 1 + rounds // 10
    times, gradients = {way: [] for way in ways}, {}
    for i in track(range(1 + rounds), f"{name}, {positives:,} x {negatives:,}", transient=True):
        for way, loss in ways.items():
            begin = time.perf_counter()
            step(loss, scores, labels)
            if i:  # one round to warm up
                times[way].append(time.perf_counter() - begin)
            gradients[way] = scores.grad
    rows = []
    for way, loss in ways.items():
        memory = peak_bytes(lambda loss=loss: step(loss, scores, labels), scores)
        error = None
        if way == "backdrop" and "matrix" in ways:
            value, right = (ways[each](scores.detach().double(), labels).item() for each in ("backdrop", "matrix"))
            gradient = (gradients["backdrop"] - gradients["matrix"]).norm() / gradients["matrix"].norm()
            error = max(abs(value - right) / right, gradient.item())
        rows.append(
            {
                "loss": name,
                "positives": positives,
                "negatives": negatives,
                "way": way,
                "milliseconds": statistics.median(times[way]) * 1e3,
                "megabytes": None if memory is None else memory / 1e6,
                "error": error,
            }
        )
    return rows


def show(figures):
    table = Table(title=f"One forward and backward pass, {figures['device']}, torch {figures['torch']}")
    for heading in ("loss", "pairs", "way", "ms", "MB", "from the matrix"):
        table.add_column(heading, justify="left" if heading in ("loss", "way") else "right")
    for row in figures["rows"]:
        table.add_row(*cells(row))
    Console(width=120).print(table)


def cells(row):
    """A row of the table, as text."""
    return (
        row["loss"],
        f"{row['positives']:,} x {row['negatives']:,}",
        row["way"],
        f"{row['milliseconds']:.1f}",
        "-" if row["megabytes"] is None else f"{row['megabytes']:.1f}",
        "" if row["error"] is None else f"{row['error']:.0e}",
    )


def main():
    arguments = options(__doc__).parse_args()
    figures = {
        "device": machine(arguments.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    for case in CASES:
        figures["rows"] += measure(*case, arguments.device, arguments.rounds)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
