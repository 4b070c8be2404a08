"""What changes between the steps: attributes, buffers, constants, modes."""

import functools
import operator

import torch
from torch import nn

from sound.comparing import EITHER, SHAPES, WAYS, Body, add, between, case, layer, norm, nothing


class Attribute(Body):
    """An attribute whose value is taken in every call."""

    def __init__(self, kind, value, use):
        super().__init__(kind)
        self.value, self.use = value, use

    def forward(self, x):
        return self.b(self.use(self.a(x), self.value))


def attribute(name, values, use=operator.mul, **settings):
    make = functools.partial(Attribute, value=values[0], use=use)
    add(
        name,
        make,
        kinds=EITHER,
        steps=len(values),
        before=lambda body, i: setattr(body, "value", values[i]),
        **settings,
    )


attribute("a temperature", [1.0, 0.7, 0.49, 0.3], operator.truediv, ways=WAYS)
attribute("a factor with as many values as steps", [0.1 + 0.1 * i for i in range(12)])
attribute("a whole number with as many values as steps", list(range(1, 13)))
attribute("a flag", [True, False, True], lambda h, flag: h.tanh() if flag else h.relu())
attribute("a name", ["tanh", "relu", "sin"], lambda h, name: getattr(torch, name)(h))
attribute("a function", [torch.tanh, torch.relu, torch.sin], lambda h, function: function(h))
attribute("a list", [[1.0], [2.0, 0.5], [0.1]], lambda h, factors: h * sum(factors))
attribute("a dictionary", [{"by": 1.0}, {"by": 0.5}, {}], lambda h, options: h * options.get("by", 2.0))
attribute("nothing, then something", [None, 2.0, None], lambda h, value: h if value is None else h * value)
attribute("a tensor", [torch.tensor(1.0 + i, dtype=torch.float64) for i in range(3)])
attribute("a tensor instead of a number", [1.0, torch.tensor(2.0, dtype=torch.float64), 3.0])


def _shift_by(body, i):
    body.shift.fill_(i)


class Buffered(Body):
    def __init__(self, kind, use):
        super().__init__(kind)
        self.use = use
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return self.b(self.use(self.a(x), self.shift).tanh())


def _replace_shift(body, i):
    body.shift = torch.tensor(0.3 * i, dtype=torch.float64)


def buffered(name, use, **settings):
    add(name, functools.partial(Buffered, use=use), kinds=EITHER, **settings)


buffered("a buffer that is filled", lambda h, shift: h + shift, before=_shift_by, ways=WAYS)
buffered("a buffer that is replaced", lambda h, shift: h + shift, before=_replace_shift)
buffered("a number made of a buffer", lambda h, shift: h + float(shift), before=_shift_by, ways=WAYS)
buffered("a number read off a buffer", lambda h, shift: h * (1 + shift.item()), before=_shift_by)
buffered("a branch on a buffer", lambda h, shift: h.relu() if shift > 0.5 else h, before=_shift_by)
buffered("a tensor made of a buffer", lambda h, shift: h + torch.tensor([shift.item()] * h.shape[-1]), before=_shift_by)
buffered("a buffer without its history", lambda h, shift: h * shift.detach().exp(), before=_shift_by)


def _forget(body, i):
    body.shift.fill_(i)
    body.kept = None


@case("a constant kept from a buffer", before=_forget, kinds=EITHER)
class Kept(Body):
    """Computes it once, until it is told to forget it."""

    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("shift", torch.tensor(0.5))
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.shift.exp() + 1
        return self.b(self.a(x) * self.kept)


SETTINGS = {"alpha": 1.0}
ALPHA = 1.0


def _set_alpha(i):
    global ALPHA
    ALPHA = SETTINGS["alpha"] = 1.0 + i / 2


between("a global number", lambda h, x: h * ALPHA, turn=_set_alpha, kinds=EITHER)
between("a global dictionary", lambda h, x: h * SETTINGS["alpha"], turn=_set_alpha, kinds=EITHER)


def _reload(body, i, **more):
    if i:
        body.load_state_dict({name: (1 - 0.2 * i) * value for name, value in body.state_dict().items()}, **more)


def _new_layer(body, i):
    if i == 1:
        torch.manual_seed(9)
        body.a = layer(body.kind).double()


def _new_weight(body, i):
    if i == 1:
        body.a.weight = nn.Parameter(body.a.weight.detach() * 2)


add("load_state_dict", Body, before=_reload, skips=True, ways=WAYS)
add("load_state_dict that assigns", Body, before=functools.partial(_reload, assign=True), kinds=EITHER)
add("a layer that is replaced", Body, before=_new_layer, kinds=EITHER)
add("a weight that is replaced", Body, before=_new_weight, kinds=EITHER)
add(
    "a weight set by .data",
    Body,
    before=lambda body, i: setattr(body.a.weight, "data", body.b.weight.data / 2),
    kinds=EITHER,
)


@case("a buffer that counts", skips=False)
class Counting(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.b(self.a(x).tanh())


@case("a buffer that counts and is used", kinds=EITHER)
class WarmUp(Counting):
    def forward(self, x):
        self.calls.add_(1)
        return self.b(self.a(x).tanh() * (self.calls / 4).clamp(max=1))


@case("a number that counts", watch=lambda body: {"calls": body.calls}, kinds=EITHER)
class NumberCounting(Body):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x).tanh() * min(1.0, self.calls / 4))


def axes(kind):
    return 0 if kind == "samples" else (0, 2, 3)


class Averaging(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("mean", torch.zeros(SHAPES[kind][1:2] + (1,) * (len(SHAPES[kind]) - 2)))

    def average(self, h):
        return h.mean(axes(self.kind)).view_as(self.mean)


@case("a buffer that averages")
class AverageSeen(Averaging):
    def forward(self, x):
        h = self.a(x).tanh()
        self.mean.lerp_(self.average(h.detach()), 0.1)
        return self.b(h)


@case("a buffer that averages and is used", ways=WAYS)
class AverageUsed(Averaging):
    def forward(self, x):
        h = self.a(x).tanh()
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * self.average(h)
        return self.b(h - self.mean)


def normed(name, change=nothing, **more):
    def make(kind):
        between_norms = norm(kind, **more.get("norm", {}))
        return nn.Sequential(layer(kind), between_norms, nn.ReLU(), layer(kind))

    settings = {key: value for key, value in more.items() if key != "norm"}
    add(name, make, before=change, **settings)


normed("batch normalisation", ways=WAYS)
normed("batch normalisation, a cumulative average", norm={"momentum": None}, kinds=EITHER)
normed("batch normalisation without running statistics", norm={"track_running_stats": False}, kinds=EITHER)
normed("batch normalisation in eval", lambda body, i: body[1].eval(), skips=True, ways=WAYS)
normed("batch normalisation in eval from the second step on", lambda body, i: body[1].train(i == 0))
normed("batch normalisation frozen", lambda body, i: body[1].eval().requires_grad_(False), skips=True, kinds=EITHER)
