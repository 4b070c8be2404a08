"""The cost model: roughly how long a forward pass takes, to tell when skipping would not pay.

A call takes the host a fixed time, and the device time for its multiplications and for the numbers it writes; a
backward pass takes twice as long as the forward pass. How fast a device multiplies, moves numbers and makes calls is
measured on it when the first decision has to be made, in some tens of milliseconds; the rest was found on two cores and
on an H200 with benchmarks/bench_skip.py. The decision is between two ways to compute the same gradient, and near the
border between them both take about as long. With `torch.use_deterministic_algorithms` nothing is measured, and the
rates are those of these two machines.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Rates(NamedTuple):
    multiplications: float  # per second
    numbers: float  # read, changed and written, per second
    call: float  # seconds that a call without gradients takes the host
    step_call: float  # the same with its backward call
    normed_call: float  # the same where layers with batch statistics see samples with gradients and without
    window_call: float  # the same on windows
    split: float  # seconds that it takes to draw a mask, split a batch by it, and merge the outputs
    windows: tuple[float, float]  # the time of the same work on windows over that on the whole map: see the two above
    overlap: bool  # whether the device works while the host makes calls
    maps: tuple[float, float]  # as large as the largest there is, that convolutions need: with gradients, without


CPU = Rates(5e10, 2e9, 1e-5, 3e-5, 3e-5, 2.4e-4, 8e-5, (1.8, 1.0), overlap=False, maps=(2.0, 3.0))
GPU = Rates(6e13, 5e11, 4e-5, 2e-4, 3e-4, 4e-4, 1.8e-3, (0.65, 0.65), overlap=True, maps=(0.5, 4.0))
NORM = 4  # a layer with batch statistics goes over its input several times, which takes as long as so many others
WATCHED = 16  # times that a number of inputs and weights is read to see that it is still what it was (skip/saved.py)
MARGIN = 1.1  # skipping has to promise to be so many times faster


class Cost(NamedTuple):
    """Of one forward pass."""

    calls: float
    multiplications: float
    numbers: float

    def backward(self, device: torch.device) -> float:
        """Seconds of the backward pass."""
        rates = _rates(device)
        return _both(rates, self.calls * rates.step_call / 2, 2 * self._work(rates))

    def windows(self, device: torch.device, number: float) -> float:
        """Seconds forward and backward on so many windows, if this is the cost of one."""
        rates = _rates(device)
        multiplications, numbers = (times * share for times, share in zip(rates.windows, self[1:], strict=True))
        work = self._replace(multiplications=multiplications, numbers=numbers)._work(rates)
        return _both(rates, self.calls * rates.window_call, 3 * number * work)

    @staticmethod
    def watching(device: torch.device, numbers: float) -> float:
        """Seconds to see that so many inputs and weights do not change before the backward pass."""
        rates = _rates(device)
        return 0.0 if rates.overlap else WATCHED * numbers / rates.numbers

    def step(self, device: torch.device) -> float:
        """Seconds forward and backward."""
        rates = _rates(device)
        return _both(rates, self.calls * rates.step_call, 3 * self._work(rates))

    def step_of_some(self, device: torch.device, kept: float, parts: int, *, norms: bool, twice: bool = False) -> float:
        """The same for a share of the samples, and forward alone for the others in so many parts, or for all."""
        rates = _rates(device)
        calls = self.calls * ((rates.normed_call if norms else rates.step_call) + parts * rates.call)
        return rates.split + _both(rates, calls, (1 + (3 if twice else 2) * kept) * self._work(rates))

    def _work(self, rates: Rates) -> float:
        return self.multiplications / rates.multiplications + self.numbers / rates.numbers


def _rates(device: torch.device) -> Rates:
    usual = CPU if device.type == "cpu" else GPU
    there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if torch.are_deterministic_algorithms_enabled() or not there:
        return usual
    return _measured(device.type, device.index, usual)


@functools.lru_cache
def _measured(kind: str, index: int | None, usual: Rates) -> Rates:
    """The usual rates, made faster or slower as this device is."""
    found = measure(torch.device(kind, index) if index is not None else torch.device(kind))
    slower = found.call / PROBED[kind].call
    return usual._replace(
        multiplications=usual.multiplications * found.multiplications / PROBED[kind].multiplications,
        numbers=usual.numbers * found.numbers / PROBED[kind].numbers,
        **{name: getattr(usual, name) * slower for name in CALLS},
    )


class Probe(NamedTuple):
    """What a device does in a second, and how long a call takes: see `measure`."""

    multiplications: float
    numbers: float
    call: float


CALLS = ("call", "step_call", "normed_call", "window_call", "split")  # rates that are times of the host
# What `measure` says of the machines that the usual rates are those of.
PROBED = {"cpu": Probe(8e10, 3e9, 4e-6), "cuda": Probe(1.5e13, 4e11, 8e-6)}


def measure(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Probe:
    """Try out a convolution, an addition and a call that has next to nothing to do."""
    cuda = device.type == "cuda"
    size = 256 if cuda else 64
    image, weight = torch.ones(4, 32, size, size, device=device), torch.ones(32, 32, 3, 3, device=device)
    numbers, one = torch.ones(2**26 if cuda else 2**21, device=device), torch.ones(1, device=device)

    def seconds(run: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(5):
            if cuda:
                torch.cuda.synchronize(device)
            begin = clock()
            for _ in range(times):
                run()
            if cuda:
                torch.cuda.synchronize(device)
            found.append((clock() - begin) / times)
        return max(min(found), 1e-9)

    with torch.no_grad():
        convolved = seconds(lambda: torch.conv2d(image, weight, padding=1), 1)
        added = seconds(lambda: numbers + 1, 1)
        called = seconds(lambda: one + 1, 50)
    return Probe(image.numel() * weight[0].numel() / convolved, numbers.numel() / added, called)


def _both(rates: Rates, calls: float, work: float) -> float:
    return max(calls, work) if rates.overlap else calls + work


def total(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip((0, 0, 0), *costs, strict=True)))


def working(cost: Cost, device: torch.device, largest: float, *, gradients: bool) -> float:
    """Numbers in memory while a pass is computed, from those of its largest map, beside what it keeps."""
    return (_rates(device).maps[0 if gradients else 1] if cost.multiplications else 1.0) * largest


def pays(spent: float, saved: float) -> bool:
    """Whether to skip, from the seconds it would take and those it would save."""
    return MARGIN * spent < saved


class Meter(TorchDispatchMode):
    """While open, counts what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # which imports triton from torch 2.15 on

        self.flops = flop_registry | {torch.ops.aten.cudnn_convolution_relu: _convolution_flops}
        self.cost = Cost(0, 0, 0)
        self.draws = False  # random numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.draws = self.draws or _draws(func, args, kwargs or {})
        if not func.is_view and func.namespace != "prim":  # which is bookkeeping of fake tensors
            count = self.flops.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            numbers = sum(leaf.numel() * _share(leaf) for leaf in made)
            numbers *= NORM if "batch_norm" in str(func) else 1
            flops *= _share(made[0]) ** 2 if made else 1.0
            calls = func is not torch.ops.aten._to_copy.default  # of weights, which autocast keeps, and the like
            self.cost = Cost(*map(sum, zip(self.cost, (calls, flops / 2, numbers), strict=True)))
        return out


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers, which attention without dropout only could."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if len(args) > place else kwargs.get("dropout_p", 0.0))


def _share(x: Tensor) -> float:
    """Of the time that numbers of 4 bytes take. Multiplications gain twice: by their number, and by what they read."""
    return min(1.0, x.itemsize / 4)


class Pass(NamedTuple):
    """A plain forward pass: what it costs, and how many numbers (of 4 bytes) it keeps for the backward pass."""

    cost: Cost
    kept: float


def look_at(function: Callable[..., Any], shapes: Sequence[torch.Size], model: nn.Module) -> Pass:
    """A pass on inputs of these shapes, without computing it. The model, which has the parameters, is in eval mode."""
    like = next(model.parameters(), torch.empty(()))
    own = (*model.parameters(), *model.buffers())
    there: set[int] = set()
    kept: dict[int, float] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in there:
            kept[storage._cdata] = storage.nbytes() / 4
        return saved

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        stand_ins = [fake.from_tensor(tensor) for tensor in own]  # those that calls will use, too
        there.update(tensor.untyped_storage()._cdata for tensor in (*own, *stand_ins))
        values = [torch.empty(s, dtype=like.dtype, device=like.device, requires_grad=True) for s in shapes]
        with torch.no_grad(), Meter() as meter:
            function(*values)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            out = function(*values)  # noqa: F841  # alive, as all that it keeps
    counted: Cost = meter.cost
    return Pass(counted, sum(kept.values()))


def _convolution_flops(x: Tensor, weight: Tensor, *settings: Any, out_val: Tensor) -> int:
    return 2 * out_val.numel() * weight[0].numel()
