"""Sums over all pairs of a sigmoid of differences, in O(n log n) time and O(n) memory.

For scores x and weights w, and for every i,

    F_i = sum_j w_j sigmoid((x_j - x_i) / T)        D_i = sum_j w_j sigmoid'((x_j - x_i) / T)

Rank statistics, soft ranks and all that is made of them are sums of F, and their gradients are sums of D, because
sigmoid' is even:

    d/dx_k sum_i g_i F_i = (w_k D^g_k - g_k D^w_k) / T        with D^g the same sum with weights g

How: with z = exp(-|d| / T) in (0, 1], sigmoid(-|d| / T) = z / (1 + z) and sigmoid' = z / (1 + z)^2. Both are analytic
but for the pole at z = -1, so that short polynomials in z are exact to a *relative* error that falls by 5.83 with each
term, far tails included: the kernels are short sums of exponentials exp(-k |d| / T). Sums of exponentials over sorted
scores follow from those of their neighbours. So the sorted scores lie in rows of `ROW`; each row has its moments
sum_j w_j z_j^k; moments of all rows below, and above, follow by a scan over rows; and what a row has of its own pairs
is added pair by pair. Every exponent is at most 0 and only gaps between scores enter: nothing overflows, whatever the
temperature, ties, clusters or tails.

All is computed in float64, with as many terms as the dtype of the scores needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

ROW = 16  # scores in a row: pairs within rows cost as much as the moments
CHUNK = {"cpu": 2**16, "cuda": 2**22}  # scores in work at a time: what stays in a core's cache, and what fills a GPU
AT_ONCE = 2**20  # scores of several problems that are sorted together
PAIRS = 2**20  # up to which all at once are faster than sorting in float32; half as many in float64
NARROW = 16  # temperatures between the scores up to which all pairs may be taken in float32
FEW = 64  # scores up to which float64 costs nothing, while there are too few errors to cancel each other
TERMS = {torch.float64: 21, torch.float32: 12}  # for errors below 1e-13, and below 3e-8
TINY = torch.finfo(torch.float64).tiny
NO_SECOND = "this loss has no second derivatives; its gradient is computed by hand, along with its value"


@cache
def coefficients(terms: int) -> tuple[list[float], list[float]]:
    """Of z / (1 + z) and z / (1 + z)^2 as sums of z, z^2, ..., z^terms on [0, 1]: their Chebyshev series, cut off.

    With t = 2 z - 1: 1 / (1 + z) = 2 / (3 + t) = sqrt(2) (1/2 + sum_k (-rho)^-k T_k(t)), rho = 3 + sqrt(8); the other
    series is that of minus its derivative.
    """
    with localcontext(prec=80):
        rho = 3 + Decimal(8).sqrt()
        series = [Decimal(2).sqrt() * (-1 / rho) ** k for k in range(4 * terms)]
        slopes = [Decimal(0)] * (len(series) + 1)
        for k in range(len(series) - 1, 0, -1):
            slopes[k - 1] = slopes[k + 1] - 4 * k * series[k]
        found = []
        for each in (series, slopes):
            total = [Decimal(0)] * terms
            before, now = [0] * terms, [1] + [0] * (terms - 1)  # T_0 in powers of z
            for k in range(terms):
                share = each[k] / 2 if k == 0 else each[k]
                total = [sum_ + share * power for sum_, power in zip(total, now, strict=True)]
                times_t = [2 * low - high for low, high in zip([0, *now[:-1]], now, strict=True)]
                before, now = now, times_t if k == 0 else [2 * a - b for a, b in zip(times_t, before, strict=True)]
            found.append([float(each) for each in total])
    return found[0], found[1]


def comparable(x: Tensor) -> Tensor:
    """A quarter of the scores, in float64, so that no difference overflows; infinite ones as large as can be.

    NaN becomes 0, so that it does not spread to other problems: who calls this has to bring it back.
    """
    limit = torch.finfo(torch.float64).max / 2
    return (x.detach().double() * 0.25).nan_to_num_(0, limit, -limit)


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would round products of matrices."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def in_parts(compute: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """What `compute` gives for the rows of these tensors, so many at a time that memory stays small."""
    at_once = max(1, AT_ONCE // max(rows[0].shape[1], 1))
    if len(rows[0]) <= at_once:
        return compute(*rows)
    parts = [compute(*part) for part in zip(*(torch.split(each, at_once) for each in rows), strict=True)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def spread_of(x: Tensor) -> float:
    """How far apart the scores are; NaN or infinity where one is."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return float(high) - float(low)


def scaled(x: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Scores in the dtype to take all pairs in, and the temperature for them.

    Rounding a difference to float32 changes sigmoid' of it by so many times 6e-8 as it has temperatures.
    """
    if x.dtype != torch.float64 and x.shape[-1] > FEW and spread_of(x) <= NARROW * temperature:
        return x.detach().float(), temperature
    return comparable(x), temperature / 4


def signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """With its signature at hand, which torch asks a Function's `forward` for at every call."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


class SoftSums(torch.autograd.Function):
    """F of scores (problems, n) for weights (problems, kinds, n), in float64: (problems, kinds, n).

    The second result is for the backward pass: D, or where there are few enough pairs sigmoid' of each,
    (problems, 1, n, n). Weights get no gradient.
    """

    @staticmethod
    @signed
    def forward(x: Tensor, weight: Tensor, temperature: float, exact: bool) -> tuple[Tensor, Tensor]:
        if (found := _few(x, temperature, exact)) is not None:
            value, kept = _matrix(*found, weight)
            if kept.dtype == torch.float32:  # then no score is NaN
                return value, kept
        else:
            value, kept = sums(comparable(x), weight, temperature, terms_for(x), weight.shape[1])
        return value.masked_fill_(x.isnan().any(-1)[:, None, None], math.nan), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.temperature, _ = inputs
        ctx.pairwise = output[1].ndim == 4
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        x, weight, kept = ctx.saved_tensors
        if ctx.pairwise and not torch.is_grad_enabled():  # the usual case, without what the other ones need
            return _gradient_of_pairs(gradient, x, weight, kept, ctx.temperature), None, None, None
        result: Tensor = _Gradient.apply(  # type: ignore[no-untyped-call]
            gradient, x, weight, kept, ctx.temperature, ctx.pairwise
        )
        return result, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        results = SoftSums.apply(*_folded(info, dims, inputs))  # type: ignore[no-untyped-call]
        value, kept = (each.view(info.batch_size, -1, *each.shape[1:]) for each in results)
        return (value, kept), (0, 0)


class _Gradient(torch.autograd.Function):
    """The gradient of `SoftSums`, which has none itself."""

    @staticmethod
    @signed
    def forward(
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: Tensor,
        temperature: float,
        pairwise: bool,
    ) -> Tensor:
        if pairwise:
            return _gradient_of_pairs(gradient, x, weight, kept, temperature)
        broken = x.isnan().any(-1) | ~gradient.isfinite().flatten(1).all(1)
        gradient = gradient.masked_fill(broken[:, None, None], 0)
        _, slope = sums(comparable(x), gradient.contiguous(), temperature, terms_for(x), 0)
        result = (weight * slope).sub_(gradient * kept).sum(1).div_(temperature)
        return result.masked_fill_(broken[:, None], math.nan).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise RuntimeError(NO_SECOND)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        result: Tensor = _Gradient.apply(*_folded(info, dims, inputs))  # type: ignore[no-untyped-call]
        return result.view(info.batch_size, -1, *result.shape[1:]), 0


def _folded(info: Any, dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """What vmap maps over, as further problems."""
    found = []
    for each, dim in zip(inputs, dims, strict=True):
        if isinstance(each, Tensor):
            each = each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            each = each.flatten(0, 1)
        found.append(each)
    return found


def _gradient_of_pairs(gradient: Tensor, x: Tensor, weight: Tensor, slope: Tensor, temperature: float) -> Tensor:
    """That of x, from sigmoid' of each pair, which is symmetric.

    A share of the weights in the gradient has no effect. Without it nothing large cancels.
    """
    gradient = gradient - weight * (gradient.sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=TINY))
    result = weight * _summed(gradient, slope[:, 0]) - gradient * _summed(weight, slope[:, 0])
    result = result.sum(1) / temperature
    if slope.dtype == torch.float64:  # else no score is NaN
        result = result.masked_fill(x.isnan().any(-1, keepdim=True), math.nan)
    return result.to(x.dtype)


def terms_for(x: Tensor) -> int:
    return TERMS[torch.float64 if x.dtype == torch.float64 else torch.float32]


def _few(x: Tensor, temperature: float, exact: bool) -> tuple[Tensor, float] | None:
    """Scores and temperature to take all pairs with at once, where that is the faster way."""
    pairs = x.numel() * x.shape[-1]
    if pairs > PAIRS:
        return None
    wide, divisor = (comparable(x), temperature / 4) if exact else scaled(x, temperature)
    return (wide, divisor) if wide.dtype == torch.float32 or 2 * pairs <= PAIRS else None


def _matrix(x: Tensor, temperature: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """F, and sigmoid' of each pair (problems, 1, n, n)."""
    slope, y = sigmoids(x[:, None, :] - x[:, :, None], temperature)
    return _summed(weight, y).double(), slope.mul_(y)[:, None]


def _summed(weight: Tensor, y: Tensor) -> Tensor:
    """sum_j w_j y_ij. In float32 torch's sums are more exact than its products of matrices."""
    return (weight[:, :, None].to(y.dtype) * y[:, None]).sum(-1)


def sigmoids(apart: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """sigmoid(-x) and sigmoid(x): their product is the slope, without cancellation. Changes `apart`."""
    if divisor != 1:
        apart.div_(divisor)
    return apart.neg().sigmoid_(), apart.sigmoid_()


def sums(x: Tensor, weight: Tensor, temperature: float, terms: int, values: int) -> tuple[Tensor, Tensor]:
    """F for the first `values` kinds of weights, (problems, values, n), and D for all, (problems, kinds, n).

    Scores are (problems, n) as `comparable` gives them, weights (problems, kinds, n), both in float64.
    """

    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        ordered, order = x.sort()
        places = order[:, None].expand(-1, weight.shape[1], -1)
        found = sorted_sums(ordered, weight.gather(2, places), temperature, terms, values)
        return tuple(torch.empty_like(each).scatter_(2, places[:, : each.shape[1]], each) for each in found)

    value, slope = in_parts(compute, x, weight)
    return value, slope


def sorted_sums(
    x: Tensor, weight: Tensor, temperature: float, terms: int, values: int, segment: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`sums` of scores in ascending order. With `segment`, ascending integers (n,), within each of these alone."""
    problems, n = x.shape
    above = torch.cat([weight[..., :values, :].flip(-1).cumsum(-1).flip(-1), weight.new_zeros(problems, values, 1)], -1)
    end = above[..., torch.searchsorted(segment, segment, right=True)] if segment is not None else 0
    above = above[..., 1:] - end  # the weight of all scores above each

    rows = -(-n // ROW)
    if more := rows * ROW - n:
        x = torch.cat([x, x[:, -1:].expand(-1, more)], -1)
        weight, above = (nn.functional.pad(each, (0, more)) for each in (weight, above))
        segment = torch.cat([segment, segment[-1:].expand(more)]) if segment is not None else None
    x = _in_rows(x[:, None], rows)[0]
    weight, value = _in_rows(weight, rows), _in_rows(above, rows)
    kin = _in_rows(segment[None, None], rows)[0] if segment is not None else None
    field = _Rows(x, weight, kin, rows, 4 / temperature, terms)
    low, high = field.moments()
    slope = torch.empty_like(weight)
    for chunk in field.chunks:
        field.add(chunk, value[..., chunk], slope[..., chunk], low[..., chunk], high[..., chunk])
    return _out_of_rows(value, problems, n), _out_of_rows(slope, problems, n)


def _in_rows(x: Tensor, rows: int) -> Tensor:
    """(problems, kinds, n) as (kinds, ROW, problems * rows), so that all rows are added up at once."""
    return x.view(*x.shape[:2], rows, ROW).permute(1, 3, 0, 2).flatten(2).contiguous()


def _out_of_rows(x: Tensor, problems: int, n: int) -> Tensor:
    return x.view(*x.shape[:2], problems, x.shape[2] // problems).permute(2, 0, 3, 1).flatten(2)[..., :n]


class _Rows:
    """Sorted scores in rows, (ROW, rows) with one row a column, and their weights (kinds, ROW, rows)."""

    def __init__(
        self, x: Tensor, weight: Tensor, segment: Tensor | None, of_problem: int, rate: float, terms: int
    ) -> None:
        self.x, self.weight, self.segment, self.rate, self.terms = x, weight, segment, rate, terms
        step = max(1, CHUNK["cpu" if x.is_cpu else "cuda"] // ROW)
        self.chunks = [slice(i, i + step) for i in range(0, x.shape[1], step)]
        # The last score below each row and the first above it; infinitely far where there is none.
        self.below, self.above = x[-1].roll(1), x[0].roll(-1)
        self.below[::of_problem], self.above[of_problem - 1 :: of_problem] = -math.inf, math.inf

    def _decay(self, apart: Tensor, here: Any, there: Tensor | None) -> Tensor:
        """z of these distances, which are negative; 0 from one segment to another. Changes `apart`."""
        z = apart.mul_(self.rate).exp_()
        return z if self.segment is None or there is None else z.masked_fill_(self.segment[here] != there, 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """sum_j w_j z_j^k over all rows below each, from the last score below it; and over all rows above.

        Both (kinds, terms, rows).
        """
        kinds, (_, rows) = len(self.weight), self.x.shape
        low, high = self.x.new_empty(2, kinds, self.terms, rows)
        first, last = (self.segment[i] if self.segment is not None else None for i in (0, -1))
        everything = slice(None)
        for chunk in self.chunks:
            x = self.x[:, chunk]
            for sums_, apart, row in ((low, x - x[-1], last), (high, x[0] - x, first)):
                z = self._decay(apart, (everything, chunk), row[chunk] if row is not None else None)
                power = self.weight[..., chunk].clone()
                for k in range(self.terms):
                    torch.sum(power.mul_(z), 1, out=sums_[:, k, chunk])
        low = _scan(self._powers(self.below - self.x[-1], -1, last, 1), low).roll(1, -1)
        high = _scan(self._powers(self.x[0] - self.above, 0, first, -1).flip(-1), high.flip(-1)).flip(-1).roll(-1, -1)
        return low, high

    def _powers(self, apart: Tensor, here: int, row: Tensor | None, shift: int) -> Tensor:
        decay = self._decay(apart, here, row.roll(shift) if row is not None else None)
        return decay.expand(self.terms, -1).cumprod(0)

    def add(self, chunk: slice, value: Tensor, slope: Tensor, low: Tensor, high: Tensor) -> None:
        """F and D of some rows. `value` has the weight above each score; what `slope` holds does not matter."""
        x, weight, values = self.x[:, chunk], self.weight[..., chunk], len(value)
        for_value, for_slope = coefficients(self.terms)
        torch.mul(weight, 0.25, out=slope)
        value.add_(weight[:values], alpha=0.5)
        rows = (slice(None), chunk)
        first, last = (self.segment[i] if self.segment is not None else None for i in (0, -1))
        for moments, apart, row, shift in (
            (low, self.below[chunk] - x, last, 1),
            (high, x - self.above[chunk], first, -1),
        ):
            z = self._decay(apart, rows, row.roll(shift)[chunk] if row is not None else None)
            value.add_(_polynomial(moments[:values], for_value, z), alpha=shift)
            slope.add_(_polynomial(moments, for_slope, z))
        segment = self.segment[rows] if self.segment is not None else None
        for apart_by in range(1, ROW):
            lower, upper = slice(None, -apart_by), slice(apart_by, None)
            y = (x[lower] - x[upper]).mul_(self.rate).sigmoid_()
            if segment is not None:
                y.masked_fill_(segment[lower] != segment[upper], 0)
            if values:
                value[:, upper].addcmul_(weight[:values, lower], y)
                value[:, lower].addcmul_(weight[:values, upper], y, value=-1)
            y.addcmul_(y, y, value=-1)
            slope[:, upper].addcmul_(weight[:, lower], y)
            slope[:, lower].addcmul_(weight[:, upper], y)


def _polynomial(moments: Tensor, factors: list[float], z: Tensor) -> Tensor:
    """sum_k factor_k moment_k z^k, (kinds, ROW, rows), from moments (kinds, terms, rows)."""
    terms = moments * moments.new_tensor(factors)[:, None]
    total = terms[:, -1, None] * z
    for k in range(len(factors) - 2, -1, -1):
        total.add_(terms[:, k, None]).mul_(z)
    return total


def _scan(decay: Tensor, x: Tensor) -> Tensor:
    """y_r = decay_r y_(r - 1) + x_r along the last axis: for pairs first, then those between."""
    if x.shape[-1] == 1:
        return x
    result = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x[..., 0 : 2 * half : 2], decay[..., 1::2]
    pairs = _scan(second * decay[..., 0 : 2 * half : 2], torch.addcmul(x[..., 1::2], second, first))
    result[..., 1::2] = pairs
    result[..., 0] = x[..., 0]
    rest = (x.shape[-1] - 1) // 2
    result[..., 2::2] = torch.addcmul(x[..., 2::2], decay[..., 2::2], pairs[..., :rest])
    return result
