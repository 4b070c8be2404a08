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
import operator
import random
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Skip, insert, skip_blocked

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


# ------------------------------------------------------------------------------------ what nothing should be in the way

add("two layers", Body, skips=True, ways=WAYS)
add("inputs without a gradient", Body, skips=True, wanted=False, kinds=EITHER)
add("a mask with a generator of its own", Body, skips=True, own=True, kinds=EITHER)


@case("a perceptron", kinds=("samples",), skips=True, ways=WAYS)
def _perceptron(kind):
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
    )


@case("a network of convolutions", kinds=MAPS, skips=True, ways=WAYS)
def _convolutions(kind):
    return nn.Sequential(
        *(layer(kind), nn.BatchNorm2d(WIDTH).eval(), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(WIDTH, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, WIDTH, 1)),
    )


@case("a residual block", kinds=MAPS, skips=True)
class Residual(Body):
    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        y += x
        return F.relu(y, inplace=True)


@case("a gated branch and a sum", skips=True)
class Gate(Body):
    def forward(self, x):
        return self.a(x) * torch.sigmoid(self.b(x)) + x


class Tokens(nn.Module):
    """Vectors as sequences of tokens."""

    def __init__(self, inner, width):
        super().__init__()
        self.read, self.inner, self.write = nn.Linear(1, width), inner, nn.Linear(width, 1)

    def forward(self, x):
        return self.write(self.inner(self.read(x[..., None])))[..., 0]


class Attention(nn.Module):
    """Self-attention with two heads."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return x + self.out(y.transpose(1, 2).reshape(n, tokens, width))


class WrittenOut(Attention):
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v)


@case("attention", kinds=("samples",), skips=True)
def _attention(kind):
    return Tokens(nn.Sequential(Attention(), Attention()), 8)


@case("attention written out", kinds=("samples",), skips=True)
def _written_out(kind):
    return Tokens(WrittenOut(), 8)


@case("torch's transformer layer", kinds=("samples",), skips=True, ways=WAYS)
def _transformer(kind):
    return Tokens(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 8)


@case("torch's attention", kinds=("samples",), skips=True)
class Multihead(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.read, self.write = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.read(x[..., None])
        return self.write(x + self.attention(x, x, x, need_weights=False)[0])[..., 0]


@case("a recurrent network", kinds=("samples",))
class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gru, self.write = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.write(self.gru(x[..., None])[0])[..., 0]


def _codes(kind, i):
    return (torch.randint(10, (BATCH, 4), generator=torch.Generator().manual_seed(i)),)


@case("an embedding", kinds=("samples",), skips=True, inputs=_codes, ways=WAYS)
def _embedding(kind):
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, WIDTH))


@case("an embedding whose gradient is scaled by how often codes occur", kinds=("samples",), inputs=_codes, ways=WAYS)
def _by_frequency(kind):
    return nn.Sequential(nn.Embedding(10, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(16, WIDTH))


def _series(kind, i):
    return (numbers(2, 1, 40, seed=i),)


def _frames(kind, i):
    return (numbers(2, 3, 1, 9, 9, seed=i),)


@whole("frames of films beside each other", kinds=("positions",), inputs=_frames)
class Frames(nn.Module):
    """Films and frames share an axis in the convolutions, and have one each where the mask lies."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.mask = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3), Backdrop(0.5, dims=(0, 3, 4), exact=True)

    def forward(self, films):
        h = self.b(self.a(films.flatten(0, 1)).relu())
        return self.mask(h.view(*films.shape[:2], *h.shape[1:])).square()


@whole("a series", kinds=("positions",), skips=True, inputs=_series)
def _series_network(kind):
    layers = [nn.Conv1d(1, 4, 5, padding=2), nn.ReLU(), nn.Conv1d(4, 4, 3, stride=2, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, Backdrop1d(0.9, exact=True), nn.Flatten(), nn.Linear(80, 3))


@whole("a mask of patches, drawn anew for each", kinds=("positions",), skips=True)
def _patches(kind):
    return nn.Sequential(layer(kind), nn.ReLU(), layer(kind), Backdrop2d(0.8, patch=3), nn.Tanh(), layer(kind))


@whole("one mask for all samples", kinds=("positions",), skips=True)
def _shared_mask(kind):
    return nn.Sequential(layer(kind), nn.ReLU(), layer(kind), Backdrop2d(0.9, shared=True, exact=True), nn.Tanh())


@whole("each sample dropped or not", kinds=("samples",))
def _bernoulli(kind):
    return nn.Sequential(layer(kind), nn.ReLU(), layer(kind), Backdrop(0.6), nn.Tanh(), layer(kind))


# ------------------------------------------------------------------------------------------------------- gradient modes


@case("no_grad block", skips=True, ways=WAYS)
class NoGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
        return self.b(x)


@case("no_grad method", skips=True, kinds=EITHER)
class NoGradMethod(Body):
    @torch.no_grad()
    def features(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.features(x))


@case("no_grad branch", skips=True)
class NoGradBranch(Body):
    def forward(self, x):
        with torch.no_grad():
            gate = self.a(x).sigmoid()
        return self.b(x) * gate


@case("no_grad for all of it", kinds=EITHER)
class AllNoGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            return self.b(self.a(x))


@case("inference_mode block", ways=WAYS)
class InferenceMode(Body):
    def forward(self, x):
        with torch.inference_mode():
            x = self.a(x).tanh()
        return self.b(x.clone())


@case("inference_mode method", kinds=EITHER)
class InferenceMethod(Body):
    @torch.inference_mode()
    def features(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.features(x).clone()) + x


@case("enable_grad within no_grad")
class EnableGrad(Body):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
            with torch.enable_grad():
                x = self.b(x)
        return x * 2


@case("enable_grad method", kinds=EITHER)
class EnableGradMethod(Body):
    @torch.enable_grad()
    def last(self, x):
        return self.b(x)

    def forward(self, x):
        with torch.no_grad():
            x = self.a(x).tanh()
            return self.last(x)


@case("gradients switched by an attribute", before=lambda body, i: setattr(body, "learns", i != 1), kinds=EITHER)
class Switched(Body):
    def forward(self, x):
        with torch.set_grad_enabled(self.learns):
            x = self.a(x).tanh()
        return self.b(x)


@case("set_grad_enabled as a call", kinds=EITHER)
class SetGrad(Body):
    def forward(self, x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        x = self.a(x).tanh()
        torch.set_grad_enabled(before)
        return self.b(x)


def in_bfloat16(model, inputs, i):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*inputs)


SINGLE = {"dtype": torch.float32, "tolerance": 1e-5, "head": lambda kind: nn.Identity()}


@case("autocast off in a block", call=in_bfloat16, **SINGLE, ways=WAYS)
class AutocastOff(Body):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.b(self.a(x).tanh())


@case("autocast off by a decorator", call=in_bfloat16, **SINGLE, kinds=EITHER)
class AutocastOffMethod(Body):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.b(self.a(x).tanh())


BFLOAT = {"dtype": torch.float32, "tolerance": 3e-2}
add("bfloat16 autocast", Body, call=in_bfloat16, skips=True, **BFLOAT, ways=WAYS)


@case("autocast in a block", **BFLOAT)
class AutocastOn(Body):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
        return self.b(x.float().tanh())


# ------------------------------------------------------------------------------------ autograd Functions, detach, hooks


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class ScaledReverse(torch.autograd.Function):
    """As domain-adversarial networks have it, with a factor that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Saturating(torch.autograd.Function):
    """Saves what it needs, and its gradient is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class SignOfGradient(torch.autograd.Function):
    """Not linear in the gradient, so the gradients of two windows may not be added behind it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.sign()


class CentredGradient(torch.autograd.Function):
    """Works on each sample alone on the way forward, but not on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean()


FUNCTIONS = {
    "gradient reversal": Reverse.apply,
    "gradient reversal with a factor": lambda x: ScaledReverse.apply(x, 0.3),
    "straight-through rounding": StraightThrough.apply,
    "straight-through sign": Saturating.apply,
    "the sign of the gradient": SignOfGradient.apply,
    "gradients coupled on the way back": CentredGradient.apply,
}


class Applied(nn.Module):
    def __init__(self, kind, function):
        super().__init__()
        self.layer, self.function = layer(kind), function

    def forward(self, x):
        return self.layer(self.function(x)).tanh()


for _name, _function in FUNCTIONS.items():
    between(_name, lambda h, x, function=_function: function(h))
    _head = functools.partial(Applied, function=_function)
    add(f"{_name}, behind the mask", Body, kinds=EITHER, head=_head, skips=True)


@case("gradient reversal just before the mask", ways=WAYS)
class ReversedLast(Body):
    def forward(self, x):
        return Reverse.apply(self.b(self.a(x).tanh()))


@case("gradient reversal of the input", kinds=EITHER)
class ReversedFirst(Body):
    def forward(self, x):
        return self.b(self.a(Reverse.apply(x)).tanh())


class Exponential(torch.autograd.Function):
    """With setup_context, as torch.func wants it."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 0.5 * grad * y


between("a Function with setup_context", lambda h, x: Exponential.apply(h.tanh()), kinds=EITHER)


class Weighted(torch.autograd.Function):
    """Takes parameters, and gives them a gradient of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, 3 * (grad * x).sum() if ctx.needs_input_grad[1] else None


@case("a Function with parameters")
class WithParameters(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.b(Weighted.apply(self.a(x), self.weight))


between("detach", lambda h, x: h.detach(), ways=WAYS, skips=True)
between("a gate detached", lambda h, x: h * h.sigmoid().detach(), skips=True)
between("straight-through by detach", lambda h, x: h + (h.round() - h).detach(), skips=True, kinds=EITHER)
between("a detached branch of the input", lambda h, x: h + x.detach().tanh(), skips=True, kinds=EITHER)
between("a value without its gradient by .data", lambda h, x: h.data + 0.5 * h)
between(".data of the input", lambda h, x: h * x.data.sigmoid(), kinds=EITHER)
between("requires_grad_ on a detached value", lambda h, x: h.detach().requires_grad_().tanh(), kinds=EITHER)


def _doubled_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: 2 * grad)
    return h.tanh()


def _clipped_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return h.tanh()


def _centred_gradient(h, x):
    if h.requires_grad:
        h.register_hook(lambda grad: grad - grad.mean())
    return h.tanh()


between("a tensor hook", _doubled_gradient, ways=WAYS)
between("a tensor hook that clips", _clipped_gradient)
between("a tensor hook that couples", _centred_gradient)


@case("a hidden gradient retained", watch=lambda body: {"hidden": body.hidden.grad}, kinds=EITHER)
class Retained(Body):
    def forward(self, x):
        self.hidden = self.a(x).tanh()
        self.hidden.retain_grad()
        return self.b(self.hidden)


def _once(change):
    return lambda body, i: change(body) if i == 1 else None


def _clip_parameters(body):
    for p in body.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


def _count_gradients(body):
    body.counted = []
    for p in body.parameters():
        p.register_post_accumulate_grad_hook(lambda p, counted=body.counted: counted.append(p.grad.sum().item()))


add("hooks on parameters", Body, before=_once(_clip_parameters), ways=WAYS)
add(
    "hooks behind the accumulation of gradients",
    Body,
    before=_once(_count_gradients),
    watch=lambda body: {"counted": torch.tensor(sorted(getattr(body, "counted", [])), dtype=torch.float64)},
)


def _triple(module, args, output):
    return 3 * output


def _halve(module, args):
    return (args[0] / 2,)


def _halve_gradient(module, grads, *more):
    return tuple(g if g is None else g / 2 for g in grads)


altered("a forward hook", lambda body: body.a.register_forward_hook(_triple), ways=WAYS)
altered(
    "a forward hook with keywords",
    lambda b: b.a.register_forward_hook(lambda *x: x[-1] + 1, with_kwargs=True),
    kinds=EITHER,
)
altered("a forward hook on the body", lambda body: body.register_forward_hook(_triple), kinds=EITHER)
altered("a forward pre-hook", lambda body: body.b.register_forward_pre_hook(_halve))
altered("a forward pre-hook on the body", lambda body: body.register_forward_pre_hook(_halve), kinds=EITHER)
altered("a backward hook", lambda body: body.a.register_full_backward_hook(_halve_gradient), ways=WAYS)
altered("a backward hook on the body", lambda body: body.register_full_backward_hook(_halve_gradient), kinds=EITHER)
altered("a backward pre-hook", lambda body: body.b.register_full_backward_pre_hook(_halve_gradient), kinds=EITHER)


def _hook_comes_and_goes(body, i):
    if i == 1:
        body.handle = body.a.register_forward_hook(_triple)
    elif i == 2:
        body.handle.remove()
    elif i == 3:
        body.b.register_full_backward_hook(_halve_gradient)


add("hooks added and removed later", Body, before=_hook_comes_and_goes, steps=4, ways=WAYS)


@whole("a hook on the mask")
class HookedMask(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.mask.register_forward_hook(_triple)


@whole(
    "a hook on the mask that comes later",
    before=_once(lambda model: model.mask.register_forward_hook(_triple)),
    kinds=EITHER,
)
def _hook_on_mask(kind):
    return Masked(kind)


LAYERS = (nn.Linear, nn.Conv2d)
HANDLES: list = []


@contextlib.contextmanager
def _handles():
    """Takes away again what was registered for all modules."""
    try:
        yield
    finally:
        while HANDLES:
            HANDLES.pop().remove()


@contextlib.contextmanager
def _registered(register):
    with _handles():
        HANDLES.append(register())
        yield


def _for_layers(hook):
    return lambda module, *args: hook(module, *args) if isinstance(module, LAYERS) else None


GLOBAL_HOOKS = {
    "a global forward hook": (nn.modules.module.register_module_forward_hook, _triple),
    "a global forward pre-hook": (nn.modules.module.register_module_forward_pre_hook, _halve),
    "a global backward hook": (nn.modules.module.register_module_full_backward_hook, _halve_gradient),
    "a global backward pre-hook": (nn.modules.module.register_module_full_backward_pre_hook, _halve_gradient),
}
for _name, (_register, _hook) in GLOBAL_HOOKS.items():
    _add = functools.partial(_register, _for_layers(_hook))
    add(_name, Body, kinds=EITHER, around=functools.partial(_registered, _add))
    _later = {"around": _handles, "turn": lambda i, add=_add: HANDLES.append(add()) if i == 1 else None}
    add(f"{_name} that comes later", Body, kinds=EITHER, **_later)


def _other_forward(self, x):
    return self.b(self.a(x)).sin()


def _negated(self, x):
    return -type(self).forward(self, x)


def _own_forward(body):
    body.forward = types.MethodType(_other_forward, body)


def _layer_with_own_forward(body):
    body.a.forward = types.MethodType(_negated, body.a)


altered("a forward put on the body", _own_forward, kinds=EITHER, ways=WAYS)
altered("a forward put on a layer", _layer_with_own_forward, kinds=EITHER)
add("a forward put on the body later", Body, before=_once(_own_forward), kinds=EITHER)
add("a forward put on a layer later", Body, before=_once(_layer_with_own_forward), kinds=EITHER)


class NegatedLinear(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class NegatedConv2d(nn.Conv2d):
    def forward(self, x):
        return -super().forward(x)


def _other_class(body):
    body.a.__class__ = NegatedLinear if body.kind == "samples" else NegatedConv2d


add("a layer that becomes another class", Body, before=_once(_other_class), kinds=EITHER)


# ----------------------------------------------------------------------------------------------------- computed weights


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


# --------------------------------------------------------------------------------------- what changes between the steps


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


# ------------------------------------------------------------------------------------------------- values that are kept


@case("a penalty kept for the loss", loss=lambda body: body.penalty, ways=WAYS)
class Penalty(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        self.penalty = h.square().mean()
        return self.b(h)


@case("a hidden value kept for the loss", loss=lambda body: body.hidden.square().sum())
class Hidden(Body):
    def forward(self, x):
        self.hidden = self.a(x).tanh()
        return self.b(self.hidden)


@case("the output kept for the loss", loss=lambda body: body.output.square().sum(), ways=WAYS)
class OutputKept(Body):
    def forward(self, x):
        self.output = self.b(self.a(x).tanh())
        return self.output


@case("a hidden value kept to be looked at", watch=lambda body: {"seen": body.seen}, kinds=EITHER)
class Seen(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        self.seen = h.detach()
        return self.b(h)


@case(
    "hidden values collected in a list",
    before=lambda body, i: body.features.clear(),
    loss=lambda body: sum(h.square().mean() for h in body.features),
    watch=lambda body: {"number": len(body.features)},
)
class Collected(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.features = []

    def forward(self, x):
        self.features.append(self.a(x).tanh())
        self.features.append(self.b(self.features[-1]))
        return self.features[-1]


def _extract(body):
    body.features = {}
    body.a.register_forward_hook(functools.partial(_remember, body.features))


def _remember(features, module, args, output):
    features["a"] = output


altered(
    "features taken out by a hook",
    _extract,
    ways=("Skip",),  # of a copy, the hook remembers in the dictionary of the original
    loss=lambda body: body.features["a"].square().mean(),
    kinds=EITHER,
)


@whole("a value from before the mask in the output")
class TwoOutputs(Masked):
    def forward(self, x):
        h = self.a(x).tanh()
        return self.c(self.mask(self.b(h)).tanh()), h


@whole("what the mask gets, in the output as well")
class Bypass(Masked):
    def forward(self, x):
        h = self.b(self.a(x).tanh())
        return self.c(self.mask(h).tanh()) + h


# -------------------------------------------------------------------------------------------------- arguments of a call


def keyed(**more):
    return lambda model, inputs, i: model(*inputs, **{key: make(i) for key, make in more.items()})


@case("a float that changes", call=keyed(scale=lambda i: 1.0 + 0.1 * i), steps=12, skips=True)
@case("a float that changes, in Skip", call=keyed(scale=lambda i: 0.3 * (i + 1)), ways=("Skip",))
class Scaled(Body):
    def forward(self, x, scale=1.0):
        return self.b(self.a(x).tanh() / scale)


@case("a whole number that changes", call=keyed(times=lambda i: i + 1), steps=4, kinds=EITHER)
class Repeated(Body):
    def forward(self, x, times=1):
        for _ in range(times):
            x = self.a(x).tanh()
        return self.b(x)


@case(
    "arguments that are no tensors",
    call=keyed(mode=lambda i: ("tanh", "relu")[i % 2], shifts=lambda i: [0.1 * i, 1]),
    kinds=EITHER,
    ways=WAYS,
)
class Options(Body):
    def forward(self, x, mode=None, shifts=(), nothing=None):
        x = self.a(x)
        if nothing is None and mode in ("relu", "tanh"):
            x = getattr(torch, mode)(x)
        for shift in shifts:
            x = x + shift
        return self.b(x)


@case("isinstance", skips=True, kinds=EITHER)
class Isinstance(Body):
    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
        x = self.a(x) if isinstance(self.a, (nn.Linear, nn.Conv2d)) and not isinstance(self.a, nn.Bilinear) else x
        return self.b(x.tanh())


def _two(kind, i):
    return numbers(*SHAPES[kind], seed=i), numbers(*SHAPES[kind], seed=10 + i)


@case("any number of arguments", inputs=_two, kinds=EITHER, ways=WAYS)
class Star(Body):
    def forward(self, *args):
        return self.b(sum(self.a(x) for x in args).tanh())


@case(
    "any keywords",
    inputs=_two,
    call=lambda model, inputs, i: model(left=inputs[0], right=inputs[1]),
    kinds=EITHER,
    ways=WAYS,
)
class Keywords(Body):
    def forward(self, **kwargs):
        return self.b(self.a(kwargs["left"]).tanh()) * kwargs["right"]


@case(
    "a dictionary of tensors",
    inputs=_two,
    call=lambda m, inputs, i: m({"x": inputs[0], "more": [inputs[1], i]}),
    kinds=EITHER,
    ways=WAYS,
)
class Dictionary(Body):
    def forward(self, batch):
        return self.b(self.a(batch["x"]).tanh() + batch["more"][0] * batch["more"][1])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float
    other: Any = None


@case(
    "a dataclass",
    inputs=_two,
    call=lambda model, inputs, i: model(Batch(inputs[0], 1.0 + i, inputs[1])),
    kinds=EITHER,
    ways=WAYS,
)
class Dataclass(Body):
    def forward(self, batch):
        return self.b(self.a(batch.x).tanh() * batch.scale) + batch.other


class Outputs(NamedTuple):
    hidden: torch.Tensor
    out: torch.Tensor


class Several(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        return Outputs(h, self.b(h))


class Described(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        return {"batch": Batch(self.b(h), 2.0, h), "size": tuple(h.shape)}


@whole("a named tuple before the mask", kinds=EITHER)
class NamedBefore(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.several = Several(kind)

    def forward(self, x):
        values = self.several(x)
        return self.c(self.mask(values.out)) + values.hidden


@whole("a dataclass in a dictionary before the mask", kinds=EITHER)
class DescribedBefore(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.described = Described(kind)

    def forward(self, x):
        values = self.described(x)
        return {"y": self.c(self.mask(values["batch"].x * values["batch"].scale)), "size": values["size"]}


def beside(name, *shapes, use=operator.add, kinds=("samples",), **settings):
    """A second input of another shape, which is used between the layers."""
    of_kind = dict(zip(kinds, shapes, strict=True))
    add(
        name,
        functools.partial(Beside, use=use),
        kinds=kinds,
        inputs=lambda kind, i: (numbers(*SHAPES[kind], seed=i), numbers(*of_kind[kind], seed=10 + i)),
        **settings,
    )


class Beside(Body):
    def __init__(self, kind, use):
        super().__init__(kind)
        self.use = use

    def forward(self, x, other):
        return self.b(self.use(self.a(x), other).tanh())


beside("a second input with a batch of one", (1, WIDTH), (1, WIDTH, SIZE, SIZE), kinds=BOTH, ways=WAYS)
beside("a second input with a batch and an axis of one", (BATCH, 1), (2, 1, SIZE, 1), kinds=BOTH)
beside("a second input without a batch", (WIDTH,), (WIDTH, SIZE, SIZE), kinds=BOTH, ways=WAYS)
beside("a second input that is a map for all", (), (SIZE, SIZE), kinds=BOTH)
beside("a second input that is a row", (WIDTH,), (SIZE,), kinds=BOTH)
beside("a second input for groups of samples", (4, 1, WIDTH), use=lambda h, y: (h.view(4, 2, WIDTH) + y).view(8, WIDTH))
beside("a table as long as the batch", (BATCH, WIDTH), use=lambda h, table: h @ table.t() @ table, ways=WAYS)
beside("a square table as long as the batch", (BATCH, BATCH), use=lambda h, table: table @ h)
beside("a bias as long as the batch", (BATCH,), use=lambda h, bias: h + bias[:, None])
beside("a table as long as the batch, row by row", (BATCH, WIDTH), use=lambda h, table: h * table)
beside("a table as long as the batch, used both ways", (BATCH, WIDTH), use=lambda h, table: h * table + table.mean(0))
beside("a table as long as the batch, looked up", (BATCH, WIDTH), use=lambda h, table: h + table[h.argmax(1)])


@case(
    "one sample and many",
    inputs=lambda kind, i: (numbers(1, WIDTH, seed=i), *batch(kind, i)),
    kinds=("samples",),
    ways=WAYS,
)
class OneAndMany(Body):
    def forward(self, one, many):
        return self.b(self.a(one).tanh() + many)


class Table(Body):
    """With a parameter and a buffer as long as the batch."""

    def __init__(self, kind, use):
        super().__init__(kind)
        self.use = use
        self.table = nn.Parameter(torch.randn(BATCH, WIDTH))
        self.register_buffer("places", torch.linspace(-1, 1, BATCH))

    def forward(self, x):
        return self.b(self.use(self.a(x), self.table, self.places))


add("a parameter as long as the batch", functools.partial(Table, use=lambda h, t, p: h @ t.t() @ t), kinds=("samples",))
add("a parameter with a row per sample", functools.partial(Table, use=lambda h, t, p: h + t), kinds=("samples",))
add("a buffer as long as the batch", functools.partial(Table, use=lambda h, t, p: h * p[:, None]), kinds=("samples",))
add("the batch's places", functools.partial(Table, use=lambda h, t, p: h + t[: len(h)].mean()), kinds=("samples",))


def _positions_in_batch(h, x):
    return h * torch.arange(len(h), dtype=h.dtype)[:, None]


between("the number of a sample in the batch", _positions_in_batch, kinds=("samples",))
between("the size of the batch", lambda h, x: h * len(h) / h.shape[0] + len(x), kinds=("samples",))
between("the size in a view", lambda h, x: h.view(h.size(0), 2, -1).flip(1).reshape(len(x), -1), kinds=("samples",))


# ------------------------------------------------------------------------------------------------------------- in place

IN_PLACE = {
    "relu_": lambda h, x: h.relu_(),
    "F.relu with the keyword": lambda h, x: F.relu(h, inplace=True),
    "F.relu by position": lambda h, x: F.relu(h, True),
    "F.leaky_relu by position": lambda h, x: F.leaky_relu(h, 0.2, True),
    "F.elu, the result not used": lambda h, x: (F.elu(h, inplace=True), h)[1],
    "torch.relu_, the result not used": lambda h, x: (torch.relu_(h), h)[1],
    "+=": lambda h, x: operator.iadd(h, x),
    "*= with a value of its own": lambda h, x: operator.imul(h + 1, h),
    "add_ of the input": lambda h, x: h.add_(x, alpha=0.5),
    "clamp_": lambda h, x: h.clamp_(min=-0.2, max=0.2),
    "masked_fill_": lambda h, x: h.masked_fill_(x > 0, 0.1),
    "copy_ into new memory": lambda h, x: torch.empty_like(h).copy_(h).mul_(2),
    "F.threshold by position": lambda h, x: F.threshold(h, 0.0, -0.5, True),
    "sub_ and exp_": lambda h, x: h.sub_(1).exp_(),
}
for _name, _function in IN_PLACE.items():
    between(f"in place: {_name}", _function, kinds=EITHER)


def _alias(h, x):
    before = h
    h.mul_(2)
    return before + h


def _alias_by_view(h, x):
    before = h.view(h.shape)
    h.add_(1)
    return before * 2


def _part(h, x):
    h[:, :2] *= 3
    return h


def _part_by_view(h, x):
    part = h.narrow(1, 0, 2)
    part.mul_(3).add_(1)
    return h.tanh()


def _part_set(h, x):
    h[:, 0] = 0.5
    h[:, 1] = x[:, 1]
    return h


def _flat(h, x):
    h.view(-1)[::2].zero_()
    return h


def _first_sample(h, x):
    h[0] = 0
    h[-1] += h[1].detach()
    return h


def _swapped(h, x):
    h.transpose(0, 1).mul_(2)
    return h


def _selected(h, x):
    h.select(1, 2).add_(h.select(1, 3))
    return h


def _assembled(h, x):
    new = torch.zeros_like(h)
    new[:, :3] = h[:, 3:]
    new[:, 3:] += h[:, :3].tanh()
    return new


def _by_index(h, x):
    return torch.zeros_like(h).index_add_(1, torch.tensor([5, 4, 3, 2, 1, 0]), h)


def _by_mask(h, x):
    h = h.clone()
    h[h > 0] = 0.3
    return h


def _input(h, x):
    x.mul_(0.5)
    return h + x


def _input_part(h, x):
    x[:, 0] = 0
    return h * x


def _input_data(h, x):
    x.data.mul_(0.5)
    return h.tanh()


VIEWS = {
    "a second name": _alias,
    "a view taken before": _alias_by_view,
    "some channels": _part,
    "some channels by a view": _part_by_view,
    "channels that are set": _part_set,
    "every second number": _flat,
    "one sample": _first_sample,
    "a transposed view": _swapped,
    "a channel from another": _selected,
    "put together from parts": _assembled,
    "added by index": _by_index,
    "where it is positive": _by_mask,
}
for _name, _function in VIEWS.items():
    between(f"in place: {_name}", _function)


class InputChanged(Body):
    """Changes its input before or behind its use."""

    def __init__(self, kind, function):
        super().__init__(kind)
        self.function = function

    def forward(self, x):
        return self.b(self.function(x.tanh(), x))


for _name, _function in {"scaled": _input, "a part": _input_part, "by .data": _input_data}.items():
    add(f"the input changed in place: {_name}", functools.partial(InputChanged, function=_function), ways=WAYS)


@case("a residual connection over a layer in place")
class InPlaceResidual(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.a(x)
        positive = self.act(h)
        return h + positive + self.b(positive)


@case("memory that is used again", kinds=EITHER)
class Workspace(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("memory", torch.zeros(SHAPES[kind]), persistent=False)

    def forward(self, x):
        h = self.a(x).tanh()
        torch.mul(h.detach(), 2, out=self.memory)
        return self.b(h) + self.memory


@whole("a value changed in place behind the mask")
class ChangedBehind(Masked):
    def forward(self, x):
        h = self.a(x)
        y = self.mask(self.b(h.tanh()))
        h.mul_(2)
        return self.c(y) + h


@whole("the input changed in place behind the mask", kinds=EITHER)
class InputBehind(Masked):
    def forward(self, x):
        y = self.mask(self.b(x.tanh()))
        x += 1
        return self.c(y) + x


@whole("a copy of the mask's output changed in place", kinds=EITHER)
class CopyChanged(Masked):
    def forward(self, x):
        y = self.mask(self.b(self.a(x).tanh())).clone()
        y[:, 0] = 0
        return self.c(y.relu_())


# -------------------------------------------------------------------------------------- subclasses of layers, functions


def _same(size, kernel, stride):
    return max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)


def pad_same(x, kernel, stride, value=0.0):
    """As timm has it."""
    high, wide = (_same(n, kernel, stride) for n in x.shape[-2:])
    return F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2), value=value)


class SameConv(nn.Conv2d):
    def forward(self, x):
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class SameMaxPool(nn.MaxPool2d):
    def forward(self, x):
        return F.max_pool2d(pad_same(x, self.kernel_size, self.stride, -math.inf), self.kernel_size, self.stride)


class SameAvgPool(nn.AvgPool2d):
    def forward(self, x):
        return F.avg_pool2d(pad_same(x, self.kernel_size, self.stride), self.kernel_size, self.stride)


class ConvNormAct(nn.Conv2d):
    """As detection libraries have it."""

    def __init__(self, *args, norm=None, activation=None, **more):
        super().__init__(*args, **more)
        self.norm, self.activation = norm, activation

    def forward(self, x):
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        x = x if self.norm is None else self.norm(x)
        return x if self.activation is None else self.activation(x)


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, WIDTH, -1), None, None, training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight) / 5
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MeanFreeConv(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, weight, bias)


class MaskedConv(nn.Conv2d):
    """As PixelCNN has it: the weights themselves are changed."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        allowed = torch.ones_like(self.weight)
        allowed[:, :, 1, 1:] = allowed[:, :, 2:] = 0
        self.register_buffer("allowed", allowed)

    def forward(self, x):
        self.weight.data *= self.allowed
        return super().forward(x)


class MaskedWeightConv(MaskedConv):
    def forward(self, x):
        return F.conv2d(x, self.weight * self.allowed, self.bias, padding=1)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias).permute(0, 3, 1, 2)


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x))


class FrozenNorm(nn.BatchNorm2d):
    """Running statistics in training too, as detection libraries have it."""

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class LeakyRelu(nn.ReLU):
    def forward(self, x):
        return super().forward(x) + 0.1 * x


class HalvingDropout(nn.Dropout):
    def forward(self, x):
        return 0.5 * x


class Shift(nn.Identity):
    def forward(self, x):
        return x.roll(1, -1)


class ResidualSequential(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Backwards(nn.Sequential):
    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


class Blur(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.stride = stride
        row = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("kernel", (row[:, None] * row / 16).repeat(WIDTH, 1, 1, 1))

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.kernel, stride=self.stride, groups=WIDTH)


def stacked(name, *makers, **settings):
    """Layers on maps, between convolutions."""
    settings.setdefault("kinds", MAPS)
    add(name, lambda kind: nn.Sequential(layer(kind), *(make() for make in makers), nn.Tanh(), layer(kind)), **settings)


def _conv(make, *args, **more):
    return lambda: make(WIDTH, WIDTH, *args, **more)


stacked(
    "convolutions that pad as much as it takes", _conv(SameConv, 3, stride=2), _conv(SameConv, 4), skips=True, ways=WAYS
)
stacked("max-pooling that pads as much as it takes", lambda: SameMaxPool(3, 2), skips=True, kinds=("positions",))
stacked("average pooling that pads as much as it takes", lambda: SameAvgPool(3, 2), kinds=("positions",))
stacked(
    "a convolution with norm and activation inside",
    lambda: ConvNormAct(WIDTH, WIDTH, 3, padding=1, norm=nn.BatchNorm2d(WIDTH).eval(), activation=F.relu),
)
stacked("a standardised convolution", _conv(StandardisedConv, 3, padding=1), skips=True)
stacked("a convolution with another _conv_forward", _conv(MeanFreeConv, 3, padding=1), kinds=("positions",))
stacked("a masked convolution that changes its weights", _conv(MaskedConv, 3, padding=1))
stacked("a masked convolution", _conv(MaskedWeightConv, 3, padding=1), skips=True, ways=WAYS, kinds=("positions",))
stacked("layer normalisation of channels", lambda: LayerNorm2d(WIDTH), skips=True, kinds=("positions",))
stacked("batch normalisation with an activation", lambda: NormAct(WIDTH), lambda: NormAct(WIDTH))
stacked("batch normalisation that is always frozen", lambda: FrozenNorm(WIDTH), kinds=("positions",))
stacked("a subclass of ReLU", LeakyRelu, kinds=("positions",))
stacked("a subclass of Dropout that drops nothing", HalvingDropout, kinds=("positions",))
stacked("a subclass of Identity that shifts", Shift)
stacked("a subclass of Sequential", lambda: ResidualSequential(layer("positions"), nn.ReLU()), kinds=("positions",))
stacked(
    "a subclass of Sequential in reverse order",
    lambda: Backwards(nn.Tanh(), layer("positions"), nn.ReLU()),
    kinds=("positions",),
)
stacked("blurring", lambda: Blur(2), kinds=("positions",))


class CosineLinear(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1)) * 3


class LowRank(nn.Linear):
    """Frozen, with a trained part of low rank."""

    def __init__(self, *args):
        super().__init__(*args)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight + (self.weight.sign() - self.weight).detach(), self.bias)


for _class in (CosineLinear, LowRank, BinaryLinear):
    add(
        f"a subclass of Linear: {_class.__name__}",
        lambda kind, make=_class: nn.Sequential(make(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        kinds=("samples",),
        skips=True,
    )


@whole("a subclass of the mask", kinds=EITHER)
class MaskSubclass(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        parent = type(self.mask)

        class Doubled(parent):
            def forward(self, x):
                return 2 * super().forward(x)

        self.mask = Doubled(0.75, exact=True)


class Functional(nn.Module):
    """Weights without layers."""

    def __init__(self, kind, function):
        super().__init__()
        shape = (WIDTH, WIDTH) if kind == "samples" else (WIDTH, WIDTH, 3, 3)
        self.weight, self.bias = nn.Parameter(torch.randn(shape) / 4), nn.Parameter(torch.randn(WIDTH))
        self.last, self.function = layer(kind), function

    def forward(self, x):
        return self.last(self.function(x, self.weight, self.bias).tanh())


FUNCTIONAL = {
    "F.linear": ("samples", lambda x, w, b: F.linear(x, w, b)),
    "matmul": ("samples", lambda x, w, b: x @ w.t() + b),
    "addmm": ("samples", lambda x, w, b: torch.addmm(b, x, w)),
    "einsum": ("samples", lambda x, w, b: torch.einsum("ni,oi->no", x, w) + b),
    "weight first": ("samples", lambda x, w, b: (w @ x.t()).t() + b),
    "F.conv2d": ("positions", lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    "F.conv2d by position": ("positions", lambda x, w, b: F.conv2d(x, w, b, 1, 1)),
    "torch.conv2d with stride": ("positions", lambda x, w, b: torch.conv2d(x, w, b, stride=2, padding=(1, 1))),
    "F.conv2d on a padded map": ("positions", lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 2, 0), value=0.5), w, b)),
    "F.conv2d on a reflected map": ("positions", lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), w, b)),
    "F.conv2d on a circular map": ("positions", lambda x, w, b: F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), w, b)),
    "F.conv2d 'same'": ("positions", lambda x, w, b: F.conv2d(x, w, b, padding="same", dilation=2)),
    "F.conv2d in groups": ("positions", lambda x, w, b: F.conv2d(x, w[:, :2], b, padding=1, groups=3)),
    "F.conv_transpose2d": ("positions", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1)),
    "einsum over channels": ("positions", lambda x, w, b: torch.einsum("nihw,oi->nohw", x, w[..., 0, 0])),
    "F.linear on the last axis": ("positions", lambda x, w, b: F.linear(x.movedim(1, -1), w[..., 0, 0]).movedim(-1, 1)),
    "unfold and matmul": ("positions", lambda x, w, b: (w.flatten(1) @ F.unfold(x, 3, padding=1)).view_as(x)),
    "F.batch_norm in eval": ("positions", lambda x, w, b: F.batch_norm(F.conv2d(x, w), b.detach(), b.detach().exp())),
    "F.max_pool2d": ("positions", lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 3, 1, 1)),
    "F.avg_pool2d": ("positions", lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 3, 2, 1, count_include_pad=False)),
    "F.interpolate": ("positions", lambda x, w, b: F.interpolate(F.conv2d(x, w, b), scale_factor=2, mode="bilinear")),
    "F.pixel_shuffle": ("positions", lambda x, w, b: F.pixel_shuffle(F.conv2d(x, w, b).repeat(1, 4, 1, 1), 2)),
}
for _name, (_kind, _function) in FUNCTIONAL.items():
    add(f"functional: {_name}", functools.partial(Functional, function=_function), kinds=(_kind,))


# --------------------------------------------------------------------------------------------- samples that are coupled

_TURNED = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
_GROUP = torch.arange(BATCH) % 2
COUPLED = {
    "softmax over the batch": lambda h: BATCH * h.softmax(0),
    "softmax over the batch by a negative axis": lambda h: BATCH * h.softmax(-2),
    "softmax over everything": lambda h: BATCH * WIDTH * h.flatten().softmax(0).view_as(h),
    "log-sum-exp over the batch": lambda h: h - h.logsumexp(0),
    "mean over the batch": lambda h: h - h.mean(0),
    "mean over everything": lambda h: h - h.mean(),
    "mean over the batch, detached": lambda h: h - h.mean(0).detach(),
    "mean over the batch as a number": lambda h: h * float(h.detach().mean()),
    "sum over all axes": lambda h: h + 0.1 * h.sum((0, 1)),
    "standardised over the batch": lambda h: (h - h.mean(0)) / (h.var(0) + 0.1).sqrt(),
    "var_mean": lambda h: h * torch.var_mean(h, 0)[0],
    "norm over the batch": lambda h: F.normalize(h, dim=0),
    "norm of everything": lambda h: 5 * h / h.norm(),
    "largest of all": lambda h: h / h.abs().max(),
    "largest of the batch": lambda h: h - h.amax(0),
    "median of the batch": lambda h: h - h.median(0).values,
    "sorted over the batch": lambda h: h.sort(0).values,
    "the largest first": lambda h: h.topk(BATCH, dim=0).values,
    "cumulative sum": lambda h: h.cumsum(0),
    "the next sample": lambda h: h + h.roll(1, 0),
    "rolled as a whole": lambda h: h + h.roll(2),
    "flipped": lambda h: h + 2 * h.flip(0),
    "the first sample": lambda h: h - h[0],
    "the first sample, expanded": lambda h: h * h[:1].expand_as(h),
    "the last sample": lambda h: h * h[-1].sigmoid(),
    "every second sample first": lambda h: torch.cat([h[::2], h[1::2]]),
    "shifted by cat": lambda h: torch.cat([h[1:], h[:1]]),
    "shifted by padding": lambda h: h + F.pad(h, (0, 0, 1, 0))[:-1],
    "halves swapped": lambda h: torch.cat(h.chunk(2)[::-1]),
    "samples restacked": lambda h: torch.stack(h.unbind()[::-1]),
    "indexed": lambda h: h + h[_TURNED],
    "index_select": lambda h: h + torch.index_select(h, 0, _TURNED),
    "gather": lambda h: h + h.gather(0, _TURNED[:, None].expand_as(h)),
    "index_add by group": lambda h: h - h.new_zeros(2, WIDTH).index_add(0, _GROUP, h)[_GROUP] / 4,
    "means of neighbours": lambda h: (h.view(4, 2, -1) - h.view(4, 2, -1).mean(1, keepdim=True)).view(8, -1),
    "softmax of neighbours by reshape": lambda h: 12 * h.reshape(4, -1).softmax(1).reshape(8, -1),
    "neighbours by unflatten": lambda h: h.unflatten(0, (2, 4)).cumsum(1).flatten(0, 1),
    "samples reordered by reshape": lambda h: h.view(2, 4, -1).transpose(0, 1).reshape(8, -1),
    "numbers reordered by reshape": lambda h: h.t().reshape(8, -1),
    "similarities": lambda h: (h @ h.t()).softmax(-1) @ h,
    "similarities by einsum": lambda h: torch.einsum("nd,md->nm", h, h).softmax(1) @ h,
    "differences of all pairs": lambda h: h + (h[:, None] - h[None]).square().sum(1),
    "a matrix over the batch": lambda h: torch.ones(8, 8, dtype=h.dtype).tril() @ h,
    "addmm over the batch": lambda h: torch.addmm(h, torch.full((8, 8), 0.1, dtype=h.dtype), h),
    "bmm over groups": lambda h: torch.bmm(torch.ones(2, 4, 4, dtype=h.dtype).tril(), h.view(2, 4, -1)).view(8, -1),
    "attention over the batch": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "layer_norm over the batch": lambda h: F.layer_norm(h, h.shape),
    "group_norm of the transposed": lambda h: F.group_norm(h.t()[None], 3)[0].t(),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "convolution along the batch": lambda h: F.conv1d(h.t()[:, None], h.new_ones(1, 1, 3), padding=1)[:, 0].t(),
    "average pooling along the batch": lambda h: F.avg_pool1d(h.t(), 3, 1, 1).t(),
    "share of positive samples": lambda h: h * (h[:, :1] > 0).to(h.dtype).mean(),
    "in place by the mean": lambda h: h.sub_(h.mean(0)),
    "one sample set from another": lambda h: torch.where(torch.arange(8)[:, None] == 3, h[2], h),
    "faint: mean": lambda h: h + 1e-4 * h.mean(0),
    "faint: the next sample": lambda h: h + 1e-4 * h.roll(1, 0),
    "faint: softmax": lambda h: h + 1e-4 * h.softmax(0),
    "only where something is large": lambda h: h + F.relu(h.amax(0) - 1.0),
}
for _name, _function in COUPLED.items():
    between(f"coupled: {_name}", lambda h, x, function=_function: function(h), kinds=("samples",))


@case("coupled: behind a gate that is zero at first", kinds=("samples",), steps=4)
class ZeroGate(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h + self.gate * (h.mean(0) + h.softmax(0)))


@case("coupled: a residual branch whose last layer is zero at first", kinds=("samples",), steps=4)
class ZeroLayer(Body):
    def __init__(self, kind):
        super().__init__(kind)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return x + self.b(self.a(x).tanh().cumsum(0))


@case("coupled: from the third step on", kinds=("samples",), before=lambda body, i: setattr(body, "on", i > 1), steps=4)
class CoupledLater(Body):
    def forward(self, x):
        h = self.a(x)
        return self.b(h - h.mean(0) if self.on else h)


@case("coupled: by attention that takes the batch for the sequence", kinds=("samples",))
class BatchSecond(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.read, self.write = nn.Linear(1, 4), nn.Linear(4, 1)
        self.attention = nn.MultiheadAttention(4, 2)  # sequence first

    def forward(self, x):
        x = self.read(x[..., None])
        return self.write(self.attention(x, x, x, need_weights=False)[0])[..., 0]


@case("coupled: by a recurrent network that takes the batch for the sequence", kinds=("samples",))
class BatchInTime(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gru, self.write = nn.GRU(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x):
        return self.write(self.gru(x)[0])


stacked("coupled: batch normalisation in groups of samples", lambda: GhostNorm(WIDTH), kinds=("pictures",))


class GhostNorm(nn.BatchNorm2d):
    def forward(self, x):
        return torch.cat([super(GhostNorm, self).forward(part) for part in x.chunk(4)])


def _fold_samples(h, x):
    n, c, height, width = h.shape
    return F.instance_norm(h.reshape(1, n * c, height, width)).reshape(n, c, height, width) + h.reshape(
        n // 2, 2 * c, height, width
    ).softmax(1).reshape(n, c, height, width)


def _temporal_shift(h, x):
    """As networks for video do it, frames being neighbours in the batch."""
    clips = h.view(2, 4, *h.shape[1:])
    first = torch.cat([clips[:, 1:, :2], torch.zeros_like(clips[:, :1, :2])], 1)
    return torch.cat([first, clips[:, :, 2:]], 2).view_as(h)


between("coupled: samples folded into channels", _fold_samples, kinds=("pictures",))
between("coupled: frames of a video", _temporal_shift, kinds=("pictures",))


# ------------------------------------------------------------------------------------------- positions that are coupled

_LINE = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
_GRID = torch.stack(torch.meshgrid(_LINE, _LINE, indexing="xy"), -1).expand(2, -1, -1, -1)
SPREAD = {
    "softmax over positions": lambda h: h.flatten(2).softmax(-1).view_as(h) * 100,
    "softmax over rows": lambda h: 10 * h.softmax(-1),
    "mean over positions": lambda h: h - h.mean((2, 3), keepdim=True),
    "mean over positions, detached": lambda h: h - h.mean((2, 3), keepdim=True).detach(),
    "mean over everything": lambda h: h - h.mean(),
    "faint mean over positions": lambda h: h + 1e-4 * h.mean((2, 3), keepdim=True),
    "a pooled gate": lambda h: h * F.adaptive_avg_pool2d(h, 1).sigmoid(),
    "a pooled gate of maxima": lambda h: h * F.adaptive_max_pool2d(h, 1).sigmoid(),
    "regions pooled and enlarged": lambda h: h + F.interpolate(F.adaptive_avg_pool2d(h, 3), size=h.shape[2:]),
    "group_norm": lambda h: F.group_norm(h, 3),
    "instance_norm": lambda h: F.instance_norm(h),
    "layer_norm over maps": lambda h: F.layer_norm(h, h.shape[1:]),
    "norm over positions": lambda h: 10 * F.normalize(h, dim=-1),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "flipped": lambda h: h + h.flip(-1),
    "rolled": lambda h: h + h.roll((1, 2), (2, 3)),
    "turned": lambda h: h.transpose(-1, -2),
    "rot90": lambda h: torch.rot90(h, 1, (2, 3)),
    "cumulative sum": lambda h: h.cumsum(-1),
    "sorted": lambda h: h.sort(-1).values,
    "largest of a row": lambda h: h - h.amax(-1, keepdim=True),
    "a matrix over rows": lambda h: h @ torch.ones(SIZE, SIZE, dtype=h.dtype).tril(),
    "attention over positions": lambda h: F.scaled_dot_product_attention(*[h.flatten(2).mT] * 3).mT.reshape(h.shape),
    "a map of places": lambda h: h * _LINE,
    "a column of places": lambda h: h + _LINE[:, None],
    "places as a channel": lambda h: torch.cat([h[:, 1:], _LINE.expand(len(h), 1, SIZE, SIZE)], 1),
    "places from the size": lambda h: h * torch.arange(h.shape[-1], dtype=h.dtype) / h.shape[-1],
    "a factor from the size": lambda h: h * h.shape[-1] / 10 + h.numel() / 1000,
    "every second position": lambda h: h[:, :, ::2, 1::2],
    "cropped": lambda h: h[:, :, 1:-1, 2:],
    "a quarter of the map": lambda h: torch.cat([q for r in h.chunk(2, 2) for q in r.chunk(2, 3)], 1)[:, 6:12],
    "windows of a grid": lambda h: h.unflatten(2, (3, 4)).softmax(3).flatten(2, 3),
    "numbers reordered by reshape": lambda h: h.reshape(2, SIZE, SIZE, WIDTH).permute(0, 3, 1, 2),
    "flattened and back": lambda h: h.flatten(2).tanh().unflatten(2, (SIZE, SIZE)),
    "channels last and back": lambda h: h.permute(0, 2, 3, 1).tanh().permute(0, 3, 1, 2),
    "replicated borders": lambda h: F.pad(h, (1, 1, 1, 1), "replicate"),
    "borders of another value": lambda h: F.pad(h, (1, 1, 1, 1), value=2.0),
    "borders cut off": lambda h: F.pad(h, (-1, -1, 0, 1)),
    "enlarged": lambda h: F.interpolate(h, scale_factor=2),
    "reduced": lambda h: F.interpolate(h, size=(7, 7), mode="bilinear", align_corners=True),
    "spectrum": lambda h: torch.fft.irfft2(torch.fft.rfft2(h) * 0.5, s=h.shape[2:]),
    "grid_sample": lambda h: F.grid_sample(h, -0.9 * _GRID, align_corners=True),
    "unfold and fold": lambda h: F.fold(F.unfold(h, 3, padding=1), (SIZE, SIZE), 3, padding=1),
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h, 2)[:, :WIDTH],
    "one position set": lambda h: torch.where(_LINE > 0.9, h[..., :1], h),
    "one position for all": lambda h: h + h[:, :, 3:4, 5:6],
}
for _name, _function in SPREAD.items():
    between(f"spread: {_name}", lambda h, x, function=_function: function(h), kinds=("positions",))


@case("spread: a learned map", kinds=("positions",))
class LearnedMap(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.map, self.row = nn.Parameter(torch.randn(1, WIDTH, SIZE, SIZE)), nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        return self.b((self.a(x) + self.map).tanh() * self.row)


@case("spread: squeeze and excite", kinds=("positions",))
class Excite(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.down, self.up = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(2, WIDTH, 1)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h * self.up(self.down(h.mean((2, 3), keepdim=True)).relu()).sigmoid())


@case("spread: behind a gate that is zero at first", kinds=("positions",), steps=4)
class ZeroGateMap(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h + self.gate * h.mean((2, 3), keepdim=True))


# ---------------------------------------------------------------------------------------- operations that no rule knows


def operation(name, forward, backward):
    """An operation of torch.library with a gradient; `backward` is given the gradient and the input."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return forward(x).clone()

    found = torch.library.custom_op(f"backdrop_sound::{name}", run, mutates_args=())
    found.register_fake(lambda x: torch.empty_like(x))
    found.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return found


def _largest_gradient(grad, x):
    return grad / x.abs().max() - (grad * x).sum() / x.abs().max() ** 2 * (x.abs() == x.abs().max()) * x.sign()


OPERATIONS = {
    "each number alone": operation("alone", lambda x: x.tanh(), lambda grad, x: grad * (1 - x.tanh() ** 2)),
    "less the mean of all": operation("less", lambda x: x - x.mean(0), lambda grad, x: grad - grad.mean(0)),
    "coupled on the way back alone": operation("back", lambda x: 2 * x, lambda grad, x: 2 * grad - grad.mean(0)),
    "coupled on the way forward alone": operation("forth", lambda x: x - x.mean(0), lambda grad, x: grad),
    "by the largest": operation("largest", lambda x: x / x.abs().max(), _largest_gradient),
    "faintly coupled": operation("faint", lambda x: x + 1e-4 * x.mean(0), lambda g, x: g + 1e-4 * g.mean(0)),
    "the next sample": operation("next", lambda x: x + x.roll(1, 0), lambda grad, x: grad + grad.roll(-1, 0)),
    "by the size of the batch": operation("size", lambda x: x / len(x), lambda grad, x: grad / len(x)),
    "the sign of the gradient": operation("sign", lambda x: x * 1.0, lambda grad, x: grad.sign()),
}
for _name, _function in OPERATIONS.items():
    between(f"custom operation: {_name}", lambda h, x, function=_function: function(h.tanh()))


@case("custom operation: behind a gate that is zero at first", kinds=("samples",), steps=4)
class GatedOperation(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h + self.gate * OPERATIONS["less the mean of all"](h))


# ------------------------------------------------------------------------------------------------------ life of a model


@case("a layer used twice", skips=True)
class Twice(Body):
    def forward(self, x):
        return self.b(self.a(self.a(x).tanh()).tanh())


@whole("a layer used before and behind the mask")
class AcrossMask(Masked):
    def forward(self, x):
        return self.a(self.mask(self.b(self.a(x).tanh())).tanh())


@whole("a mask used twice")
class MaskTwice(Masked):
    def forward(self, x):
        return self.mask(self.b(self.mask(self.a(x)).tanh())) + self.c(x)


@whole("two masks on one trunk")
class TwoMasks(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.other = mask_for(kind)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.mask(self.b(h)) * self.other(self.c(h))


@whole("two masks in a row")
class Chain(TwoMasks):
    def forward(self, x):
        return self.c(self.other(self.b(self.mask(self.a(x)).tanh())).tanh())


@whole("a mask in a branch", kinds=EITHER)
class Branch(Masked):
    def forward(self, x):
        return x + self.c(self.mask(self.b(self.a(x).tanh())))


@whole("a mask in a loop")
class Loop(Masked):
    def forward(self, x):
        for _ in range(3):
            x = self.mask(self.b(self.a(x).tanh()))
        return self.c(x)


def _new_p(model, i):
    model.mask.p = (0.75, 0.0, 0.4, 0.9)[i]


@whole("a p that changes", before=_new_p, steps=4)
def _changing_p(kind):
    return Masked(kind)


@whole("a p that is a tensor and changes", before=_new_p, steps=4)
class TensorP(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.mask = Backdrop2d(torch.tensor(0.9)) if kind == "positions" else Backdrop(torch.tensor(0.75))


@whole("training and eval in turns", before=lambda model, i: model.train(i % 2 == 0), steps=4)
def _in_turns(kind):
    return nn.Sequential(layer(kind), norm(kind), nn.Dropout(0.0), layer(kind), mask_for(kind), nn.Tanh(), layer(kind))


@whole("a mask that is in eval alone", before=lambda model, i: model.mask.train(i != 1), kinds=EITHER)
def _mask_in_eval(kind):
    return Masked(kind)


@whole("a mask that was inserted", skips=True)
def _inserted(kind):
    return insert(nn.Sequential(layer(kind), nn.ReLU(inplace=True), layer(kind), nn.Tanh()), {"2": mask_for(kind)})


@whole("masks that were inserted, one into a block", kinds=MAPS)
def _inserted_twice(kind):
    model = nn.Sequential(Residual(kind), nn.Tanh(), Residual(kind), layer(kind))
    return insert(model, {"0.a": mask_for(kind), "2": mask_for(kind)})


@case("tied weights", skips=True, ways=WAYS)
class Tied(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.b.weight = self.a.weight


@case("tied weights, transposed", kinds=EITHER)
class Transposed(Body):
    def forward(self, x):
        h = self.b(self.a(x).tanh())
        if self.kind == "samples":
            return F.linear(h, self.a.weight.t())
        return F.conv2d(h, self.a.weight.transpose(0, 1), padding=1)


@whole("weights tied across the mask", kinds=EITHER)
class TiedAcross(Masked):
    def __init__(self, kind):
        super().__init__(kind)
        self.c.weight = self.a.weight


def _freeze(body, i):
    body.a.requires_grad_(i % 2 == 1)


def _freeze_all(body, i):
    body.requires_grad_(i == 1)


add("a layer frozen and trained in turns", Body, before=_freeze, steps=4, ways=WAYS)
add("a layer frozen and trained, inputs without a gradient", Body, before=_freeze, steps=4, wanted=False, skips=True)
add("all layers frozen and trained in turns", Body, before=_freeze_all, kinds=EITHER)
add(
    "biases trained alone",
    Body,
    before=lambda b, i: b.a.weight.requires_grad_(False),
    wanted=False,
    skips=True,
    kinds=EITHER,
)


def _new_size(kind, i):
    shape = list(SHAPES[kind])
    shape[0] = (8, 5, 1, 8, 3)[i]
    return (numbers(*shape, seed=i),)


def _new_map(kind, i):
    return (numbers(2, WIDTH, *((12, 12), (9, 15), (16, 8), (12, 12))[i], seed=i),)


add("batches of several sizes", Body, inputs=_new_size, steps=5, ways=WAYS)
add("maps of several sizes", Body, kinds=("positions",), inputs=_new_map, steps=4, skips=True)
add("a batch of one", Body, inputs=lambda kind, i: (numbers(1, *SHAPES[kind][1:], seed=i),), ways=WAYS)
add("a batch of two", Body, inputs=lambda kind, i: (numbers(2, *SHAPES[kind][1:], seed=i),), kinds=EITHER)
add("an axis more", Body, kinds=("samples",), inputs=lambda kind, i: (numbers(BATCH, 3, WIDTH, seed=i),), skips=True)


def _strided(view):
    """The tensors of a step keep the strides that they have here."""
    return lambda kind, i: tuple(map(view, batch(kind, i)))


def _read(view):
    return lambda model, inputs, i: model(*map(view, inputs))


def _channels_last(x):
    return x.to(memory_format=torch.channels_last)


add(
    "channels last",
    Body,
    kinds=MAPS,
    inputs=_strided(_channels_last),
    call=_read(_channels_last),
    skips=True,
    ways=WAYS,
)
add("channels last weights", lambda kind: Body(kind).to(memory_format=torch.channels_last), kinds=("positions",))
add(
    "transposed inputs",
    Body,
    call=_read(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    skips=True,
    kinds=EITHER,
)
add("every second of the inputs", Body, call=_read(lambda x: x.repeat_interleave(2, 0)[::2]), skips=True, kinds=EITHER)
add("expanded inputs", Body, call=_read(lambda x: x[:1].expand_as(x)), skips=True, kinds=EITHER)
add("a view of the inputs", Body, call=_read(lambda x: F.pad(x, (1, 0))[..., 1:]), skips=True, kinds=EITHER)

add("zero gradients", Body, upstream=lambda i: 0.0, kinds=EITHER)
add("zero gradients in some steps", Body, upstream=lambda i: float(i % 2), steps=4, ways=WAYS)
add("most gradients zero", Body, head=lambda kind: FewRows())
add("only some of the output is used", Body, head=lambda kind: FirstChannel(), kinds=EITHER)


class FewRows(nn.Module):
    def forward(self, x):
        return x[:2] * (x[:2] > 0)


class FirstChannel(nn.Module):
    def forward(self, x):
        return x[:, 0].tanh()


def _functional_call(model, inputs, i):
    return torch.func.functional_call(model, {k: 1.5 * v for k, v in model.named_parameters()}, tuple(inputs))


def _two_forwards(model, inputs, i):
    return model(*inputs) * model(*(x.flip(0) for x in inputs))


def _one_without_gradients(model, inputs, i):
    with torch.no_grad():
        model(*inputs)
    return model(*inputs)


def _checkpointed(reentrant):
    return lambda model, inputs, i: checkpoint(model, *inputs, use_reentrant=reentrant)


add("functional_call", Body, call=_functional_call, kinds=EITHER, ways=WAYS)
add("two forwards and one backward", Body, call=_two_forwards, skips=True, ways=WAYS)
add("two forwards with a buffer that counts", WarmUp, call=_two_forwards)
add("a forward without gradients first", Body, call=_one_without_gradients, kinds=EITHER)
add("a checkpoint around the model", Body, call=_checkpointed(False), ways=WAYS)
add("a reentrant checkpoint around the model", Body, call=_checkpointed(True), own=True, kinds=EITHER, ways=WAYS)
add("gradients accumulated", Body, accumulate=True, skips=True, ways=WAYS)


@case("a checkpoint within the body")
class Checkpointed(Body):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=False).tanh())


@case("a reentrant checkpoint within the body", kinds=EITHER)
class CheckpointedReentrant(Body):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=True).tanh())


@case("a checkpoint with what is kept for the loss", loss=lambda body: body.penalty, kinds=EITHER)
class CheckpointedPenalty(Body):
    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        self.penalty = h.square().mean()
        return self.b(h)


@case("a graph break", ways=WAYS)
class Break(Body):
    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h)


@case("a branch on the data")
class Decides(Body):
    def forward(self, x):
        h = self.a(x)
        return self.b(h.tanh() if h.sum() > 0 else h.relu())


@case("code that torch is told not to follow", kinds=EITHER)
class NotFollowed(Body):
    @torch.compiler.disable
    def hidden(self, x):
        return self.a(x).tanh()

    def forward(self, x):
        return self.b(self.hidden(x))


@case("the world in numpy", kinds=("samples",))
class Numpy(Body):
    def forward(self, x):
        factor = torch.from_numpy(x.detach().numpy().std(0))
        return self.b(self.a(x) * factor)


# ----------------------------------------------------------------------------------------- parameters in unusual places


def _outside(body):
    body.outside = [torch.full((), 0.5, dtype=torch.float64, requires_grad=True)]


@case("a tensor with a gradient in a list", extra=lambda body: {"outside": body.outside[0]}, kinds=EITHER)
class Listed(Body):
    def __init__(self, kind):
        super().__init__(kind)
        _outside(self)

    def forward(self, x):
        return self.b(self.a(x).tanh() * self.outside[0])


@case("a tensor with a gradient in a closure", extra=lambda body: {"outside": body.outside()}, kinds=EITHER, ways=WAYS)
class Enclosed(Body):
    def __init__(self, kind):
        super().__init__(kind)
        value = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
        self.outside = lambda: value

    def forward(self, x):
        return self.b(self.a(x).tanh() * self.outside())


GLOBAL = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
between("a global tensor with a gradient", lambda h, x: h * GLOBAL, extra=lambda body: {"global": GLOBAL}, kinds=EITHER)


def _weights_from_elsewhere(body, i):
    """A network that makes the weights of another, outside of the model."""
    if not body.source:
        body.source.append(torch.full((WIDTH, WIDTH), 0.1, dtype=torch.float64, requires_grad=True))
    body.made = (body.source[0] * (i + 1)).tanh()


@case(
    "weights made by another network",
    before=_weights_from_elsewhere,
    extra=lambda body: {"source": body.source[0]},
    kinds=("samples",),
    ways=WAYS,
)
class Made(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.source, self.made = [], None

    def forward(self, x):
        return self.b((self.a(x) @ self.made).tanh())


@case("weights made within", kinds=EITHER)
class Hyper(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, WIDTH * WIDTH)

    def forward(self, x):
        weight = self.make(self.code).view(WIDTH, WIDTH)
        h = self.a(x).tanh()
        return self.b(F.linear(h, weight) if self.kind == "samples" else F.conv2d(h, weight[..., None, None]))


@case("weights made from each sample", kinds=("samples",))
class HyperEach(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.make = nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, x):
        weight = self.make(x).view(-1, WIDTH, WIDTH)
        return self.b(torch.bmm(weight, self.a(x)[:, :, None])[:, :, 0].tanh())


@case("parameters in lists and dictionaries", kinds=EITHER)
class Collections(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(2)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(()))})

    def forward(self, x):
        h = self.a(x)
        for shift in self.shifts:
            h = (h + shift).tanh()
        return self.b(h * self.scales["a"])


@case("a parameter that is not used", kinds=EITHER)
class Unused(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.spare = nn.Linear(2, 2)


@case("a normalisation for its statistics alone")
class Statistics(Body):
    """Nobody uses its result, but it keeps running statistics of what passes."""

    def __init__(self, kind):
        super().__init__(kind)
        self.norm = norm(kind)

    def forward(self, x):
        self.norm(self.a(x))
        return self.b(x).tanh()


@case("running statistics that are read behind their normalisation")
class ReadsStatistics(Statistics):
    def forward(self, x):
        y = self.norm(self.a(x))
        return self.b(y * (1 + self.norm.running_mean.sum())).tanh()


@case("rectifiers with random slopes", own=True, kinds=("positions",))
class RandomSlopes(Body):
    def forward(self, x):
        return self.b(F.rrelu(self.a(x), training=True))


@case("rectifiers with a slope for each channel, as many as pixels", kinds=("positions",), skips=True)
class Slopes(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.slope = nn.PReLU(WIDTH)

    def forward(self, x):
        return self.slope(self.a(x)[..., :WIDTH])


@case("a convolution with weights of its own for each sample", kinds=("positions",))
class OwnWeights(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, 1, 3, 3))

    def forward(self, x):
        joined = x.reshape(1, -1, *x.shape[2:])
        return F.conv2d(joined, self.weight, padding=1, groups=len(self.weight)).view_as(x)


@case("a lazy layer", own=True, kinds=("samples",), ways=WAYS)
class Lazy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b = nn.LazyLinear(7), nn.LazyLinear(WIDTH)

    def forward(self, x):
        return self.b(self.a(x).tanh())


@case("an expert for each sample", kinds=("samples",))
class Experts(Body):
    """Each sample goes to one of two layers, chosen by the data."""

    def forward(self, x):
        y = torch.zeros_like(x)
        for number, expert in enumerate((self.a, self.b)):
            chosen = (x[:, 0] > 0) == bool(number)
            y[chosen] = expert(x[chosen])
        return y


# ----------------------------------------------------------------------------------------------- numbers that are drawn


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
