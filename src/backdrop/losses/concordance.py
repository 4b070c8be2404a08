"""The concordance of risks with survival times: a loss over pairs of which one is known to live longer.

Few samples are taken as a matrix of pairs. Of many, all pairs within blocks of `BLOCK` samples next to each other in
time are; what later blocks, and earlier ones, add to a sample is a smooth function of its hazard alone, so it is
computed on a grid, and taken from there by polynomials. Where hazards are so far apart that the grid would be large,
pairs are sorted out by the binary digits of their order in time instead, which takes longer.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from backdrop.distributed import Group, all_gather, not_compiled, resolve
from backdrop.losses._batches import (
    SingleClass,
    check_inputs,
    check_number,
    check_weights,
    make_weights,
    normalise,
)
from backdrop.losses._loss import Loss, nothing_to_compare
from backdrop.losses._pairs import Means, with_gradient
from backdrop.losses._soft_ranks import Scores, bounds_of, comparable, sigmoids, sorted_sums, spread_of, terms_for

BLOCK = 64  # samples next to each other in time, all pairs of which are taken at once
FEW = 1536  # samples up to which all pairs are
CELL = 2.0  # temperatures that a cell of the grid is wide: poles of sigmoid are at half of pi times i from its middle
CELLS = 48  # up to which the grid is faster than digits
NODES = {21: 18, 12: 11}  # of a cell, for as many terms as float64 and float32 have: errors fall by 6.4 with each
WORK = {"cpu": 2**17, "cuda": 2**23}  # pairs in work at a time


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
    taken, in O(n) memory; in O(n log n) time where hazards are at most some 100 temperatures apart, else O(n log^2 n).

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
    processes = resolve(group)
    rows = [log_hazards.reshape(-1), *(each.detach().reshape(-1).double() for each in (times, events))]
    if weight is not None or processes is not None:
        rows.append(make_weights(weight, rows[0]))
    if processes is not None:
        together = all_gather(torch.stack([row.double() for row in rows], 1), processes, same_loss=True)
        rows = [each.to(row.dtype) for each, row in zip(together.unbind(1), rows, strict=True)]
    hazards, t, happened, *weights = rows[0], *(row.detach() for row in rows[1:])
    if weights:
        legal, shares = normalise(weights[0])
        check_weights(bool(legal))
        counted = shares > 0
        hazards, t, happened, *weights = (each[counted] for each in (hazards, t, happened, shares.double()))
    no_event = happened == 0
    first, last = bounds_of(t)
    if not bool((no_event | (happened == 1)).all()):
        raise ValueError("events has to hold 0 and 1, but got others")
    if math.isnan(first):
        raise ValueError("times has to hold numbers, but got others")
    if len(t) <= FEW:
        i = happened.nonzero().view(-1)
        if math.isinf(first) or math.isinf(last):
            t = t.nan_to_num()  # as large as can be
        until = torch.where(no_event, t.nextafter(torch.full_like(t, math.inf)), t)  # a little later at the same time
        which = torch.empty(len(i), len(t), dtype=torch.float64, device=t.device)
        torch.gt(until, t[i, None], out=which)
        u, w = (weights[0][i], weights[0]) if weights else (None, None)
        total = float(which.sum() if u is None or w is None else u @ (which @ w))
        compute = partial(_sum_of_few, i, which, u, w, temperature)
    else:
        w = weights[0] if weights else torch.ones_like(t)
        u, order = w * happened, _order(t, happened)
        longer = w.new_zeros(int(order.max()) + 2).index_add_(0, order, w)
        longer = longer.flip(0).cumsum(0).flip(0)[1:]  # the weight of those who are known to live longer than each
        total = float((u * longer[order]).sum())
        compute = partial(_sum, order, u, w, temperature)
    if not total > 0:
        return nothing_to_compare(rows[0], single_class, "no two samples that can be compared")

    def mean(at: Tensor) -> Means:
        value, gradient = compute(at)
        if gradient.dtype == torch.float64:  # else no score is NaN
            broken = at.isnan().any()
            value, gradient = value.masked_fill(broken, math.nan), gradient.masked_fill(broken, math.nan)
        return value / total, gradient / (total * temperature)

    return with_gradient(mean, hazards)


def _order(times: Tensor, happened: Tensor) -> Tensor:
    """Integers that rise with time, from 0 on; at the same time events come before those who are censored."""
    by_time = torch.unique(times, return_inverse=True)[1]
    order: Tensor
    _, order = torch.unique(2 * by_time + (happened == 0), return_inverse=True)
    return order


def _sum_of_few(
    i: Tensor, which: Tensor, u: Tensor | None, w: Tensor | None, temperature: float, hazards: Tensor
) -> Means:
    """The sum of u_i w_j sigmoid((h_j - h_i) / T) over those in `which`, along with T times its gradient."""
    scores = Scores(hazards, temperature)
    matrix = scores.matrix(i)
    matrix.keep(which)
    above = matrix.above(w)
    down, gradient = matrix.slopes(w), matrix.slopes_to(u)
    if u is not None and w is not None:
        down, gradient = down.mul_(u), gradient.mul_(w)
    value = above.sum() if u is None else u @ above
    value, gradient = scores.mark(value, gradient.index_add_(0, i, down, alpha=-1))
    return value, gradient


def _sum(order: Tensor, u: Tensor, w: Tensor, temperature: float, hazards: Tensor) -> Means:
    """The same for p_ij = u_i w_j where order_i < order_j, else 0."""
    x, terms = comparable(hazards), terms_for(hazards)
    rate = 4 / temperature
    if spread_of(x) * rate <= CELL * CELLS:
        place = order.argsort()
        value, slope = _on_a_grid((x[place] - x.amin()) * rate, order[place], u[place], w[place], NODES[terms])
        return value, torch.empty_like(slope).scatter_(0, place, slope)
    return _by_digits(x, order, u, w, temperature, terms)


def _on_a_grid(x: Tensor, order: Tensor, u: Tensor, w: Tensor, nodes: int) -> Means:
    """For samples in the order of time, with hazards in temperatures from the lowest on.

    Those of one time may lie in several blocks. Each sample is taken pair by pair with the block that holds the last of
    its time, and by way of the grid with all later ones.
    """
    n, cells = len(x), int(x.amax() / CELL) + 1
    grid, to_series = _grid(nodes, cells, x)
    size = BLOCK
    while size < len(grid) // 2:  # so that the tables take no more memory than the samples
        size *= 2
    blocks = -(-n // size)
    own = torch.arange(n, device=x.device) // size
    last = (torch.searchsorted(order, order, right=True) - 1) // size
    moved = (last != own).nonzero()[:, 0]
    e, at_grid = x.exp(), grid.exp()  # sigmoid(x_j - x_i) = e_j / (e_i + e_j), as in `Scores`
    ue, we = u * e, w * e
    order = order.int()
    padding = ((e, 1.0), (we, 0.0), (ue, 0.0), (order, 0))  # an order of 0 is later than none
    in_blocks = [
        nn.functional.pad(each, (0, blocks * size - n), value=fill).view(blocks, size) for each, fill in padding
    ]

    value = x.new_zeros(())
    above, to_later, to_earlier = x.new_zeros(3, blocks, len(grid))
    work = WORK["cpu" if x.is_cpu else "cuda"]
    for part in _slices(blocks, work // (size * len(grid))):
        some, weight = in_blocks[0][part], torch.stack([each[part] for each in in_blocks[1:3]], 1)
        y = (some[..., None] + at_grid).reciprocal_()
        above[part] = (weight[:, :1] @ y)[:, 0]
        to_later[part], to_earlier[part] = (weight @ y.mul_(y)).unbind(1)
    for part in _slices(len(moved), work // len(grid)):
        rows = moved[part]
        y = (e[rows, None] + at_grid).reciprocal_()
        y.mul_(y).mul_(ue[rows, None])
        to_earlier.index_add_(0, last[rows], y).index_add_(0, own[rows], y, alpha=-1)
    to_later, to_earlier = to_later.mul_(at_grid), to_earlier.mul_(at_grid)
    above, to_later = (_after(each.flip(0)).flip(0) for each in (above, to_later))
    tables = [(each.view(-1, nodes) @ to_series) for each in (above, to_later, _after(to_earlier))]

    cell = (x / CELL).long()
    inside = (x / CELL - cell).mul_(2).sub_(1)
    slope = torch.empty_like(x)
    for part in _slices(n, work // nodes):
        series = _series(inside[part], nodes)
        later, earlier = ((each[part] * cells).add_(cell[part]) for each in (last, own))
        found = [(tables[i][at] * series).sum(1) for i, at in ((0, later), (1, later), (2, earlier))]
        value += u[part] @ found[0]
        slope[part] = (w[part] * found[2]).sub_(u[part] * found[1])

    near, staying = x.new_zeros(blocks, size), u.index_fill(0, moved, 0)
    staying = nn.functional.pad(staying, (0, blocks * size - n)).view(blocks, size)
    apart = torch.empty_like(near)
    for part in _slices(blocks, work // size**2):
        some, weight, places, up = in_blocks[0][part], in_blocks[1][part, :, None], in_blocks[3][part], staying[part]
        y = (some[..., None] + some[:, None]).reciprocal_().masked_fill_(places[:, None] <= places[..., None], 0)
        value += up.flatten() @ (y @ weight).flatten()
        up = up * some
        torch.mul((y.mul_(y) @ weight)[..., 0], up, out=apart[part])
        near[part] = (up[:, None] @ y)[:, 0]
    slope -= apart.view(-1)[:n]
    for part in _slices(len(moved), work // size):
        rows = moved[part]
        at = last[rows]
        y = (in_blocks[0][at] + e[rows, None]).reciprocal_()
        y.masked_fill_(in_blocks[3][at] <= order[rows, None], 0)
        weight = in_blocks[1][at]
        value += u[rows] @ (y * weight).sum(1)
        y.mul_(y)
        slope[rows] -= ue[rows] * (y * weight).sum(1)
        near.index_add_(0, at, y.mul_(ue[rows, None]))
    return value, slope.addcmul_(near.view(-1)[:n], we)


def _grid(nodes: int, cells: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Chebyshev's points of all cells, and the matrix that makes series of values there."""
    angle = torch.arange(nodes, device=like.device, dtype=like.dtype).add_(0.5).mul_(math.pi / nodes)
    first = torch.arange(cells, device=like.device, dtype=like.dtype)[:, None] * CELL
    to_series = _series(angle.cos(), nodes).mul_(2 / nodes)
    to_series[:, 0] /= 2
    return (first + (angle.cos() + 1) * (CELL / 2)).flatten(), to_series


def _series(x: Tensor, count: int) -> Tensor:
    """Chebyshev's polynomials of x in [-1, 1], (n, count)."""
    found = [torch.ones_like(x), x]
    while len(found) < count:
        found.append(2 * x * found[-1] - found[-2])
    return torch.stack(found, 1)


def _after(x: Tensor) -> Tensor:
    """The sums of the rows before each."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1].cumsum(0)])


def _slices(n: int, step: int) -> list[slice]:
    step = max(step, 1)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _by_digits(x: Tensor, order: Tensor, u: Tensor, w: Tensor, temperature: float, terms: int) -> Means:
    n = len(x)
    value, gradient = x.new_zeros(()), torch.zeros_like(x)
    last = int(order.max())
    alone = last == n - 1  # no ties, so that places in time are orders
    if alone:
        value += _blocks(x, order, u, w, temperature, gradient)
    # Each other pair differs first in one bit of its orders: among all whose higher bits are the same.
    place = x.argsort()
    for bit in range(last.bit_length() - 1, (BLOCK.bit_length() - 2) if alone else -1, -1):
        here = order[place]
        later = here >> bit & 1
        weights = torch.stack([w[place] * later, u[place] * (1 - later)])[None]
        above, slope = sorted_sums(x[place][None], weights, temperature, terms, 1, here >> (bit + 1))
        value += weights[0, 1] @ above[0, 0]
        gradient.index_add_(0, place, weights[0, 0] * slope[0, 1] - weights[0, 1] * slope[0, 0])
        place = place[(here >> bit).sort(stable=True)[1]]
    return value, gradient


def _blocks(x: Tensor, order: Tensor, u: Tensor, w: Tensor, temperature: float, gradient: Tensor) -> Tensor:
    """All pairs whose orders differ in the lowest bits only; no two orders are the same."""
    place = order.argsort()
    more = -len(place) % BLOCK
    padded = torch.cat([place, place[:1].expand(more)]).view(-1, BLOCK)
    real = torch.arange(padded.numel(), device=x.device).view(-1, BLOCK) < len(place)
    value = x.new_zeros(())
    for at, some in zip(torch.split(padded, 256), torch.split(real, 256), strict=True):
        pairs = (order[at][:, None] > order[at][:, :, None]) * (u[at] * some)[:, :, None] * (w[at] * some)[:, None]
        slope, y = sigmoids((x[at][:, None] - x[at][:, :, None]).div_(temperature / 4))
        slope.mul_(y).mul_(pairs)
        found, to = y.mul_(pairs).sum(), (slope.sum(1) - slope.sum(2)).flatten()
        value += found
        gradient.index_add_(0, at.flatten(), to)
    return value


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
