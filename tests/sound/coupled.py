"""Samples and positions that depend on each other, however little."""

import torch
import torch.nn.functional as F
from torch import nn

from sound.comparing import BATCH, SIZE, WIDTH, Body, between, case
from sound.subclasses import stacked

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
