"""Do informed masks train better? Uniform and informed masks at the same p, and no mask, for the same work.

    python benchmarks/train_informed.py [--data FOLDER] [--seeds N] [--json FILE] [--pages]
    python benchmarks/train_informed.py --again benchmarks/results/train-informed-cpu.json --pages

Four small cases, all of which take minutes of one core: cats against dogs of CIFAR-10 in 8x8 pixels by the AUC loss
at batches of 2,048, 5 to 1 and with 1% dogs; distances between classes as in the task `latent`, with two masks; and the
UIUC textures in 50x66 pixels with attention pooling above a mask of positions. Masks are exact and keep 6%.

Work is counted in forward passes, as `Skip` needs them: 1 + 2a for a share a of the samples, 1 + 3a for chosen ones, 3
without a mask; 1 + 3a for positions, chosen or not, as if their windows did not overlap. So informed masks on samples
have a few steps less than uniform ones, and training without a mask has about a third of the steps. For every way the
learning rate is chosen by the median on validation images over the seeds (not the mean: of distances between classes
one held-out image may be all of it), a factor of three apart, until the best one has a neighbour on both sides. Every
seed has a training set, an order and an initial network of its own, the same for all ways. Intervals are 95% over the
seeds; those of differences are of pairs with the same seed. A file that is there already is gone on with.
"""

import itertools
import json
import math
import platform
import statistics
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop, Backdrop2d
from backdrop.experiments.data import cifar10, uiuc
from backdrop.losses import class_distance_loss, rank_statistic_loss
from bench_coverage import put_between_markers
from bench_layer import options

KEPT, BATCH = 0.06, 2048
RATES = [10 ** (-i / 2) for i in range(2, 11)]  # 0.1 to 0.00001
FIRST = (3, 4, 5)  # of them: 0.03, 0.01, 0.003
WAYS = ("uniform", "informed", "no mask")
T95 = {7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201, 15: 2.131}  # Student's t by degrees of freedom
PAGE = Path(__file__).parent.parent / "docs" / "masks.md"


def mask_of(way, kind=Backdrop):
    return nn.Identity() if way == "no mask" else kind(1 - KEPT, exact=True, choose=CHOOSE[way])


CHOOSE = {"uniform": "uniform", "informed": "gradient"}


def passes(way, share, positions):
    """Forward passes in a step."""
    return {"uniform": 1 + (3 if positions else 2) * share, "informed": 1 + 3 * share, "no mask": 3}[way]


def pick(labels, counts, generator):
    """So many of each class, and the rest."""
    places = [(labels == i).nonzero().flatten() for i in range(len(counts))]
    places = [x[torch.randperm(len(x), generator=generator)] for x in places]
    chosen = torch.cat([x[:n] for x, n in zip(places, counts, strict=True)])
    return chosen, torch.cat([x[n:] for x, n in zip(places, counts, strict=True)])


@cache
def images_of(name, root):
    """Training and test images, small."""
    if name == "uiuc":
        parts = [(F.avg_pool2d(one.images.float(), 6), one.labels) for one in uiuc(root)]
    else:
        parts = [(F.avg_pool2d(one.images.float(), 4).flatten(1), one.labels) for one in cifar10(root, subset=name)]
    std, mean = torch.std_mean(parts[0][0])
    return [((x - mean) / std, y) for x, y in parts]


class Case:
    """One training: data and a network for a seed, the loss of a batch, and what is measured: lower is better."""

    steps, share, positions = 120, KEPT, False

    def __init__(self, root, seed):
        self.generator = torch.Generator().manual_seed(seed)
        (x, y), self.test = images_of(self.data, root)
        held, rest = pick(y, self.held, self.generator)
        self.validation, self.training = (x[held], y[held]), (x[rest], y[rest])

    def measured(self, model):
        model.eval()
        with torch.no_grad():
            parts = {"training": self.training, "validation": self.validation, "test": self.test}
            return {name: self.measure(model, *part) for name, part in parts.items()}


class CatsAndDogs(Case):
    """A perceptron and the rank statistic, with so many dogs for each cat."""

    data, held, said, batch = "cats-dogs", (500, 100), "1 - AUC, %", BATCH

    def __init__(self, root, seed):
        super().__init__(root, seed)
        x, y = self.training
        cats = int((y == 0).sum())
        chosen, _ = pick(y, (cats, round(self.dogs * cats)), self.generator)
        self.training = x[chosen], y[chosen]
        self.positives = round(self.batch * self.dogs / (1 + self.dogs))

    def network(self, way):
        layers = [nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
        return nn.Sequential(*layers, mask_of(way))

    def loss(self, model):
        x, y = self.training
        batch, _ = pick(y, (self.batch - self.positives, self.positives), self.generator)
        return rank_statistic_loss(model(x[batch]).flatten(), y[batch], temperature=1.0)

    def measure(self, model, x, y):
        scores = model(x).flatten().double()
        dogs, cats = scores[y == 1][:, None], scores[y == 0]
        return 100 * ((dogs < cats).double() + 0.5 * (dogs == cats)).mean().item()


class FiveToOne(CatsAndDogs):
    dogs, name = 0.2, "AUC, cats and dogs 5:1"


class OneInAHundred(CatsAndDogs):
    dogs, name = 0.01, "AUC, cats and dogs, 1% dogs"


class Two(nn.Module):
    """Scores and hidden states, each behind a mask (Eq. 4)."""

    def __init__(self, way):
        super().__init__()
        self.below = nn.Sequential(nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.scores, self.first, self.second = nn.Linear(48, 10), mask_of(way), mask_of(way)

    def forward(self, x):
        hidden = self.below(x)
        return self.first(self.scores(hidden)), self.second(hidden)


class Latent(Case):
    """Cross-entropy, and mean hidden states at equal distances (Eq. 3)."""

    name, said, data, share = "class distances (latent)", "loss", "imbalanced", 2 * KEPT
    held = tuple(round(0.2 * 100 * i) for i in range(1, 11))
    network = staticmethod(Two)

    def loss(self, model):
        x, y = self.training
        batch = torch.randperm(len(y), generator=self.generator)[:BATCH]
        return self.value(*model(x[batch]), y[batch])

    def value(self, scores, hidden, labels):
        return F.cross_entropy(scores, labels) + class_distance_loss(hidden, labels, distance=1.0)

    def measure(self, model, x, y):
        return self.value(*model(x), y).item()


class Attention(nn.Module):
    """Features of positions, a mask, and attention pooling over them."""

    def __init__(self, way, width=12):
        super().__init__()
        layers = [nn.Conv2d(1, width, 5, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 24, 3), nn.ReLU()]
        self.below = nn.Sequential(*layers, nn.Conv2d(24, 24, 3), nn.ReLU(), mask_of(way, Backdrop2d))
        self.attention, self.last = nn.Linear(24, 1), nn.Linear(24, 25)

    def forward(self, x):
        tokens = self.below(x).flatten(2).transpose(1, 2)
        return self.last((tokens * self.attention(tokens).softmax(1)).sum(1))


class Textures(Case):
    name, said, data, held, positions = "UIUC textures, attention pooling", "errors, %", "uiuc", (4,) * 25, True
    network = staticmethod(Attention)

    def loss(self, model):
        x, y = self.training
        batch = torch.randperm(len(y), generator=self.generator)[:25]
        return F.cross_entropy(model(x[batch]), y[batch])

    def measure(self, model, x, y):
        return 100 * (model(x).argmax(1) != y).double().mean().item()


CASES = (FiveToOne, OneInAHundred, Latent, Textures)


def train(kind, way, rate, seed, root):
    case = kind(root, seed)
    torch.manual_seed(seed)
    model = case.network(way)
    work = {name: passes(name, case.share, case.positions) for name in WAYS}
    steps = round(case.steps * work["uniform"] / work[way])
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, cycle_momentum=False)
    for _ in range(steps):
        optimizer.zero_grad()
        case.loss(model).backward()
        optimizer.step()
        schedule.step()
    return {"steps": steps, **case.measured(model)}


def search(kind, way, seeds, root, trials):
    """Trainings for each learning rate besides those there are, and which is best on validation images."""
    found = {i: trials[f"{rate:.2g}"] for i, rate in enumerate(RATES) if f"{rate:.2g}" in trials}
    wanted = [i for i in FIRST if i not in found]
    while True:
        for i in wanted:
            said = f"{kind.name}, {way}, {RATES[i]:.2g}"
            found[i] = [train(kind, way, RATES[i], seed, root) for seed in track(range(seeds), said, transient=True)]
        middle = {i: statistics.median(finite(rows, "validation")) for i, rows in found.items()}
        best = min(middle, key=middle.get)
        wanted = [i for i in (best - 1, best + 1) if i not in found and 0 <= i < len(RATES)]
        if not wanted:
            break
    return {"rate": RATES[best], "trials": {f"{RATES[i]:.2g}": found[i] for i in sorted(found)}}


def finite(rows, part):
    return [row[part] if math.isfinite(row[part]) else math.inf for row in rows]


def interval(values):
    """The mean, and half of a 95% interval."""
    return statistics.fmean(values), T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def told(values):
    centre, half = interval(values)
    digits = 2 if half < 10 else 0
    return f"{centre:.{digits}f} ± {half:.{digits}f}"


def best_of(row, part):
    return [one[part] for one in row["trials"][f"{row['rate']:.2g}"]]


HEADINGS = ("case", "lower is better", "mask", "steps", "learning rate", "training", "test", "test, less than uniform")


def table(figures):
    rows, names = [], [kind.name for kind in CASES]
    for row in sorted(figures["rows"], key=lambda row: names.index(row["case"])):
        uniform = next(r for r in figures["rows"] if (r["case"], r["way"]) == (row["case"], "uniform"))
        apart = [a - b for a, b in zip(best_of(uniform, "test"), best_of(row, "test"), strict=True)]
        cells = [row["case"], row["measured"], row["way"], str(best_of(row, "steps")[0]), f"{row['rate']:.2g}"]
        rows.append([*cells, told(best_of(row, "training")), told(best_of(row, "test")), told(apart)])
        rows[-1][-1] = "" if row is uniform else rows[-1][-1]
    return rows


def pages(figures):
    lines = [HEADINGS, ["---"] * 3 + ["---:"] * 5, *table(figures)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = f"{figures['seeds']} seeds, torch {figures['versions']['torch']}"
    put_between_markers(
        PAGE, f"{said}:\n\n{text}\n", ("<!-- informed-training -->", "<!-- end of informed-training -->")
    )


def main():
    parser = options(__doc__)
    parser.add_argument("--data", help="where data sets lie")
    parser.add_argument("--seeds", type=int, choices=[number + 1 for number in T95], default=8)
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="this case alone")
    parser.add_argument("--again", type=Path, help="take the figures from this file instead of training")
    parser.add_argument("--pages", action="store_true", help="write the table into docs/masks.md")
    arguments = parser.parse_args()
    kept = arguments.again or arguments.json
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    figures = {"versions": versions, "seeds": arguments.seeds, "kept": KEPT, "rows": []}
    if kept and kept.exists():
        figures = json.loads(kept.read_text())
    for way, kind in (
        [] if arguments.again else itertools.product(WAYS, CASES if arguments.only is None else [CASES[arguments.only]])
    ):
        known = next((row for row in figures["rows"] if (row["case"], row["way"]) == (kind.name, way)), None)
        found = search(kind, way, figures["seeds"], arguments.data, known["trials"] if known else {})
        if known is None:
            figures["rows"].append(known := {"case": kind.name, "measured": kind.said, "way": way})
        known |= found
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    shown = Table(title="At equal work")
    for i, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if i < 3 else "right")
    for row in table(figures):
        shown.add_row(*row)
    Console(width=160).print(shown)
    if arguments.pages:
        pages(figures)


if __name__ == "__main__":
    main()
