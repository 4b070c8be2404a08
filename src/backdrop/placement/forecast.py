"""What masks would do at other p: the variance of uniform and of informed ones, without drawing any.

Let c_u be what unit u of a mask adds to the gradient of the parameters. One backward pass gives the gradient that
arrives at every unit, and with it the probabilities of an informed mask; one more for each of some units gives |c_u|.
The variances follow (docs/theory.md): exactly for uniform masks and for units drawn by themselves, and for exact
informed ones by Hajek's approximation, whose b_u solve b_u - b_u^2 / sum b = pi_u (1 - pi_u):

    V = sum b_u |c_u / pi_u|^2 - |sum b_u c_u / pi_u|^2 / sum b

Where exact masks keep their share of both signs (`backdrop._core.informed`) that is so for either by itself, and as the
share of one may lie between two numbers of units, with a fraction f, f (1 - f) times the squared distance of the two
means of c_u / pi_u is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backdrop._core import informed
from backdrop._core.draw import Lattice, make_lattice, spread
from backdrop.layers import Backdrop, drops_samples
from backdrop.placement.gradients import Step
from backdrop.placement.inspection import expected_kept

__all__ = ["Forecast", "Predicted", "forecast"]

GROUPS = 8  # the most samples with units of their own that are looked at
STAYS_UNIFORM = 0.2  # of the choice of the units that are looked at
ONCE, AGAIN = 2, 3  # forward passes of work for the units that are kept, with Skip; positions are run again anyhow
HEADINGS = ("mask", "p", "kept", "uniform / |g|^2", "informed / |g|^2", "times less")


@dataclass(frozen=True)
class Predicted:
    """The variance of the gradient by one mask alone, at one p.

    Args:
        p: the probability that a unit's gradient is dropped.
        kept: how many units of a group are kept, on average.
        uniform: the variance of a uniform mask, over |g|^2.
        informed: that of a mask with choose="gradient", over |g|^2.
    """

    p: float
    kept: float
    uniform: float
    informed: float


@dataclass(frozen=True)
class Forecast:
    """What a mask would do.

    Args:
        name: its dotted path; a second call of it has a number behind.
        rows: one for each p.
        batch: the variance of the gradient from batch to batch, over |g|^2; nan where it is unknown.
        uniform_share: the share of units with the least noise for the work of Skip, by uniform choice; nan where the
            variance from batch to batch is unknown.
        uniform_work: noise times work there, over that of smaller batches: below 1 the mask is better than they are.
        informed_share: the same with choose="gradient".
        informed_work: likewise.
    """

    name: str
    rows: tuple[Predicted, ...]
    batch: float
    uniform_share: float
    uniform_work: float
    informed_share: float
    informed_work: float

    @property
    def sentence(self) -> str:
        """Whether the mask pays, in words."""
        if not self.uniform_work > 0:
            return f"{self.name}: the variance from batch to batch is not known, so there is nothing to compare with."

        def told(what: str, share: float, work: float) -> str:
            pays = "pay" if work < 0.97 else "do not pay" if work > 1.03 else "are as good"
            return f"{what} masks {pays}: {work:.2f} times the noise for the same work at the best share, {share:.2g}"

        return (
            f"{self.name}: against smaller batches {told('uniform', self.uniform_share, self.uniform_work)}; "
            f"{told('informed', self.informed_share, self.informed_work)}."
        )

    def cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            gain = row.uniform / row.informed if row.informed > 0 else math.inf
            numbers = (row.p, row.kept, row.uniform, row.informed)
            yield self.name, *(f"{number:.4g}" for number in numbers), f"{gain:.3g}"


class Spy:
    """Lets a mask multiply by weights of ours, which may change between backward passes."""

    def __init__(self, mask: Backdrop) -> None:
        self.mask, self.calls = mask, list[tuple[Tensor, Tensor, Lattice]]()
        self.before = dict(mask.__dict__)

    def __enter__(self) -> Spy:
        self.mask.__dict__ |= {"_weighs_itself": True, "draw_weight": self.weigh, "_across": None, "training": True}
        return self

    def __exit__(self, *error: object) -> None:
        self.mask.__dict__.clear()
        self.mask.__dict__.update(self.before)

    def weigh(self, x: Tensor) -> Tensor:
        lattice = make_lattice(x.shape, self.mask.dims, self.mask.patch)
        wide = x.dtype in (torch.float64, torch.complex128)
        ones = torch.ones(lattice.groups, lattice.size, device=x.device, dtype=torch.float64 if wide else torch.float32)
        weight = spread(ones, lattice, x.shape).clone()
        self.calls.append((x, weight, lattice))
        return weight


def forecast(
    step: Step, name: str, mask: Backdrop, ps: Sequence[float], units: int, squared: float, batch: float
) -> tuple[list[Forecast], str]:
    """For each call of a mask, the only one that is on; or why not.

    Args:
        step: of the training, with all masks off.
        name: of the mask.
        mask: that of the model of the step.
        ps: probabilities to look at.
        units: the most of a group to look at.
        squared: |g|^2.
        batch: the variance from batch to batch, over |g|^2.
    """
    with Spy(mask) as spy:
        value, found = step.value(), list[Forecast]()
        if not spy.calls:
            return [], "it was not called"
        for i, (x, weight, lattice) in enumerate(spy.calls):
            called = name if not i else f"{name} ({i + 1})"
            if not x.requires_grad:
                return [], "what it blocks is skipped; give the model without skipping"
            if torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)[0] is None:
                return [], "it masks several tensors at once"  # of which this is a view
            sums = _Call(step, value, x, weight, lattice).sums(mask, ps, units)
            kept = [expected_kept(lattice.size, p, exact=mask.exact) for p in ps]
            rows = [
                Predicted(p, k, uniform / squared, chosen / squared)
                for p, k, (uniform, chosen) in zip(ps, kept, sums, strict=True)
            ]
            n, blind = lattice.size, ONCE if drops_samples(mask, x.ndim) else AGAIN
            found.append(
                Forecast(
                    called,
                    tuple(rows),
                    batch,
                    *_best([(row.kept / n, row.uniform) for row in rows], batch, blind, n),
                    *_best([(row.kept / n, row.informed) for row in rows], batch, AGAIN, n),
                )
            )
    return found, ""


def _best(known: list[tuple[float, float]], batch: float, passes: int, size: int) -> tuple[float, float]:
    """The share with the least noise times work, over that of smaller batches; the variance is linear in 1 / share."""
    if not batch > 0 or not known:
        return math.nan, math.nan
    points = sorted(({1.0: 0.0} | {1 / share: variance for share, variance in known}).items())
    best = (1.0, (1 + passes) / 3)
    for i in range(201):
        share = (1 / size) ** (i / 200)
        at = min(max(1 / share, 1.0), points[-1][0])
        right = next(j for j, (inverse, _) in enumerate(points) if inverse >= at)
        (a, low), (b, high) = points[max(0, right - 1)], points[right]
        variance = high if a == b else low + (high - low) * (at - a) / (b - a)
        if 1 / share > points[-1][0]:  # beyond what was asked for
            break
        work = (batch + variance) * (1 + passes * share) / (3 * batch)
        best = min(best, (share, work), key=lambda pair: pair[1])
    return best


class _Call:
    """One call of a mask: gradients of what any of its units let through."""

    def __init__(self, step: Step, value: Tensor, x: Tensor, weight: Tensor, lattice: Lattice) -> None:
        self.step, self.value, self.x, self.weight, self.lattice = step, value, x, weight, lattice
        ones = torch.ones(lattice.groups, lattice.size, dtype=torch.float64)
        through, past = (self._gradient(ones * on, x) for on in (1, 0))  # by this mask, or around it
        self.norms = informed.unit_norms((through - past, lattice))
        self.past = self._parameters(ones * 0)

    def _set(self, units: Tensor) -> None:
        self.weight.copy_(spread(units.to(self.weight), self.lattice, self.x.shape))

    def _gradient(self, units: Tensor, x: Tensor) -> Tensor:
        self._set(units)
        (found,) = torch.autograd.grad(self.value, x, retain_graph=True)
        return found

    def _parameters(self, units: Tensor) -> list[Tensor | None]:
        self._set(units)
        found = torch.autograd.grad(self.value, self.step.parameters, retain_graph=True, allow_unused=True)
        return [None if grad is None else grad.detach() for grad in found]

    def squared(self, group: int, index: Any, weight: Any) -> float:
        """Of the gradient that these units of a group add, times weights."""
        units = torch.zeros(self.lattice.groups, self.lattice.size, dtype=torch.float64, device=self.norms.device)
        units[group, index] = weight
        total = 0.0
        for grad, past in zip(self._parameters(units), self.past, strict=True):
            if grad is not None and past is not None:
                off = (grad - past).to_dense() if grad.is_sparse else grad - past
                off = torch.view_as_real(off) if off.is_complex() else off
                total += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        return total

    def sums(self, mask: Backdrop, ps: Sequence[float], units: int) -> list[tuple[float, float]]:
        """The variance of a uniform and of an informed mask, for each p."""
        groups, found = self.lattice.groups, [(0.0, 0.0)] * len(ps)
        looked_at = torch.randperm(groups)[:GROUPS].tolist()
        for group in looked_at:
            for i, pair in enumerate(self._group(group, mask, ps, units)):
                found[i] = found[i][0] + pair[0], found[i][1] + pair[1]
        return [(a * groups / len(looked_at), b * groups / len(looked_at)) for a, b in found]

    def _group(self, group: int, mask: Backdrop, ps: Sequence[float], units: int) -> Iterator[tuple[float, float]]:
        signed, size = self.norms[group : group + 1], self.lattice.size
        norms = signed.abs()
        # A few units stand for all. Sums of |c|^2 and of |c|^2 / pi are to come from them: chosen with both in view.
        sizes = norms / norms.max().clamp(min=1e-300)
        likely = sum((part / part.sum().clamp(min=1e-300) for part in (sizes, sizes.square())), torch.zeros_like(sizes))
        dropped = max(0.0, 1 - units / size)
        times = informed.weigh_norms(likely, dropped, True, "count", STAYS_UNIFORM, None)[0]
        index = times.nonzero().flatten()
        times, whole = times[index], self.squared(group, slice(None), 1.0)
        squares = torch.tensor([self.squared(group, u, 1.0) for u in index.tolist()], dtype=times.dtype).to(times)
        each = float((times * squares).sum())
        for p in ps:
            number = _number(size, p, mask.exact)
            spread_ = max(0.0, each - whole / size) / max(1, size - 1)
            uniform = size * spread_ * (size * (1 / number if mask.exact else inverse_count(size, p)) - 1)
            pi = informed.inclusion_probabilities(norms, number, mask.floor)[0]
            if mask.exact:
                chosen = self._exact(group, pi, signed[0] > 0, times * squares, index)
            else:
                none = float(torch.log1p(-pi.clamp(max=1)).sum().exp())
                less = 1 / (1 + none / number)
                real = (pi / less)[index]
                chosen = float((times * squares * torch.where(real > 0, 1 / real - 1, 0.0)).sum())
                chosen += (less**2 - 1) * (whole - each)
            yield max(0.0, uniform), max(0.0, chosen)

    def _exact(self, group: int, pi: Tensor, positive: Tensor, squares: Tensor, index: Tensor) -> float:
        """The variance of an informed exact mask, from sums of |c|^2 over the units of this index."""
        variance, apart, share = 0.0, torch.zeros_like(pi), 0.0
        for part, sign in ((positive, 1.0), (~positive, -1.0)):
            b = _spreads(torch.where(part, pi, 0.0))
            if not float(b.sum()) > 0:
                continue
            ratio = torch.where(pi > 0, b / pi.clamp(min=1e-300), 0.0)
            variance += float((squares * (ratio / pi.clamp(min=1e-300))[index]).sum())
            variance -= self.squared(group, slice(None), ratio) / float(b.sum())
            apart, share = apart + sign * ratio / b.sum(), float(pi[part].sum()) % 1
        if bool(positive.any()) and not bool(positive.all()):
            variance += share * (1 - share) * self.squared(group, slice(None), apart)
        return variance


def _number(size: int, p: float, exact: bool) -> float:
    return float(max(1, round(size * (1 - p)))) if exact else size * (1 - p)


def _spreads(pi: Tensor) -> Tensor:
    """Hajek's b: b - b^2 / sum b = pi (1 - pi)."""
    wanted = pi * (1 - pi)
    b = wanted.clone()
    for _ in range(100):
        total = b.sum()
        if not float(total) > 0:
            return b
        b = wanted + b.square() / total
    return b


def inverse_count(size: int, p: float) -> float:
    """E[1 / K] of a Bernoulli mask that keeps one unit where it would keep none."""
    if p == 0:
        return 1 / size
    j = torch.arange(1, size + 1, dtype=torch.float64)
    n = torch.tensor(float(size), dtype=torch.float64)
    logs = torch.lgamma(n + 1) - torch.lgamma(j + 1) - torch.lgamma(n - j + 1)
    logs += j * math.log1p(-p) + (size - j) * math.log(p) - j.log()
    return float(logs.exp().sum()) + p**size
