"""Weights that are computed or changed in `forward`."""

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sound.comparing import EITHER, WAYS, Body, add, altered, case
from sound.hooks import _once


class Bounded(nn.Module):
    def forward(self, weight):
        return 0.3 * weight.tanh()


class Standardised(nn.Module):
    """With a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, weight):
        return self.gain * (weight - weight.mean()) / weight.std()


def _cached(model, inputs, i):
    with parametrize.cached():
        return model(*inputs) + model(*(2 * x for x in inputs))


def _parametrized(body, *parametrizations_of_weight):
    for each in parametrizations_of_weight or (Bounded(), Standardised()):
        parametrize.register_parametrization(body.a, "weight", each)


altered("a parametrized weight", _parametrized)
altered("a parametrized weight, cached", _parametrized, call=_cached, ways=WAYS)
add("a weight parametrized later", Body, before=_once(lambda body: _parametrized(body, Bounded())), kinds=EITHER)
altered("spectral norm", lambda body: parametrizations.spectral_norm(body.a), ways=WAYS)
altered("weight norm", lambda body: parametrizations.weight_norm(body.b), kinds=EITHER)
altered("orthogonal weights", lambda b: parametrizations.orthogonal(b.a, orthogonal_map="cayley"), kinds=("samples",))


def _old_weight_norm(body):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(body.a)


altered("spectral norm by hooks", lambda body: torch.nn.utils.spectral_norm(body.a), kinds=EITHER)
altered("weight norm by hooks", _old_weight_norm, ways=("Skip",), kinds=EITHER)  # torch cannot copy it


@case("weights clipped in forward", ways=WAYS)
class Clipped(Body):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return self.b(self.a(x).tanh())


@case("weights scaled in forward by .data", kinds=EITHER)
class Decaying(Body):
    def forward(self, x):
        self.a.weight.data.mul_(0.9)
        return self.b(self.a(x).tanh())


@case("weights changed behind their use")
class ChangedLater(Body):
    def forward(self, x):
        y = self.b(self.a(x).tanh())
        self.a.weight.data.mul_(0.9)
        self.b.weight.data.mul_(0.9)
        return y


@case("a teacher that follows", kinds=EITHER)
class Teacher(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.b.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.b.parameters(), self.a.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return self.a(x).tanh() + self.b(x)
