"""When skipping is said to pay, on machines of any speed; and that nothing grows with the number of sizes seen."""

import itertools

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, skip_blocked
from backdrop.graph import cost
from backdrop.skip.engine import PLANS
from skipping import captures, check

pytestmark = captures
CPU = torch.device("cpu")


@pytest.fixture
def speed(monkeypatch):
    """Makes the machine so many times as fast as the one that the usual rates are those of."""

    def make(multiplications=1.0, numbers=1.0, call=1.0):
        usual = cost.PROBED["cpu"]
        probe = cost.Probe(usual.multiplications * multiplications, usual.numbers * numbers, usual.call / call)
        monkeypatch.setattr(cost, "measure", lambda device: probe)
        cost._measured.cache_clear()

    yield make
    cost._measured.cache_clear()


def test_what_is_measured_is_work_over_time():
    """By a clock on which a convolution takes 2 seconds, an addition 4 and 50 calls 8, and all tries but one longer."""
    takes = itertools.chain.from_iterable([9.0, 9.0, least, 9.0, 9.0] for least in (2.0, 4.0, 8.0))
    now, begun = 0.0, False

    def clock():
        nonlocal now, begun
        now, begun = now + (next(takes) if begun else 1.0), not begun
        return now

    found = cost.measure(CPU, clock)
    assert found == (4 * 32 * 64 * 64 * 32 * 9 / 2.0, 2**21 / 4.0, 8.0 / 50)


def test_rates_are_those_of_the_machine(speed):
    speed()
    for found, usual in zip(cost._rates(CPU), cost.CPU, strict=True):
        assert found == pytest.approx(usual)
    speed(multiplications=10, numbers=0.1, call=0.5)
    rates = cost._rates(CPU)
    assert rates.multiplications == pytest.approx(10 * cost.CPU.multiplications)
    assert rates.numbers == pytest.approx(0.1 * cost.CPU.numbers)
    for name in cost.CALLS:
        assert getattr(rates, name) == pytest.approx(2 * getattr(cost.CPU, name))
    assert rates.windows == cost.CPU.windows


def test_nothing_is_measured_where_steps_have_to_repeat_themselves(monkeypatch):
    monkeypatch.setattr(cost, "measure", lambda device: pytest.fail("measured"))
    torch.use_deterministic_algorithms(True)
    try:
        assert cost._rates(CPU) == cost.CPU
        assert cost._rates(torch.device("cuda")) == cost.GPU
    finally:
        torch.use_deterministic_algorithms(False)


def last(model, x):
    model(x).square().sum().backward()
    (entry,) = model.skip_report
    return entry.last


def test_decisions_are_others_where_rates_are_ten_times_off(speed):
    """What pays on one machine does not where calls take ten times as long."""
    rows = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), Backdrop(0.9, exact=True))
    maps = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), Backdrop2d(0.999, exact=True))
    for model, x in ((rows, torch.randn(2000, 64)), (maps, torch.randn(1, 3, 128, 128))):
        said = []
        for call in (1.0, 0.1):
            speed(call=call)
            said.append(last(skip_blocked(model), x))
        assert not said[0].startswith("plain")
        assert said[1].startswith("plain: ")
        assert "pays" in said[1]


def test_two_hundred_sizes_and_fifty_floats_take_few_captures_and_plans():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.mask = nn.Linear(3, 4), nn.Linear(4, 2), Backdrop(0.5)

        def forward(self, x, scale=1.0):
            return self.mask(self.b((self.a(x) * scale).tanh()))

    def number():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain = Scaled().double()
    fast = skip_blocked(plain, when="always")
    seen = []
    for i in range(200):
        assert not last(fast, torch.randn(5 + i, 3, dtype=torch.float64)).startswith("plain")
        seen.append(number())
    for i in range(50):
        fast(torch.randn(5, 3, dtype=torch.float64), 1 + i / 7).sum().backward()
        seen.append(number())
    assert seen[3] == seen[199]
    assert seen[203] == seen[-1]
    assert seen[-1] - seen[0] <= 4
    engine = fast.forward
    assert len(engine.graphs) <= 5
    assert max(len(graph.plans) for graph in engine.graphs) == PLANS
    check(plain, torch.randn(9, 3, dtype=torch.float64))
