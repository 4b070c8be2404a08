"""Records of trials that nobody ran, for tests of reports: the paper's grids, with effects that are planted."""

import math

import numpy as np

from backdrop.experiments.records import Record
from backdrop.experiments.report.tables import GP_TABLE
from backdrop.experiments.task import product

MACHINE = {"host": "somewhere", "device": "Some CPU", "threads": "2", "python": "3.11.7", "torch": "2.13.0"}
BASE = {"epochs": 6, "lr": 1e-3, "optimizer": "adamw", "exact": False, "judge": "test"}


def record(settings, metrics=None, state="complete", *, metric="accuracy", **more):
    """A trial; its curve ends at its metrics."""
    settings = {**BASE, **settings}
    metrics = metrics or {}
    key = "-".join(f"{name}={value}" for name, value in sorted(settings.items()))
    rows = []
    for epoch in range(1, settings["epochs"] + 1):
        rows.append({"epoch": epoch, "step": 10 * epoch, "loss": 2.0 / epoch + 0.01 * settings.get("seed", 0)})
        if metric in metrics:
            share = 1 - math.exp(-epoch)
            column, factor = ("test loss", 2 - share) if metric == "loss" else (metric, share)
            rows[-1][column] = metrics[metric] * factor
    more = {"curve": rows, "seconds": 12.5, "machine": MACHINE, **more}
    return Record(key, state, settings, metrics if state == "complete" else {}, **more)


def gp(seeds=8, rows=GP_TABLE, noise=3.0):
    """Table 2 as the paper has it, with a part of the noise shared by all trials of a seed."""
    draw = np.random.default_rng(1).normal(size=(seeds, len(GP_TABLE) + 1, 3)) * noise
    found = []
    for i, row in enumerate(rows):
        for seed in range(seeds):
            total, small, large = np.array(row[3:]) + draw[seed, -1] + draw[seed, i] / 2
            metrics = {"accuracy": total, "loss": 2 - total / 50, "small": small, "large": large}
            found.append(record({**row._asdict(), "batch_size": 4, "seed": seed, "size": 1024}, metrics))
            for name in ("accuracy", "small", "large"):
                del found[-1].settings[name]
    return found


def ponce(seeds=6):
    return _by_size(seeds, [8, 32, 64, 128, 256], [0.0, 0.5, 0.75, 0.875, 0.9375], _ponce, "accuracy")


def _ponce(size, p, noise):
    accuracy = 80 - 1.5 * math.log2(size / 8) + (3 + math.log2(size / 8)) * p + noise
    return {"accuracy": accuracy, "loss": 2 - accuracy / 50}


def cifar10(seeds=5):
    return _by_size(seeds, [16, 64, 256, 1024, 2048], [0.0, 0.25, 0.5, 0.75, 0.9], _cifar10, "loss")


def _cifar10(size, p, noise):
    fall = 0.4 * (p / 0.75 if p <= 0.75 else 1 - 3 * (p - 0.75)) * (16 / size) ** 0.2
    return {"loss": (0.8 + 0.01 * noise) * (1 - fall), "accuracy": 85 + 0.3 * p + 0.3 * noise}


def auc(seeds=5):
    return _by_size(seeds, [32, 256, 2048], [0.0, 0.5, 0.75, 0.88, 0.94, 0.97], _auc, "auc")


def _auc(size, p, noise):
    return {"auc": 0.84 - 0.004 * math.log2(size / 32) + 0.05 * p * (size / 2048) ** 0.15 + 0.002 * noise}


def _by_size(seeds, sizes, ps, truth, metric):
    draw = np.random.default_rng(2).normal(size=(seeds, len(sizes), len(ps)))
    shared = np.random.default_rng(3).normal(size=seeds)
    return [
        record({"batch_size": n, "p": p, "seed": seed}, truth(n, p, shared[seed] + draw[seed, i, j] / 3), metric=metric)
        for i, n in enumerate(sizes)
        for j, p in enumerate(ps)
        for seed in range(seeds)
    ]


def latent(seeds=5):
    sizes, ps = [32, 64, 128, 256, 512, 1024], [0.0, 0.5, 0.75, 0.94, 0.97]
    grid = [
        *product(batch_size=sizes, p_x=[0.0], p_d=[0.0]),
        *product(batch_size=[2048], p_x=ps, p_d=ps),
        *product(batch_size=sizes, p_x=[0.94], p_d=[0.97]),
    ]
    draw = np.random.default_rng(4).normal(size=(seeds, len(grid), 2)) * 0.02
    found = []
    for i, point in enumerate(grid):
        for seed in range(seeds):
            n, x, d = point["batch_size"], point["p_x"], point["p_d"]
            xe = 1.2 + 0.05 * math.log2(n / 32) - 0.4 * x - 0.1 * d + 0.5 * (x > 0.95) + draw[seed, i, 0]
            dist = 0.9 - 0.5 * d - 0.1 * x + draw[seed, i, 1]
            metrics = {
                "xe": xe,
                "dist": dist,
                "xe_minibatch": xe,
                "dist_minibatch": dist * (1 - 8 / n),
                "loss": xe + dist,
            }
            found.append(record({**point, "seed": seed}, {**metrics, "accuracy": 90 - 20 * xe}, metric="loss"))
    return found


def search(trials=24):
    """As `tune` leaves them: everything differs, and every third trial was pruned."""
    draw, found = np.random.default_rng(5), []
    for i in range(trials):
        small, large = (1 - 10 ** draw.uniform(-3, 0, 2)).tolist()
        settings = {"p_small": small, "p_large": large, "lr": 10 ** draw.uniform(-4, -2)}
        settings |= {"seed": 0, "judge": "validation"}
        accuracy = 50 + 12 * small * large + draw.normal()
        state = "pruned" if i % 3 == 2 else "complete"
        reason = "below the median" if state == "pruned" else None
        found.append(record(settings, {"accuracy": accuracy}, state, reason=reason))
    return found
