"""Numbers that are drawn: what was drawn is read off the output, and gradients have to belong to it."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Skip, skip_blocked
from sound.comparing import (
    BOTH,
    MAPS,
    WIDTH,
    Body,
    Pair,
    Step,
    assert_said,
    assert_same_step,
    batch,
    mask_for,
    numbers,
    wants,
)


@dataclasses.dataclass(frozen=True)
class Draws:
    """A body that draws random numbers, which can be read off its output.

    Args:
        read: what was drawn, given the body, its input and its output; a row per sample.
        replay: the output for numbers that were drawn.
        alone: each sample has random numbers of its own.
    """

    name: str
    make: Callable[[str], nn.Module]
    read: Callable
    replay: Callable
    kinds: tuple = ("samples",)
    skips: Any = True
    alone: bool = True

    def skips_on(self, kind):
        return wants(self.skips, kind)


DRAWS: list[Draws] = []
WIDE = 32


def draws(name, **settings):
    def register(make):
        DRAWS.append(Draws(name, make, **settings))
        return make

    return register


class Noisy(nn.Module):
    """Returns the hidden values, with what was drawn in them, beside the output."""

    def __init__(self, kind, change=None):
        super().__init__()
        first, last = (nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH))
        if kind != "samples":
            first, last = nn.Conv2d(WIDTH, WIDE, 3, padding=1), nn.Conv2d(WIDE, WIDTH, 3, padding=1)
        self.a, self.b, self.change = first, last, change

    def hidden(self, x):
        return self.a(x).tanh()

    def finish(self, h):
        return torch.cat([h, self.b(h)], 1)

    def forward(self, x):
        return self.finish(self.change(self.hidden(x)))


def _factors(body, x, y):
    return y[:, :WIDE] / body.hidden(x)


def _times(body, x, drawn):
    return body.finish(body.hidden(x) * drawn)


def _terms(body, x, y):
    return y[:, :WIDE] - body.hidden(x)


def _plus(body, x, drawn):
    return body.finish(body.hidden(x) + drawn)


def noisy(name, change, read=_factors, replay=_times, **settings):
    """With a function, or what makes a module."""

    def make(kind):
        return Noisy(kind, change() if isinstance(change, (type, functools.partial)) else change)

    DRAWS.append(Draws(name, make, read, replay, **settings))


class GaussianNoise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


class DropPath(nn.Module):
    """As timm has it."""

    def forward(self, x):
        kept = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
        return x * kept.div_(0.6)


EVERYWHERE = {"kinds": (*BOTH, "pictures"), "skips": ("samples", "pictures")}
noisy("dropout", functools.partial(nn.Dropout, 0.5), **EVERYWHERE)
noisy("F.dropout in place", lambda h: F.dropout(h * 1, 0.5, inplace=True))
noisy("F.dropout", lambda h: F.dropout(h, 0.3), **EVERYWHERE)
noisy("F.dropout by position", lambda h: F.dropout(h, 0.3, True, False))
noisy("torch.dropout", lambda h: torch.dropout(h, 0.3, True))
noisy("dropout of channels", functools.partial(nn.Dropout2d, 0.5), kinds=MAPS, skips=("pictures",))
noisy("F.dropout1d", lambda h: F.dropout1d(h[..., None], 0.5)[..., 0])
noisy("stochastic depth", DropPath, alone=False, kinds=(*BOTH, "pictures"), skips=False)
noisy("bernoulli", lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)), skips=False)
noisy("rand_like", lambda h: h * (torch.rand_like(h) < 0.4), skips=False)
noisy("rand of a size", lambda h: h * torch.rand(h.shape, dtype=h.dtype), skips=False, kinds=BOTH)
noisy("F.rrelu", lambda h: F.rrelu(h, 0.1, 0.9, training=True), skips=False)
noisy("noise", GaussianNoise, _terms, _plus, skips=False, kinds=BOTH)
noisy("torch.normal", lambda h: h + torch.normal(0.0, 0.1, h.shape, dtype=h.dtype), _terms, _plus, skips=False)
noisy("normal_", lambda h: h + torch.empty_like(h).normal_(), _terms, _plus, skips=False)


def _shared_terms(body, x, y):
    """The same for all samples, so that of one is enough."""
    return (y[:1, :WIDE] - body.hidden(x)[:1]).expand_as(y[:, :WIDE])


SHARED = {"read": _shared_terms, "replay": _plus, "alone": False, "skips": False}
noisy("noise that all samples share", lambda h: h + torch.randn(h.shape[1:], dtype=h.dtype), **SHARED, kinds=BOTH)
noisy("noise with a batch of one", lambda h: h + torch.randn_like(h[:1]), **SHARED)


@draws(
    "a mixture of samples",
    read=lambda body, x, y: y[:, -1].round().long(),
    replay=lambda body, x, drawn: torch.cat([body.mixed(x, drawn), drawn[:, None].to(x.dtype)], 1),
    skips=False,
    alone=False,
)
class Mixture(Body):
    def mixed(self, x, order):
        h = self.a(x).tanh()
        return self.b(0.7 * h + 0.3 * h[order])

    def forward(self, x):
        order = torch.randperm(len(x))
        return torch.cat([self.mixed(x, order), order[:, None].to(x.dtype)], 1)


@draws(
    "attention dropout",
    read=lambda body, x, y: y[..., 8:].detach(),
    replay=lambda body, x, drawn: body.finish(drawn, *body.qkv(x), True),
)
class AttentionDropout(nn.Module):
    """Values hold the identity too, so that the weights of attention can be seen."""

    def __init__(self, kind):
        super().__init__()
        self.project = nn.Linear(1, 24)

    def qkv(self, x):
        q, k, v = self.project(x[..., None]).chunk(3, -1)
        return q, k, torch.cat([v, torch.eye(WIDTH, dtype=x.dtype).expand(len(x), -1, -1)], -1)

    def finish(self, drawn, q, k, v, replayed=False):
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights * (drawn / weights).detach()) @ v

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x), dropout_p=0.4)


class LeftOut(Body):
    """A layer is left out, for all samples alike; the output says whether."""

    def __init__(self, kind, draw):
        super().__init__(kind)
        self.draw = draw

    def rest(self, x, left_out):
        h = x if left_out else self.a(x).tanh()
        return torch.cat([self.b(h), torch.full_like(h[:, :1], float(left_out))], 1)

    def forward(self, x):
        return self.rest(x, self.draw() < 0.5)


LEFT_OUT = {
    "Python's random numbers": random.random,
    "Python's choice": lambda: random.choice([0, 1]),
    "torch's random numbers": lambda: torch.rand(1).item(),
    "torch's whole numbers": lambda: int(torch.randint(2, ())),
}
for _name, _function in LEFT_OUT.items():
    DRAWS.append(
        Draws(
            f"a layer left out by {_name}",
            functools.partial(LeftOut, draw=_function),
            read=lambda body, x, y: y[:, -1],
            replay=lambda body, x, drawn: body.rest(x, bool(drawn.flatten()[0])),
            kinds=BOTH,
            skips=False,
            alone=False,
        )
    )


def train_drawn(draws, kind, way):
    """Gradients have to be those of the output, in every step; numbers have to be drawn anew. Returns the model."""
    torch.manual_seed(0)
    body, mask = draws.make(kind).double(), mask_for(kind, own=True)
    model = Skip(body, mask, when="always") if way == "Skip" else Pair(body, mask)
    model = skip_blocked(model, when="always") if way == "skip_blocked" else model
    body, again = model.module, mask_for(kind, own=True)
    (x,) = batch(kind, 0)
    x.requires_grad_()
    seen, random_state = [], random.getstate()
    random.seed(0)
    for i in range(6):
        model.zero_grad()
        x.grad = None
        y = model(x)
        upstream = numbers(*y.shape, seed=90 + i)
        y.backward(upstream)
        found = step_of(y, x, model)
        if way != "plain":
            assert_said(model.report if way == "Skip" else model.skip_report, draws.skips_on(kind))
        with torch.no_grad():
            seen.append(draws.read(body, x, y))
        model.zero_grad()
        x.grad = None
        y = draws.replay(body, x, seen[-1])
        y.backward(upstream * again.draw_weight(y))
        assert_same_step(step_of(y, x, model), found)
    random.setstate(random_state)
    assert any(not torch.equal(seen[0], other) for other in seen[1:]), "drawn once for all steps"
    if draws.alone:
        for drawn in seen:
            rows = drawn.flatten(1).mul(1e6).round()
            assert len(rows.unique(dim=0)) == len(rows), "samples share random numbers"
            assert not torch.equal(seen[0], seen[1])
    return model


def step_of(y, x, model):
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Step({"output": y.detach().clone()}, {**gradients, "input": x.grad.clone()})


# Networks with dropout whose output is linear in some parameters: there Euler's theorem ties gradients to the output.


def _encoder(kind):
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Unflatten(1, (3, 8)), inner, nn.Linear(8, 2, bias=False))


def _dropped_perceptron(kind):
    layers = [nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(16, 3, bias=False))


def _dropped_convolutions(kind):
    layers = [nn.Conv2d(WIDTH, 8, 3, bias=False), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(8, 8, 3, bias=False)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8, 3, bias=False))


class DroppedAttention(nn.Module):
    """Torch's attention with dropout: linear in the values and in the last layer."""

    def __init__(self, kind):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True, bias=False, vdim=3, kdim=3)
        self.read = nn.Linear(1, 4)

    def forward(self, x):
        keys = x[..., None].expand(-1, -1, 3)
        return self.attention(self.read(x[..., None]), keys, keys, need_weights=False)[0]


LINEAR = {  # the kind, what makes the network, groups of parameters in which it is linear
    "a perceptron": ("samples", _dropped_perceptron, [["0.weight"], ["3.weight"], ["6.weight"]]),
    "convolutions": ("pictures", _dropped_convolutions, [["0.weight"], ["3.weight"], ["7.weight"]]),
    "torch's transformer layer": ("samples", _encoder, [["3.weight"], ["2.norm2.weight", "2.norm2.bias"]]),
    "torch's attention": (
        "samples",
        DroppedAttention,
        [["attention.v_proj_weight"], ["attention.out_proj.weight"]],
    ),
}
