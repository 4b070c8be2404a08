"""Everyday models that an engine may get wrong, and what it takes to compare a skipping one with the plain one.

A case is a small module, the body, that lies before a mask. It is trained for a few steps as part of the plain model
and as part of a skipping one, from the same state and with the same masks; outputs, all gradients, parameters and
buffers have to stay the same. Cases whose body draws random numbers of its own are at the end: what was drawn is read
off the output, and the gradients have to be those of the output that was returned.
"""

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked

WIDTH, BATCH, SIZE = 6, 8, 12
SHAPES = {  # what the masks drop, on what
    "samples": (BATCH, WIDTH),
    "pictures": (BATCH, WIDTH, 5, 5),  # whole samples as well
    "positions": (2, WIDTH, SIZE, SIZE),
}
BOTH, MAPS = ("samples", "positions"), ("pictures", "positions")
EITHER = ("one of the two, in turns",)  # where what a mask drops makes no difference
WAYS = ("skip_blocked", "Skip")
RATE = 0.05


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(kind, **more):
    return nn.Linear(WIDTH, WIDTH, **more) if kind == "samples" else nn.Conv2d(WIDTH, WIDTH, 3, padding=1, **more)


def norm(kind, **more):
    return nn.BatchNorm1d(WIDTH, **more) if kind == "samples" else nn.BatchNorm2d(WIDTH, **more)


def mask_for(kind, own=False, **more):
    """Keeps 2 of 8 samples, or 14 of 144 positions of each."""
    if own:
        more["generator"] = torch.Generator().manual_seed(3)
    return Backdrop2d(0.9, exact=True, **more) if kind == "positions" else Backdrop(0.75, exact=True, **more)


def batch(kind, i):
    return (numbers(*SHAPES[kind], seed=i),)


# ------------------------------------------------------------------------------------------------------------ comparing


class Pair(nn.Module):
    """What `Skip` computes, in the plain way."""

    def __init__(self, module, mask):
        super().__init__()
        self.module, self.mask = module, mask

    def forward(self, *args, **kwargs):
        return self.mask(self.module(*args, **kwargs))


class Head(nn.Module):
    """Makes the gradient at the mask depend on what arrives there."""

    def __init__(self, kind):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return (x * self.scale).tanh()


class Model(nn.Module):
    def __init__(self, first, head):
        super().__init__()
        self.first, self.head = first, head

    def forward(self, *args, **kwargs):
        return self.head(self.first(*args, **kwargs))


def call(model, inputs, i):
    return model(*inputs)


def nothing(*_):
    return {}


def wants(skips, kind):
    return skips if isinstance(skips, bool) else kind in skips


@dataclasses.dataclass(frozen=True)
class Case:
    """A body before a mask, and what happens to it in a few steps of training.

    Args:
        make: the body of a kind of mask; with `whole` the model, which has masks of its own.
        kinds: of masks that make sense.
        skips: whether every step has to skip something; for all kinds or for some.
        ways: in which the model is made a skipping one.
        inputs: the tensors of a step.
        call: how the model is called with them in a step.
        loss: what the body adds to the loss.
        before: what happens to the body before a step, `turn` to the world, `around` all the time.
        watch: numbers and tensors of the body that have to be the same after every step.
        extra: tensors that want a gradient and are no parameters of the model.
        upstream: factor of the gradient that arrives.
        own: the mask has a generator of its own, because the body draws random numbers too.
        accumulate: gradients are added up over the steps.
        wanted: whether the inputs want a gradient.
    """

    name: str
    make: Callable[[str], nn.Module]
    kinds: tuple = BOTH
    skips: Any = False
    ways: tuple = WAYS[:1]
    whole: bool = False
    head: Callable[[str], nn.Module] = Head
    inputs: Callable = batch
    call: Callable = call
    loss: Callable = nothing
    before: Callable = nothing
    turn: Callable = nothing
    around: Callable = contextlib.nullcontext
    watch: Callable = nothing
    extra: Callable = nothing
    upstream: Callable = lambda i: 1.0
    own: bool = False
    accumulate: bool = False
    wanted: bool = True
    steps: int = 3
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10

    def skips_on(self, kind):
        return wants(self.skips, kind)


class Step(NamedTuple):
    values: dict
    gradients: dict


def build(case, kind, way):
    """The model of a case as "plain", "skip_blocked" or "Skip" has it, always from the same random numbers."""
    torch.manual_seed(0)
    body = case.make(kind).to(case.dtype)
    if case.whole:
        model = body
    else:
        mask, head = mask_for(kind, case.own), case.head(kind).to(case.dtype)
        model = Model(Skip(body, mask, when="always") if way == "Skip" else Pair(body, mask), head)
    return skip_blocked(model, when="always") if way == "skip_blocked" else model


def body_of(model):
    return model.first.module if isinstance(model, Model) else model


def report_of(model, way):
    return model.skip_report if way == "skip_blocked" else model.first.report


def wanting(inputs, wanted=True):
    return [x.detach().clone().requires_grad_(wanted and x.is_floating_point()) for x in inputs]


def take_step(case, kind, model, i):
    """A step of gradient descent, from random numbers of its own."""
    body = body_of(model)
    case.before(body, i)
    leaves = wanting([x.to(case.dtype) if x.is_floating_point() else x for x in case.inputs(kind, i)], case.wanted)
    passed = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in leaves]  # may be overwritten
    if not case.accumulate:
        model.zero_grad()
    torch.manual_seed(i)
    random.seed(i)
    output = case.call(model, passed, i)
    outputs = [y for y in tree_leaves(output) if isinstance(y, torch.Tensor)]
    total = case.upstream(i) * sum((y * numbers(*y.shape, seed=50 + i)).sum() for y in outputs)
    total = total + sum(tree_leaves(case.loss(body)))
    if total.requires_grad:
        total.backward()
    extra = case.extra(body)
    parameters = {**dict(model.named_parameters()), **extra}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    gradients.update({f"input {j}": x.grad for j, x in enumerate(leaves)})
    for x in extra.values():
        x.grad = None
    if not case.accumulate:
        descend(model)
    values = {**case.watch(body), **dict(model.named_buffers()), **dict(model.named_parameters())}
    values.update({f"output {j}": y for j, y in enumerate(outputs)} | {f"input {j}": x for j, x in enumerate(passed)})
    return Step({name: torch.as_tensor(v).detach().clone() for name, v in values.items()}, gradients)


def descend(model):
    """A step so short that rounding does not grow from one to the next."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max([1.0, *(grad.norm().item() for grad in gradients)])
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= RATE / largest * p.grad


def assert_same_step(plain, fast, tolerance=1e-10):
    """Gradients relative to the largest, values relative to each; no gradient may be missing that is not zero."""
    assert fast.gradients.keys() == plain.gradients.keys()
    largest = max(map(size, plain.gradients.values()), default=0.0)
    assert math.isfinite(largest), "a plain gradient is not finite"
    for name, value in plain.gradients.items():
        actual = fast.gradients[name]
        if value is None or actual is None:
            assert size(value) == 0, f"gradient of {name} is missing"
            assert size(actual) == 0, f"{name} has a gradient, of size {size(actual):.1e}"
            continue
        assert (actual.shape, actual.dtype) == (value.shape, value.dtype), name
        error = distance(actual, value)
        assert error <= tolerance * largest + 1e-14, f"gradient of {name}: off by {error:.1e} of {largest:.1e}"
    assert fast.values.keys() == plain.values.keys()
    for name, value in plain.values.items():
        actual = fast.values[name]
        assert (actual.shape, actual.dtype) == (value.shape, value.dtype), name
        assert distance(actual, value) <= tolerance * (size(value) + 1e-3), f"value of {name}"


def size(x):
    return 0.0 if x is None else x.double().norm().item()


def distance(x, y):
    return (x.double() - y.double()).norm().item()


def assert_said(report, skips=False):
    """What was not skipped is said: the whole step, or what ended the segment."""
    assert len(report) > 0, "no word about the mask"
    for entry in report:
        assert entry.drops in ("samples", "positions")
        assert 0 <= entry.share <= 1
        if entry.last.startswith("plain"):
            assert entry.share == 0, f"{entry.mask}: skipped and plain at once: {entry.last}"
        said = entry.last.startswith("plain") or "eval" in entry.last or entry.kept
        assert entry.share > 0 or said, f"{entry.mask}: nothing said: {entry.last}"
        if skips:
            assert entry.share > 0, f"{entry.mask}: nothing skipped: {entry.last}; {entry.kept}"


def compare(case, kind, way):
    """Train both models of a case; with "plain" for the way, the plain one twice. Returns the second."""
    with case.around():
        plain, fast = build(case, kind, "plain"), build(case, kind, way)
        for i in range(case.steps):
            case.turn(i)
            expected = take_step(case, kind, plain, i)
            actual = take_step(case, kind, fast, i)
            assert_same_step(expected, actual, case.tolerance)
            if way != "plain":
                assert_said(report_of(fast, way), case.skips_on(kind))
    return fast


# --------------------------------------------------------------------------------------------------- the table of cases

CASES: list[Case] = []


def add(name, make, **settings):
    if settings.get("kinds") == EITHER:
        settings["kinds"] = BOTH[len(CASES) % 2 :][:1]
    CASES.append(Case(name, make, **settings))


def case(name, **settings):
    """A class, or a function, that makes the body of a kind."""

    def register(make):
        add(name, make, **settings)
        return make

    return register


def altered(name, change, **settings):
    """Two layers to which something is done first."""

    def make(kind):
        body = Body(kind)
        change(body)
        return body

    add(name, make, **settings)


class Body(nn.Module):
    """Two layers, a and b: linear ones, or convolutions."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = layer(kind), layer(kind)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Between(Body):
    """Something between the two layers, which may look at the input again."""

    def __init__(self, kind, function):
        super().__init__(kind)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self.a(x), x))


def between(name, function, **settings):
    add(name, functools.partial(Between, function=function), **settings)


class Masked(Body):
    """A whole model, with its mask in the middle."""

    def __init__(self, kind, **more):
        super().__init__(kind)
        self.mask, self.c = mask_for(kind, **more), layer(kind)

    def forward(self, x):
        return self.c(self.mask(self.b(self.a(x).tanh())).tanh())


whole = functools.partial(case, whole=True)
