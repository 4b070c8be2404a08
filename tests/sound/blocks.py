"""What well-known networks are made of, as their authors write it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Backdrop, Backdrop1d
from sound.comparing import BATCH, EITHER, MAPS, WIDTH, Body, case, layer, numbers, whole

# ----------------------------------------------------------------------------------------------------------------- maps


class SqueezeExcite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x):
        return x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)), inplace=True)).sigmoid()


class InvertedResidual(nn.Module):
    """Of MobileNet and EfficientNet; its norms have their running statistics in training too."""

    def __init__(self, gate):
        super().__init__()
        wide = 2 * WIDTH
        self.expand, self.each = nn.Conv2d(WIDTH, wide, 1), nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.gate, self.project = gate(wide), nn.Conv2d(wide, WIDTH, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (wide, wide, WIDTH)).eval()

    def train(self, mode=True):
        super().train(mode)
        self.norms.eval()
        return self

    def forward(self, x):
        h = F.silu(self.norms[0](self.expand(x)), inplace=True)
        h = self.gate(F.silu(self.norms[1](self.each(h)), inplace=True))
        h = self.norms[2](self.project(h))
        h += x
        return h


@case("inverted residuals", kinds=MAPS, skips=True)
def _inverted(kind):
    return nn.Sequential(InvertedResidual(nn.Identity), InvertedResidual(nn.Identity), layer(kind))


@case("inverted residuals with squeeze and excite", kinds=MAPS, skips=True)
def _excited(kind):
    return nn.Sequential(InvertedResidual(SqueezeExcite), InvertedResidual(nn.Identity), layer(kind))


class ResponseNorm(nn.Module):
    """Of ConvNeXt's second version: channels by their norm over space."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x):
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gain * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + x


class ConvNeXt(nn.Module):
    def __init__(self, response):
        super().__init__()
        self.each, self.norm = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.response, self.narrow = nn.Linear(WIDTH, 8), response(8), nn.Linear(8, WIDTH)
        self.gamma = nn.Parameter(0.5 * torch.ones(WIDTH))

    def forward(self, x):
        h = self.norm(self.each(x).permute(0, 2, 3, 1))
        h = self.gamma * self.narrow(self.response(F.gelu(self.wide(h))))
        return x + h.permute(0, 3, 1, 2)


@case("ConvNeXt", kinds=MAPS, skips=True)
def _convnext(kind):
    return nn.Sequential(ConvNeXt(nn.Identity), ConvNeXt(nn.Identity))


@case("ConvNeXt with response normalisation", kinds=MAPS, skips=True)
def _convnext_again(kind):
    return nn.Sequential(ConvNeXt(nn.Identity), ConvNeXt(ResponseNorm), ConvNeXt(nn.Identity))


@case("dense connections", kinds=MAPS, skips=True)
class Dense(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH + 3 * i, 3, 3, padding=1) for i in range(3))

    def forward(self, x):
        found = [x]
        for each in self.layers:
            found.append(F.elu(each(torch.cat(found, 1))))
        return torch.cat(found, 1)


@case("channels in a hierarchy", kinds=MAPS, skips=True)
class Res2(Body):
    """Of Res2Net: each part of the channels also gets the result of the one before."""

    def __init__(self, kind):
        super().__init__(kind)
        self.parts = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        first, *others = self.a(x).split(2, 1)
        found = [F.avg_pool2d(first, 3, 1, 1)]
        for each, part in zip(self.parts, others, strict=True):
            found.append(each(part + found[-1]))
        return self.b(torch.cat(found, 1))


@case("a U-Net for any size", inputs=lambda kind, i: (numbers(2, WIDTH, 12 + i, 15, seed=i),), kinds=("positions",))
class UNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Conv2d(WIDTH, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.first(x), inplace=True)
        b = F.relu_(self.second(F.max_pool2d(a, 2)))
        c = self.third(F.max_pool2d(b, 2)).relu_()
        c = F.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)
        h = self.up(torch.cat([c, b], 1))
        high, wide = a.size(2) - h.size(2), a.size(3) - h.size(3)
        h = F.pad(h, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
        return self.last(torch.cat([h, a], 1))


@case("a pyramid of features", kinds=("positions",), skips=True)
class Pyramid(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, 2, 1) for _ in range(2))
        self.side, self.out = nn.ModuleList(nn.Conv2d(WIDTH, 4, 1) for _ in range(2)), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        found = []
        for each in self.down:
            x = each(x).tanh()
            found.append(x)
        low, high = (side(x) for side, x in zip(self.side, found, strict=True))
        return {"out": self.out(low + F.interpolate(high, size=low.shape[-2:], mode="nearest"))}["out"]


@case("dilated branches and a pooled one", kinds=MAPS)
class Dilated(Body):
    """Of DeepLab."""

    def __init__(self, kind):
        super().__init__(kind)
        self.branches = nn.ModuleList(nn.Conv2d(WIDTH, 2, 3, padding=r, dilation=r) for r in (1, 2, 3))
        self.pooled, self.project = nn.Conv2d(WIDTH, 2, 1), nn.Conv2d(8, WIDTH, 1)

    def forward(self, x):
        x = self.a(x)
        pooled = F.interpolate(self.pooled(F.adaptive_avg_pool2d(x, 1)), size=x.shape[2:], mode="bilinear")
        return self.b(self.project(torch.cat([*(each(x).relu() for each in self.branches), pooled], 1)))


@case("a gate of the largest and the mean channel", kinds=MAPS, skips=True)
class SpatialGate(Body):
    """Of CBAM."""

    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Conv2d(2, 1, 5, padding=2)

    def forward(self, x):
        h = self.a(x)
        both = torch.cat((torch.max(h, 1)[0].unsqueeze(1), torch.mean(h, 1).unsqueeze(1)), dim=1)
        return self.b(h * torch.sigmoid(self.gate(both)))


@case("convolutions mixed for each sample", kinds=MAPS)
class DynamicConv(Body):
    """Of CondConv: one convolution in groups, of which each is a sample."""

    def __init__(self, kind):
        super().__init__(kind)
        self.weights, self.route = nn.Parameter(torch.randn(3, WIDTH, WIDTH, 3, 3) / 5), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.a(x)
        n, c, high, wide = x.shape
        share = self.route(x.mean((2, 3))).softmax(1)
        weight = torch.einsum("bk,koihw->boihw", share, self.weights).reshape(n * c, c, 3, 3)
        return self.b(F.conv2d(x.reshape(1, n * c, high, wide), weight, padding=1, groups=n).view(n, c, high, wide))


@case("kernels made at each position", kinds=MAPS)
class Involution(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.kernel = nn.Conv2d(WIDTH, 9, 1)

    def forward(self, x):
        x = self.a(x)
        n, c, high, wide = x.shape
        around = F.unfold(x, 3, padding=1).view(n, c, 9, high, wide)
        return self.b((self.kernel(x).view(n, 1, 9, high, wide) * around).sum(2))


@case("a code book, straight through", kinds=MAPS, loss=lambda body: body.commitment, skips=True)
class CodeBook(Body):
    """Of the VQ-VAE."""

    def __init__(self, kind):
        super().__init__(kind)
        self.codes = nn.Embedding(7, WIDTH)

    def forward(self, x):
        z = self.a(x).permute(0, 2, 3, 1).contiguous()
        flat, codes = z.view(-1, WIDTH), self.codes.weight
        nearest = (flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()).argmin(1)
        q = self.codes(nearest).view(z.shape)
        self.commitment = F.mse_loss(q.detach(), z) + 0.25 * F.mse_loss(q, z.detach())
        return self.b((z + (q - z).detach()).permute(0, 3, 1, 2))


@whole("gated convolutions whose results are cut to one length", kinds=("positions",), skips=True)
class WaveNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(3))
        self.side = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.mask = Backdrop1d(0.8, exact=True)

    def forward(self, x):
        x, found = x.flatten(2)[..., :40], []
        for gate, side in zip(self.gates, self.side, strict=True):
            filtered, opened = gate(x).chunk(2, dim=1)
            found.append(side(torch.tanh(filtered) * torch.sigmoid(opened)))
            x = found[-1] + x[..., -found[-1].size(-1) :]
        return self.mask(sum(each[..., -x.size(-1) :] for each in found)).tanh()


@whole("tokens and a class token", kinds=("positions",), skips=True)
class Tokens(nn.Module):
    """Of the vision transformer, with a mask of tokens."""

    def __init__(self, kind):
        super().__init__()
        self.patches, self.token = nn.Conv2d(WIDTH, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.places, self.norm = nn.Parameter(torch.randn(1, 12, 8)), nn.LayerNorm(8)
        self.qkv, self.out, self.last = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.mask = Backdrop(0.7, dims=(0, 1), exact=True)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(len(h), -1, -1), h), dim=1)
        h = h + self.places[:, : h.shape[1]]
        n, t, c = h.shape
        q, k, v = self.qkv(self.norm(h)).reshape(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + self.out(((q / 2 @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))
        return self.mask(h + self.last(h).relu())[:, 1:].tanh()


# -------------------------------------------------------------------------------------------------------------- samples


def _words(kind, i):
    return (torch.randint(0, 9, (BATCH, 7), generator=torch.Generator().manual_seed(i)),)


class Encoder(nn.Module):
    """Texts as BERT and T5 read them: padding, kinds of tokens, relative places, a causal mask in a buffer."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.kinds = nn.Embedding(9, WIDTH, padding_idx=0), nn.Embedding(2, WIDTH)
        self.near, self.q, self.kv = nn.Embedding(9, 2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("before", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(), persistent=False)

    def forward(self, words):
        n, t = words.shape
        there = words != 0
        x = self.words(words) + self.kinds(torch.zeros(n, t, dtype=torch.long))
        q, k, v = (h.view(n, t, 2, -1).transpose(1, 2) for h in (self.q(x), *self.kv(x).chunk(2, -1)))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH / 2)
        apart = torch.arange(t)[:, None] - torch.arange(t)[None]
        scores = scores + self.near(apart.clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
        scores = scores.masked_fill(~self.before[:, :, :t, :t], torch.finfo(scores.dtype).min)
        scores = scores + (1.0 - there[:, None, None, :].to(x.dtype)) * -1e4
        x = self.norm(x + (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(n, t, -1))
        return self.out(self.taken(x, there))


@case("texts by the mean of their words", inputs=_words, kinds=("samples",), skips=True)
class MeanOfWords(Encoder):
    def taken(self, x, there):
        return (x * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)


@case("texts by their last word", inputs=_words, kinds=("samples",), skips=True)
class LastWord(Encoder):
    def taken(self, x, there):
        return x[torch.arange(len(x)), there.sum(1).clamp(min=1) - 1]


@case("words whose vectors are kept short", inputs=_words, kinds=("samples",))
class Short(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words, self.out = nn.Embedding(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        return self.out(self.words(words).mean(1))


@case("a teacher that follows", kinds=("samples",))
class Teacher(Body):
    """Of DINO: an average of the student, and a centre of what it says."""

    def __init__(self, kind):
        super().__init__(kind)
        self.b.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def forward(self, x):
        with torch.no_grad():
            for student, teacher in zip(self.a.parameters(), self.b.parameters(), strict=True):
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
            wanted = ((self.b(x) - self.centre) / 0.3).softmax(-1)
            self.centre = self.centre * 0.9 + self.b(x).mean(0, keepdim=True) * 0.1
        return -(wanted * F.log_softmax(self.a(x) / 0.2, -1)).sum(-1)


@case("a queue of what was seen", kinds=("samples",))
class Queue(Body):
    """Of MoCo."""

    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("queue", torch.randn(2 * BATCH, WIDTH))

    def forward(self, x):
        z = F.normalize(self.a(x), dim=1)
        scores = torch.cat([(z * self.b(x)).sum(1, keepdim=True), z @ self.queue.clone().detach().t()], 1)
        with torch.no_grad():
            self.queue[:BATCH] = z.detach()
        return scores


class Mixture(Body):
    """Experts by weight, of which the best two count."""

    def __init__(self, kind):
        super().__init__(kind)
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        weight, index = share.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = x.new_zeros(x.shape)
        for number, expert in enumerate((self.a, self.b)):
            y = y + (weight * (index == number)).sum(-1, keepdim=True) * expert(x)
        return self.balanced(y, share)


@case("experts with a penalty", kinds=("samples",), loss=lambda body: body.penalty)
class Penalised(Mixture):
    def balanced(self, y, share):
        self.penalty = share.mean(0).square().sum()
        return y


@case("experts with room for some samples each", kinds=("samples",))
class Capacity(Mixture):
    def balanced(self, y, share):
        place = F.one_hot(share.argmax(1), 2).cumsum(0) * F.one_hot(share.argmax(1), 2)
        return y * (place.sum(1, keepdim=True) <= 3).to(y.dtype)


@case("two views in one batch", kinds=("samples",))
class Views(Body):
    def forward(self, x):
        one, other = self.b(self.a(torch.cat([x, x.flip(1)])).relu()).split(x.size(0))
        return F.pairwise_distance(one, other)


@case("messages along edges", kinds=("samples",))
class Messages(Body):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("edges", torch.stack([torch.arange(BATCH), torch.arange(BATCH).roll(1)]))

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.zeros_like(h).index_add_(0, self.edges[1], h[self.edges[0]]))


@case("a state that is carried on", kinds=("samples",), ways=("Skip",))
class Stateful(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.state = nn.GRUCell(2, WIDTH), None

    def forward(self, x):
        state = torch.zeros_like(x) if self.state is None else self.state.detach()
        for part in x.split(2, 1):
            state = self.cell(part, state)
        self.state = state
        return state


@case("steps until nothing changes", kinds=EITHER)
class FixedPoint(Body):
    """Of deep equilibrium models: as many as the data needs."""

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(10):
                found = torch.tanh(0.2 * self.a(z) + self.b(x))
                if (found - z).norm() < 1e-3:
                    break
                z = found
        return torch.tanh(0.2 * self.a(z) + self.b(x))
