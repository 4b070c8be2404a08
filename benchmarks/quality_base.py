"""What the tasks of quality.py have in common."""

import math

import torch
from torch import nn

from backdrop import Backdrop


def finite(value):
    """JSON has no infinity."""
    return round(value, 5) if math.isfinite(value) else None


def generator_of(*numbers):
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**62
    return torch.Generator().manual_seed(seed)


def area_below(scores, positives):
    """100 (1 - ROC AUC), by the place of each positive among the negatives."""
    scores = scores.flatten().double().nan_to_num(0.0)
    negative = scores[~positives].sort().values
    above = scores[positives].contiguous()
    places = torch.searchsorted(negative, above) + torch.searchsorted(negative, above, right=True)
    return 100 - 50 * places.double().mean().item() / len(negative)


def errors(scores, labels):
    return 100 * (scores.argmax(1) != labels).double().mean().item()


class Task:
    """Parts are tuples of tensors with a row for each sample: inputs first, then what the loss is told."""

    inputs = 1
    seconds = 4.0  # of a training
    sizes = (32, 256)  # of minibatches
    kept = 0.06  # of what masks may keep
    ways = ("whole", "small", "medium", "uniform", "informed", "budget")
    augmented = False

    def strata(self):
        """Classes of the training samples, for ways that draw by them."""
        return self.training[-1].long()

    def head(self):
        return nn.Identity()

    def mask(self, choose, p):
        return Backdrop(p, exact=True, choose=choose)

    def prepare(self, part, generator, crop=False):
        """What the network gets, and what else the loss gets."""
        return part[: self.inputs], part[self.inputs :]

    def shown(self, model, part):
        """What the network says, in parts that stay in the cache."""
        with torch.no_grad():
            return torch.cat([model(*some) for some in zip(*(x.split(2000) for x in part[: self.inputs]), strict=True)])

    def measure(self, model, part):
        raise NotImplementedError

    def also(self, model):
        """Other figures of the test samples, at the end."""
        return {}


class Pair(nn.Module):
    """The same network, or two, for two views of each sample."""

    def __init__(self, first, second=None):
        super().__init__()
        self.first, self.second = first, second or first

    def forward(self, a, b):
        return self.first(a), self.second(b)
