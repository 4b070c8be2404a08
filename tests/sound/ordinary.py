"""What nothing should be in the way of: these have to be skipped."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d
from sound.comparing import BATCH, EITHER, MAPS, WAYS, WIDTH, Body, add, case, layer, numbers, whole

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
