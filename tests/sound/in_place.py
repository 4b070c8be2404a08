"""Operations in place, on shared values and on views."""

import functools
import operator

import torch
import torch.nn.functional as F
from torch import nn

from sound.comparing import EITHER, SHAPES, WAYS, Body, Masked, add, between, case, whole

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
