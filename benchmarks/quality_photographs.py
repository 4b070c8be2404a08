"""Tasks of quality.py on photographs: CIFAR-10 in 16 x 16 pixels."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from backdrop.losses import class_distance_loss, rank_statistic_loss
from quality_base import Pair, Task, area_below, errors, generator_of


def export(path, root=None):
    """What the tasks need of CIFAR-10, in one small file."""
    from backdrop.experiments.data import cifar10

    kept = {}
    for name, parts in (("pets", cifar10(root)), ("all", cifar10(root, subset="imbalanced"))):
        for part, images in zip(("train", "test"), parts, strict=True):
            x, y = images.images, images.labels
            if name == "pets":
                which = (y == 3) | (y == 5)
                x, y = x[which], y[which] == 5
            kept[f"{name}_{part}_x"] = F.avg_pool2d(x.float(), 2).round().byte().numpy()
            kept[f"{name}_{part}_y"] = y.to(torch.uint8).numpy()
    np.savez_compressed(path, **kept)


@cache
def photographs(name, path):
    """Training and test samples."""
    if not Path(path).exists():
        raise SystemExit(f"there is no {path}: make it with `python benchmarks/quality.py --export {path}`")
    with np.load(path) as file:
        parts = [[torch.from_numpy(file[f"{name}_{part}_{x}"]) for x in "xy"] for part in ("train", "test")]
    std, mean = torch.std_mean(parts[0][0].float(), (0, 2, 3), keepdim=True)
    return [((x.float() - mean) / std, y.long()) for x, y in parts]


def pick(labels, counts, generator):
    """So many of each class, and the rest."""
    places = [(labels == i).nonzero().flatten() for i in range(len(counts))]
    places = [x[torch.randperm(len(x), generator=generator)] for x in places]
    chosen = torch.cat([x[:n] for x, n in zip(places, counts, strict=True)])
    return chosen, torch.cat([x[n:] for x, n in zip(places, counts, strict=True)])


def eye(outputs, width=8, hidden=32):
    """A small network for images of 16 x 16."""
    convolutions = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(32 * width, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Pets(Task):
    """Cats and dogs, by the area under the ROC curve; validation and test samples are as many of both."""

    said = "1 - ROC AUC, %"
    ways = ("whole", "small", "medium", "balanced", "subsample", "uniform", "informed", "budget")
    sizes = (64, 512)

    def __init__(self, seed, data):
        generator = generator_of(seed)
        (x, y), self.test = photographs("pets", data)
        held, rest = pick(y, (500, 500), generator)
        self.validation = x[held], y[held]
        chosen, _ = pick(y[rest], (4000, self.dogs), generator)
        self.training = x[rest][chosen], y[rest][chosen]

    def body(self):
        return eye(1)

    def loss(self, scores, labels):
        return rank_statistic_loss(scores.flatten(), labels, single_class="zero")

    def measure(self, model, part):
        return area_below(self.shown(model, part), part[1] == 1)


class FiveToOne(Pets):
    name, dogs = "ROC AUC, cats and dogs 5:1", 800


class OneInAHundred(Pets):
    name, dogs = "ROC AUC, 1% dogs", 40


class Latent(Task):
    """Cross-entropy, and class means at equal distances (Eqs. 3 and 4), on 10 classes of 100, 200, ... 1,000 images."""

    name, said = "class distances (latent)", "loss"
    ways = ("whole", "small", "medium", "balanced", "uniform", "informed", "budget")

    def __init__(self, seed, data):
        (x, y), self.test = photographs("all", data)
        held, rest = pick(y, [20 * (i + 1) for i in range(10)], generator_of(seed))
        self.validation, self.training = (x[held], y[held]), (x[rest], y[rest])

    def body(self):
        return nn.Sequential(*eye(10)[:-1], Both(nn.Linear(32, 10)))

    def loss(self, outputs, labels):
        scores, hidden = outputs
        return F.cross_entropy(scores, labels) + class_distance_loss(hidden, labels, distance=1.0, single_class="zero")

    def measure(self, model, part):
        with torch.no_grad():
            return self.loss(model(part[0]), part[1]).item()

    def also(self, model):
        with torch.no_grad():
            return {"errors, %": errors(model(self.test[0])[0], self.test[1])}


class Both(nn.Module):
    """What a layer makes of its input, and the input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x), x


class Decorrelation(Task):
    """Two views of an image shall have the same 32 features, and no two features shall say the same (Barlow Twins)."""

    name, said, inputs = "decorrelation of features", "loss", 2
    ways = ("whole", "small", "medium", "uniform", "informed", "budget")
    augmented, sizes = True, (64, 512)

    def __init__(self, seed, data):
        (x, y), (test, self.labels) = photographs("all", data)
        order = torch.randperm(len(x), generator=generator_of(seed))
        x, self.known = x[order], y[order]
        self.training, self.test_images = (x[1000:],), test[::3]
        self.validation = self.views(x[:1000], generator_of(1, seed))
        self.test = self.views(self.test_images, generator_of(2))

    def views(self, x, generator):
        """Half of it hidden, darker or brighter."""
        made = []
        for _ in range(2):
            side, grey = torch.rand(2, len(x), generator=generator)
            made.append((x * HALVES[(4 * side).long()]).add_((grey - 0.5)[:, None, None, None]))
        return tuple(made)

    def prepare(self, part, generator, crop=False):
        return (self.views(part[0], generator) if len(part) == 1 else part), ()

    def body(self):
        return Pair(eye(32, hidden=64))

    def loss(self, outputs):
        first, second = ((x - x.mean(0)) / (x.var(0, correction=0) + 1e-4).sqrt() for x in outputs)
        alike = first.T @ second / len(first)
        own = torch.eye(len(alike), dtype=torch.bool)
        return (1 - alike[own]).square().sum() + 0.05 * alike[~own].square().sum()

    def measure(self, model, part):
        with torch.no_grad():
            return self.loss(model(*part)).item()

    def also(self, model):
        """Classes told by a linear function of the features."""
        with torch.no_grad():
            known, new = (model.body.first(x).double() for x in (self.training[0], self.test_images))
            std, mean = torch.std_mean(known, 0)
            known, new = (F.pad((x - mean) / (std + 1e-6), (0, 1), value=1.0) for x in (known, new))
            wanted = F.one_hot(self.known[1000:], 10).double()
            solved = torch.linalg.solve(known.T @ known + torch.eye(33), known.T @ wanted)
            return {"errors of a linear probe, %": errors(new @ solved, self.labels[::3])}


HALVES = torch.ones(4, 1, 16, 16)
HALVES[0, :, :8], HALVES[1, :, 8:], HALVES[2, :, :, :8], HALVES[3, :, :, 8:] = 0, 0, 0, 0
