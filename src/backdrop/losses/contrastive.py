"""Contrast: each a shall be near its own b, and far from those of others, in O(n d) memory at any n.

With similarities s_ij = a_i . b_j / temperature, weights w_i (1 each, if none are given), W their sum, and P(i) all j
with the label of i (i alone, where there are no labels), the softmax form is the mean of both directions,

    L = (L_ab + L_ba) / 2
    L_ab = 1/W sum_i w_i (log sum_j w_j exp(s_ij) - sum_{j in P(i)} w_j s_ij / sum_{j in P(i)} w_j)

and L_ba the same with a and b exchanged: InfoNCE as in CLIP, and with labels the supervised contrastive loss, whose
mean over positives is outside the logarithm. The sigmoid form (SigLIP) takes every pair for itself, z_ij = 1 for those
of one label and -1 for others:

    L = 1/W sum_ij w_i w_j log(1 + exp(-z_ij (s_ij + bias)))

The matrix of pairs is walked in tiles; the softmax form walks it again in the backward pass.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backdrop.distributed import Group, gather, not_compiled, resolve, sum_over
from backdrop.losses._batches import SingleClass, check_number, check_settings, check_weights, make_weights, wide
from backdrop.losses._loss import once

Form: TypeAlias = Literal["softmax", "sigmoid"]
SMALL = 2**17  # pairs, up to which their whole matrix is the faster way
TILE = {"cpu": 2**17, "cuda": 2**25}  # pairs in a tile
SAFE = 40.0  # exp(40) and exp(-40), and either times the number of pairs, are as precise in float32 as 1


@not_compiled
def contrastive_loss(
    a: Tensor,
    b: Tensor,
    *,
    temperature: float | Tensor,
    labels: Tensor | None = None,
    form: Form = "softmax",
    bias: float | Tensor | None = None,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """How much nearer each a is to its own b than to all others, in both directions: InfoNCE, supervised, or SigLIP.

    Similarities are dot products of a and b as they are given; for cosines, normalise them first. Memory grows with the
    number of pairs (a_i, b_i), not with its square. The equations are at the top of `backdrop.losses.contrastive`.

    Args:
        a: (n, d).
        b: (n, d): row i belongs to row i of `a`.
        temperature: what similarities are divided by, at least 1e-30. A tensor of one number gets a gradient.
        labels: (n,) integers: all pairs of one label belong together. None is as if all were different.
        form: "softmax", or "sigmoid" for SigLIP.
        bias: of the sigmoid form, added to similarities; a number, 0 by default, or a tensor, which gets a gradient.
        weight: (n,) at least 0, how much each pair counts, also among the negatives. Those with weight 0 are padding,
            whatever they hold.
        single_class: what to do with a batch in which there is nothing to compare: "error", or "zero" for a zero that
            still carries a graph.
        group: processes over whose pairs the loss is taken; every one gets the same value. Each compares its own rows
            of `a` with all rows of `b`.

    Examples:
        >>> a = torch.eye(3)
        >>> contrastive_loss(a, a, temperature=0.5)  # log(1 + 2 exp(-1 / 0.5))
        tensor(0.2395)
    """
    check_settings(single_class, group)
    _check_form(form, bias)
    _check_features(a, b)
    dtype = torch.promote_types(wide(a), wide(b))
    kinds = None if labels is None else _labels(labels, a)
    scale, shift = _number("temperature", temperature, a), _number("bias", 0.0 if bias is None else bias, a)
    weights = None
    if weight is not None:
        weights = make_weights(weight, a).to(dtype)
        present = weights > 0
        legal, whole = torch.stack([((weights >= 0) & weights.isfinite()).all(), present.all()]).tolist()
        check_weights(legal)
        if not whole:
            rows = present.nonzero()[:, 0]
            a, b, weights = a[rows], b[rows], weights[rows]
            kinds = None if kinds is None else kinds[rows]
    processes = resolve(group)
    with torch.autocast(a.device.type, enabled=False):
        a, b = a.to(dtype) / (scale.to(dtype) if isinstance(scale, Tensor) else scale), b.to(dtype)
        if processes is None and 1 < len(a) ** 2 <= SMALL and kinds is None and weights is None:
            return _small(a, b, form, shift)
        weights = a.new_ones(len(a)) if weights is None else weights
        shift = shift.to(dtype) if isinstance(shift, Tensor) else a.new_tensor(shift)
        return _compare(a, b, weights, kinds, form, shift, single_class, processes)


class ContrastiveLoss(nn.Module):
    """`contrastive_loss` as a module: `loss(a, b, labels=None, weight=None)`.

    Args:
        temperature: what similarities are divided by; an attribute that may be changed. An `nn.Parameter` is learned.
        form: "softmax" or "sigmoid".
        bias: of the sigmoid form; an `nn.Parameter` is learned.
        single_class: "error" or "zero".
        group: processes over whose pairs the loss is taken.
    """

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        form: Form = "softmax",
        bias: float | Tensor | None = None,
        single_class: SingleClass = "error",
        group: Group = None,
    ) -> None:
        super().__init__()
        check_settings(single_class, group)
        _check_form(form, bias)
        for name, value in (("temperature", temperature), ("bias", bias)):
            if value is not None:
                _number(name, value, torch.zeros(()))
        self.temperature, self.form, self.bias = temperature, form, bias
        self.single_class, self.group = single_class, group

    def forward(self, a: Tensor, b: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        return contrastive_loss(
            a,
            b,
            temperature=self.temperature,
            labels=labels,
            form=self.form,
            bias=self.bias,
            weight=weight,
            single_class=self.single_class,
            group=self.group,
        )

    def extra_repr(self) -> str:
        settings = {"temperature": self.temperature, "bias": self.bias}
        values = {name: x.item() if isinstance(x, Tensor) else x for name, x in settings.items() if x is not None}
        shown = [f"{name}={value:g}" for name, value in values.items()]
        shown += [] if self.form == "softmax" else [f"form={self.form!r}"]
        shown += [] if self.single_class == "error" else [f"single_class={self.single_class!r}"]
        shown += [] if self.group is None else [f"group={self.group if isinstance(self.group, str) else '...'}"]
        return ", ".join(shown)


def _small(a: Tensor, b: Tensor, form: Form, bias: float | Tensor) -> Tensor:
    """Without labels and weights, where the whole matrix is the faster way."""
    s = a @ b.T
    if form == "softmax":
        own = torch.arange(len(a), device=a.device)
        return (nn.functional.cross_entropy(s, own) + nn.functional.cross_entropy(s.T, own)) / 2
    s = s + bias
    return nn.functional.softplus(
        torch.where(torch.eye(len(a), dtype=torch.bool, device=a.device), -s, s), threshold=40
    ).sum() / len(a)


class _Pairs:
    """Which pairs there are: own rows of a with all rows of b, and what is known of them."""

    def __init__(self, count: int, weight: Tensor, labels: Tensor | None, processes: dist.ProcessGroup | None) -> None:
        self.processes, self.own = processes, slice(0, count)
        self.labels = labels
        if processes is not None:
            columns = [weight.double().view(torch.int64)] + ([] if labels is None else [labels])  # to the last bit
            rows, self.own = gather(torch.stack(columns, 1), processes)
            weight = rows[:, 0].contiguous().view(torch.float64).to(weight.dtype)
            self.labels = None if labels is None else rows[:, 1]
        self.count = len(weight)
        self.largest = weight.amax().double() if self.count else weight.new_ones((), dtype=torch.float64)
        self.weight = weight / self.largest.to(weight.dtype)
        self.total = self.weight.sum(dtype=torch.float64)

    def everywhere(self, x: Tensor) -> Tensor:
        return x.detach() if self.processes is None else gather(x, self.processes)[0]

    def summed_here(self, x: Tensor) -> Tensor:
        """The own rows of a sum over processes."""
        if self.processes is not None:
            dist.all_reduce(x, group=self.processes)
        return x[self.own]

    def tiles(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Slices of own rows, and of all columns."""
        budget, rows = TILE["cpu" if device.type == "cpu" else "cuda"], self.own.stop - self.own.start
        high = max(1, min(rows, math.isqrt(budget)))
        across = max(1, min(self.count, budget // high))
        for i in range(0, rows, high):
            for j in range(0, self.count, across):
                yield slice(i, min(i + high, rows)), slice(j, min(j + across, self.count))

    def diagonal(self, tile: Tensor, r: slice, c: slice) -> tuple[Tensor, slice]:
        """Where pairs of a row and its own column lie in a tile, and which rows these are."""
        first, last = self.own.start + r.start, self.own.start + r.stop
        low, high = max(first, c.start), min(last, c.stop)
        if low >= high:
            return tile[:0, 0], slice(0, 0)
        return tile.diagonal(first - c.start), slice(low - self.own.start, high - self.own.start)


def _compare(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    form: Form,
    bias: Tensor,
    single_class: SingleClass,
    processes: dist.ProcessGroup | None,
) -> Tensor:
    """The loss of features that are divided by the temperature, none of them padding."""
    pairs = _Pairs(len(a), weight, labels, processes)
    if form == "softmax":
        enough = pairs.count > 1 and (pairs.labels is None or bool((pairs.labels != pairs.labels[0]).any()))
    else:
        enough = pairs.count > 0
    if not enough:
        if single_class == "zero":
            return a[:0].sum() + b[:0].sum() + 0 * bias
        raise ValueError(
            f"the batch of {pairs.count} pairs has one class only, so there is nothing to compare; take a larger "
            "batch, or let such a batch count as zero with single_class='zero'"
        )
    share = pairs.weight[pairs.own].double() / pairs.total
    if form == "sigmoid":
        value = _Sigmoids.apply(a, b, bias, pairs)  # type: ignore[no-untyped-call]
        loss = sum_over(value, processes) * (pairs.largest / pairs.total)
    else:
        rows, columns, own = _LogSums.apply(a, b, pairs)  # type: ignore[no-untyped-call]
        part = (share * ((rows + columns) / 2 - (own if pairs.labels is None else 0))).sum()
        loss = sum_over(part, processes) + pairs.largest.log()
        if pairs.labels is not None:
            loss = loss - _agreement(a, b, pairs)
    return loss.to(a.dtype)


def _agreement(a: Tensor, b: Tensor, pairs: _Pairs) -> Tensor:
    """The mean over samples of the mean similarity to all of their label: a product of the means of each label."""
    assert pairs.labels is not None
    classes, index = torch.unique(pairs.labels, return_inverse=True)
    sizes = a.new_zeros(len(classes), dtype=torch.float64).index_add(0, index, pairs.weight.double())
    share = pairs.weight / sizes.to(a.dtype)[index]
    index, share = index[pairs.own], share[pairs.own, None]
    means = [
        sum_over(x.new_zeros(len(classes), x.shape[1]).index_add(0, index, share * x), pairs.processes) for x in (a, b)
    ]
    return ((means[0] * means[1]).sum(1, dtype=torch.float64) * sizes).sum() / pairs.total


class _LogSums(torch.autograd.Function):
    """Of own rows: log sum_j w_j exp(s_ij), log sum_j w_j exp(s_ji), and s_ii, in float64."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, pairs: _Pairs) -> tuple[Tensor, Tensor, Tensor]:
        everything, w = pairs.everywhere(b), pairs.weight
        mine, lw = w[pairs.own], w.log()
        low = lw.amin()
        norms = [torch.linalg.vector_norm(x, dim=1).amax() if len(x) else x.new_zeros(()) for x in (a, everything)]
        ctx.safe = bool(norms[0] * norms[1] - low < SAFE)
        empty = 0.0 if ctx.safe else -math.inf
        rows, columns = (x.new_full((len(x),), empty, dtype=torch.float64) for x in (a, everything))
        own = torch.zeros_like(rows)
        kept = None
        for r, c in pairs.tiles(a.device):
            tile = a.detach()[r] @ everything[c].T
            diagonal, which = pairs.diagonal(tile, r, c)
            own[which] = diagonal.double()
            if ctx.safe:
                tile.exp_()
                rows[r] += tile @ w[c]
                columns[c] += mine[r] @ tile
            else:
                rows[r] = torch.logaddexp(rows[r], _log_sums(tile + lw[c], 1))
                columns[c] = torch.logaddexp(columns[c], _log_sums(tile + lw[pairs.own][r, None], 0))
            kept = tile if tile.shape == (len(a), len(everything)) else None
        if ctx.safe:
            rows, columns = rows.log_(), columns.log_()
        if pairs.processes is not None:
            top = columns.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=pairs.processes)
            columns = (columns - top).exp_()
            dist.all_reduce(columns, group=pairs.processes)
            columns = columns.log_() + top
        ctx.pairs, ctx.kept = pairs, kept
        ctx.save_for_backward(a, b, rows, columns)
        return rows, columns[pairs.own], own

    @staticmethod
    def backward(
        ctx: Any, to_rows: Tensor, to_columns: Tensor, to_own: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, rows, columns = ctx.saved_tensors
        pairs: _Pairs = ctx.pairs
        wanted = ctx.needs_input_grad
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            everything, to_all = pairs.everywhere(b), pairs.everywhere(to_columns)
            mine, lw = pairs.weight[pairs.own], pairs.weight.log()
            at = [torch.zeros_like(x) if ctx.safe else x.to(a.dtype) for x in (rows, columns)]
            up = (to_rows * (at[0] - rows).exp()).to(a.dtype)
            left = (to_all * (at[1] - columns).exp()).to(a.dtype)
            outer = torch.stack([up, mine], 1), torch.stack([pairs.weight, left])
            to_a, to_b = torch.zeros_like(a), torch.zeros_like(everything)
            for r, c in pairs.tiles(a.device):
                tile = a[r] @ everything[c].T if ctx.kept is None else ctx.kept
                if ctx.safe:
                    tile = tile.exp() if ctx.kept is None else tile
                    tile = (outer[0][r] @ outer[1][:, c]).mul_(tile)
                else:
                    across = (tile - at[0][r, None]).add_(lw[c]).exp_().mul_(up[r, None])
                    tile = (tile - at[1][c]).add_(lw[pairs.own][r, None]).exp_().mul_(left[c]).add_(across)
                diagonal, which = pairs.diagonal(tile, r, c)
                diagonal += to_own[which]
                if wanted[0]:
                    to_a[r].addmm_(tile, everything[c])
                if wanted[1]:
                    to_b[c].addmm_(tile.T, a[r])
            to_b = pairs.summed_here(to_b) if wanted[1] else to_b
        graph = (to_rows, to_columns, to_own, a, b)
        return once(to_a, *graph) if wanted[0] else None, once(to_b, *graph) if wanted[1] else None, None


class _Sigmoids(torch.autograd.Function):
    """Of own rows: sum_ij w_i w_j log(1 + exp(-z_ij (s_ij + bias))), in float64; one walk gives its gradient too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor, pairs: _Pairs) -> Tensor:
        wanted = ctx.needs_input_grad
        x, everything, w = a.detach(), pairs.everywhere(b), pairs.weight
        mine = w[pairs.own]
        value, to_bias = (a.new_zeros((), dtype=torch.float64) for _ in range(2))
        to_a, to_b = torch.zeros_like(x), torch.zeros_like(everything)
        weighted = [features * weight[:, None] for features, weight in ((x, mine), (everything, w))]
        for r, c in pairs.tiles(a.device):
            tile = (x[r] @ everything[c].T).add_(bias.detach())
            one = None if pairs.labels is None else pairs.labels[pairs.own][r, None] == pairs.labels[c]
            _turn(tile, one, pairs, r, c)
            value += mine[r].double() @ (nn.functional.softplus(tile, threshold=40) @ w[c]).double()
            if not any(wanted[:3]):
                continue
            _turn(tile.sigmoid_(), one, pairs, r, c)
            to_bias += mine[r].double() @ (tile @ w[c]).double()
            if wanted[0]:
                to_a[r].addmm_(tile, weighted[1][c])
            if wanted[1]:
                to_b[c].addmm_(tile.T, weighted[0][r])
        if any(wanted[:3]):
            to_a.mul_(mine[:, None])
            to_b = pairs.summed_here(to_b.mul_(w[:, None])) if wanted[1] else to_b
            ctx.save_for_backward(a, b, bias, to_a, to_b, to_bias.to(a.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *graph, to_a, to_b, to_bias = ctx.saved_tensors
        gradients = [
            once((grad * gradient).to(gradient.dtype), *graph) if wanted else None
            for gradient, wanted in zip((to_a, to_b, to_bias), ctx.needs_input_grad, strict=False)
        ]
        return (*gradients, None)


def _turn(tile: Tensor, one: Tensor | None, pairs: _Pairs, r: slice, c: slice) -> None:
    """Change the sign of those that belong together, in place."""
    if one is None:
        pairs.diagonal(tile, r, c)[0].neg_()
    else:
        tile.copy_(torch.where(one, -tile, tile))


def _log_sums(x: Tensor, dim: int) -> Tensor:
    """The logarithm of the sums of exp(x), in float64, so that a large one loses no digits. Overwrites x."""
    top = x.amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    return x.sub_(top).exp_().sum(dim).double().log_() + top.squeeze(dim).double()


def _check_form(form: Form, bias: float | Tensor | None) -> None:
    if form not in ("softmax", "sigmoid"):
        raise ValueError(f"form has to be 'softmax' or 'sigmoid', but got {form!r}")
    if bias is not None and form == "softmax":
        raise ValueError("bias is for form='sigmoid' only: a softmax does not change with it")


def _check_features(a: Tensor, b: Tensor) -> None:
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"{name} has to be a floating-point tensor, but got {kind}")
    if a.ndim != 2 or a.shape != b.shape or a.device != b.device:
        raise ValueError(
            "a and b have to have the same shape (n, d), a row for each pair, on one device, but got "
            f"{tuple(a.shape)} on {a.device} and {tuple(b.shape)} on {b.device}"
        )


def _labels(labels: Tensor, a: Tensor) -> Tensor:
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels has to be a tensor of integers, but got {kind}")
    if tuple(labels.shape) not in ((len(a),), (len(a), 1)) or labels.device != a.device:
        raise ValueError(
            f"labels has to be one integer per pair, shape ({len(a)},), on the device of a, {a.device}, but got shape "
            f"{tuple(labels.shape)} on {labels.device}"
        )
    return labels.detach().flatten().long()


def _number(name: str, value: float | Tensor, like: Tensor) -> float | Tensor:
    """A setting: a number, or a 0-d tensor with its graph."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise TypeError(
                f"{name} has to be a number or a floating-point tensor of one, but got shape {tuple(value.shape)} and "
                f"dtype {value.dtype}"
            )
        if name == "temperature":
            check_number(name, value.item())
        return value.reshape(()).to(like.device)
    if name == "temperature":
        return check_number(name, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} has to be a number, but got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} has to be finite, but got {value}")
    return float(value)
