"""Units chosen by the gradient that arrives at them, unbiased by Horvitz-Thompson weights.

Let g_u be the gradient that arrives at unit u. A unit is kept with probability

    pi_u = (1 - floor) min(1, |g_u| / tau) + floor k / N,    tau so that the pi_u add up to k,

and weighs 1 / pi_u, so that the expected gradient is the plain one whatever the g_u are. The variance is least where
pi_u is proportional to what the unit adds to the gradient of the parameters, of which |g_u| is the part that is known
before anything below the mask is computed; the floor bounds what a unit costs that adds more than its |g_u| says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backdrop._core.checks import Probability, Scale, check_devices
from backdrop._core.draw import Lattice, is_zero


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
    u = _random(total, size + 1, norms, generator)[own]
    if exact:
        kept = _systematic(inclusion, number, u[:, :-1], u[:, -1:])
    else:
        kept, inclusion = _independent(inclusion, u[:, :-1], u[:, -1:])
    weight = torch.where(kept, 1 / inclusion, 0.0) if scale is not None else kept.to(norms.dtype)
    return weight * (1 - p) if scale == "eq1" else weight


def _random(groups: int, size: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:  # the form with the argument cannot be compiled for batches of any size
        return torch.rand(groups, size, device=like.device, dtype=like.dtype)
    return torch.rand(groups, size, generator=generator, device=like.device, dtype=like.dtype)


def unit_norms(*given: tuple[Tensor, Lattice]) -> Tensor:
    """|g_u| over all tensors up to one common factor, (groups, units), in float64 where there is one.

    Infinite and NaN gradients stay what they are.
    """
    return together([_norms_of(grad.detach(), lattice) for grad, lattice in given])


def together(norms: Sequence[Tensor]) -> Tensor:
    """Of units whose gradients come in several parts."""
    stacked = torch.stack(list(norms))
    return _norm(stacked, [0], stacked.dtype).squeeze(0)


def effective_number(norms: Tensor) -> float:
    """(sum |g|)^2 / sum |g|^2: as many equal gradients would be as much. NaN where they are not finite."""
    largest = norms.amax() if norms.numel() else norms.new_zeros(())
    shares = norms / torch.where(largest > 0, largest, 1.0)  # whose squares stay in range
    return float(shares.sum().square() / shares.square().sum().clamp(min=1.0)) if norms.numel() else 0.0


def _norms_of(grad: Tensor, lattice: Lattice) -> Tensor:
    wide = torch.float32 if grad.device.type == "mps" else torch.float64
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

    On a CPU in the dtype of the gradient, which is faster, as long as no square leaves its range.
    """
    if not others:
        return grad.abs().to(wide)
    readable = type(grad) is Tensor and grad.device.type == "cpu" and not torch.compiler.is_compiling()
    if not readable or grad.dtype == torch.float64:
        return _norm(grad, others, wide)
    norms = _norm(grad, others, torch.float32)
    low, high = map(float, norms.aminmax()) if norms.numel() else (1.0, 1.0)
    if low > 1e-15 and high < 1e15:
        return norms.to(wide)
    return _norm(grad, others, wide)


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
    pi = torch.zeros_like(pi).scatter(1, index, pi)
    return (1 - floor) * pi + floor * number / size if floor else pi


def _systematic(pi: Tensor, number: Any, u: Tensor, offset: Tensor) -> Tensor:
    """Just `number` units: those in whose part of a line, laid in random order, one of its equally spaced points lies.

    Units that are sure to be kept, or not to be, come first, where sums are exact.
    """
    order = torch.where((pi >= 1) | (pi <= 0), -1.0, u).argsort(1)
    ends = pi.gather(1, order).cumsum(1).clamp(max=number)
    last = torch.arange(pi.shape[1], device=pi.device) == pi.shape[1] - 1
    ends = torch.where(last, number, ends)
    points = (ends - offset).ceil().clamp(min=0)
    before = torch.cat([torch.zeros_like(points[:, :1]), points[:, :-1]], 1)
    return torch.zeros_like(pi, dtype=torch.bool).scatter(1, order, points > before)


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
