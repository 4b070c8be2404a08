"""Units chosen by the gradient that arrives at them, unbiased by Horvitz-Thompson weights.

Let g_u be the gradient that arrives at unit u. A unit is kept with probability

    pi_u = b + (1 - b) min(1, |g_u| / tau),    b = floor k / N,    tau so that the pi_u add up to k,

and weighs 1 / pi_u, so that the expected gradient is the plain one whatever the g_u are. The variance is least where
pi_u is proportional to what the unit adds to the gradient of the parameters, of which |g_u| is the part that is known
before anything below the mask is computed; the floor bounds what a unit costs that adds more than its |g_u| says, and
leaves those alone that are sure to be kept.

Where a unit's gradient is one number, as of scores, exact masks keep their share of both signs: what units have in
common then cancels as it does in the whole gradient. So such sizes come with their sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backdrop._core.checks import Probability, Scale, check_devices
from backdrop._core.draw import Lattice, is_zero

LARGE = 64  # units, from which on permutations are drawn one by one
PART = 2**19  # numbers whose squares are added up at a time
ROUNDS = 6  # of the fast way to inclusion probabilities, before the one that sorts


def weigh(
    grad: Tensor,
    lattice: Lattice,
    p: Probability,
    exact: bool,
    scale: Scale,
    floor: float,
    generator: torch.Generator | None,
) -> Tensor:
    """What each unit's gradient is multiplied by, (groups, units). Nothing waits for the device."""
    return weigh_norms(unit_norms((grad, lattice)), p, exact, scale, floor, generator)


def weigh_norms(
    norms: Tensor,
    p: Probability,
    exact: bool,
    scale: Scale,
    floor: float,
    generator: torch.Generator | None,
    part: tuple[int, slice] | None = None,
) -> Tensor:
    """The same from the size of each unit's gradient, (groups, units), which may be those groups of so many."""
    check_devices(p, generator, norms.device)
    groups, size = norms.shape
    if size == 0 or is_zero(p):
        return torch.ones_like(norms)
    number: Any = size * (1 - (p.to(norms.dtype) if isinstance(p, Tensor) else p))  # half precision ends at 65,504
    if exact:
        number = number.round().clamp(min=1) if isinstance(number, Tensor) else max(1, round(number))
    inclusion = inclusion_probabilities(norms, number, floor)
    total, own = part or (groups, slice(None))
    if exact:
        order = _by_sign(_orders(total, size, norms, generator)[own], norms)
        kept = _systematic(inclusion, number, order, _random(total, 1, norms, generator)[own])
    else:
        u = _random(total, size + 1, norms, generator)[own]
        kept, inclusion = _independent(inclusion, u[:, :-1], u[:, -1:])
    weight = torch.where(kept, 1 / inclusion, 0.0) if scale is not None else kept.to(norms.dtype)
    return weight * (1 - p) if scale == "eq1" else weight


def _random(groups: int, size: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:  # the form with the argument cannot be compiled for batches of any size
        return torch.rand(groups, size, device=like.device, dtype=like.dtype)
    return torch.rand(groups, size, generator=generator, device=like.device, dtype=like.dtype)


def _orders(groups: int, size: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random order of the units of each group. On a CPU sorting would take longer than all else."""
    if _is_readable(like) and size >= LARGE:
        return torch.stack([torch.randperm(size, generator=generator) for _ in range(groups)])
    return _random(groups, size, like, generator).argsort(1)


def _by_sign(order: Tensor, norms: Tensor) -> Tensor:
    """Units with a negative gradient first, and otherwise in this order."""
    if _is_readable(norms) and not bool((norms < 0).any()):
        return order
    positive = norms.gather(1, order) > 0
    return order.gather(1, positive.to(torch.uint8).argsort(dim=1, stable=True))


def _is_readable(x: Tensor) -> bool:
    """Whether looking at values costs nothing and may decide what is done."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and not torch._C._functorch.is_batchedtensor(x)


def unit_norms(*given: tuple[Tensor, Lattice]) -> Tensor:
    """|g_u| over all tensors up to one common factor, (groups, units), in float64 where there is one.

    Infinite and NaN gradients stay what they are. With its sign where g_u is one number, of a sample of its own.
    """
    return together([_norms_of(grad.detach(), lattice) for grad, lattice in given])


def together(norms: Sequence[Tensor]) -> Tensor:
    """Of units whose gradients come in several parts."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return _norm(stacked, [0], stacked.dtype).squeeze(0)


def effective_number(norms: Tensor) -> float:
    """(sum |g|)^2 / sum |g|^2: as many equal gradients would be as much. NaN where they are not finite."""
    norms = norms.abs()
    largest = norms.amax() if norms.numel() else norms.new_zeros(())
    shares = norms / torch.where(largest > 0, largest, 1.0)  # whose squares stay in range
    return float(shares.sum().square() / shares.square().sum().clamp(min=1.0)) if norms.numel() else 0.0


def _norms_of(grad: Tensor, lattice: Lattice) -> Tensor:
    wide = torch.float32 if grad.device.type == "mps" else torch.float64
    if not torch.compiler.is_compiling() and grad.layout != torch.strided:
        grad = grad.to_dense()
    if 0 in lattice.axes and grad.shape == lattice.shape and not grad.is_complex():
        return grad.to(wide).reshape(lattice.groups, lattice.size)
    others = [axis for axis in range(grad.ndim) if axis not in lattice.axes]
    if grad.is_complex():
        others, grad = [*others, grad.ndim], torch.view_as_real(grad.resolve_conj())
    norms = _norms(grad, others, wide)
    norms = norms.squeeze(-1) if grad.ndim > len(lattice.shape) else norms
    for axis, patch in zip(lattice.axes, lattice.patch, strict=True):
        if patch > 1:
            norms = _norm_of_neighbours(norms, axis, patch)
    return norms.reshape(lattice.groups, lattice.size)


def _norms(grad: Tensor, others: list[int], wide: torch.dtype) -> Tensor:
    """Over these axes, which stay with size 1.

    On a CPU in float32 where the gradient has no more, which is faster, if squares stay in its range: all but those of
    numbers that are nothing beside the largest.
    """
    if not others:
        return grad.abs().to(wide)
    if not _is_readable(grad) or grad.dtype == torch.float64 or not grad.numel():
        return _norm(grad, others, wide)
    between = others == list(range(others[0], others[-1] + 1)) and others[-1] < grad.ndim - 1
    quick = between and grad.is_contiguous()
    norms = _norms_of_columns(grad, others) if quick else _norm(grad, others, torch.float32)
    return norms.to(wide) if 1e-12 < float(norms.amax()) < 1e15 else _norm(grad, others, wide)


def _norms_of_columns(grad: Tensor, others: list[int]) -> Tensor:
    """In float32, over axes beside each other that are not the last, where torch's norm goes through memory in leaps.

    As a product with ones, which is as fast as a sum; part by part, so that squares take little memory.
    """
    first, last = others[0], others[-1] + 1
    outer, along, inner = (math.prod(part) for part in (grad.shape[:first], grad.shape[first:last], grad.shape[last:]))
    matrices, total = grad.view(outer, along, inner), grad.new_zeros(outer, 1, inner, dtype=torch.float32)
    rows, squares = max(1, PART // inner), grad.new_empty(0, dtype=torch.float32)
    for some, sums in zip(*(x.split(max(1, rows // along)) for x in (matrices, total)), strict=True):
        for part in some.split(rows, 1):
            part = part.float()  # in one place: memory that is new each time takes longer than all else
            torch.mul(part, part, out=squares.resize_(part.shape))
            sums.baddbmm_(squares.new_ones(len(squares), 1, squares.shape[1]), squares)
    return total.sqrt_().view([1 if axis in others else n for axis, n in enumerate(grad.shape)])


def _norm_of_neighbours(x: Tensor, axis: int, patch: int) -> Tensor:
    """Along an axis, `patch` at a time; the last ones may be fewer."""
    missing = -x.shape[axis] % patch
    if missing:
        x = torch.cat([x, x.new_zeros([missing if i == axis else n for i, n in enumerate(x.shape)])], axis)
    shape = [*x.shape[:axis], x.shape[axis] // patch, patch, *x.shape[axis + 1 :]]
    return _norm(x.reshape(shape), [axis + 1], x.dtype).squeeze(axis + 1)


def _norm(x: Tensor, axes: list[int], dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=True, dtype=dtype)
    return found


def inclusion_probabilities(norms: Tensor, number: Any, floor: float) -> Tensor:
    """pi for each unit; they add up to `number` in each group.

    Where gradients are infinite or NaN, those units come first and all others are alike; where all are zero, all are.
    """
    size, norms = norms.shape[1], norms.abs()
    base = floor * number / size
    if floor == 1:
        return torch.zeros_like(norms) + base
    number = number * (1 - floor) / (1 - base)
    pi = _by_rounds(norms, number) if _is_readable(norms) and not isinstance(number, Tensor) else None
    pi = _by_sorting(norms, number) if pi is None else pi
    return pi + base * (1 - pi) if floor else pi  # which leaves one one


def _by_sorting(norms: Tensor, number: Any) -> Tensor:
    """min(1, norms / tau), with the tau for which they add up to the number."""
    size = norms.shape[1]
    finite = norms.isfinite()
    norms = torch.where(finite.all(1, keepdim=True), norms, (~finite).to(norms.dtype))
    largest = norms.amax(1, keepdim=True)
    norms = norms / torch.where(largest > 0, largest, 1.0)  # so that sums stay in range
    ordered, index = norms.sort(1, descending=True)
    tail = ordered.flip(1).cumsum(1).flip(1)
    rank = torch.arange(size, device=norms.device, dtype=norms.dtype)
    sure = (ordered * (number - rank) > tail) & (rank < number)
    count = sure.sum(1, keepdim=True)
    rest = torch.where(sure, 0.0, ordered).sum(1, keepdim=True)
    left = number - count.to(norms.dtype)
    share = torch.where(rest > 0, ordered * left / torch.where(rest > 0, rest, 1.0), left / (size - count).clamp(min=1))
    pi = torch.where(sure, 1.0, share.clamp(0, 1))
    return torch.zeros_like(pi).scatter(1, index, pi)


def _by_rounds(norms: Tensor, number: float) -> Tensor | None:
    """The same by taking out those that are sure again and again; None where that takes long.

    Also where sums leave their range, and where nothing is left to share.
    """
    rest = norms.sum(1, keepdim=True)
    if not norms.numel() or not bool(((rest > 1e-150) & (rest < 1e150)).all()):
        return None
    pi = norms * (number / rest)
    sure: Tensor | None = None
    for _ in range(ROUNDS):
        new = pi > 1
        if not bool(new.any()):
            return pi
        sure = new if sure is None else sure | new
        rest = norms.masked_fill(sure, 0.0).sum(1, keepdim=True)
        if not bool((rest > 1e-150).all()):
            return None
        pi = (norms * ((number - sure.sum(1, keepdim=True).to(norms.dtype)) / rest)).masked_fill_(sure, 1.0)
    return None


def _systematic(pi: Tensor, number: Any, order: Tensor, offset: Tensor) -> Tensor:
    """Just `number` units: those in whose part of a line, laid in this order, one of its equally spaced points lies.

    Units that are sure to be kept are not on the line, and the last one with a part has all that rounding left.
    """
    sure, line = pi >= 1, pi
    any_sure = not _is_readable(pi) or bool(sure.any())
    if any_sure:
        number = number - sure.sum(1, keepdim=True).to(pi.dtype)
        line = pi.masked_fill(sure, 0.0)
    ends = line.gather(1, order).cumsum(1)
    ends = torch.where(ends >= ends[:, -1:], number, ends).clamp_(max=number)
    points = ends.sub_(offset).ceil_().clamp_(min=0)
    before = torch.nn.functional.pad(points[:, :-1], (1, 0))
    kept = torch.zeros_like(sure).scatter(1, order, points > before)
    return kept | sure if any_sure else kept


def _independent(pi: Tensor, u: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Each unit by itself, and one chosen by pi where none came out: which, and their inclusion probabilities."""
    kept = u < pi
    total = pi.sum(1, keepdim=True)
    shares = pi / total
    instead = (shares.cumsum(1) <= choice).sum(1, keepdim=True)
    last = torch.where(pi > 0, torch.arange(pi.shape[1], device=pi.device), 0).amax(1, keepdim=True)
    instead = torch.minimum(instead, last)  # rounding must not choose what cannot be chosen
    empty = ~kept.any(1, keepdim=True)
    kept = kept | (empty & (torch.arange(pi.shape[1], device=pi.device) == instead))
    none = torch.log1p(-pi.clamp(max=1)).sum(1, keepdim=True).exp()
    return kept, pi + none * shares
