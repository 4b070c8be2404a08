"""The cost model: roughly how long a forward pass takes, to tell when skipping would not pay.

A call takes a fixed time to launch, plus time for its multiplications, plus time for the numbers it writes; a backward
pass takes twice as long as the forward pass. The rates were measured once, on two cores and on an H200, with
benchmarks/bench_skip.py. They decide between two ways to compute the same gradient; near the border between them both
take about as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Rates(NamedTuple):
    multiplications: float  # per second
    numbers: float  # read, changed and written, per second
    call: float  # seconds that a call takes at least
    window_call: float  # seconds that a call on windows takes at least, forward and backward
    windows: float  # the time of the same work on windows over that on the whole map


CPU = Rates(5e10, 1e9, 1e-5, 1.5e-4, 1.0)
GPU = Rates(3.5e13, 2.5e11, 1e-5, 4e-4, 0.65)


class Cost(NamedTuple):
    """Of one forward pass."""

    calls: float
    multiplications: float
    numbers: float

    def seconds(self, device: torch.device, share: float = 1.0, calls: float = 1.0) -> float:
        """For a share of the data, and with each call made so many times."""
        rates = CPU if device.type == "cpu" else GPU
        return self.calls * calls * rates.call + share * self._work(rates)

    def seconds_on_windows(self, device: torch.device, windows: float) -> float:
        """Forward and backward on so many windows, if this is the cost of one. A GPU works while calls are made."""
        rates = CPU if device.type == "cpu" else GPU
        calls, work = self.calls * rates.window_call, 3 * windows * rates.windows * self._work(rates)
        return calls + work if device.type == "cpu" else max(calls, work)

    def _work(self, rates: Rates) -> float:
        return self.multiplications / rates.multiplications + self.numbers / rates.numbers


def total(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def pays(spent: float, saved: float) -> bool:
    """Whether to skip, from the seconds it would take and those it would save."""
    return spent < saved


class Meter(TorchDispatchMode):
    """While open, counts what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = Cost(0, 0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            numbers = sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.cost = Cost(*map(sum, zip(self.cost, (1, flops / 2, numbers), strict=True)))
        return out
