"""The table of rules, function by function: skipped in full, or refused for a reason that is said; the same numbers."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Backdrop, Backdrop2d, Backdrop3d
from skipping import captures, check

pytestmark = captures
N, C, H, W = 4, 4, 6, 8
FIXED = torch.Generator().manual_seed(3)


def fixed(*shape):
    return torch.randn(shape, generator=FIXED, dtype=torch.float64)


ALL = ""  # skipped in full
KERNEL, KERNEL_1D, MATRIX, PLANE, ROW = (
    *(fixed(C, C, 3, 3), fixed(C, C, 3), fixed(C, C), fixed(H, W)),
    torch.tensor([2, 0, 1]),
)
CUBE = fixed(C, C, C)
GRID = fixed(N, H, W, 2).tanh()


def tokens(x):
    return x.flatten(2).mT


def heads(x):
    return tokens(x).unflatten(2, (2, -1)).transpose(1, 2)


def maps(y):
    return y.mT.unflatten(2, (H, W))


# What it is, what it does to a map (4, 4, 6, 8), why positions are not skipped, and why samples are not.
FUNCTIONS = [
    ("conv, circular", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), KERNEL), "circular", ALL),
    ("conv, reflect", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), KERNEL), ALL, ALL),
    ("conv, replicate", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), "replicate"), KERNEL), ALL, ALL),
    ("conv, dilated", lambda x: F.conv2d(x, KERNEL, padding="same", dilation=2), ALL, ALL),
    ("conv, transposed", lambda x: F.conv_transpose2d(x, KERNEL, stride=2, output_padding=1), ALL, ALL),
    ("conv 1-D", lambda x: F.conv1d(x.flatten(2), KERNEL_1D, padding=1).unflatten(2, (H, W)), "reshapes", ALL),
    ("max_pool", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), ALL, ALL),
    ("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), ALL, ALL),
    ("adaptive, regular", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), ALL, ALL),
    ("adaptive, irregular", lambda x: F.adaptive_max_pool2d(x, (4, 3)), "different numbers of cells", ALL),
    ("batch_norm", lambda x: F.batch_norm(x, MATRIX[0], MATRIX[1].exp(), training=False), ALL, ALL),
    ("batch_norm, training", lambda x: F.batch_norm(x, None, None, training=True), "batch statistics", "batch stat"),
    ("group_norm", lambda x: F.group_norm(x, 2, eps=0.1), "statistics over space", ALL),
    ("instance_norm", lambda x: F.instance_norm(x, eps=0.1), "statistics over space", ALL),
    ("layer_norm, channels", lambda x: F.layer_norm(x.movedim(1, -1), (C,), eps=0.1).movedim(-1, 1), ALL, ALL),
    ("layer_norm, space", lambda x: F.layer_norm(x, (C, H, W), eps=0.1), "statistics over space", ALL),
    ("linear", lambda x: F.linear(x.movedim(1, -1), MATRIX).movedim(-1, 1), ALL, ALL),
    ("bilinear", lambda x: F.bilinear(x.movedim(1, -1), x.sin().movedim(1, -1), CUBE).movedim(-1, 1), ALL, ALL),
    ("matmul, rows", lambda x: (x.movedim(1, -1) @ MATRIX).movedim(-1, 1), ALL, ALL),
    ("bmm", lambda x: maps(torch.bmm(tokens(x), MATRIX.expand(N, C, C))), "reshapes", ALL),
    ("baddbmm", lambda x: maps(torch.baddbmm(tokens(x), tokens(x).sin(), MATRIX.expand(N, C, C))), "reshapes", ALL),
    ("einsum", lambda x: torch.einsum("nchw,cd->ndhw", x, MATRIX), ALL, ALL),
    ("einsum, dots", lambda x: torch.einsum("...chw,cd->...dhw", x, MATRIX), ALL, ALL),
    ("pad, constant", lambda x: F.pad(x, (1, 2, 0, 1), value=0.3), ALL, ALL),
    ("slices", lambda x: x[:, 1:, ::2, 1:-1], ALL, ALL),
    ("chunk", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), ALL, ALL),
    ("split", lambda x: torch.cat(torch.split(x, [1, 3], 1)[::-1], 1), ALL, ALL),
    ("split along a masked axis", lambda x: x.split(3, 2)[0], "mixes positions", ALL),
    ("unbind", lambda x: torch.stack(x.unbind(1)[::-1], 1), ALL, ALL),
    ("cat along samples", lambda x: torch.cat([x, x.sin()])[:N], "takes some of the samples", "some of the samples"),
    ("cat along a masked axis", lambda x: torch.cat([x, x.sin()], 2), "joins maps", ALL),
    ("stack", lambda x: torch.stack([x, x.sin()], 2).flatten(1, 2), ALL, ALL),
    ("reshape of channels", lambda x: x.reshape(N, 2, 2, H, W).sum(2), ALL, ALL),
    ("permute", lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), ALL, ALL),
    ("interpolate, nearest", lambda x: F.interpolate(x, scale_factor=2), ALL, ALL),
    ("interpolate, up and down", lambda x: F.interpolate(x, (9, 4), mode="nearest-exact"), ALL, ALL),
    ("interpolate, bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ALL, ALL),
    ("interpolate, any size", lambda x: F.interpolate(x, (9, 10), mode="bilinear"), ALL, ALL),
    ("interpolate, corners", lambda x: F.interpolate(x, (12, 16), mode="bilinear", align_corners=True), ALL, ALL),
    ("interpolate, smaller", lambda x: F.interpolate(x, (4, 6), mode="bilinear", align_corners=True), ALL, ALL),
    ("interpolate, bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), "bicubic", ALL),
    ("interpolate, antialias", lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True), "antialias", ALL),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), ALL, ALL),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), ALL, ALL),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), ALL, ALL),
    ("unfold", lambda x: F.unfold(x, 3, padding=1).unflatten(2, (H, W)), "reshapes", ALL),
    ("fold", lambda x: F.fold(F.unfold(x, 3, padding=1), (H, W), 3, padding=1), "unfold|fold", ALL),
    ("Tensor.unfold", lambda x: x.unfold(2, 2, 2).mean(-1), "no rule|mixes|unfold", ALL),
    ("squeeze-and-excite", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), "goes elsewhere", ALL),
    ("sum over positions", lambda x: x + x.sum((2, 3), keepdim=True), "goes elsewhere", ALL),
    ("mean over channels", lambda x: x - x.mean(1, keepdim=True), ALL, ALL),
    ("mean over samples", lambda x: x - x.mean(0, keepdim=True), "goes elsewhere", "goes elsewhere"),
    ("einsum without an arrow", lambda x: torch.einsum("nchw,cd", x, MATRIX).permute(2, 0, 1, 3), ALL, ALL),
    ("amax", lambda x: x.amax(1, keepdim=True), ALL, ALL),
    ("var", lambda x: x.var(1, keepdim=True), ALL, ALL),
    ("softmax", lambda x: x.softmax(1), ALL, ALL),
    ("softmax along a masked axis", lambda x: x.softmax(2), "mixes positions", ALL),
    ("softmax over samples", lambda x: x.softmax(0), "mixes samples", "mixes samples"),
    ("dropout", lambda x: F.dropout(x, 0.5), ALL, None),
    ("dropout of channels", lambda x: F.dropout2d(x, 0.5), ALL, None),
    ("roll of channels", lambda x: x.roll(1, 1), ALL, ALL),
    ("roll", lambda x: x.roll(1, 2), "mixes positions", ALL),
    ("roll over samples", lambda x: x.roll(1, 0), "mixes samples", "mixes samples"),
    ("flip", lambda x: x.flip(1), ALL, ALL),
    ("cumsum", lambda x: x.cumsum(1), ALL, ALL),
    ("cumsum along a masked axis", lambda x: x.cumsum(2), "mixes positions", ALL),
    ("sort", lambda x: x.sort(1).values, ALL, ALL),
    ("sort along a masked axis", lambda x: x.sort(2).values, "mixes positions", ALL),
    ("topk", lambda x: x.topk(2, 1).values, ALL, ALL),
    ("topk along a masked axis", lambda x: x.topk(2, 2).values, "mixes positions", ALL),
    ("gather", lambda x: x.gather(1, ROW.view(1, 3, 1, 1).expand(N, 3, H, W)), ALL, ALL),
    ("gather along a masked axis", lambda x: x.gather(2, ROW.view(1, 1, 3, 1).expand(N, C, 3, W)), "mixes pos", ALL),
    ("index_select", lambda x: x.index_select(1, ROW), ALL, ALL),
    ("index_select of samples", lambda x: x.index_select(0, ROW), "mixes samples", "mixes samples"),
    ("index", lambda x: x[:, ROW], ALL, ALL),
    ("masked_fill", lambda x: x.masked_fill(x > 0.5, 0.1), ALL, ALL),
    ("where", lambda x: torch.where(PLANE > 0, x, x.sin()), ALL, ALL),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), ALL, ALL),
    ("lerp", lambda x: torch.lerp(x, x.sin(), PLANE.sigmoid()), ALL, ALL),
    ("addcmul", lambda x: torch.addcmul(x, x.sin(), PLANE, value=0.3), ALL, ALL),
    ("prelu", lambda x: F.prelu(x, MATRIX[0]), ALL, ALL),
    ("normalize", lambda x: F.normalize(x, dim=1), ALL, ALL),
    ("cosine_similarity", lambda x: F.cosine_similarity(x, x.sin(), 1).unsqueeze(1), ALL, ALL),
    (
        "pairwise_distance",
        lambda x: F.pairwise_distance(x.movedim(1, -1), x.sin().movedim(1, -1)).unsqueeze(1),
        ALL,
        ALL,
    ),
    (
        "cdist",
        lambda x: torch.cdist(tokens(x), tokens(x).sin()).unflatten(1, (H, W)).movedim(-1, 1),
        "reshapes|no rule",
        ALL,
    ),
    ("grid_sample", lambda x: F.grid_sample(x, GRID, align_corners=False), "no rule|grid", ALL),
    ("fft", lambda x: torch.fft.fft2(x).real, "no rule|fft", ALL),
    ("tril", lambda x: x.tril(), "no rule|tril", ALL),
    ("glu", lambda x: F.glu(x, 1), ALL, ALL),
    (
        "attention over tokens",
        lambda x: maps(F.scaled_dot_product_attention(heads(x), heads(x).sin(), heads(x)).transpose(1, 2).flatten(2)),
        "reshapes",
        ALL,
    ),
]


class Model(nn.Module):
    def __init__(self, function, mask):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function, self.mask = nn.Conv2d(C, C, 3, padding=1), function, mask

    def forward(self, x):
        x = self.function(self.first(x).tanh())
        return self.mask(x * 0.7)


def run(function, mask, ends, *inputs):
    model = Model(function, mask).double()
    fast = check(model, *(inputs or [fixed(N, C, H, W)]), statistics="exact")
    (entry,) = fast.skip_report
    reasons = [str(reason) for _, reason in entry.kept] or [entry.last]
    if ends:
        assert any(re.search(ends, reason) for reason in reasons), (reasons, entry.skipped)
        assert entry.share < 1
    else:
        assert entry.share == 1, (reasons, entry.last)
        assert entry.skipped[0] == "first", entry.skipped


@pytest.mark.parametrize(("function", "ends"), [pytest.param(f, ends, id=name) for name, f, ends, _ in FUNCTIONS])
def test_positions(function, ends):
    run(function, Backdrop2d(0.8, generator=torch.Generator()), ends)


@pytest.mark.parametrize(
    ("function", "ends"), [pytest.param(f, ends, id=name) for name, f, _, ends in FUNCTIONS if ends is not None]
)
def test_samples(function, ends):
    run(function, Backdrop(0.5, exact=True, generator=torch.Generator()), ends)
