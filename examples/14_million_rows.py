"""A batch that stays on the disk: the rank statistic over a million rows, one step at a time, in one process.

    python examples/14_million_rows.py

A table of 1,000,000 rows, about one in a hundred of them positive, is written to a file and read from it in parts of
20,000. The loss, which compares every positive with every negative, wants the outputs of all rows, and these lie in
memory: one number each. A mask keeps a hundredth of the rows; they alone are computed with gradients, once drawn
uniformly and once chosen by the gradient that arrives at them (choose="gradient"). The gradients are those of the plain
masked model on a tensor of all rows.

Prints the loss and the ROC AUC of rows that were not trained on for both, the seconds of a step, and the most memory
that was taken beyond what was there before. The file takes 122 MiB.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from backdrop import Backdrop, skip_blocked
from backdrop.integrations.sources import from_array
from backdrop.losses import rank_statistic_loss

TINY = bool(os.environ.get("TINY"))  # TINY=1 is for tests
ROWS, FRESH, COLUMNS = (5_000, 5_000, 32) if TINY else (1_000_000, 100_000, 32)
PART = 1_000 if TINY else 20_000  # rows in work at a time
STEPS = 5 if TINY else 10
P = 0.9 if TINY else 0.99


def write(path: Path, rows: int, seed: int) -> Tensor:
    """A file of rows, part by part; returns the labels. What is positive lies far out along two directions."""
    random = np.random.default_rng(seed)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (rows, COLUMNS))
    labels = np.empty(rows, bool)
    for first in range(0, rows, PART):
        part = random.normal(size=(min(PART, rows - first), COLUMNS)).astype(np.float32)
        file[first : first + len(part)] = part
        far = part[:, 0] * part[:, 1] + part[:, 2:6].sum(1) + random.normal(size=len(part))
        labels[first : first + len(part)] = far > 5.9
    file.flush()
    return torch.from_numpy(labels)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), Backdrop(P, exact=True)
    )


def area(scores: Tensor, labels: Tensor) -> float:
    """Under the ROC curve."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positives = int(labels.sum())
    wins = ranks[labels].sum().item() - positives * (positives + 1) / 2
    return wins / positives / (len(labels) - positives)


def peak() -> float:
    """The most memory that this process ever had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("rows.npy", "fresh.npy")]
        labels, fresh_labels = write(files[0], ROWS, 0), write(files[1], FRESH, 1)
        rows, fresh = (from_array(path, axes="nc") for path in files)
        print(f"{ROWS:,} rows, {int(labels.sum()):,} of them positive, {files[0].stat().st_size / 2**20:.0f} MiB")
        before = peak()
        for choose in ("uniform", "gradient"):
            plain = network()
            plain[-1].choose = choose
            model = skip_blocked(plain, at_once=PART)
            optimiser, start = torch.optim.Adam(model.parameters(), lr=0.01), time.perf_counter()
            for _ in range(STEPS):
                loss = rank_statistic_loss(model(rows).flatten(), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            took = (time.perf_counter() - start) / STEPS
            report = str(model.skip_report)
            model.eval()
            with torch.no_grad():  # in parts, too
                found = area(model(fresh).flatten(), fresh_labels)
            print(f"{choose}: loss {loss.item():.4f}, ROC AUC of new rows {found:.4f}, {took:.2f} s a step")
            print(report)
        print(f"the most memory beyond what was there before: {peak() - before:.2f} GiB")


if __name__ == "__main__":
    main()
