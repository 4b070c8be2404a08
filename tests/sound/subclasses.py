"""Subclasses of known layers with a forward of their own, and functional calls."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from sound.comparing import EITHER, MAPS, WAYS, WIDTH, Masked, add, layer, whole


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
