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
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

ROW = 16  # scores in a row: pairs within rows cost as much as the moments
CHUNK = {"cpu": 2**16, "cuda": 2**22}  # scores in work at a time: what stays in a core's cache, and what fills a GPU
AT_ONCE = 2**20  # scores of several problems that are sorted together
PAIRS = 2**20  # up to which all at once are faster than sorting
RANGE = 300.0  # exp(300), exp(-300) and their squares are numbers like any other in float64
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


def bounds_of(x: Tensor) -> tuple[float, float]:
    """The lowest and the highest score; NaN where one is."""
    if not x.numel():
        return 0.0, 0.0
    low, high = x.aminmax()
    return float(low), float(high)


def spread_of(x: Tensor) -> float:
    """How far apart the scores are; NaN or infinity where one is."""
    low, high = bounds_of(x)
    return high - low


def sigmoids(apart: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(-x) and sigmoid(x): their product is the slope, without cancellation. Changes `apart`."""
    return apart.neg().sigmoid_(), apart.sigmoid_()


def times(matrix: Tensor, v: Tensor) -> Tensor:
    """Sums over the last axis, of each problem."""
    return matrix @ v if v.ndim == 1 else (matrix @ v[..., None])[..., 0]


class Scores:
    """Scores (n,) or (problems, n) of which all pairs are to be taken.

    With e = exp(x / T), sigmoid((x_j - x_i) / T) = e_j / (e_i + e_j) and its slope e_i e_j / (e_i + e_j)^2: nothing
    cancels, and no pair costs an exponential. Where e would leave the range of numbers, by sigmoids of differences.
    """

    def __init__(self, x: Tensor, temperature: float, bounds: tuple[float, float] | None = None) -> None:
        self.broken: Tensor | None = None  # which problems hold NaN; None where none does
        self.e: Tensor | None = None
        self.temperature = self.divisor = temperature
        low, high = bounds_of(x.detach()) if bounds is None else bounds
        self.apart = high - low
        if self.apart <= RANGE * temperature:
            self.x = x.detach().double()
            if max(-low, high) > min(2 * self.apart, RANGE * temperature):
                self.x = self.x - (low / 2 + high / 2)
            self.e = (self.x / temperature).exp_()
        else:
            if not self.apart < math.inf:
                self.broken = x.isnan().any(-1)
            self.x, self.divisor = comparable(x), temperature / 4

    def matrix(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Matrix:
        """Of some scores i against some j; all by default."""
        e = self.x if self.e is None else self.e
        a, b = (e if at is None else e.index_select(-1, at) for at in (rows, columns))
        if self.e is not None:
            return Matrix(a, b, (a[..., None] + b[..., None, :]).reciprocal_())
        slope, y = sigmoids((b[..., None, :] - a[..., None]).div_(self.divisor))
        return Matrix(None, None, y, slope.mul_(y))

    def centred(self, matrix: Matrix, v: Tensor | None) -> Tensor:
        """What `matrix.above(v)` lacks to half of all: e_j / (e_i + e_j) - 1/2 = (e_j - e_i) / (e_i + e_j) / 2."""
        if self.e is None or self.apart > self.temperature:
            return matrix.above(v) - (self.x.shape[-1] if v is None else v.sum(-1, keepdim=True)) / 2
        less = (self.x / self.temperature).expm1_()  # e - 1, with all digits
        own = matrix.y.sum(-1) if v is None else times(matrix.y, v)
        return times(matrix.y, less if v is None else less * v).sub_(own.mul_(less)).div_(2)

    def mark(self, *found: Tensor) -> tuple[Tensor, ...]:
        """With NaN in the results of problems that hold NaN; the first axis of each is that of problems."""
        if (broken := self.broken) is None:
            return found
        return tuple(
            each.masked_fill(broken.view(broken.shape + (1,) * (each.ndim - broken.ndim)), math.nan) for each in found
        )


class Matrix:
    """y_ij = sigmoid((x_j - x_i) / T) and its slope s_ij, and sums over either for weights of columns j or rows i."""

    def __init__(self, rows: Tensor | None, columns: Tensor | None, y: Tensor, slope: Tensor | None = None) -> None:
        self.rows, self.columns = rows, columns  # e of them; None where `y` and `slope` are what they say
        self.y, self.slope = y, slope  # else 1 / (e_i + e_j), and its square as soon as it is asked for

    def keep(self, which: Tensor) -> None:
        """Only those pairs, others are 0."""
        self.y.mul_(which)
        if self.slope is not None:
            self.slope.mul_(which)

    def above(self, v: Tensor | None = None) -> Tensor:
        """sum_j v_j y_ij. Not after any slope."""
        if self.columns is None:
            return self.y.sum(-1) if v is None else times(self.y, v)
        return times(self.y, self.columns if v is None else self.columns * v)

    def slopes(self, v: Tensor | None = None) -> Tensor:
        """sum_j v_j s_ij."""
        if self.rows is None or self.columns is None:
            return self._slope().sum(-1) if v is None else times(self._slope(), v)
        return times(self._slope(), self.columns if v is None else self.columns * v).mul_(self.rows)

    def slopes_to(self, u: Tensor | None = None) -> Tensor:
        """sum_i u_i s_ij."""
        if self.rows is None or self.columns is None:
            return self._slope().sum(-2) if u is None else times(self._slope().mT, u)
        return times(self._slope().mT, self.rows if u is None else self.rows * u).mul_(self.columns)

    def _slope(self) -> Tensor:
        if self.slope is None:
            self.slope = self.y.mul_(self.y)
        return self.slope


def signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """With its signature at hand, which torch asks a Function's `forward` for at every call."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


Back: TypeAlias = Callable[[Tensor], Tensor]  # of the gradient of F that of x


def soft_sums(x: Tensor, weight: Tensor | None, temperature: float) -> tuple[Tensor, Back]:
    """F in float64 of scores (n,) or (problems, n) for such weights, by default 1."""
    if x.numel() * x.shape[-1] > PAIRS:
        return _sums_of_many(x, weight, temperature)
    scores = Scores(x, temperature)
    matrix = scores.matrix()
    return scores.mark(matrix.above(weight))[0], _back(scores, matrix, weight)


def centred_sums(
    x: Tensor, weight: Tensor | None, temperature: float, bounds: tuple[float, float] | None = None
) -> tuple[Tensor, Back]:
    """The same less their mean, with all digits where temperatures are high, and sums nearly the same."""
    if x.numel() * x.shape[-1] > PAIRS:
        value, back = _sums_of_many(x, weight, temperature)
        return value - (x.shape[-1] if weight is None else weight.sum(-1, keepdim=True)) / 2, back
    scores = Scores(x, temperature, bounds)
    matrix = scores.matrix()
    return scores.mark(scores.centred(matrix, weight))[0], _back(scores, matrix, weight)


def _back(scores: Scores, matrix: Matrix, weight: Tensor | None) -> Back:
    def back(gradient: Tensor) -> Tensor:
        # A share of the weights in the gradient has no effect. Without it nothing large cancels.
        if weight is None:
            gradient = gradient - gradient.mean(-1, keepdim=True)
            result = matrix.slopes(gradient).sub_(matrix.slopes().mul_(gradient))
        else:
            share = gradient.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_(min=TINY)
            gradient = gradient - weight * share
            result = matrix.slopes(gradient).mul_(weight).sub_(matrix.slopes(weight).mul_(gradient))
        return scores.mark(result.div_(scores.temperature))[0]

    return back


def _sums_of_many(x: Tensor, weight: Tensor | None, temperature: float) -> tuple[Tensor, Back]:
    shape, x = x.shape, x.view(-1, x.shape[-1])
    weight = torch.ones_like(x, dtype=torch.float64) if weight is None else weight.expand(shape).view(x.shape)
    x, broken, terms = comparable(x), x.isnan().any(-1, keepdim=True), terms_for(x)
    value, slope = (each[:, 0] for each in sums(x, weight[:, None], temperature, terms, 1))

    def back(gradient: Tensor) -> Tensor:
        gradient = gradient.reshape(x.shape)
        wrong = broken | ~gradient.isfinite().all(-1, keepdim=True)
        gradient = gradient.masked_fill(wrong, 0)
        other = sums(x, gradient[:, None], temperature, terms, 0)[1][:, 0]
        result = (weight * other).sub_(gradient * slope).div_(temperature)
        return result.masked_fill_(wrong, math.nan).view(shape)

    return value.masked_fill_(broken, math.nan).view(shape), back


class SoftSums(torch.autograd.Function):
    """F of scores (problems, n) for weights (problems, n), in float64, under `torch.func`. Weights get no gradient.

    The second result is for the backward pass: D.
    """

    @staticmethod
    @signed
    def forward(x: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        value, kept = sums(comparable(x), weight[:, None], temperature, terms_for(x), 1)
        return value[:, 0].masked_fill_(x.isnan().any(-1)[:, None], math.nan), kept[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.temperature = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
        result: Tensor = _Gradient.apply(gradient, *ctx.saved_tensors, ctx.temperature)  # type: ignore[no-untyped-call]
        return result, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        results = SoftSums.apply(*_folded(info, dims, inputs))  # type: ignore[no-untyped-call]
        value, kept = (each.view(info.batch_size, -1, *each.shape[1:]) for each in results)
        return (value, kept), (0, 0)


class _Gradient(torch.autograd.Function):
    """The gradient of `SoftSums`, which has none itself."""

    @staticmethod
    @signed
    def forward(gradient: Tensor, x: Tensor, weight: Tensor, kept: Tensor, temperature: float) -> Tensor:
        broken = x.isnan().any(-1, keepdim=True) | ~gradient.isfinite().all(-1, keepdim=True)
        gradient = gradient.masked_fill(broken, 0)
        _, slope = sums(comparable(x), gradient[:, None], temperature, terms_for(x), 0)
        result = (weight * slope[:, 0]).sub_(gradient * kept).div_(temperature)
        return result.masked_fill_(broken, math.nan).to(x.dtype)

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


def terms_for(x: Tensor) -> int:
    return TERMS[torch.float64 if x.dtype == torch.float64 else torch.float32]


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
