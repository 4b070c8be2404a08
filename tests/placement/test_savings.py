"""What Skip would save: the same decisions as Skip makes, and figures near what was measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, insert, inspect, skip_blocked
from backdrop.experiments.models import all_cnn, gp_network
from backdrop.graph import cost
from backdrop.placement.savings import savings

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture(autouse=True)
def usual_rates(monkeypatch):
    """Those that the cost model has for the machines of the benchmarks, whatever this one is."""
    monkeypatch.setattr(cost, "_rates", lambda device: cost.CPU if device.type == "cpu" else cost.GPU)


def gp(small, size=512):
    masks = Backdrop2d(small, exact=True), Backdrop2d(0.94, exact=True)
    return gp_network(*masks, padded=size < 1024)


def measured(name, case):
    (row,) = (row for row in json.loads((RESULTS / name).read_text())["rows"] if row["case"] == case)
    return row["skip_ms"] / row["plain_ms"], row["skip_mb"] / row["plain_mb"]


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.75, 0.9, 0.97])
def test_samples_against_the_benchmark(p):
    time, memory = measured("skip-cpu.json", f"All-CNN, GroupNorm, 256 images, p={p}, cpu")
    saving = savings(all_cnn(after=Backdrop(p), norm="group"), (256, 3, 32, 32))["27"]
    assert saving.time == pytest.approx(time, abs=0.15)
    assert saving.memory == pytest.approx(memory, abs=0.17)


@pytest.mark.parametrize("p", [0.9, 0.97, 0.999])
def test_positions_against_the_benchmark(p):
    time, memory = measured("skip-cpu.json", f"GP, BatchNorm sampled, 1 x 512^2, p=({p}, 0.94), cpu")
    saving = savings(gp(p), (1, 1, 512, 512), statistics="sampled")["28"]
    assert saving.time == pytest.approx(time, abs=0.15)
    assert saving.memory == pytest.approx(memory, abs=0.17)


@pytest.mark.parametrize("p", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("statistics", ["exact", "sampled"])
def test_decisions_are_those_of_skip(p, statistics):
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()]
    masks = Backdrop2d(p, exact=True), Backdrop(p, exact=True)
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers, masks[0], *ends, masks[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = savings(model, (6, 1, 96, 96), statistics=statistics)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    fast = skip_blocked(model, statistics=statistics)
    for _ in range(2):
        fast(torch.randn(6, 1, 96, 96)).sum().backward()
    assert found.keys() == {"5", "11"}
    for entry in fast.skip_report:
        assert entry.last.startswith("plain") == (found[entry.mask].time == 1.0)
        if entry.last.startswith("plain"):
            assert entry.last.removeprefix("plain: ") in found[entry.mask].note


def test_notes():
    model = gp(0.99)
    exact = savings(model, (1, 1, 512, 512))["28"]
    assert (exact.time, exact.memory) == (1.0, 1.0)
    assert "not from 26 down: its batch statistics couple all" in exact.note
    sampled = savings(model, (1, 1, 512, 512), statistics="sampled")["28"]
    assert sampled.note == "skips 0 to 27, 28 calls"
    assert savings(gp(0.0), (1, 1, 512, 512))["28"].note == "p is 0, so nothing is blocked"
    assert savings(nn.Sequential(Backdrop(0.5), nn.Linear(2, 2)), (4, 2))["0"].note == "no gradient is wanted"


def test_on_a_gpu_the_decisions_are_those_that_were_measured():
    for p, skips in ((0.9, False), (0.95, False), (0.99, True), (0.999, True)):
        saving = savings(gp(p, 1024), (4, 1, 1024, 1024), statistics="sampled", device="cuda")["28"]
        time, memory = measured("skip-h200.json", f"GP, BatchNorm sampled, 4 x 1024^2, p=({p}, 0.94), cuda")
        assert (saving.time < 1) == skips == (time < 0.95)
        assert saving.memory == pytest.approx(memory, rel=0.1)


def test_what_a_pass_keeps_is_what_autograd_saves():
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 500)).eval()
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / 4
        return tensor

    x = torch.randn(4, 2, 8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    assert cost.look_at(model, [x.shape], model).kept == pytest.approx(sum(saved.values()))
    assert sum(saved.values()) < 4 * (2 * 64 + 3 * 8 * 36 + 500) + 100


def test_nothing_is_computed():
    model = nn.Sequential(nn.Conv3d(1, 8, 3), Backdrop(0.9), nn.Flatten())
    assert savings(model, (512, 1, 512, 512, 512))["1"].time < 1


@pytest.mark.parametrize(
    ("model", "shape", "settings", "message"),
    [
        (nn.Linear(2, 2), (3, 5), {}, r"Sequential cannot take an input of shape \(3, 5\): 0 says: "),
        (nn.Linear(2, 2), (3, 2), {"statistics": "none"}, "statistics has to be one of"),
        (nn.Bilinear(2, 2, 2), (3, 2), {}, "model has to take one tensor, but Bilinear takes 2"),
        (nn.Linear(2, 2), 3, {}, "input_shape has to be the shape of a batch"),
    ],
)
def test_refused(model, shape, settings, message):
    with pytest.raises(ValueError, match=message):
        savings(nn.Sequential(model, Backdrop(0.5)) if isinstance(model, nn.Linear) else model, shape, **settings)


def test_what_looks_at_values_ends_what_is_skipped():
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() < float("inf") else -x

    model = nn.Sequential(nn.Conv2d(1, 2, 3), Decides(), Backdrop2d(0.9), nn.Conv2d(2, 2, 3))
    (expected,) = savings(model, (1, 1, 16, 16)).values()
    assert (expected.time, expected.memory) == (1.0, 1.0)
    assert re.fullmatch(r"torch did not follow what lies before the mask \(.* at .*savings.py:\d+\)", expected.note)
    found = inspect(model, (1, 1, 16, 16))
    assert [(row.name, row.receptive_field) for row in found.rows] == [
        *(("0", (3, 3)), ("1.sum", None), ("1.lt", None), ("2", (3, 3)), ("3", (5, 5))),
    ]
    assert found.masks[0].mask.saving == expected


def test_several_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x):
            return self.first(x), {"second": self.second(x)}

    model = insert(nn.Sequential(nn.Linear(256, 256), Pair()), {"1": Backdrop(0.9)})
    found = savings(model, (1024, 256))["1.backdrop"]
    assert found.note == "skips 0, 1.first, 1.second"
    assert 1 / 3 < found.time < 0.5


def test_a_device_that_is_ten_times_slower_has_rates_ten_times_lower():
    """`measure` times three runs by a clock that is given: here each takes what a slow machine would need."""

    def clock_of(probe):
        size, weights = 4 * 32 * 64 * 64, 32 * 9
        takes = [size * weights / probe.multiplications] * 5 + [2**21 / probe.numbers] * 5 + [50 * probe.call] * 5
        times = [t for seconds in takes for t in (0.0, seconds)]
        return iter(times).__next__

    usual = cost.PROBED["cpu"]
    slow = cost.Probe(usual.multiplications / 10, usual.numbers / 10, usual.call * 10)
    found = cost.measure(torch.device("cpu"), clock_of(slow))
    assert found == pytest.approx(slow)


@pytest.mark.parametrize("change", ["multiplications", "numbers", "call"])
@pytest.mark.parametrize("times", [0.1, 10.0])
def test_rates_follow_what_was_measured(monkeypatch, change, times):
    usual = cost.PROBED["cpu"]
    monkeypatch.setattr(cost, "measure", lambda device: usual._replace(**{change: getattr(usual, change) * times}))
    cost._measured.cache_clear()
    try:
        found = cost._measured("cpu", None, cost.CPU)
    finally:
        cost._measured.cache_clear()
    for name in cost.Rates._fields:
        changed = name == change or (change == "call" and name in cost.CALLS)
        before = getattr(cost.CPU, name)
        assert getattr(found, name) == (pytest.approx(before * times) if changed else before)


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_rates_that_are_ten_times_off_are_seen_in_decisions(monkeypatch, times):
    """Small steps, where calls take about as long as the work: with wrong rates some go the other way."""

    def skips():
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
        model = nn.Sequential(*layers, Backdrop(0.95, exact=True))
        return [savings(model, (rows, 64))["5"].time < 1 for rows in (16, 64, 256, 1024, 4096, 65536)]

    right = skips()
    assert right == sorted(right)  # from some size on
    assert {True, False} <= set(right)
    wrong = cost.CPU._replace(multiplications=cost.CPU.multiplications * times, numbers=cost.CPU.numbers * times)
    monkeypatch.setattr(cost, "_rates", lambda device: wrong)
    assert skips() != right


def test_the_report_says_from_which_p_skipping_pays():
    def last(p):
        model = skip_blocked(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), Backdrop2d(p)))
        model(torch.randn(1, 3, 128, 128)).sum().backward()
        return model.skip_report[0].last

    said = re.fullmatch(r"plain: windows would cost .* backward pass; it pays from p = ([\d.]+) on", last(0.5))
    p = float(said[1])
    assert not last(p).startswith("plain")
    assert last(1 - 2 * (1 - p)).startswith("plain")
    tiny = skip_blocked(nn.Sequential(nn.Linear(2, 2), Backdrop(0.5)))
    tiny(torch.randn(4, 2)).sum().backward()
    assert "samples with gradients is faster; it pays at no p" in tiny.skip_report[0].last


def test_dropout_before_a_mask_of_positions():
    """Which cells it keeps is a value of its own, of which there is no more than a shape here."""
    layers = [nn.Conv2d(1, 4, 3), nn.Dropout(0.1), nn.Conv2d(4, 4, 3), Backdrop2d(0.999, exact=True)]
    report = savings(nn.Sequential(*layers), (1, 1, 256, 256))
    assert next(iter(report.values())).time is not None


def large(p, channels=8):
    layers = [nn.Conv2d(1, channels, 5, 2, 2), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, Backdrop2d(p), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_tiles_and_budgets_are_those_of_a_step():
    model, shape = large(0.999, channels=16), (1, 1, 512, 512)
    whole = savings(model, shape)["4"]
    tiled = savings(model, shape, memory="4MB")["4"]
    assert tiled.memory < whole.memory < 1
    assert whole.time <= tiled.time
    fast = skip_blocked(model, memory="4MB")
    fast(torch.randn(shape)).sum().backward()
    assert f"in tiles: {fast.skip_report[0].tiles}" == tiled.note.removeprefix("skips 0 to 3, 4 calls; ")
    assert "in tiles: " in savings(model, shape, tile=128)["4"].note


def test_tiles_run_whatever_p_is():
    """Forward once and once again with gradients, without what a plain step keeps."""
    dense = savings(large(0.0), (1, 1, 512, 512), memory="3MB")["4"]
    assert dense.time > 1
    assert dense.memory < 1


def test_a_budget_that_nothing_fits_in_is_an_error_here_too():
    with pytest.raises(ValueError, match="the least that would do"):
        savings(large(0.99), (1, 1, 512, 512), memory="100kB")
    with pytest.raises(ValueError, match="the least that would do"):
        inspect(large(0.99), (1, 1, 512, 512), memory="100kB")
    assert "in tiles: " in str(inspect(large(0.99), (1, 1, 512, 512), memory="3MB"))
