"""The table of rules, function by function: skipped in full, or refused for a reason that is said; the same numbers."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backdrop import Backdrop, Backdrop2d, skip_blocked
from skipping import captures, check, followed_later, step

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
LAST = torch.tensor([3, 0, 2, 2])
CUBE, ROWS = fixed(C, C, C), fixed(1, C, H, 1)
GRID = fixed(N, H, W, 2).tanh()


def tokens(x):
    return x.flatten(2).mT


def heads(x):
    return tokens(x).unflatten(2, (2, -1)).transpose(1, 2)


def maps(y):
    return y.mT.unflatten(2, (H, W))


AT = torch.randn(N, C, H, W, generator=FIXED).argsort(1)


def depth_to_space(x):
    return x.view(N, 2, 2, C // 4, H, W).permute(0, 3, 4, 1, 5, 2).reshape(N, C // 4, 2 * H, 2 * W)


def nearest_by_expand(x):
    return x[..., None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(N, C, 2 * H, 2 * W)


def shifted_in_part(x):
    y = torch.zeros_like(x)
    y[:, :2] = x[:, 2:]
    y[:, 2:, ...] = x[:, :2] * 2
    return y


def set_where(x):
    y = x.sin()
    y[x > 0.3] = 0.1
    return y


def set_at_borders(x):
    y = x * 2
    y[:, :, 0], y[:, :, -1] = 0.0, 1.0
    return y


def set_for_some(x):
    y = x * 2
    y[1:] = x[:-1]
    return y


HIDDEN = torch.zeros(4, 12, 12, dtype=torch.float64)
HIDDEN[2:, :6, 6:] = -100.0


def windows(x, hidden=HIDDEN):
    """Attention within windows of 3 x 4 cells, which lie along the axis of samples."""
    n, c, h, w = x.shape
    y = x.view(n, c, h // 3, 3, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 12, c)
    scores = (y @ y.mT).view(n, -1, 12, 12) + hidden
    y = scores.view(-1, 12, 12).softmax(-1) @ y
    return y.view(n, h // 3, w // 4, 3, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


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
    ("Tensor.unfold", lambda x: x.unfold(2, 2, 2).mean(-1), ALL, ALL),
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
    ("windows", windows, "reshapes", ALL),
    ("shifted windows", lambda x: windows(x.roll((-1, -2), (2, 3))).roll((1, 2), (2, 3)), "mixes positions", ALL),
    ("paths left out", lambda x: x + x.sin() * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.8).div_(0.8), ALL, None),
    ("repeat of a table", lambda x: x + ROWS.repeat(len(x), 1, 1, 1), ALL, ALL),
    ("noise", lambda x: x + torch.randn_like(x) * 0.1, ALL, None),
    ("noise between", lambda x: x.lerp(x.sin(), torch.rand_like(x[:, :1])), ALL, None),
    ("dropout of channels", lambda x: F.dropout2d(x, 0.5), ALL, None),
    ("roll of channels", lambda x: x.roll(1, 1), ALL, ALL),
    ("roll", lambda x: x.roll(1, 2), "mixes positions", ALL),
    ("roll over samples", lambda x: x.roll(1, 0), "mixes samples", "mixes samples"),
    ("flip", lambda x: x.flip(1), ALL, ALL),
    ("flip, axes one by one", lambda x: x.flip(1, -1), "mixes positions", ALL),
    ("flip over samples, axes one by one", lambda x: x.flip(1, 0), "mixes samples", "mixes samples"),
    ("count_nonzero", lambda x: x * (x > 0).count_nonzero(1)[:, None], ALL, ALL),
    ("count_nonzero, axes one by one", lambda x: x * (x > 0).count_nonzero(1, 0), "elsewhere", "elsewhere"),
    ("einsum of a diagonal", lambda x: torch.einsum("nnhw->nhw", x)[:, None], "a diagonal", "a diagonal"),
    ("signs by their bits", lambda x: x * (1 + (x.view(torch.int64) < 0)), "stored|elsewhere", "stored|elsewhere"),
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
    ("index for each sample", lambda x: x[torch.arange(len(x)), LAST][:, None], "by an index", ALL),
    ("index in reverse", lambda x: x[torch.arange(len(x)).flip(0), LAST][:, None], "by an index", "by an index"),
    ("index of some samples", lambda x: x[torch.arange(2), LAST[:2]].repeat(2, 1, 1)[:, None], "repeats", "repeats"),
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
    ("tril", lambda x: x.tril(), "mixes positions", ALL),
    ("glu", lambda x: F.glu(x, 1), ALL, ALL),
    ("lp_pool", lambda x: F.lp_pool2d(x.abs() + 0.1, 3, 3, 2), ALL, ALL),
    ("lp_pool, ceil_mode", lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 3, 2, ceil_mode=True), "ceil_mode", ALL),
    ("max_pool, dilated, ceil_mode", lambda x: F.max_pool2d(x, 2, 2, 1, dilation=2, ceil_mode=True), ALL, ALL),
    ("max_pool, indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], "return_indices", ALL),
    ("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), "by an index", ALL),
    ("interpolate, area", lambda x: F.interpolate(x, (3, 4), mode="area"), ALL, ALL),
    ("index_add", lambda x: x.index_add(1, ROW, x[:, :3].sin()), ALL, ALL),
    ("index_add along a masked axis", lambda x: x.index_add(2, ROW, x[:, :, :3].sin()), "mixes positions", ALL),
    ("index_copy", lambda x: x.index_copy(1, ROW, x[:, :3].sin()), ALL, ALL),
    ("index_fill of samples", lambda x: x.index_fill(0, ROW, 0.3), "mixes samples", "mixes samples"),
    ("scatter", lambda x: x.scatter(1, AT, x.sin()), ALL, ALL),
    ("scatter_add", lambda x: x.scatter_add(1, AT, x.sin()), ALL, ALL),
    ("scatter_reduce", lambda x: x.scatter_reduce(1, AT, x.sin(), "amax"), ALL, ALL),
    ("scatter along a masked axis", lambda x: x.scatter(2, AT, x.sin()), "mixes positions", ALL),
    ("scatter over samples", lambda x: x.scatter(0, AT % N, x.sin()), "mixes samples", "mixes samples"),
    ("take_along_dim", lambda x: torch.take_along_dim(x, x.argsort(1), 1), ALL, ALL),
    ("index, listed", lambda x: x[:, [0, 2, 3]], ALL, ALL),
    ("narrow", lambda x: x.narrow(3, 1, 5).narrow(1, 0, 2), ALL, ALL),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, 2).repeat_interleave(3, dim=3), ALL, ALL),
    ("repeat_interleave of samples", lambda x: x[:2].repeat_interleave(2, 0), "repeats samples", "repeats samples"),
    ("diff", lambda x: x.diff(dim=3).diff(dim=1), ALL, ALL),
    ("diff with more", lambda x: x.diff(dim=3, prepend=x[..., :1]), "mixes positions", ALL),
    ("Tensor.unfold along a masked axis", lambda x: x.unfold(2, 3, 1).amax(-1), ALL, ALL),
    ("patches by unfold", lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).mean(-1), ALL, ALL),
    ("depth to space", depth_to_space, ALL, ALL),
    ("depth to space along one axis", lambda x: x.unflatten(1, (2, 2)).permute(0, 2, 3, 1, 4).flatten(2, 3), ALL, ALL),
    ("space to depth", lambda x: x.view(N, C, 3, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(N, 4 * C, 3, 4), ALL, ALL),
    ("means of patches", lambda x: x.reshape(N, C, 3, 2, 4, 2).mean((3, 5)), ALL, ALL),
    ("one cell of each patch", lambda x: x.unflatten(3, (2, 4))[:, :, :, 0], "reshapes", ALL),
    (
        "nearest by expand",
        lambda x: x[..., None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(N, C, 2 * H, -1),
        ALL,
        ALL,
    ),
    ("complex numbers", lambda x: torch.complex(x, x.sin()).imag + torch.complex(x.cos(), x).real, ALL, ALL),
    ("pairs as complex numbers", lambda x: torch.view_as_complex(torch.stack([x, x.sin()], -1)).abs(), ALL, ALL),
    ("complex numbers as pairs", lambda x: torch.view_as_real(torch.polar(x.exp(), x)).sum(-1), ALL, ALL),
    ("set to values", shifted_in_part, ALL, ALL),
    ("set where", set_where, ALL, ALL),
    ("set at borders", set_at_borders, "writes to one of", ALL),
    ("set for some samples", set_for_some, "writes to some of the samples", "writes to some of the samples"),
    ("cross", lambda x: torch.cross(x[:, :3], x[:, 1:], dim=1), ALL, ALL),
    ("tensordot", lambda x: torch.tensordot(x, MATRIX, ([1], [0])).movedim(-1, 1), ALL, ALL),
    ("hstack", lambda x: torch.hstack([x, x.sin()]), ALL, ALL),
    ("one_hot", lambda x: x * F.one_hot(PLANE.long() % 3, 4).movedim(-1, 0), ALL, ALL),
    ("quantile", lambda x: x.quantile(0.5, 1, keepdim=True), ALL, ALL),
    ("special functions", lambda x: torch.special.expit(x) + torch.erfinv(x / 2) + torch.lgamma(x.exp()), ALL, ALL),
    ("broadcast_tensors", lambda x: torch.broadcast_tensors(x, x[:, :1])[1], ALL, ALL),
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


LATER = dict.fromkeys(("set to values", "quantile"), followed_later)


@pytest.mark.parametrize(
    ("function", "ends"), [pytest.param(f, ends, id=name, marks=LATER.get(name, ())) for name, f, ends, _ in FUNCTIONS]
)
def test_positions(function, ends):
    run(function, Backdrop2d(0.8, generator=torch.Generator()), ends)


@pytest.mark.parametrize(
    ("function", "ends"),
    [pytest.param(f, ends, id=name, marks=LATER.get(name, ())) for name, f, _, ends in FUNCTIONS if ends is not None],
)
def test_samples(function, ends):
    run(function, Backdrop(0.5, exact=True, generator=torch.Generator()), ends)


class Heads(nn.Module):
    """Attention with two heads: queries, keys and values of layers of their own, or of one."""

    def __init__(self, attend, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.fused = attend, fused
        if fused:
            self.qkv = nn.Linear(8, 24)
        else:
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out, self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(F.layer_norm(x, (8,)))))


class Tokens(nn.Module):
    def __init__(self, block, mask):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.first, self.block, self.mask = nn.Embedding(9, 8), nn.Linear(8, 8), block, mask

    def forward(self, words):
        return self.mask(self.block(self.first(self.words(words))))


def written_out(q, k, v, hidden=None):
    scores = q @ k.transpose(-2, -1) / 2
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def bmm(q, k, v):
    scores = torch.baddbmm(q.new_zeros(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (-1, 2))


def by_einsum(q, k, v):
    return torch.einsum("...qk,...kd->...qd", torch.einsum("nhqd,nhkd->nhqk", q, k).softmax(-1), v)


FUTURE = torch.ones(11, 11, dtype=torch.bool).triu(1)
SHORT = torch.rand(5, 1, 1, 11, generator=FIXED) < 0.3
SHORT[..., 0] = False  # everybody sees something
BIAS = torch.randn(2, 11, 11, generator=FIXED).double()
ATTENTION = {
    "function": F.scaled_dot_product_attention,
    "function, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "function, what is seen": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=~FUTURE),
    "function, short texts": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ~SHORT),
    "function, bias": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS, scale=0.3),
    "written out": written_out,
    "written out, causal": lambda q, k, v: written_out(q, k, v, FUTURE),
    "written out, short texts": lambda q, k, v: written_out(q, k, v, SHORT),
    "einsum": by_einsum,
}


@pytest.mark.parametrize("fused", [False, True], ids=["three layers", "one layer"])
@pytest.mark.parametrize("attend", ATTENTION.values(), ids=list(ATTENTION))
def test_the_side_of_the_queries_before_a_mask_of_tokens(attend, fused):
    """What lies behind it too; keys, values and what lies below are dense, and the report says so."""
    model = Tokens(Heads(attend, fused), Backdrop(0.7, (0, 1), generator=torch.Generator())).double()
    fast = check(model, torch.randint(9, (5, 11), generator=torch.Generator().manual_seed(0)))
    (entry,) = fast.skip_report
    assert {"block.out", "block.wide", "block.narrow"} <= set(entry.skipped)
    assert ("block.q" in entry.skipped) == (not fused)
    assert not {"block.k", "block.v", "block.qkv", "first"} & set(entry.skipped)
    reasons = dict(entry.kept)
    assert any("reads all positions" in reason for reason in reasons.values()), reasons
    assert "first" in reasons
    assert 5 / 16 < entry.share < 1
    assert entry.last.endswith("of 55 units were computed again")


@pytest.mark.parametrize("attend", [*ATTENTION.values(), bmm], ids=[*ATTENTION, "bmm"])
def test_attention_under_a_mask_of_samples(attend):
    model = Tokens(Heads(attend), Backdrop(0.5, exact=True, generator=torch.Generator())).double()
    (entry,) = check(model, torch.randint(9, (5, 11), generator=torch.Generator().manual_seed(0))).skip_report
    assert entry.share == 1, entry.kept


class Returns(nn.Module):
    """Of what a layer returns, one part."""

    def __init__(self, layer, part):
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x):
        return self.part(self.layer, x)


ENCODER = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
LAYERS = {
    "nn.MultiheadAttention": Returns(nn.MultiheadAttention(8, 2, batch_first=True), lambda f, x: f(x, x, x)[0]),
    "without weights": Returns(
        nn.MultiheadAttention(8, 2, batch_first=True), lambda f, x: f(x, x.sin(), x, need_weights=False)[0]
    ),
    "sequence first": Returns(nn.MultiheadAttention(8, 2), lambda f, x: f(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)),
    "weights": Returns(nn.MultiheadAttention(8, 2, batch_first=True), lambda f, x: f(x, x, x)[1]),
    "masks": Returns(
        nn.MultiheadAttention(8, 2, batch_first=True),
        lambda f, x: f(x, x, x, key_padding_mask=SHORT[:, 0, 0], attn_mask=FUTURE)[0],
    ),
    "nn.TransformerEncoderLayer": nn.TransformerEncoderLayer(8, 2, **ENCODER),
    "norm first": nn.TransformerEncoderLayer(8, 2, norm_first=True, activation="gelu", **ENCODER),
    "nn.TransformerEncoder": nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, **ENCODER), 2, enable_nested_tensor=False
    ),
    "nn.TransformerDecoderLayer": Returns(nn.TransformerDecoderLayer(8, 2, **ENCODER), lambda f, x: f(x, x.sin())),
    "nn.LSTM": Returns(nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), lambda f, x: f(x)[0]),
    "sequence first, last states": Returns(nn.LSTM(8, 6, 2), lambda f, x: torch.cat(f(x.transpose(0, 1))[1], -1)[-1]),
    "last states": Returns(nn.LSTM(8, 6, batch_first=True, proj_size=3), lambda f, x: f(x)[1][0][-1]),
    "states and outputs": Returns(nn.GRU(8, 6, batch_first=True), lambda f, x: f(x)[0] + f(x.sin())[1].transpose(0, 1)),
    "given states": Returns(nn.GRU(8, 8), lambda f, x: f(x.transpose(0, 1), x.transpose(0, 1)[:1].contiguous())[0][-1]),
    "nn.RNN over rows": Returns(
        nn.RNN(2, 3, batch_first=True), lambda f, x: f(x.unflatten(2, (4, 2)).flatten(0, 1))[0].unflatten(0, (5, -1))
    ),
    "nn.GRUCell": Returns(nn.GRUCell(8, 8), lambda f, x: f(x[:, 0], x[:, 1])),
    "nn.LSTMCell": Returns(nn.LSTMCell(8, 8), lambda f, x: f(x[:, 0], (x[:, 1], x[:, 2]))[1]),
    "nn.Bilinear": Returns(nn.Bilinear(8, 8, 3), lambda f, x: f(x, x.tanh())),
    "nn.Embedding": Returns(nn.Embedding(5, 8), lambda f, x: f((x[..., 0] * 3).round().long() % 5) + x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_under_a_mask_of_samples(name):
    model = Tokens(LAYERS[name], Backdrop(0.5, exact=True, generator=torch.Generator())).double()
    (entry,) = check(model, torch.randint(9, (5, 11), generator=torch.Generator().manual_seed(0))).skip_report
    assert entry.share == 1, entry.kept
    assert not entry.kept


def test_a_layer_over_the_batch_is_no_layer_over_samples():
    """Samples in place of time."""
    model = Tokens(Returns(nn.LSTM(8, 8), lambda f, x: f(x)[0]), Backdrop(0.5, exact=True)).double()
    (entry,) = check(model, torch.randint(9, (5, 11))).skip_report
    assert entry.kept == [("block.layer", "it mixes samples")]


def test_packed_sequences_are_left_alone():
    def packed(layer, x):
        lengths = torch.tensor([11, 9, 9, 4, 2])
        return layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][-1]

    model = Tokens(Returns(nn.GRU(8, 8, batch_first=True), packed), Backdrop(0.5, exact=True)).double()
    check(model, torch.randint(9, (5, 11)))


class Tabled(nn.Module):
    """A bias that is made of weights alone, as relative positions are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.bias = nn.Buffer(fixed(W, 2)), nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.first, self.mask = nn.Conv2d(C, C, 3, padding=1), Backdrop(0.5, exact=True)

    def forward(self, x):
        return self.mask(self.first(x) + self.bias(self.table)[:, 0].sigmoid())


def test_what_is_made_of_weights_alone_does_not_count():
    """No sample is blocked there."""
    (entry,) = check(Tabled().double(), fixed(N, C, H, W)).skip_report
    assert entry.share == 1
    assert "bias.0" not in entry.skipped


def without_autocast(x):
    with torch.autocast("cpu", enabled=False):
        return x.double().sin().to(x.dtype)


def test_an_autocast_that_is_off_inside_and_outside():
    run(without_autocast, Backdrop2d(0.8), ALL)
    model = Model(without_autocast, Backdrop2d(0.8))
    fast = skip_blocked(model, when="always")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            fast(torch.randn(N, C, H, W)).sum().backward()
        assert any("autocast" in reason for _, reason in fast.skip_report[0].kept)
        fast(torch.randn(N, C, H, W)).sum().backward()
        assert not fast.skip_report[0].kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout(0.7, inplace=True), nn.Dropout2d(0.4)], ids=str)
def test_the_output_behind_dropout_is_the_same_bits(layer, dtype):
    """Which drops the same cells, drawn from the same numbers."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Conv2d(4, 4, 1), Backdrop2d(0.9)).to(dtype)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 9, 9, dtype=dtype).to(memory_format=memory_format)
        expected, actual = (step(m, x, seed=1) for m in (model, skip_blocked(model, when="always")))
        assert torch.equal(expected.output, actual.output)
