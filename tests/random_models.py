"""Random models with masks, as source code that a person could have written: what a test draws is what it prints.

A program is put together from the pieces below, each tried at once on a tensor: what torch refuses (sizes that do not
fit, a view that may not be changed in place) is left out. In a piece `x` is the value so far and {n}, {c}, {h}, {w} are
its sizes; other braces are drawn (see `fields`); what stands in `...`, or before |, is made once, in `__init__`.
"""

import linecache
import re
import textwrap
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from backdrop import Backdrop, Backdrop1d, Backdrop2d

__all__ = ["Backdrop", "Backdrop1d", "Backdrop2d", "checkpoint", "examples", "parametrizations"]


class RandomModel(nn.Module):
    """What all drawn models have: a number that changes between steps, one that counts them, a value for the loss."""

    def __init__(self):
        super().__init__()
        self.alpha, self.steps, self.seen = 0.5, 0, None


class SameConv(nn.Conv2d):
    """Pads as needed for the input's size."""

    def forward(self, x):
        (h, w), (kh, kw), (sh, sw) = x.shape[-2:], self.kernel_size, self.stride
        high, wide = max((-(-h // sh) - 1) * sh + kh - h, 0), max((-(-w // sw) - 1) * sw + kw - w, 0)
        return super().forward(F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2]))


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.flatten(1).std(1).view(-1, 1, 1, 1) + 0.1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class CausalConv(nn.Conv2d):
    """Sees nothing to the right of its place or below."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = nn.Buffer(torch.ones_like(self.weight).tril().flip(3))

    def forward(self, x):
        self.weight.data *= self.seen
        return super().forward(x)


class ConvNormAct(nn.Conv2d):
    def __init__(self, inputs, outputs, *args):
        super().__init__(inputs, outputs, *args)
        self.norm, self.act = nn.BatchNorm2d(outputs, eps=0.1).eval(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(super().forward(x)))


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x), inplace=True)


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.less, self.more = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return self.more(self.less(x.mean((2, 3), keepdim=True)).relu_()).sigmoid()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Square(torch.autograd.Function):
    """The gradient is not that of the square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].tanh()


class Clipped(torch.autograd.Function):
    """The gradient of the batch as a whole is kept small."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.norm())


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, left, right):
        return left - 2 * right


@torch.no_grad()
def without_gradient(x):
    return x * 2


@torch.compiler.disable
def untraced(x):
    return x.cos()


def doubled(module, args, output):
    return output * 2


def halved(module, inputs, outputs):
    return tuple(grad / 2 for grad in inputs)


def seeded(number):
    return torch.Generator().manual_seed(number)


# How a person may write what a model is made of.
CONVOLUTIONS = """
x = `nn.Conv2d({c}, {og}, ({k}, {k2}), {s}, {pad}, {d}, {g}, bias={b})`(x)
x = `nn.Conv2d({c}, {o}, 3, padding=1)`(x)
x = `nn.Conv2d({c}, {o}, {k}, padding='same')`(x)
x = `nn.Conv2d({c}, {o}, 3, padding=1, padding_mode='{mode}')`(x)
x = F.conv2d(x, `nn.Parameter(torch.randn({o}, {c}, {k}, {k2}) / 2)`, None, {s}, {pad}, {d})
x = F.conv2d(x, weight=`nn.Parameter(torch.randn({o}, {c}, 3, 3) / 2)`, bias=`nn.Parameter(torch.randn({o}))`)
x = torch.conv2d(x, `nn.Parameter(torch.randn({c}, 1, 3, 3) / 2)`, padding=({pad}, {k}), groups={C})
x = F.conv2d(x, x.new_ones({c}, 1, 3, 3) / 9, padding=1, groups={c})
x = `SameConv({c}, {o}, {k}, {s})`(x)
x = `StandardisedConv({c}, {o}, 3, {s}, 1)`(x)
x = `CausalConv({c}, {o}, 3, padding=1)`(x)
x = `ConvNormAct({c}, {o}, 3, {s}, 1)`(x)
x = `parametrizations.weight_norm(nn.Conv2d({c}, {o}, 3, padding=1))`(x)
x = `nn.Conv1d({c}, {o}, 3, padding=1)`(x.flatten(2)).unflatten(2, ({h}, {w}))
x = `nn.Conv1d({c}, {o}, 3, padding=1)`(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, {h})).transpose(1, 2)
x = `nn.Conv3d(1, 1, 3, padding=1)`(x.unsqueeze(1)).squeeze(1)
x = `nn.ConvTranspose2d({c}, {o}, {k}, {s}, padding={tp})`(x)
x = F.conv_transpose2d(x, `nn.Parameter(torch.randn({c}, {o}, {k}, {k}))`, stride={s}, output_padding={s} - 1)
x = `nn.Linear({c} * 9, {o})`(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2).unflatten(2, ({h}, {w}))
x = F.conv2d(x.reshape(1, -1, {h}, {w}), x.mean((2, 3)).view(-1, 1, 1, 1), groups={N} * {c}).view_as(x)
self.again{u} = nn.Conv2d({c}, {c}, 3, padding=1) | x = self.again{u}(self.again{u}(x).relu())
"""

POOLING = """
x = F.max_pool2d(x, {k}, {s}, {tp}, ceil_mode={b})
x = `nn.MaxPool2d({k}, {s}, {tp}, {d}, ceil_mode={b})`(x)
x = `nn.AvgPool2d({k}, {s}, {tp}, ceil_mode={b}, count_include_pad={b2})`(x)
x = F.avg_pool2d(x, ({k}, {k2}), stride={s}, ceil_mode={b}, divisor_override={k})
x = F.max_pool2d(x, 2, return_indices=True)[0]
x = F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape)
x = F.adaptive_avg_pool2d(x, ({h} // 2, {k2}))
x = `nn.AdaptiveMaxPool2d({k})`(x)
x = x.reshape({N}, {C}, {h} // 2, 2, {w} // 2, 2).mean((3, 5))
x = x.unfold(2, {k}, {s}).mean(-1)
x = F.lp_pool2d(x.abs() + 0.1, 2, {k})
"""

NORMS = """
x = `nn.BatchNorm2d({c}).eval()`(x)
x = F.batch_norm(x, `nn.Buffer(torch.randn({c}))`, `nn.Buffer(torch.rand({c}) + 0.5)`, eps=0.1)
x = `nn.LayerNorm({c}, eps=0.1)`(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
x = F.layer_norm(x.movedim(1, -1), ({c},), `nn.Parameter(torch.randn({c}))`, eps=0.1).movedim(-1, 1)
x = x * (x.square().mean(1, keepdim=True) + 0.1).rsqrt()
x = F.normalize(x, dim=1, eps=0.1)
x = F.local_response_norm(x, 3)
x = `NormAct({c}).eval()`(x)
"""

# A copy for group_norm: of inputs that want no gradient and lie channels last torch 2.13 crashes in backward.
STATISTICS = """
x = `nn.BatchNorm2d({c}, eps=0.1)`(x)
x = `nn.BatchNorm2d({c}, eps=0.1, momentum=None, affine={b})`(x)
x = `nn.BatchNorm2d({c}, eps=0.1, track_running_stats=False)`(x)
x = F.batch_norm(x, None, None, training=True, eps=0.1)
x = `NormAct({c}, eps=0.1)`(x)
x = `nn.GroupNorm({g}, {c}, eps=0.1)`(x.clone(memory_format=torch.contiguous_format))
x = `nn.InstanceNorm2d({c}, eps=0.1, affine={b}, track_running_stats={b2})`(x)
x = `nn.LayerNorm([{c}, {h}, {w}])`(x)
x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True) + 0.1).sqrt()
x = x - x.mean((2, 3), keepdim=True)
x = x / (1 + x.norm())
x = x - x.amax((2, 3), keepdim=True)
"""

POINTWISE = """
x = x.relu()
x = torch.relu(x)
x = F.relu(x)
x = `nn.ReLU()`(x)
x = x.clamp(min=0)
x = torch.sigmoid(x)
x = x.tanh()
x = `nn.GELU()`(x)
x = F.leaky_relu(x, self.alpha)
x = `nn.SiLU()`(x)
x = `nn.PReLU({c})`(x)
x = `nn.Dropout(0.0)`(x)
x = F.dropout(x, 0.0, self.training)
x = torch.where(x > 0, x, 0.1 * x)
x = x * (x > 0.3)
x = x.masked_fill(x < -1, -1.0)
x = torch.log1p(x.abs())
x = x.square() / (1 + x.square())
x = 1 - x
x = x / 3 + 0.5
x = self.alpha * x + (1 - self.alpha) * x.tanh()
x = torch.clamp(x, -self.alpha, self.alpha)
x = x * `nn.Parameter(torch.randn({shape}))`
x = x + `nn.Parameter(torch.randn({shape}))`
x = torch.add(x, `nn.Buffer(torch.randn({shape}))`, alpha=2)
x = torch.addcmul(x, x.tanh(), `nn.Buffer(torch.randn({shape}))`, value=0.5)
x = torch.where(`nn.Buffer(torch.rand({shape}) > 0.5)`, x, torch.zeros_like(x))
x = `nn.Identity()`(x).contiguous()
x = x.to(torch.float64).clone()
x = torch.lerp(x, x.sin(), 0.3)
"""

CHANNELS = """
x = torch.cat([x, x.relu()], 1)
x = torch.cat((x[:, :1], `nn.Conv2d({c}, {o}, 3, padding=1)`(x)), dim=1)
a, b = x.chunk(2, 1); x = a * b.sigmoid()
a, b = torch.split(x, [1, {c} - 1], dim=1); x = torch.cat([b, a + 1], 1)
x = F.glu(x, 1)
x = torch.cat(x.split({cut}, 1)[::-1], 1)
x = torch.stack(x.unbind(1), 1)
x = torch.stack([x, -x], 2).flatten(1, 2)
x = x.view({N}, {g}, {c} // {g}, {H}, {W}).transpose(1, 2).reshape({n}, {C}, {h}, {W})
x = x.reshape({N}, {g}, -1, {H}, {W}).mean(2)
x = x[:, {cut}:]
x = x[:, ::2]
x = x.narrow(1, 0, {cut})
x = x[:, [{c} - 1, 0]]
x = x.flip(1)
x = x.roll(1, 1)
x = x.cumsum(1)
x = x.softmax(1)
x = F.log_softmax(x, dim=1)
x = x - x.mean(1, keepdim=True)
x = x * x.amax(1, keepdim=True).sigmoid()
x = torch.logsumexp(x, 1, keepdim=True)
x = torch.einsum('nchw,cd->ndhw', x, `nn.Parameter(torch.randn({c}, {o}))`)
x = torch.einsum('n...hw,...->nhw', x, `nn.Parameter(torch.randn({c}))`).unsqueeze(1)
x = `nn.Bilinear({c}, {c}, {o})`(x.movedim(1, -1), x.movedim(1, -1).tanh()).movedim(-1, 1)
x = x * F.cosine_similarity(x, `nn.Parameter(torch.randn({c}, 1, {w}))`, eps=0.1).unsqueeze(1)
x = F.pairwise_distance(x.movedim(1, -1), `nn.Parameter(torch.randn({c}))`, eps=0.1, keepdim=True).movedim(-1, 1)
x = `nn.Embedding(5, {o})`(x.mean(1).mul(2).round().long() % 5).permute(0, 3, 1, 2) + x.mean(1, keepdim=True)
x = `nn.Linear({c}, {o})`(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
x = (x.transpose(1, 3) @ `nn.Parameter(torch.randn({c}, {o}))`).transpose(1, 3)
x = x[:, :1].expand(-1, {o}, -1, -1)
x = x.repeat(1, 2, 1, 1)
x = x.repeat_interleave(2, 1)
x = x.sort(1).values
x = x.flatten(2).transpose(1, 2).reshape({n}, {h}, {w}, {c}).permute(0, 3, 1, 2)
x = x.unsqueeze(0).squeeze(0)
x = x.permute(1, 0, 2, 3).permute(1, 0, 2, 3)
"""

SPACE = """
x = x[:, :, 1:, :-1]
x = x[..., ::2, ::2]
x = x[:, :, {k}:{k} + 4]
x = x.narrow(3, 1, {w} - 2)
x = F.pad(x, ({k}, {pad}, {tp}, {k2}))
x = F.pad(x, (1, -1, 0, {k}), value=0.7)
x = F.pad(x, ({k}, 1, 0, {k2}), mode='{mode}')
x = F.pad(x, (1, 0))[..., :-1]
x = `nn.ZeroPad2d(({k}, 0, 1, {k2}))`(x)
x = F.interpolate(x, scale_factor=2)
x = F.interpolate(x, size=({h} + 3, {w} - 1), mode='{interpolation}')
x = F.interpolate(x, size=({h} * {k}, {w} + 2), mode='bilinear', align_corners={b})
x = `nn.LSTM({c}, {c}, {k}, batch_first=True, bidirectional={b})`(x.flatten(2).mT)[0].mT.unflatten(2, ({h}, {w}))
x = `nn.GRU({c}, {o}, batch_first=True)`(x.permute(0, 2, 3, 1).flatten(0, 1))[0].unflatten(0, (-1, {h})).movedim(-1, 1)
x = x + `nn.LSTM({c}, {c}, {k}, batch_first=True)`(x.flatten(2).mT)[1][{tp}][-1].view({n}, {c}, 1, 1)
x = x + `nn.LSTM({c}, {c}, {k})`(x.flatten(2).permute(2, 0, 1))[1][{tp}][-1].view({n}, {c}, 1, 1)
y = x.mean(3).mT.flatten(0, 1); x = x + `nn.GRUCell({c}, {c})`(y, y.tanh()).unflatten(0, ({N}, {h})).mT[..., None]
x = `nn.Upsample(scale_factor=1.5, mode='bilinear', align_corners={b})`(x)
x = F.pixel_shuffle(`nn.Conv2d({c}, 4, 1)`(x), 2)
x = F.pixel_unshuffle(x, 2)
x = torch.cat([x[..., ::2, ::2], x[..., 1::2, 1::2]], 1)
x = x.flip({axis})
x = x.roll({k}, {axis})
x = x.roll((1, -1), (2, 3))
x = x.transpose(2, 3)
x = torch.rot90(x, 1, (2, 3))
x = x.cumsum({axis})
x = x.softmax({axis})
x = x.tril()
x = x[:, :, 1:] - x[:, :, :-1]
x = x * torch.arange({W})
x = torch.where(torch.arange({W}) > 2, x, 0.5)
x = torch.cat([x, torch.linspace(0, 1, {W}).expand({N}, 1, {H}, {W}).to(x)], 1)
x = x / x.shape[{axis}]
x = x @ `nn.Parameter(torch.randn({w}, {w}) / 3)`
x = `nn.Linear({h}, {h})`(x.transpose(2, 3)).transpose(2, 3)
x = x[:, :, torch.arange({h} - 1, -1, -1)]
x = x.index_select({axis}, torch.tensor([0, 2, 1]))
x = F.grid_sample(x, F.affine_grid(torch.eye(2, 3).to(x).expand({N}, 2, 3) * 0.8, x.shape, False), align_corners=False)
x = x + `nn.Linear({c}, {c})`(x.mean((2, 3)))[:, :, None, None]
x = x * `SqueezeExcite({c})`(x)
x = x * F.adaptive_avg_pool2d(x, 1).sigmoid()
y = x.flatten(2).transpose(1, 2); x = (torch.softmax(y @ y.mT, -1) @ y).mT.unflatten(2, ({h}, {w}))
y = x.flatten(2).mT; x = F.scaled_dot_product_attention(y, y.tanh(), y).mT.reshape({n}, {c}, {h}, {w})
y = x.flatten(2).mT; x = `nn.MultiheadAttention({c}, 1, batch_first={b})`(y, y, y)[0].mT.unflatten(2, ({h}, {w}))
x = torch.fft.fft2(x).real / 5
x = torch.einsum('nchw,nchv->ncwv', x, x) / {h}
"""

SAMPLES = """
x = x - x.mean(0, keepdim=True)
x = x.softmax(0)
x = x.roll(1, 0)
x = x.flip(0)
x = x[torch.arange({N} - 1, -1, -1)]
x = x + x[:1]
x = x + x[-1] * 1e-4
x = x + `nn.Parameter(torch.zeros(()))` * x.mean(0)
x = x.cumsum(0)
x = `nn.RNN({c}, {c})`(x.flatten(2).mT)[0].mT.unflatten(2, ({h}, {w}))
x = x + `nn.Parameter(torch.randn(1, {c}, 1, {w}))`.repeat({N}, 1, 1, 1)
x = F.conv2d(x, `nn.Parameter(torch.randn({c}, 1, 3, 3))`.repeat({N}, 1, 1, 1)[:{c}], padding=1, groups={c})
x = x / {N}
x = x / x.numel()
x = x / (0.1 + x.amax(0))
x = x.sort(0).values
x = x + `nn.Parameter(torch.randn({n}, 1, 1, 1))`
x = x * `nn.Buffer(torch.randn({n}, {c}, {h}, {w}))`
x = x * torch.arange({N}).view(-1, 1, 1, 1)
x = torch.einsum('nchw,mn->mchw', x, `nn.Parameter(torch.randn({n}, {n}))`)
x = `nn.Conv2d({n}, {n}, 3, padding=1)`(x.transpose(0, 1)).transpose(0, 1)
x = `nn.Conv3d(1, 1, 3, padding=1)`(x.transpose(0, 1).unsqueeze(1)).squeeze(1).transpose(0, 1)
x = x.reshape({n}, -1).t().reshape({n}, {c}, {h}, {w})
x = x.view(2, -1, {c}, {h}, {w}).mean(0, keepdim=True).expand(2, -1, -1, -1, -1).reshape(x.shape)
x = x.tile(2, 1, 1, 1)[:{n}] + x.repeat_interleave(2, 0)[:{n}]
x = torch.stack([x[i] * (i + 1) for i in range(len(x))])
x = torch.cat([x[1:], x[:1]])
x = torch.cdist(x.flatten(1), x.flatten(1) + 1).mean(1).view(-1, 1, 1, 1) * x
x = torch.vmap(torch.tanh)(x)
"""

IN_PLACE = """
x.relu_()
x = x.relu_()
F.relu(x, inplace=True)
F.relu(x, True)
x = `nn.LeakyReLU(0.1, inplace=True)`(x)
F.leaky_relu_(x, 0.2)
torch.relu_(x)
x += 1
x *= self.alpha
x.add_(`nn.Parameter(torch.randn({shape}))`)
x = x.mul_(2).sub_(0.5)
x.clamp_(min=0)
F.dropout(x, 0.0, inplace=True)
x[:, :1] += 1
x[:, 0] = 0
x[..., 0] = 1.0
x[0] = 0.5
x[:, :, 1:3].mul_(2)
x[:, :1] = x[:, -1:].tanh()
x[x > 0.5] = 0.5
y = x; x = x + 1; y.mul_(2); x = x + y
y = x; x.mul_(2); x = x + y
y = x.sin(); y.mul_(x); x = y
y = x.view({n}, -1); y.mul_(2)
y = x.transpose(1, 2); y.add_(1)
y = x.clone(); y[:, :1] += x[:, :1]; x = y
y = torch.zeros_like(x); y[:, :, 1:] = x[:, :, :-1]; x = y
y = x.new_empty(x.shape); y.copy_(x); x = y
a, b = x[:, :1], x[:, -1:]; a.mul_(2); b.add_(1)
x.copy_(x * 2)
x.masked_fill_(x < 0, 0.0)
x.index_add_(1, torch.tensor([0]), x[:, -1:].tanh())
with torch.no_grad(): x.mul_(2)
x.detach().mul_(2)
x.data.add_(1)
x.zero_()
"""

AUTOGRAD = """
x = x.detach()
x = x + x.detach()
x = x.data * 2
x = x - x.detach().mean((2, 3), keepdim=True)
x = x + (x.mul(4).round().div(4) - x).detach()
x = Reverse.apply(x, self.alpha)
x = x + Reverse.apply(x, 0.7)
x = Square.apply(x)
x = Clipped.apply(x)
x, _ = Both.apply(x)
x = x + sum(Both.apply(x))
x = without_gradient(x)
x.register_hook(lambda g: g * 2)
x.register_hook(lambda g: g / (1 + g.norm()))
self.hooked{u} = nn.Conv2d({c}, {o}, 1); self.hooked{u}.register_forward_hook(doubled) | x = self.hooked{u}(x)
self.hooked{u} = nn.Tanh(); self.hooked{u}.register_full_backward_hook(halved) | x = self.hooked{u}(x)
x = checkpoint(`nn.Conv2d({c}, {o}, 3, padding=1)`, x, use_reentrant=False)
if x.requires_grad: x = checkpoint(`nn.Conv2d({c}, {c}, 3, padding=1)`, x, use_reentrant=True)
torch.set_grad_enabled(False); x = `nn.Conv2d({c}, {o}, 3, padding=1)`(x); torch.set_grad_enabled(True)
x = F.conv2d(x, `nn.Parameter(torch.randn({o}, {c}, 3, 3))`.detach())
"""

STATE = """
x = x * self.alpha
x = x.relu() if self.alpha > 0.6 else x.tanh()
x = x * 0.5 if {W} > 8 else x * 2
self.steps += 1; x = x * (1 + 0.1 * self.steps)
self.calls{u} = nn.Buffer(torch.zeros(())) | self.calls{u} += 1; x = x * self.calls{u}
self.calls{u} = nn.Buffer(torch.zeros(1)) | self.calls{u} = self.calls{u} + 1; x = x + self.calls{u}
self.mean{u} = nn.Buffer(torch.zeros({c}, 1, 1)) | self.mean{u}.lerp_(x.detach().mean((0, 2, 3))[:, None, None], 0.1)
self.mean{u} = nn.Buffer(torch.zeros(())) | x = x - self.mean{u}; self.mean{u}.add_(x.detach().mean())
self.mean{u} = nn.Buffer(torch.zeros(1, {c}, 1, 1)) | self.mean{u}[:] = x.detach().mean(); x = x - self.mean{u}
self.table{u} = nn.Buffer(torch.randn({c}, 1, 1)) | y = self.table{u}.exp() * self.alpha; x = x * y
self.seen = x
self.seen = x.mean((2, 3))
self.layer{u} = nn.Conv2d({c}, {c}, 1) | self.layer{u}.weight.data.clamp_(-0.2, 0.2); x = self.layer{u}(x)
x = x * x.detach().mean().item()
x = x + 1 if x.sum() > 0 else x - 1
torch._dynamo.graph_break()
x = {{'key': x}}['key']
x = untraced(x)
x = torch.tensor(self.alpha) * x
"""

MASKS = """
x = `Backdrop2d({p}, patch={k}, exact={b}, generator=seeded({seed}))`(x)
x = `Backdrop2d({p}, generator=seeded({seed}))`(x)
x = `Backdrop({p}, exact={b}, generator=seeded({seed}))`(x)
x = `Backdrop({p}, generator=seeded({seed}))`(x)
x = `Backdrop2d({p}, exact=True, generator=seeded({seed}))`(x) + x
x = torch.cat([x, `Backdrop({p}, generator=seeded({seed}))`(x)], 1)
x = `Backdrop2d({p}, patch=({k}, {k2}), shared={b}, scale={scale}, generator=seeded({seed}))`(x)
x = `Backdrop({p}, {dims}, generator=seeded({seed}))`(x)
x = `Backdrop1d({p}, patch={k}, generator=seeded({seed}))`(x.flatten(2)).unflatten(2, ({h}, {w}))
x = `Backdrop({p}, (0, 1), generator=seeded({seed}))`(x.flatten(2).mT).mT.reshape({n}, {c}, {h}, {w})
x = x * `Backdrop2d({p}, generator=seeded({seed}))`(x).detach() + `Backdrop({p}, generator=seeded({seed}))`(x)
self.mask{u} = Backdrop2d({p}, generator=seeded({seed})) | x = self.mask{u}(self.mask{u}(x).tanh())
y = `Backdrop({p}, generator=seeded({seed}))`(x); x = x + 1; x = x * y
"""

HEADS = """
x = x.mean((2, 3))
x = `nn.Linear({c}, {o})`(x.mean((2, 3)))
x = `nn.Conv2d({c}, {o}, 1)`(x)
x = `nn.Linear({c} * {h} * {w}, 2)`(x.flatten(1))
x = x.square().sum()
x = x.flatten(1) @ x.flatten(1).t()
x = F.log_softmax(x.amax((2, 3)), 1)
x = x * 2
"""

JOINS = """
x = x + {kept}
x += {kept}
x = {kept}.add_(x)
x = x * {kept}
x = torch.maximum(x, {kept})
x = torch.cat([x, {kept}], 1)
x = torch.cat([{kept}[..., :6, :6], x[..., :6, :6]], dim=1)
x = x + F.interpolate({kept}, size=x.shape[2:])
x = x + {kept}.mean((2, 3), keepdim=True)
x = x * {kept}.mean(1, keepdim=True).sigmoid()
x = torch.where(x > {kept}, x, {kept})
{kept}.mul_(2)
x = x + {kept}.mean()
"""

ALIASES = """
{kept} = x
{kept} = x[:, :1]
{kept} = x.detach()
{kept} = x.view({n}, {c}, {h}, {w})
{kept} = x.mean((2, 3), keepdim=True)
{kept} = x.contiguous()
"""

SIDES = """
{kept} = x
{kept} = x.mean((2, 3))
{kept} = x[:, 0]
{kept} = x.detach()
"""

BLOCKS = """
with torch.no_grad():
with torch.enable_grad():
with torch.inference_mode():
with torch.autocast('cpu', enabled=False):
for _ in range(2):
if self.alpha < 0.6:
if self.training:
def block(x):
def cheap(x):
"""

USUAL = (CONVOLUTIONS, POINTWISE, CONVOLUTIONS, POOLING, CHANNELS, POINTWISE, NORMS, SPACE, IN_PLACE)
TRAPS = (SAMPLES, AUTOGRAD, STATE, STATISTICS)
KINDS = ("piece",) * 7 + ("trap", "trap", "branch", "branches", "block", "keep", "use")

CHANGES = ["model.train()", "model.eval()"]
LOCAL_CHANGES = ["p = 0.6", "requires_grad_(False)", "train()", "eval()", "requires_grad_(True)"]


def fields(n, c, h, w):
    """What the braces of a piece may stand for, where the value so far has these sizes."""
    return {
        **dict.fromkeys(["k", "k2"], st.integers(1, 3)),
        **dict.fromkeys(["s", "d"], st.integers(1, 2)),
        **dict.fromkeys(["b", "b2"], st.booleans()),
        "pad": st.integers(0, 2),
        "tp": st.integers(0, 1),
        "o": st.integers(1, 6),
        "g": st.sampled_from([g for g in range(1, c + 1) if c % g == 0]),
        "og": st.sampled_from([g for g in range(c, 7) if g % c == 0] or [c]),
        "cut": st.integers(1, max(1, c - 1)),
        "axis": st.integers(2, 3),
        "p": st.sampled_from([0.5, 0.8, 0.95]),
        "scale": st.sampled_from(["'count'", "'probability'", None]),
        "dims": st.sampled_from([(0, 2), (0, 3), 2, (2, 3), (0, 1), 1, (0, 1, 2, 3)]),
        "seed": st.integers(0, 9),
        "mode": st.sampled_from(["reflect", "replicate", "circular"]),
        "interpolation": st.sampled_from(["nearest", "bilinear", "nearest-exact", "bicubic"]),
        "shape": st.sampled_from([f"{c}, 1, 1", "1", f"{h}, {w}", f"{w}", f"{c}, {h}, 1", f"1, {c}, 1, {w}"]),
        "N": st.sampled_from(["x.shape[0]", "len(x)", "x.size(0)", n]),
        "C": st.sampled_from(["x.shape[1]", "x.size(1)", c]),
        "H": st.sampled_from(["x.shape[2]", "x.size(-2)", h]),
        "W": st.sampled_from(["x.shape[3]", "x.size(-1)", w]),
    }


class Drawn(dict):
    """Fields that are drawn when a piece asks for them."""

    def __init__(self, draw, sizes, **known):
        super().__init__(zip("nchw", sizes, strict=True), **known)
        self.draw, self.fields = draw, fields(*sizes)

    def __missing__(self, name):
        return self.setdefault(name, self.draw(self.fields[name]))


class Program:
    """The lines of a model so far. Every piece is tried: the model is built anew and takes a step."""

    def __init__(self, draw, shape):
        self.draw, self.shape, self.sizes = draw, shape, shape
        self.init, self.forward, self.kept, self.sides, self.blocks = [], [], [], [], []
        self.names = self.depth = 0

    def pieces(self, most):
        for _ in range(self.draw(st.integers(1, most))):
            kind = self.draw(st.sampled_from(KINDS))
            if kind == "piece" or (self.depth == 2 and kind in ("branch", "branches", "block")):
                self.one_of(self.draw(st.sampled_from(USUAL)))
            elif kind == "trap":
                self.one_of(self.draw(st.sampled_from(TRAPS)))
            elif kind == "branch":
                self.join(self.branch("x"))
            elif kind == "branches":
                self.join(self.branch(self.branch("x")))
            elif kind == "block":
                self.block()
            elif kind == "keep":
                self.keep()
            elif kind == "use" and self.kept:
                self.join(self.draw(st.sampled_from(self.kept)))

    def one_of(self, pieces, **known):
        return self.attempt(self.draw(st.sampled_from(pieces.strip().split("\n"))), **known)

    def attempt(self, piece, last=False, **known):
        """Append a piece, unless it does not fit; returns whether it did."""
        if self.shape[0] == 1 and re.search("batch_norm|BatchNorm|NormAct|InstanceNorm", piece):
            return False  # of one sample, torch's batch_norm may get the gradient wrong (2.13: order in memory)
        if "def cheap(x):" in self.blocks and "register_hook" in piece:
            return False  # torch calls it twice, or once where it is captured
        init, forward = len(self.init), len(self.forward)
        filled = piece.format_map(Drawn(self.draw, self.sizes, u=self.name(), **known))
        once, _, lines = filled.rpartition(" | ")
        self.init += filter(None, once.split("; "))
        lines = re.sub("`(.*?)`", self.made, lines)
        self.forward += ["    " * len(self.blocks) + line for line in lines.split("; ")]
        try:
            self.sizes = sizes(self.source(), self.shape, last)
        except Exception:  # whatever torch says to shapes, views, types
            del self.init[init:], self.forward[forward:]
            return False
        return True

    def made(self, found):
        name = self.name("self.m")
        self.init.append(f"{name} = {found[1]}")
        return name

    def name(self, prefix=""):
        self.names += 1
        return f"{prefix}{self.names}"

    def keep(self):
        name = self.name("y")
        if self.one_of(ALIASES, kept=name):
            self.kept.append(name)

    def side(self):
        name = self.name("side")
        if self.one_of(SIDES, kept=name):
            self.sides.append(name)

    def branch(self, start):
        """Pieces behind a value; x is then what they leave, and the name of what x was is returned."""
        name = self.name("y")
        self.attempt(f"{name} = x" if start == "x" else f"{name} = x; x = {start}")
        self.depth += 1
        self.pieces(3)
        self.depth -= 1
        if self.draw(st.integers(0, 7)) == 7:
            self.one_of(MASKS)
        return name

    def join(self, name):
        any(self.one_of(JOINS, kept=name) for _ in range(3))

    def block(self):
        """Pieces under a `with`, `for` or `if`, or in a function of their own."""
        start, sizes, kept = len(self.forward), self.sizes, list(self.kept)
        opening = self.draw(st.sampled_from(BLOCKS.strip().split("\n")))
        self.forward.append("    " * len(self.blocks) + opening)
        self.blocks.append(opening)
        self.depth += 1
        self.pieces(3)
        self.depth -= 1
        self.kept = kept  # what was kept inside may not be there behind the block
        closing = self.closing()
        self.blocks.pop()
        if len(self.forward) == start + 1 or (opening.startswith("if") and self.sizes != sizes):
            del self.forward[start:]
            self.sizes = sizes
        else:
            self.forward += closing

    def closing(self):
        """What has to follow the innermost block, if it is a function."""
        indent = "    " * len(self.blocks)
        calls = {"def block(x):": "block(x)", "def cheap(x):": "checkpoint(cheap, x, use_reentrant=False)"}
        call = calls.get(self.blocks[-1])
        return [] if call is None else [f"{indent}return x", f"{indent[4:]}x = {call}"]

    def source(self):
        """The model, if no more were to come."""
        blocks, ends = list(self.blocks), []
        while self.blocks:
            ends += self.closing()
            self.blocks.pop()
        self.blocks = blocks
        init = "\n".join(["super().__init__()", *self.init])
        forward = "\n".join([*self.forward, *ends, f"return {', '.join(['x', *self.sides])}"])
        init, forward = (textwrap.indent(lines, " " * 8) for lines in (init, forward))
        return f"class Model(RandomModel):\n    def __init__(self):\n{init}\n\n    def forward(self, x):\n{forward}\n"

    def change(self):
        """What happens to the model before a step, if anything."""
        if self.draw(st.booleans()):
            return "pass"
        paths = re.findall(r"self\.(m\w+) = (?!nn\.Parameter|nn\.Buffer)", "\n".join(self.init))
        local = [f"model.{path}.{change}" for path in paths for change in LOCAL_CHANGES]
        return self.draw(st.sampled_from(CHANGES + local))


def sizes(source, shape, last):
    """Of what a model returns for an input; an error, if it does not suit."""
    model = build(source)
    x = torch.randn(shape, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():  # also behind a model that leaves it off and fails
        output = model(x * 1)
    values = output if isinstance(output, tuple) else (output,)
    for value in values:
        if not value.isfinite().all() or value.abs().max() > 1e3:
            raise ValueError("values too large to compare")
    wanted = [value.sum() for value in values if value.requires_grad]
    torch.autograd.backward(wanted)
    n, c, *space = values[0].shape if not last else (shape[0], 1, 1, 1)
    if n != shape[0] or c > 12 or len(space) != 2 or not 1 <= space[0] * space[1] <= 400:
        raise ValueError("no map, or a large one")
    return n, c, *space


def build(source, seed=0):
    names = dict(globals())
    exec(compile(source, "<drawn>", "exec"), names)
    linecache.cache["<drawn>"] = len(source), None, source.splitlines(keepends=True), "<drawn>"
    torch.manual_seed(seed)
    model = names["Model"]().double()
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * torch.randn_like(value)
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats:
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
    return model


@dataclass(repr=False)
class Example:
    """A model, its input, and what happens to the model before each step."""

    source: str
    shape: tuple
    layout: str
    leaf: bool
    wanted: bool
    changes: tuple
    seed: int

    def __repr__(self):
        given = f"{self.layout} {self.shape}, leaf={self.leaf}, requires_grad={self.wanted}, seed {self.seed}"
        steps = "".join(f"# before step {i}: {change}\n" for i, change in enumerate(self.changes))
        return f"\n{self.source}\n{steps}# x: {given}\n"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))

    def model(self):
        return build(self.source, self.seed)

    def input(self, step):
        n, c, h, w = self.shape
        generator = seeded(self.seed + step)
        if self.layout == "transposed":
            return torch.randn(n, c, w, h, generator=generator, dtype=torch.float64).transpose(2, 3)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return x.to(memory_format=torch.channels_last) if self.layout == "channels_last" else x


@st.composite
def examples(draw):
    batch = draw(st.sampled_from([3, 2, 4, 5, 3, 2, 4, 5, 1]))  # of one sample, masks of samples block nothing
    shape = batch, draw(st.integers(1, 6)), draw(st.integers(6, 14)), draw(st.integers(6, 14))
    program = Program(draw, shape)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        program.pieces(5)
        if draw(st.integers(0, 4)) == 4:
            program.side()
        if not program.one_of(MASKS):
            program.attempt("x = `Backdrop2d(0.8, generator=seeded({seed}))`(x)")
    program.pieces(3)
    program.one_of(HEADS, last=True)
    return Example(
        program.source(),
        shape,
        draw(st.sampled_from(["contiguous", "contiguous", "channels_last", "transposed"])),
        draw(st.booleans()),
        draw(st.sampled_from([True, True, False])),
        (program.change(), f"model.alpha = 0.8; {program.change()}"),
        draw(st.integers(0, 99)),
    )
