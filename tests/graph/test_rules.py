"""What rules say of calls in all the ways to write them, against brute force.

Samples: the call on some rows of its inputs gives those rows of the result. Positions: a cell of the result does not
change where anything else changes than the cells of its inputs that it is said to read.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  # calls are text
from torch import fx

from backdrop.graph import Slide, UnsupportedError, Where
from backdrop.graph.table import Call, find, rule_of
from backdrop.graph.trace import set_cells  # noqa: F401


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


D = torch.float64
X, M4, M6, M8 = numbers(4, 4, 6, 8), numbers(4, 4), numbers(6, 6), numbers(8, 8)
ROW, ROWS = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 0, 1, 3, 2, 4])
AT = numbers(4, 4, 6, 8, seed=1).argsort(1)
fx.wrap("set_cells")
CALLS = {  # functions of a map h (4, 4, 6, 8)
    "sums": """
        h.sum(0) | h.sum(-4) | h.sum([0, 1]) | h.sum(dim=(1, 0), keepdim=True) | h.sum(axis=0) | torch.sum(h, 1)
        torch.sum(h, dim=[-1, 1]) | h.sum(1, True) | h.sum(1, keepdim=True, dtype=torch.float64)
    """,
    "means": """
        h.mean() | h.mean(0) | h.mean((1,), True) | h.mean(axis=1) | h.mean(-1) | h.mean([-2, -1])
        torch.mean(h, (0, 2)) | torch.mean(h, axis=0)
    """,
    "largest and smallest": """
        h.max(1).values | h.max(1)[0] | h.max(0)[0] | torch.max(h, 0)[1] | h.max(dim=-4)[0] | h.max()
        torch.max(h, h * 2) | h.min(1, True)[0] | h.amax((0, 1)) | h.amax(dim=1) | h.amax()
        h.amin([1, -1], True) | h.amax(())
    """,
    "places and spreads": """
        h.argmax() | h.argmax(0) | h.argmax(1, True) | h.argmax(dim=-1) | h.var(0) | h.var([1])
        h.var((0, 1), unbiased=False) | h.var(1, False, True) | h.var(unbiased=False) | h.var(False) | h.std(1)
        torch.std(h, (1, 2)) | torch.var_mean(h, 1)[0] | torch.var_mean(h, dim=(0,))[1]
        torch.std_mean(h, False)[0] | torch.var(h, dim=None)
    """,
    "other reductions": """
        h.prod(1) | h.prod() | h.logsumexp(0) | h.logsumexp((1, 0)) | torch.logsumexp(h, dim=1) | h.median(1)[0]
        h.median() | h.median(0)[0] | h.nansum(1) | h.nanmean((0,)) | h.all(1) | h.any() | h.any(0)
        h.count_nonzero(0) | h.count_nonzero((1, 0)) | h.count_nonzero(1, 0) | h.count_nonzero() | h.mode(1)[0]
        h.aminmax()[0] | h.aminmax(dim=0)[0] | h.aminmax(dim=1)[1]
    """,
    "norms": """
        h.norm() | h.norm(2, 1) | h.norm(2, 0) | h.norm(dim=1) | h.norm(dim=0) | h.norm(p=2, dim=(1, 2))
        h.norm(2, (0, 1)) | h.norm(2, 1, True) | torch.norm(h, 2, 0) | torch.norm(h, dim=1, keepdim=True)
        torch.norm(h, "fro", [1, 2]) | torch.linalg.norm(h, dim=1) | torch.linalg.norm(h)
        torch.linalg.norm(h, 2, 0) | torch.linalg.norm(h, dim=(1, 2)) | torch.linalg.vector_norm(h, 2)
        torch.linalg.vector_norm(h, 2, 0) | torch.linalg.vector_norm(h, dim=1)
        torch.linalg.vector_norm(h, 2, (1, -1), True)
    """,
    "softmax": """
        h.softmax(0) | h.softmax(1) | h.softmax(-1) | h.softmax(dim=0) | F.softmax(h, 1) | F.softmax(h, dim=-4)
        torch.softmax(h, 0) | F.log_softmax(h, 1) | h.log_softmax(-3)
        F.softmax(h, 1, 3, torch.float64)
    """,
    "running sums": """
        h.cumsum(0) | h.cumsum(1) | h.cumsum(dim=-4) | torch.cumsum(h, -1) | h.cumprod(1) | h.cummax(1)[0]
        h.cummin(0)[0] | h.logcumsumexp(1)
    """,
    "gates and unit vectors": """
        F.glu(h) | F.glu(h, 0) | F.glu(h, dim=1) | F.glu(h, -4) | F.normalize(h) | F.normalize(h, dim=0)
        F.normalize(h, 2, 0) | F.normalize(h, 2.0, -3) | F.normalize(h, p=1, dim=-1)
        F.normalize(h, dim=(1, 2)) | F.normalize(h, 2, (0, 1))
    """,
    "roll": """
        h.roll(1) | h.roll(1, 0) | h.roll(1, 1) | h.roll((1, 2), (0, 1)) | h.roll(shifts=1, dims=0)
        h.roll(1, dims=1) | torch.roll(h, (1, 1), (1, -1)) | torch.roll(h, 2, -4)
        torch.roll(h, shifts=(1,), dims=(0,))
    """,
    "flip": """
        h.flip(0) | h.flip(1) | h.flip(1, 0) | h.flip(-1, 1) | h.flip((1, 2)) | h.flip([0])
        torch.flip(h, (0, 1)) | torch.flip(h, [1]) | torch.flip(h, dims=(-4,)) | h.flip(dims=(1,))
        h.flip(dims=[0, 1])
    """,
    "permute": """
        h.permute(1, 0, 2, 3) | h.permute((0, 2, 3, 1)) | h.permute(dims=(0, 2, 1, 3))
        torch.permute(h, (2, 0, 1, 3)) | h.permute(0, -1, 1, 2) | h.permute(-4, -3, -1, -2)
        torch.permute(h, dims=[0, 3, 2, 1])
    """,
    "transpose": """
        h.transpose(0, 1) | h.transpose(1, -1) | h.transpose(dim0=1, dim1=2) | torch.transpose(h, 0, -1)
        h.swapaxes(1, 2) | h.swapaxes(axis0=0, axis1=1) | h.swapdims(0, 3) | torch.swapdims(h, dim0=1, dim1=2)
        h.mT | h.movedim(0, -1) | h.movedim(1, -1) | h.movedim((0, 1), (1, 0))
        torch.movedim(h, source=1, destination=3) | h.moveaxis(-1, 1)
    """,
    "reshape": """
        h.reshape(4, -1) | h.reshape(-1, 8) | h.reshape(16, 6, 8) | h.reshape(8, 2, 6, 8)
        h.reshape(2, 8, 6, 8) | h.reshape(4, 2, 2, 6, 8) | h.reshape(4, 4, 48) | h.reshape(4, 4, 2, 3, 8)
        h.reshape(1, 4, 4, 6, 8) | h.reshape(4, 1, 4, 6, 8) | h.reshape(6, 4, 4, 8) | h.view(4, 8, 24)
        h.view(-1) | h.view(48, 16) | h.flatten() | h.flatten(1) | h.flatten(0, 1) | h.flatten(start_dim=2)
        h.flatten(-2) | torch.flatten(h, 0, 2) | h.unflatten(0, (2, 2)) | h.unflatten(1, (2, 2))
        h.unflatten(-1, (4, 2)) | h.unsqueeze(0) | h.unsqueeze(-1) | h.unsqueeze(2) | h[:, :1].squeeze()
        h[:, :1].squeeze(1) | h[:, :1, :, :1].squeeze((1, 3)) | h[:, :1, :, :1].squeeze(1, 3) | h.ravel()
        h.view_as(h) | h.reshape_as(h.flatten(1))
    """,
    "expand and repeat": """
        h.expand(4, 4, 6, 8) | h[:, :1].expand(-1, 5, -1, -1) | h[:1].expand(4, -1, -1, -1)
        h.expand(2, -1, -1, -1, -1) | h.repeat(1, 2, 1, 1) | h.repeat(2, 1, 1, 1) | h[:1].repeat(4, 1, 1, 1)
        h.repeat(2, 1, 1, 1, 1) | h.tile(2) | h.tile((2, 1, 1, 1)) | h.tile(2, 1) | torch.tile(h, (1, 2, 1))
        torch.broadcast_to(h, (2, 4, 4, 6, 8)) | h.expand_as(h)
    """,
    "cat and stack": """
        torch.cat([h, h]) | torch.cat([h, h * 2], 1) | torch.cat((h, h), dim=0) | torch.cat([h, h], -1)
        torch.cat([h, h], axis=1) | torch.concat([h, h], 0) | torch.stack([h, h]) | torch.stack([h, h], 1)
        torch.stack([h, h], dim=-1) | torch.stack([h, h], dim=2)
    """,
    "split": """
        h.split(2)[0] | h.split(2, 1)[1] | h.split([1, 3], 0)[0] | h.split(2, dim=1)[0]
        torch.split(h, 2, -4)[0] | h.chunk(2)[0] | h.chunk(2, 1)[1] | torch.chunk(h, 2, dim=0)[1]
        h.tensor_split(2)[0] | h.tensor_split(2, dim=1)[0] | h.tensor_split((1, 2), 1)[2] | h.unbind()[0]
        h.unbind(1)[0] | h.unbind(dim=0)[1] | torch.unbind(h, 2)[1] | h.unbind(-1)[3]
    """,
    "index": """
        h[0] | h[:, 0] | h[..., 0] | h[None] | h[:, None] | h[::2] | h[1:] | h[:4] | h[:100] | h[-4:]
        h[:, ::2] | h[:, -1] | h[:, 1:3, ::2, 1:] | h[:, :, 2:, :-1] | h[..., 1:, :] | h[:, ROW] | h[ROW]
        h[:, :, ROWS] | h[:, None, ..., 0] | h[:, [0, 2]] | h[..., ROW] | h[:, ROW, ROW] | h[torch.arange(4), ROW]
        h[torch.arange(4), 1] | h[:, 0, None] | h[:, 1:2] | h[0:4, 0] | h[slice(None), 1]
    """,
    "gather": """
        h.select(0, 1) | h.select(1, 0) | h.select(-1, 2) | torch.select(h, 2, 1) | h.narrow(0, 0, 4)
        h.narrow(1, 0, 2) | h.narrow(dim=0, start=1, length=2) | h.index_select(0, ROW) | h.index_select(1, ROW)
        torch.index_select(h, dim=-4, index=ROW) | h.gather(1, ROW.view(1, 4, 1, 1).expand(4, 4, 6, 8))
        h.gather(0, ROW.view(4, 1, 1, 1).expand(4, 4, 6, 8)) | torch.take_along_dim(h, ROW.view(1, 4, 1, 1), 1)
        torch.take_along_dim(h, ROW.view(4, 1, 1, 1), dim=0) | torch.take_along_dim(h, ROW)
    """,
    "sort": """
        h.sort(1)[0] | h.sort(0)[0] | h.sort(dim=0)[0] | h.sort()[0] | torch.sort(h, 1, True)[0]
        torch.sort(h, dim=-4)[0] | torch.sort(h, stable=True, dim=0)[0] | h.argsort(0) | h.argsort(dim=1)
        h.argsort(1, True) | h.topk(2)[0] | h.topk(2, 1)[0] | h.topk(2, 0)[0] | h.topk(2, dim=0)[0]
        torch.topk(h, k=2, dim=1)[0] | h.kthvalue(2, 1)[0] | h.kthvalue(2, 0)[0] | h.kthvalue(2)[0]
    """,
    "products": """
        h @ M8 | M6 @ h | h.matmul(M8) | torch.matmul(M6, h) | h.flatten(2) @ h.flatten(2).transpose(1, 2)
        torch.bmm(h.flatten(2), h.flatten(2).mT) | h[:, :, 0, 0] @ h[:, :, 0, 1].t() | h[:, :, 0, 0].mm(M4)
        M4 @ h[:, :, 0, 0] | torch.mm(M4, h[:, :, 0, 0]) | h[:, :, 0, 0].mv(M4[0])
        torch.addmm(h[:, :, 0, 0], M4, M4) | torch.addmm(M4, h[:, :, 0, 0], M4)
        torch.addmm(M4, M4, h[:, :, 0, 0]) | torch.addmm(M4[0], h[:, :, 0, 0], M4)
        torch.addmm(h[0, 0, 0, :4], M4, M4) | torch.baddbmm(h[:, 0, :, :6], h[:, 0], h[:, 1].mT)
        torch.addbmm(M6, h[:, 0], h[:, 1].mT) | torch.addbmm(h[0, 0, :, :6], M6[None], M6[None])
    """,
    "einsum": """
        torch.einsum("nchw->nhw", h) | torch.einsum("nchw->chw", h) | torch.einsum("nnhw->nhw", h)
        torch.einsum("nchw,dc->ndhw", h, M4) | torch.einsum("nchw,mn->mchw", h, M4)
        torch.einsum("nchw,nchv->ncwv", h, h) | torch.einsum("nchw,mchw->nm", h, h)
        torch.einsum("...w,wv->...v", h, M8) | torch.einsum("n...->...n", h)
        torch.einsum("nchw,n->nchw", h, M4[0]) | torch.einsum("nchw->n", h)
        torch.einsum("ab,ncab->nc", M6, h[..., :6])
    """,
    "linear and normalise": """
        F.linear(h, M8) | F.linear(h.mT, M6) | F.linear(M8, h.flatten(2)[0, :, :8])
        F.linear(h[:, :, 0, 0], h[:, :, 0, 1]) | F.layer_norm(h, (8,)) | F.layer_norm(h, (6, 8))
        F.layer_norm(h, h.shape[1:]) | F.layer_norm(h, h.shape) | F.layer_norm(h, [8], eps=.1)
        F.rms_norm(h, (8,)) | F.rms_norm(h, (4, 6, 8)) | F.group_norm(h, 2) | F.group_norm(h, num_groups=4)
        F.instance_norm(h) | F.batch_norm(h, M4[0], M4[1].exp()) | F.batch_norm(h, None, None, training=True)
        F.batch_norm(h, M4[0].clone(), M4[1].exp(), None, None, True) | F.local_response_norm(h, 3)
    """,
    "convolve": """
        F.conv2d(h, torch.ones(4, 4, 3, 3, dtype=D))
        F.conv2d(h, torch.ones(4, 2, 3, 1, dtype=D), None, (2, 1), (1, 0), 1, 2)
        F.conv2d(h[0], torch.ones(4, 4, 3, 3, dtype=D))
        F.conv1d(h.flatten(2), torch.ones(4, 4, 3, dtype=D), padding=1)
        F.conv1d(h[:, 0], torch.ones(6, 6, 3, dtype=D))
        F.conv3d(h[:, None], torch.ones(2, 1, 3, 3, 3, dtype=D), padding=1)
        F.conv_transpose2d(h, torch.ones(4, 2, 3, 3, dtype=D), stride=2)
        F.conv2d(h, torch.ones(4, 4, 3, 5, dtype=D), padding="same")
    """,
    "pool": """
        F.max_pool2d(h, 2) | F.max_pool2d(h, 3, 1, 1) | F.max_pool2d(h[0], 2) | F.avg_pool2d(h, 2)
        F.avg_pool1d(h[:, 0], 2) | F.avg_pool3d(h[:, None], 2) | F.avg_pool3d(h, 2)
        F.adaptive_avg_pool2d(h, 1) | F.adaptive_avg_pool2d(h, (3, 4)) | F.adaptive_max_pool1d(h[:, 0], 2)
        F.adaptive_avg_pool2d(h[0], 2) | F.max_pool1d(h[:, :, 0], 2) | F.max_pool1d(h[:, 0, 0], 2)
        F.avg_pool1d(h[:, 0, 0], 2) | F.adaptive_avg_pool1d(h[:, 0, 0], 2)
        F.adaptive_max_pool1d(h[:, 0, 0], 4)
    """,
    "interpolate and pad": """
        F.interpolate(h, scale_factor=2) | F.interpolate(h, (3, 4))
        F.interpolate(h.flatten(2), 24, mode="linear") | F.pad(h, (1, 1)) | F.pad(h, (0, 0, 0, 0, 1, 1))
        F.pad(h, (0,) * 6 + (1, 0)) | F.pad(h, (1, 1, 1, 1), "reflect") | F.pad(h, (0,) * 6 + (-1, 1))
        F.pad(h[0], (1, 1, 1, 1), "circular") | F.pixel_shuffle(h, 2) | F.pixel_unshuffle(h, 2)
        F.channel_shuffle(h, 2) | F.pixel_shuffle(h[0], 2)
    """,
    "of two tensors": """
        F.prelu(h, M4[0]) | F.prelu(h, M4[0, :1]) | F.prelu(h[:, 0, 0, 0], M4[0, :1]) | torch.prelu(h, M4[0])
        torch.where(h > 0, h, h.mean()) | torch.lerp(h, h * 2, 0.3) | h.masked_fill(h > 0, 1.0)
        torch.renorm(h, 2, 0, 1.0) | torch.renorm(h, 2, 1, 1.0) | h.renorm(2, -4, 1.0)
        F.cosine_similarity(h, h * 2) | F.cosine_similarity(h, h.flip(1), 0)
        F.cosine_similarity(h, M8[:6][None, None], dim=-1) | F.cosine_similarity(h, M8[0], dim=0)
        F.pairwise_distance(h, h * 2) | F.pairwise_distance(h[:, :, 0, 0], M4) | F.pairwise_distance(h, h[:1])
        F.bilinear(h, h, torch.ones(2, 8, 8, dtype=D))
        F.bilinear(h.transpose(0, 3), h.transpose(0, 3), torch.ones(2, 4, 4, dtype=D))
    """,
    "attention and tables": """
        F.scaled_dot_product_attention(h, h * 2, h)
        F.scaled_dot_product_attention(h[:, :, 0], h[:, :, 1], h[:, :, 2])
        F.scaled_dot_product_attention(h[:, :, 0, 0], h[:, :, 0, 1], h[:, :, 0, 2])
        F.scaled_dot_product_attention(h[:, 0], h[:, 1], h[:, 2], is_causal=True)
        F.scaled_dot_product_attention(h, h, h, h[:, :, :, :6])
        F.scaled_dot_product_attention(h.transpose(0, 1), h.transpose(0, 1) * 2, h.transpose(0, 1))
        F.scaled_dot_product_attention(h[:1], h * 2, h * 3)
        F.scaled_dot_product_attention(h, h[:1] * 2, h[:1]) | F.embedding(h.argmax(1), M4)
        F.embedding(torch.arange(4), h[:, :, 0, 0]) | F.embedding(h.argmax(0), M4)
    """,
    "put by an index": """
        h.index_add(1, ROW, h * 2) | h.index_add(0, ROW, h * 2) | torch.index_add(h, 2, ROW, h[:, :, :4], alpha=2)
        h.index_copy(1, ROW, h * 2) | h.index_copy(dim=3, index=ROW, source=h[..., :4]) | h.index_fill(1, ROW[:2], 0.5)
        h.index_fill(0, ROW[:2], 0.5) | h.scatter(1, AT, h * 2) | h.scatter(1, AT, 0.5) | h.scatter(0, AT, h)
        h.scatter(2, AT, h) | h.scatter(1, AT[:2], h) | h.scatter_add(1, AT, h * 2)
        torch.scatter(h, dim=1, index=AT, src=h * 2) | h.scatter_reduce(1, AT, h * 2, "sum") | h.scatter_add(1, AT, h)
        h.scatter(1, AT[:, :, :3], h)
    """,
    "set": """
        set_cells(h, (slice(None), 0), 0.5) | set_cells(h, (slice(None), slice(1, 3)), h[:, :2]) | set_cells(h, 0, 0.5)
        set_cells(h, (Ellipsis, slice(2, None)), h[..., :6]) | set_cells(h, (slice(None), slice(None), 1), h[:, :, 0])
        set_cells(h, (slice(0, 4), 1), h[:, 0]) | set_cells(h, (slice(None), 1), h[0, 0])
        set_cells(h, Ellipsis, h[:1]) | set_cells(h, (slice(None), None, 1), h[:, :1]) | set_cells(h, h > 0, 0.5)
        set_cells(h, h[:, :, 0, 0] > 0, 0.5) | set_cells(h, h[..., 0] > 0, 0.5) | set_cells(h, ROW, 0.5)
        set_cells(h, (slice(None), ROW), h) | set_cells(h, (slice(1, None),), h[:3])
        set_cells(h, slice(None), h[:, :, :1]) | set_cells(h, (), h * 2)
    """,
    "neighbours": """
        h.diff() | h.diff(dim=0) | h.diff(dim=1) | h.diff(2, 2) | torch.diff(h, dim=-1, prepend=h[..., :1])
        torch.diff(h, 1, 1, h[:, :1], h[:, :2]) | h.unfold(2, 2, 1) | h.unfold(0, 2, 2) | h.unfold(1, 3, 1)
        h.unfold(-1, 4, 2) | F.lp_pool2d(h, 2, 2) | F.lp_pool2d(h, 4.0, (3, 1), 2) | F.lp_pool1d(h[:, 0], 2, 3, 2)
        F.lp_pool2d(h, 2, 5, 4, ceil_mode=True) | F.interpolate(h, (3, 2), mode="area")
        F.interpolate(h, (3, 3), mode="area") | h.narrow(2, 1, 3) | h.narrow(3, -3, 2)
        torch.narrow(h, dim=2, start=0, length=6)
    """,
    "turned and repeated": """
        h.fliplr() | h.flipud() | h.rot90() | h.rot90(2, (2, 3)) | torch.rot90(h, 1, [1, 2])
        h.repeat_interleave(2, 0) | h.repeat_interleave(2, 1) | h.repeat_interleave(3, dim=2) | h.repeat_interleave(2)
        h.repeat_interleave(ROW, 1) | torch.repeat_interleave(h, ROW, dim=0) | torch.repeat_interleave(h, 2, 3)
        h.tril() | h.triu(1) | h.mT.tril()
    """,
    "complex numbers": """
        torch.complex(h, h * 2).imag | torch.complex(h, h * 2).real | torch.polar(h.abs(), h).abs()
        torch.imag(torch.complex(h, h)) | torch.view_as_complex(torch.stack([h, h], -1)).real
        torch.view_as_real(torch.complex(h, h)) | torch.complex(h, h).angle()
        torch.view_as_complex(h.unflatten(3, (4, 2))).abs()
    """,
    "joined and compared": """
        torch.hstack([h, h * 2]) | torch.vstack([h, h * 2]) | torch.dstack([h, h * 2])
        torch.hstack([h[:, 0, 0, 0], h[:, 0, 0, 1]]) | torch.column_stack([h, h * 2])
        torch.cross(h[:, :3], h[:, 1:], dim=1) | torch.cross(h[:3], h[1:], dim=0)
        torch.linalg.cross(h[..., :3], h[..., 1:4]) | torch.cross(h[:, :3], h[:1, 1:], dim=1) | F.softmin(h, 1)
        F.softmin(h, 0) | torch.broadcast_tensors(h, h[:, :1])[1] | torch.broadcast_tensors(h[:1], h)[0]
        torch.bucketize(h, M4[0].sort()[0]) | h.quantile(0.5, 1) | torch.quantile(h, 0.5, dim=0)
        h.quantile(0.3, dim=1, keepdim=True) | torch.nanquantile(h, 0.5) | torch.tensordot(h, M4, [[1], [0]])
        torch.tensordot(M4, h, ([1], [0])) | torch.tensordot(h, M8, 1)
        torch.tensordot(h, h * 2, ([1, 2, 3], [1, 2, 3])) | F.one_hot(h.argmax(1), 4)
        F.one_hot(h.argmax(0), num_classes=4) | F.embedding_bag(h[:, :, 0, 0].argsort(1), M4)
        F.embedding_bag(h[:, :, 0, 0].argsort(1), M4, mode="sum")
    """,
    "the rest": """
        h.diagonal() | h.tril() | h.new_zeros(4, 4) + h[:, :, 0, 0] | h.to(torch.float32)
        h.type(torch.float32) | h.double() | h + h.new_ones(4, 1, 1, 1)
        h * torch.arange(4, dtype=D).view(4, 1, 1, 1) | h * torch.arange(4, dtype=D).view(4, 1, 1) | h + h[0]
        h + h[:, :1] | h - h[:1] | h[:, :, 0, 0] + h[:, 0, 0, 0] | h[:, 0, 0, 0][:, None] + h[:, 0, 0, 0]
        h[:, 0, 0, 0] + h[:, 0, 0, 0][:, None] | torch.maximum(h, h[0])
        torch.pow(h[:, 0, 0, 0].exp(), h[:, :, 0, 0])
    """,
}


def run(node, given):
    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def tensors(value):
    return [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, torch.Tensor)]


def calls(text):
    """Every call in it that has a rule, and all values."""
    module = fx.symbolic_trace(eval(f"lambda h: {text}"))
    values = {}
    for node in module.graph.nodes:
        if node.op == "output":
            break
        if node.op in ("placeholder", "get_attr"):
            values[node] = X if node.op == "placeholder" else getattr(module, node.target)
            continue
        values[node] = run(node, values.__getitem__)
        if rule_of(node) is not None and tensors(values[node]):
            yield node, values


def step_of(node, values, axes, **more):
    """What the rule says; None if that cannot be skipped."""
    several = {source: tensors(values[source]) for source in node.all_input_nodes}
    shapes = {source: tuple(found[0].shape) for source, found in several.items() if found}
    tuples = frozenset(source for source in shapes if isinstance(values[source], tuple))
    shape = tuple(tensors(values[node])[0].shape)
    try:
        step = find(Call(node, shape, axes, shapes, "exact", 1, tuples, **more))
    except UnsupportedError:
        return None
    return None if step.couples else step


def same(found, wanted, axis, cells, shape):
    """Whether cells along an axis are the same, of all results that have it."""
    pairs = [(a, b) for a, b in zip(tensors(found), tensors(wanted), strict=True) if b.shape == shape]
    return all(torch.allclose(wide(a), wide(b.index_select(axis, cells)), 1e-9, 1e-12) for a, b in pairs)


def wide(x):
    return x if x.is_complex() else x.double()


def each_text(kind):
    return [text.strip() for line in CALLS[kind].strip().splitlines() for text in line.split(" | ")]


@pytest.mark.parametrize("kind", CALLS)
def test_rows_of_samples(kind):
    found = 0
    for text in each_text(kind):
        for node, values in calls(text):
            first = tensors(values[node])[0]
            for axis in range(first.ndim):
                step = step_of(node, values, (axis,))
                if step is None:
                    continue
                rows = torch.tensor([2, 0, 3] if first.shape[axis] >= 4 else range(first.shape[axis]))

                def taken(source, step=step, rows=rows, values=values):
                    value, tap = values[source], step.inputs.get(source)
                    if tap is None or tap.axes[0] is None:
                        return value
                    index = (rows[:, None] * tap.inner + torch.arange(tap.inner)).flatten()
                    parts = [each.index_select(tap.axes[0], index % each.shape[tap.axes[0]]) for each in tensors(value)]
                    return parts[0] if isinstance(value, torch.Tensor) else tuple(parts)

                if step.run is None:
                    part = run(node, taken)
                else:
                    part = step.run(*fx.map_arg((node.args, node.kwargs), taken), Where(tuple, (), (), (), len(rows)))
                assert same(part, values[node], axis, rows, first.shape), (text, node, axis)
                found += 1
    assert found > 0


@pytest.mark.parametrize("kind", CALLS)
def test_cells_of_positions(kind):
    for text in each_text(kind):
        for node, values in calls(text):
            first = tensors(values[node])[0]
            for axes in itertools.permutations(range(first.ndim), 2):
                step = step_of(node, values, axes, again=True)
                for source, tap in step.inputs.items() if step is not None else ():
                    if isinstance(values[source], torch.Tensor) and values[source].is_floating_point():
                        assert_reads_no_other(text, node, values, axes, source, tap)


def assert_reads_no_other(text, node, values, axes, source, tap):
    x, first = values[source], tensors(values[node])[0]
    if tap.axes[1] is None or isinstance(tap.fill, str):  # all of it, or borders that stand for cells inside
        return
    slides = [None, tap.slides[0] if tap.slides else None]
    for axis, along, slide in zip(axes, tap.axes, slides, strict=True):
        if along is None:
            continue
        slide = slide or Slide(high=0) if axis == axes[1] else Slide(tap.inner, 0, tap.inner - 1)
        for cell in (0, first.shape[axis] // 2, first.shape[axis] - 1):
            at = torch.arange(x.shape[along])
            low, high = ((cell * slide.down + end) // slide.up for end in (slide.low, slide.high))
            read = ((at >= low) & (at <= high)).view([-1 if i == along else 1 for i in range(x.ndim)])
            changed = {**values, source: torch.where(read, x, numbers(*x.shape, seed=cell + 1))}
            found = tensors(run(node, changed.__getitem__))
            part = tuple(y.narrow(axis, cell, 1) if y.shape == first.shape else y for y in found)
            wanted = tuple(tensors(values[node]))
            assert same(part, wanted, axis, torch.tensor([cell]), first.shape), (text, node, axes, cell)
