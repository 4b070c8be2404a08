"""Survival: losses for times that are known only to be later than something.

Cox's partial likelihood compares each sample that had its event with all that were still at risk then. With log hazards
eta_i, weights w_i, and for each time t of an event those at risk R(t) and those with the event D(t), d of them,

    L = 1/W sum_t sum_{i in D(t)} w_i (log S_i - eta_i),    W = the sum of w_i over all events,
    Breslow:  S_i = sum_{j in R(t)} w_j exp(eta_j)
    Efron:    S_i = that - l/d sum_{j in D(t)} w_j exp(eta_j),  l = 0, ..., d - 1, each with the mean weight of D(t)

Everything is computed as logarithms of sums of positive terms, so nothing cancels or overflows: those at risk that have
no event at t are summed apart from those that have one. Who is at risk is, for each sample, a range of the times of
events in order: from its entry to its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from backdrop.distributed import Group, all_gather, not_compiled, resolve
from backdrop.losses._batches import (
    SingleClass,
    check_inputs,
    check_settings,
    check_weights,
    make_weights,
    normalise,
    wide,
)
from backdrop.losses._pairs import Means, with_gradient
from backdrop.losses._soft_ranks import bounds_of

Ties: TypeAlias = Literal["efron", "breslow"]


@not_compiled
def cox_loss(
    log_hazards: Tensor,
    times: Tensor,
    events: Tensor,
    *,
    ties: Ties = "efron",
    strata: Tensor | None = None,
    entry: Tensor | None = None,
    weight: Tensor | None = None,
    single_class: SingleClass = "error",
    group: Group = None,
) -> Tensor:
    """Cox's negative log partial likelihood, per event, in O(n log n) time and O(n) memory.

    It compares every event with all samples at risk at that time, so it wants the whole cohort at once. Its size
    depends on the number at risk; only differences of log hazards matter.

    Args:
        log_hazards: (n,) or (n, 1): the larger, the sooner an event is expected.
        times: (n,): of the event, or until when there was none. Compared as float64.
        events: (n,) of 1 where the time is that of an event, and 0 where it is censored; bool, integer or float.
        ties: how events at the same time are counted: "efron" or "breslow". Without ties both are the same.
        strata: (n,) integers: samples are compared with those of their own stratum only.
        entry: (n,), each below its time: a sample is at risk only after its entry (left truncation).
        weight: (n,) at least 0: with Breslow's ties a sample with weight 2 counts like two of it. Those with weight 0
            are padding, whatever else they hold.
        single_class: what to do with a batch without events: "error", or "zero" for a zero that still carries a graph.
        group: processes over whose samples the loss is taken; every one gets the same value.

    Examples:
        >>> log_hazards, times = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
        >>> cox_loss(log_hazards, times, events=torch.tensor([1, 1, 0]))  # (log(e + 2) - 1 + log 2) / 2
        tensor(0.6223)
    """
    _check_ties(ties)
    check_inputs("log_hazards", log_hazards, log_hazards, single_class, group)
    if log_hazards.ndim not in (1, 2) or log_hazards.shape[1:] not in ((), (1,)):
        raise ValueError(f"log_hazards has to have the shape (n,) or (n, 1), but got {tuple(log_hazards.shape)}")
    eta = log_hazards.flatten()
    time, event = _column("times", times, eta), _column("events", events, eta)
    start = None if entry is None else _column("entry", entry, eta)
    groups = None if strata is None else _column("strata", strata, eta)
    processes = resolve(group)
    if weight is None and start is None and groups is None and processes is None:
        found = _without_ties(eta, time, event, ties == "efron")
        if found is not None:
            return found
    weights = torch.ones_like(time) if weight is None else make_weights(weight, eta).double()
    if processes is not None:
        columns = [eta.double(), time, event, weights, torch.full_like(time, -torch.inf) if start is None else start]
        columns += [] if groups is None else [groups.view(torch.float64)]  # to the last bit
        gathered = all_gather(torch.stack(columns, 1), processes, same_loss=True)
        eta = gathered[:, 0].to(eta.dtype)
        time, event, weights, beginning, *more = gathered.detach().t().contiguous()[1:]
        start = None if start is None else beginning
        groups = None if groups is None else more[0].view(torch.int64)
    count, largest = len(eta), None
    if processes is not None or weight is not None:
        legal, shares = normalise(weights)
        present = shares > 0
        right, whole = torch.stack([legal, present.all()]).tolist()
        check_weights(right)
        largest = weights.amax() if count else None
        rows = slice(None) if whole else present.nonzero()[:, 0]
        eta, time, event, weights = (x[rows] for x in (eta, time, event, shares))
        start, groups = (None if x is None else x[rows] for x in (start, groups))
    some = _check_times(time, event, start)
    if not some:
        if single_class == "zero":
            return eta[:0].sum(dtype=wide(eta))
        raise ValueError(
            f"the batch of {count} samples has no event, so there is nothing to compare; take a larger batch, "
            "or let such a batch count as zero with single_class='zero'"
        )
    risk = _at_risk(time, event == 1, groups, start, weights)
    loss = with_gradient(partial(_likelihood, risk, ties == "efron"), eta)
    return loss if largest is None else loss + largest.log().to(loss.dtype)  # weights are over the largest there


class CoxLoss(nn.Module):
    """`cox_loss` as a module: `loss(log_hazards, times, events, strata=None, entry=None, weight=None)`.

    Args:
        ties: "efron" or "breslow"; an attribute that may be changed.
        single_class: "error" or "zero".
        group: processes over whose samples the loss is taken.
    """

    def __init__(self, ties: Ties = "efron", *, single_class: SingleClass = "error", group: Group = None) -> None:
        super().__init__()
        _check_ties(ties)
        check_settings(single_class, group)
        self.ties, self.single_class, self.group = ties, single_class, group

    def forward(
        self,
        log_hazards: Tensor,
        times: Tensor,
        events: Tensor,
        strata: Tensor | None = None,
        entry: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        return cox_loss(
            log_hazards,
            times,
            events,
            ties=self.ties,
            strata=strata,
            entry=entry,
            weight=weight,
            single_class=self.single_class,
            group=self.group,
        )

    def extra_repr(self) -> str:
        shown = [f"ties={self.ties!r}"]
        shown += [] if self.single_class == "error" else [f"single_class={self.single_class!r}"]
        shown += [] if self.group is None else [f"group={self.group if isinstance(self.group, str) else '...'}"]
        return ", ".join(shown)


class _Risk(NamedTuple):
    """Who is at risk when, in the order of strata and times. A slot is a time at which there are events."""

    order: Tensor  # (n,): which sample comes where; all below is in this order
    weight: Tensor  # (n,)
    events: Tensor  # (count,): where those with an event are
    slot: Tensor | None  # (count,): the slot of each event; None where each has its own
    each: Tensor  # (slots,): how many events it has
    first: Tensor | None  # (n,): the first slot at which each is at risk; None where it is always 0
    end: Tensor  # (n,): the slot before which that ends, not counting the one of its own event


def _at_risk(time: Tensor, event: Tensor, strata: Tensor | None, entry: Tensor | None, weight: Tensor) -> _Risk:
    keys, first_keys = time, entry
    if strata is not None:
        values, ranks = torch.unique(time if entry is None else torch.cat([time, entry]), return_inverse=True)
        base = torch.unique(strata, return_inverse=True)[1] * len(values)
        keys = base + ranks[: len(time)]
        first_keys = base - 1 if entry is None else base + ranks[len(time) :]
    keys, order = keys.sort()
    events = event[order].nonzero()[:, 0]
    slots, each = torch.unique_consecutive(keys[events], return_counts=True)
    end = torch.searchsorted(slots, keys, right=True)
    end[events] -= 1
    first = None if first_keys is None else torch.searchsorted(slots, first_keys[order], right=True)
    alone = len(slots) == len(events)
    slot = None if alone else torch.repeat_interleave(torch.arange(len(slots), device=time.device), each)
    return _Risk(order, weight[order], events, slot, each, first, end)


def _without_ties(eta: Tensor, time: Tensor, event: Tensor, efron: bool) -> Tensor | None:
    """The loss where all times differ, by one sort; None where they do not, or something is to be said of them."""
    later, order = time.sort(descending=True)
    if not bool((later[1:] < later[:-1]).all()):
        return None
    happened = event.index_select(0, order)
    total = float(happened.sum())
    if not total > 0 or not bool(((happened == 0) | (happened == 1)).all()) or len(time) == 1:
        return None

    def compute(log_hazards: Tensor) -> Means:
        low, high = bounds_of(log_hazards.detach())
        if not high - low < SPREAD:
            return _likelihood(_at_risk(time, event == 1, None, None, torch.ones_like(time)), efron, log_hazards)
        x = log_hazards.detach().double().index_select(0, order) - high
        at_risk = x.exp().cumsum(0)
        value = happened @ (at_risk.log() - x)
        share = (happened / at_risk).flip(0).cumsum(0).flip(0)
        gradient = share.mul_(x.exp_()).sub_(happened).div_(total)
        return value / total, torch.empty_like(gradient).index_copy_(0, order, gradient)

    return with_gradient(compute, eta)


def _likelihood(risk: _Risk, efron: bool, log_hazards: Tensor) -> Means:
    eta = log_hazards.detach().double()[risk.order]
    x = eta + risk.weight.log()
    slots, slot = len(risk.each), risk.slot
    ranges = _Ranges(risk.first, risk.end, slots)
    own, weight = x[risk.events], risk.weight[risk.events]
    others = ranges.sum_over_members(x)
    if slot is None:
        of_slot, mean = own, weight
        at_risk = torch.logaddexp(others, own)
        inverse = per_event = weight.log() - at_risk
    else:
        of_slot = _log_sums(own, slot, slots)
        mean = (weight.new_zeros(slots).index_add(0, slot, weight) / risk.each)[slot]
        left = torch.zeros_like(own)  # the log of the share of those with an event that still counts
        if efron:
            before = torch.arange(len(own), device=own.device) - (risk.each.cumsum(0) - risk.each)[slot]
            left = torch.log1p(-before.double() / risk.each[slot])
        at_risk = torch.logaddexp(others[slot], of_slot[slot] + left)
        inverse = _log_sums(mean.log() - at_risk, slot, slots)
        per_event = _log_sums(mean.log() - at_risk + left, slot, slots)[slot]
    total = weight.sum()
    value = (mean / total * at_risk - weight / total * eta[risk.events]).sum()
    gradient = (x + ranges.sum_over_slots(inverse)).exp()
    gradient[risk.events] += (own + per_event).exp() - weight
    return value, torch.empty_like(gradient).index_copy_(0, risk.order, gradient / total)


class _Ranges:
    """Logarithms of sums over ranges of slots, or over the ranges that hold a slot, without differences.

    A range that begins at the first slot is one prefix. Any other, from `first` to `last`, is split where the two first
    differ in binary: it is the end of one block and the beginning of the next, of a size that is a power of two. So all
    ranges of one size take one cumulative sum along blocks.
    """

    def __init__(self, first: Tensor | None, end: Tensor, slots: int) -> None:
        self.end, self.slots, self.prefixes = end, slots, first is None
        self.parts: list[tuple[int, Tensor, Tensor, Tensor]] = []  # size of a block, members, first and last
        if first is None:
            return
        some = (end > first).nonzero()[:, 0]
        first, last = first[some], end[some] - 1
        sizes, order = torch.frexp((first ^ last).double()).exponent.sort(stable=True)
        kinds, counts = torch.unique_consecutive(sizes, return_counts=True)
        for kind, rows in zip(kinds.tolist(), torch.split(order, counts.tolist()), strict=True):
            self.parts.append((2**kind // 2, some[rows], first[rows], last[rows]))

    def sum_over_members(self, x: Tensor) -> Tensor:
        """For each slot, log of the sum of exp(x) of those whose range holds it."""
        y, numbers, top = _terms(x)
        if self.prefixes:
            total = numbers.from_the_end(numbers.sums(y, self.end, self.slots + 1)[1:])
            return numbers.log(total) + top
        total = y.new_full((self.slots,), numbers.zero)
        for block, members, first, last in self.parts:
            ours = y[members]
            if block == 0:
                found = numbers.sums(ours, last, self.slots)
            else:
                padded = -(-self.slots // (2 * block)) * 2 * block
                halves = numbers.sums(torch.cat([ours, ours]), torch.cat([first, last]), padded).view(-1, 2, block)
                halves = torch.stack([numbers.cumulate(halves[:, 0], -1), numbers.from_the_end(halves[:, 1])], 1)
                found = halves.flatten()[: self.slots]
            total = numbers.add(total, found)
        return numbers.log(total) + top

    def sum_over_slots(self, x: Tensor) -> Tensor:
        """For each member, log of the sum of exp(x) of the slots in its range."""
        y, numbers, top = _terms(x)
        if self.prefixes:
            sums = nn.functional.pad(numbers.cumulate(y, -1), (1, 0), value=numbers.zero)
            return (numbers.log(sums) + top)[self.end]
        total = y.new_full((len(self.end),), numbers.zero)
        for block, members, first, last in self.parts:
            if block == 0:
                total[members] = y[last]
            else:
                padding = -self.slots % (2 * block)
                halves = nn.functional.pad(y, (0, padding), value=numbers.zero).view(-1, 2, block)
                halves = torch.stack([numbers.from_the_end(halves[:, 0]), numbers.cumulate(halves[:, 1], -1)], 1)
                total[members] = numbers.add(halves.flatten()[first], halves.flatten()[last])
        return numbers.log(total) + top


class _Numbers(NamedTuple):
    """How positive numbers are added: as they are, or by their logarithms."""

    zero: float
    sums: Callable[[Tensor, Tensor, int], Tensor]
    cumulate: Callable[[Tensor, int], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    log: Callable[[Tensor], Tensor]

    def from_the_end(self, x: Tensor) -> Tensor:
        return self.cumulate(x.flip(-1), -1).flip(-1)


def _sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The sums with each index."""
    return x.new_zeros(count).index_add_(0, index, x)


def _log_sums(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The logarithm of the sums of exp(x) with each index."""
    top = x.new_full((count,), -torch.inf).scatter_reduce_(0, index, x, "amax")
    top.masked_fill_(top.isinf(), 0)
    return _sums((x - top[index]).exp(), index, count).log_().add_(top)


PLAIN = _Numbers(0.0, _sums, torch.cumsum, torch.add, torch.log)
LOGS = _Numbers(-torch.inf, _log_sums, torch.logcumsumexp, torch.logaddexp, torch.clone)
SPREAD = 600.0  # exp(-600) is a number like any other in float64, as precise as 1


def _terms(x: Tensor) -> tuple[Tensor, _Numbers, float]:
    """exp(x) over its largest, where all are numbers as precise as any; else x itself. And what its log lacks."""
    low, high = torch.stack(x.aminmax()).tolist()
    return ((x - high).exp_(), PLAIN, high) if high - low < SPREAD else (x, LOGS, 0.0)


def _column(name: str, given: Tensor, like: Tensor) -> Tensor:
    """One number per sample, in float64, or int64 for strata."""
    if not isinstance(given, Tensor) or given.is_complex() or (name == "strata" and given.is_floating_point()):
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(
            f"{name} has to be a tensor of {'integers' if name == 'strata' else 'real numbers'}, but got {kind}"
        )
    if tuple(given.shape) not in ((len(like),), (len(like), 1)) or given.device != like.device:
        raise ValueError(
            f"{name} has to be one number per sample, shape ({len(like)},), on the device of log_hazards, {like.device}"
            f", but got shape {tuple(given.shape)} on {given.device}"
        )
    return given.detach().flatten().to(torch.int64 if name == "strata" else torch.float64)


def _check_ties(ties: Ties) -> None:
    if ties not in ("efron", "breslow"):
        raise ValueError(f"ties has to be 'efron' or 'breslow', but got {ties!r}")


def _check_times(times: Tensor, events: Tensor, entry: Tensor | None) -> bool:
    """Whether there are events among those that count."""
    happened = events == 1
    right, later = happened | (events == 0), times == times if entry is None else entry < times  # so not NaN either
    fine, some = torch.stack([(right & later).all(), happened.any()]).tolist()
    if fine:
        return bool(some)
    if not right.all():
        raise ValueError(f"events has to hold 0 and 1, but got {torch.unique(events)[:10].tolist()}")
    if times.isnan().any() or (entry is not None and entry.isnan().any()):
        raise ValueError(
            "times and entry have to hold numbers, but got NaN; give samples that shall not count weight 0"
        )
    assert entry is not None
    worst = (~later).nonzero()[0, 0]
    raise ValueError(
        "entry has to be below times, or the sample is never at risk, but got "
        f"entry {entry[worst].item():g} and time {times[worst].item():g}"
    )
