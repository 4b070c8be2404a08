"""The concordance of risks with survival times: a loss over pairs of which one is known to live longer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backdrop.distributed import Group, all_gather, not_compiled, resolve
from backdrop.losses._batches import SingleClass, check_inputs, check_number, check_weights, make_weights, normalise
from backdrop.losses._loss import Loss, nothing_to_compare
from backdrop.losses._pairs import Means, WithGradient
from backdrop.losses._soft_ranks import comparable, sorted_sums, terms_for

BLOCK = 32  # samples next to each other in time, all pairs of which are taken at once
FEW = 1536  # samples up to which all pairs are


@not_compiled
def concordance_loss(
    log_hazards: Tensor,
    times: Tensor,
    events: Tensor,
    *,
    temperature: float,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """1 - smooth concordance: the mean over comparable pairs of sigmoid((h_j - h_i) / temperature).

    A pair (i, j) is comparable if i has an event, and j is known to live longer: t_i < t_j, or t_i = t_j and j is
    censored. As the temperature goes to 0 the loss becomes 1 - Harrell's C, with ties of hazards as half. All pairs are
    taken, in O(n log^2 n) time and O(n) memory.

    Args:
        log_hazards: (n,) or (n, 1), the higher the sooner the event.
        times: (n,) or (n, 1), of the event or of censoring.
        events: (n,) or (n, 1) of 0 and 1, bool, integer or float: whether the event was seen.
        temperature: how far apart hazards have to be to count as ordered, at least 1e-30.
        weight: (n,) at least 0: a pair counts as much as the product of both weights; 0 is padding.
        single_class: "error" or "zero" for a batch in which no pair is comparable.
        group: processes over whose samples the loss is taken.

    Examples:
        >>> hazards, times = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 3.0])
        >>> concordance_loss(hazards, times, torch.tensor([1, 1, 0]), temperature=0.01)
        tensor(0.3333)
    """
    temperature = check_number("temperature", temperature)
    check_inputs("log_hazards", log_hazards, times, single_class, group, "times")
    check_inputs("log_hazards", log_hazards, events, single_class, group, "events")
    allowed = ((len(log_hazards),), (len(log_hazards), 1)) if log_hazards.ndim else ()
    if any(tuple(each.shape) not in allowed for each in (log_hazards, times, events)):
        raise ValueError(
            "log_hazards, times and events have to have the shape (n,) or (n, 1), but got "
            f"{', '.join(str(tuple(each.shape)) for each in (log_hazards, times, events))}"
        )
    hazards = log_hazards.reshape(-1)
    weights = make_weights(weight, hazards)
    rows = [hazards, *(each.detach().reshape(-1).double() for each in (times, events)), weights]
    processes = resolve(group)
    if processes is not None:
        together = all_gather(torch.stack([row.double() for row in rows], 1), processes, same_loss=True)
        rows = [each.to(row.dtype) for each, row in zip(together.unbind(1), rows, strict=True)]
    hazards, t, happened, weights = rows[0], *(row.detach() for row in rows[1:])
    legal, weights = normalise(weights)
    counted = weights > 0
    right = ((happened == 0) | (happened == 1) | ~counted).all()
    known = (~t.isnan() | ~counted).all()
    for passed, message in zip(
        torch.stack([legal, right, known]).tolist(),
        ("", "events has to hold 0 and 1", "times has to hold numbers"),
        strict=True,
    ):
        if message:
            if not passed:
                raise ValueError(f"{message}, but got others")
        else:
            check_weights(passed)
    t, happened, weights = t[counted], happened[counted], weights[counted].double()
    order = _order(t, happened)
    longer = weights.new_zeros(int(order.max()) + 2 if len(order) else 1).index_add_(0, order, weights)
    longer = longer.flip(0).cumsum(0).flip(0)[1:]  # the weight of those who are known to live longer than each
    total = (weights * happened * longer[order]).sum() if len(order) else weights.sum()
    if not total > 0:
        return nothing_to_compare(hazards, single_class, "no two samples that can be compared")

    def compute(at: Tensor) -> Means:
        value, gradient = _sum(at, order, weights * happened, weights, temperature)
        return value / total, gradient / total

    loss: Tensor = WithGradient.apply(hazards[counted], compute)  # type: ignore[no-untyped-call]
    return loss


def _order(times: Tensor, happened: Tensor) -> Tensor:
    """Integers that rise with time, from 0 on; at the same time events come before those who are censored."""
    by_time = torch.unique(times, return_inverse=True)[1]
    order: Tensor
    _, order = torch.unique(2 * by_time + (happened == 0), return_inverse=True)
    return order


def _sum(hazards: Tensor, order: Tensor, u: Tensor, w: Tensor, temperature: float) -> Means:
    """sum_ij u_i w_j sigmoid((h_j - h_i) / T) over pairs with order_i < order_j, along with its gradient."""
    x, n = comparable(hazards), len(hazards)
    value, gradient = x.new_zeros(()), torch.zeros_like(x)
    last = int(order.max())
    alone = last == n - 1  # no ties, so that places in time are orders
    if n <= FEW:
        value += _all_pairs(x[None], order[None], u[None], w[None], temperature, gradient[None])
    else:
        if alone:
            value += _blocks(x, order, u, w, temperature, gradient)
        # Each other pair differs first in one bit of its orders: among all whose higher bits are the same.
        place = x.argsort()
        for bit in range(last.bit_length() - 1, (BLOCK.bit_length() - 2) if alone else -1, -1):
            here = order[place]
            later = here >> bit & 1
            weights = torch.stack([w[place] * later, u[place] * (1 - later)])[None]
            above, slope = sorted_sums(x[place][None], weights, temperature, terms_for(hazards), 1, here >> (bit + 1))
            value += weights[0, 1] @ above[0, 0]
            gradient.index_add_(0, place, weights[0, 0] * slope[0, 1] - weights[0, 1] * slope[0, 0])
            place = place[(here >> bit).sort(stable=True)[1]]
    broken = hazards.isnan().any()
    return value.masked_fill(broken, math.nan), (gradient / temperature).masked_fill_(broken, math.nan)


def _blocks(x: Tensor, order: Tensor, u: Tensor, w: Tensor, temperature: float, gradient: Tensor) -> Tensor:
    """All pairs whose orders differ in the lowest bits only; no two orders are the same."""
    place = order.argsort()
    more = -len(place) % BLOCK
    padded = torch.cat([place, place[:1].expand(more)]).view(-1, BLOCK)
    real = torch.arange(padded.numel(), device=x.device).view(-1, BLOCK) < len(place)
    value = x.new_zeros(())
    for at, some in zip(torch.split(padded, 256), torch.split(real, 256), strict=True):
        found = torch.zeros_like(at, dtype=x.dtype)
        value += _all_pairs(x[at], order[at], u[at] * some, w[at] * some, temperature, found)
        gradient.index_add_(0, at.flatten(), found.flatten())
    return value


def _all_pairs(x: Tensor, order: Tensor, u: Tensor, w: Tensor, temperature: float, gradient: Tensor) -> Tensor:
    y = (x[:, None] - x[:, :, None]).div_(temperature / 4).sigmoid_()  # (blocks, i, j)
    slope = y.mT.contiguous()  # sigmoid(-x), without cancellation
    pairs = (order[:, None] > order[:, :, None]) * u[:, :, None]
    pairs *= w[:, None]
    slope.mul_(y).mul_(pairs)
    gradient += slope.sum(1)
    gradient -= slope.sum(2)
    return (pairs.mul_(y)).sum()


class ConcordanceLoss(Loss):
    """`concordance_loss` as a module: `loss(log_hazards, times, events, weight=None)`.

    Args:
        temperature: how far apart hazards have to be to count as ordered; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    _function = staticmethod(concordance_loss)

    def __init__(self, temperature: float, *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__(single_class, group, temperature=temperature)

    def forward(  # type: ignore[override]
        self, log_hazards: Tensor, times: Tensor, events: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        return self._call(log_hazards, times, events, weight=weight)
