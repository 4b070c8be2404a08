"""Cached data sets: how long loading takes, against reading the same bytes and nothing else.

    python benchmarks/bench_data.py [--root DIR] [--rounds 15] [--json FILE]

For the data sets that are there (`backdrop data fetch`). Loading is a whole call, `data.cifar10()` or `data.uiuc()`,
with its checks and its split; medians over rounds in which both take turns, with the files in the page cache. Goal:
below one second per 100 MB.
"""

import json
import platform
import statistics
import time

from rich.console import Console
from rich.table import Table

from backdrop.experiments import data
from bench_layer import machine, options


def timed(run):
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(info, load, root, rounds):
    times = [(timed(lambda: load(root)), timed((info.path / "images.npy").read_bytes)) for _ in range(1 + rounds)]
    loading, reading = (statistics.median(column) for column in zip(*times[1:], strict=True))
    megabytes = info.bytes / 1e6
    row = {"name": info.name, "megabytes": megabytes, "load_seconds": loading, "read_seconds": reading}
    return {**row, "seconds_per_100_megabytes": 100 * loading / megabytes}


def cells(row):
    """A row of the table, as text."""
    numbers = (row["load_seconds"], row["read_seconds"], row["seconds_per_100_megabytes"])
    return row["name"], f"{row['megabytes']:.0f}", *(f"{number:.3f}" for number in numbers)


def main():
    parser = options(__doc__)
    parser.add_argument("--root", help="where the data sets lie")
    arguments = parser.parse_args()
    loaders = {"cifar10": data.cifar10, "uiuc": data.uiuc}
    there = [info for info in data.info(arguments.root) if info.verified]
    rows = [measure(info, loaders[info.name], arguments.root, arguments.rounds) for info in there]
    table = Table("data set", "MB", "load, s", "read, s", "load, s per 100 MB", title=machine("cpu"))
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table if rows else "no data set is there: backdrop data fetch cifar10")
    if arguments.json:
        figures = {"device": machine("cpu"), "python": platform.python_version(), "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
