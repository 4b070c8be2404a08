"""Do informed masks train better? Cats against dogs by the AUC loss at batches of 2,048, with each kind of mask.

    python benchmarks/train_informed.py [--data FOLDER] [--seeds N] [--json FILE]

A small network on the images of CIFAR-10 in 8x8 pixels, so that it takes minutes on a CPU. Masks keep 6% of the
samples; all ways have the same time by the count of forward passes: informed masks have a few steps less, and training
without a mask has about a third of the steps. The learning rate is chosen for each way from the same ones, by the mean
AUC on validation images over the seeds; another training set, order and initial network for each seed. Told: one minus
the AUC, in percent, on the training and on the test images, means with 95% intervals over the seeds.
"""

import json
import math
import platform
import statistics

import torch
from rich.progress import track
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop
from backdrop.experiments.data import cifar10
from backdrop.losses import rank_statistic_loss
from bench_layer import options, show

KEPT, BATCH, STEPS = 0.06, 2048, 200
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
WAYS = {  # the layer, and forward passes in a step
    "uniform": (lambda: Backdrop(1 - KEPT, exact=True), 1 + 2 * KEPT),
    "informed": (lambda: Backdrop(1 - KEPT, exact=True, choose="gradient"), 1 + 3 * KEPT),
    "whole batch": (nn.Identity, 3),
}
T95 = {7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201, 15: 2.131}  # Student's t by degrees of freedom


def small(images):
    return F.avg_pool2d(images.float().div(127.5).sub(1), 4).flatten(1)


def pick(labels, counts, generator):
    """So many of each class, and the rest."""
    places = [(labels == i).nonzero().flatten() for i in range(len(counts))]
    places = [x[torch.randperm(len(x), generator=generator)] for x in places]
    chosen = torch.cat([x[:n] for x, n in zip(places, counts, strict=True)])
    return chosen, torch.cat([x[n:] for x, n in zip(places, counts, strict=True)])


def wrong_pairs(model, x, y):
    """One minus the AUC, in percent."""
    with torch.no_grad():
        scores = model(x).flatten()
    below = (scores[y == 1][:, None] < scores[y == 0]).float() + 0.5 * (scores[y == 1][:, None] == scores[y == 0])
    return 100 * below.mean().item()


def train(way, rate, seed, positives, sets):
    (x, y), (test_x, test_y) = sets
    generator = torch.Generator().manual_seed(seed)
    held, rest = pick(y, (500, 100), generator)
    rest_y = y[rest]
    count = int((rest_y == 0).sum())
    chosen, _ = pick(rest_y, (count, round(positives * count)), generator)
    train_x, train_y = x[rest[chosen]], rest_y[chosen]
    torch.manual_seed(seed)
    make, passes = WAYS[way]
    model = nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), make())
    steps = round(STEPS * WAYS["uniform"][1] / passes)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    share = round(BATCH * positives / (1 + positives))
    for _ in range(steps):
        batch, _ = pick(train_y, (BATCH - share, share), generator)
        optimizer.zero_grad()
        rank_statistic_loss(model(train_x[batch]).flatten(), train_y[batch], temperature=1.0).backward()
        optimizer.step()
        schedule.step()
    return {
        "training": wrong_pairs(model, train_x, train_y),
        "validation": wrong_pairs(model, x[held], y[held]),
        "test": wrong_pairs(model, test_x, test_y),
    }


def mean_and_half(values):
    """With half of a 95% interval."""
    return statistics.fmean(values), T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def main():
    parser = options(__doc__)
    parser.add_argument("--data", help="where data sets lie")
    parser.add_argument("--seeds", type=int, choices=[number + 1 for number in T95], default=8)
    arguments = parser.parse_args()
    sets = [(small(one.images), one.labels) for one in cifar10(arguments.data, subset="cats-dogs")]
    rows = []
    for positives, said in ((0.2, "5 to 1"), (0.01, "1% positives")):
        for way in WAYS:
            found = {}
            for rate in track(RATES, f"{said}, {way}", transient=True):
                found[rate] = [train(way, rate, seed, positives, sets) for seed in range(arguments.seeds)]
            best = min(RATES, key=lambda rate, f=found: statistics.fmean(one["validation"] for one in f[rate]))
            row = {"classes": said, "way": way, "rate": best}
            for part in ("training", "test"):
                row[part], row[f"{part}_half"] = mean_and_half([one[part] for one in found[best]])
            rows.append({**row, "all": {str(rate): values for rate, values in found.items()}})
    columns = {
        "classes": "{classes}",
        "mask": "{way}",
        "learning rate": "{rate}",
        "training": "{training:.2f} +- {training_half:.2f}",
        "test": "{test:.2f} +- {test_half:.2f}",
    }
    show("1 - AUC in percent, at equal work", columns, rows, section=len(WAYS))
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
