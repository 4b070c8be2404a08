"""Arguments of all kinds, and inputs that broadcast."""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import nn

from sound.comparing import (
    BATCH,
    BOTH,
    EITHER,
    SHAPES,
    SIZE,
    WAYS,
    WIDTH,
    Body,
    Masked,
    add,
    batch,
    between,
    case,
    numbers,
    whole,
)


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
