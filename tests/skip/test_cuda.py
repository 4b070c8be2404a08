"""Skip on a GPU: its kernels against plain operations, no waiting for the device, few shapes. Skipped without one."""

import copy

import pytest
import torch
from torch import fx, nn

from backdrop import Backdrop, Backdrop2d, skip_blocked
from backdrop._core import kernels
from backdrop.graph import cost
from backdrop.skip import engine, statistics, windows
from backdrop.skip.epilogue import Epilogue, Moments, finish
from backdrop.skip.windows import find_windows
from skipping import assert_close, assert_same_gradients, captures, ran_windows, step

pytestmark = [captures, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def block(inputs, outputs, order="relu first"):
    conv, relu, norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.ReLU(), nn.BatchNorm2d(outputs)
    return {"relu first": [conv, relu, norm], "norm first": [conv, norm, relu], "no norm": [conv, relu]}[order]


def network(mask, order="relu first"):
    layers = [
        *block(1, 24, order),
        *block(24, 40, order),
        nn.MaxPool2d(3, 2, 1),
        *block(40, 40, order),
        nn.MaxPool2d(3, 2, 1),
    ]
    return nn.Sequential(*layers, mask).cuda()


@pytest.mark.parametrize("order", ["relu first", "norm first", "no norm"])
@pytest.mark.parametrize(
    "mask", [Backdrop2d(0.99), Backdrop2d(0.99, exact=True), Backdrop(0.8), Backdrop(0.8, exact=True)]
)
def test_float64_has_the_gradients_of_the_plain_pair(order, mask):
    model = network(mask, order).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    x = torch.randn(12, 1, 60, 75, dtype=torch.float64, device="cuda")
    assert_same_gradients(step(copy.deepcopy(model), x), step(skip_blocked(model, when="always"), x))


@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("order", ["relu first", "norm first", "no norm"])
def test_kernels_against_plain_operations_on_windows(policy, order, monkeypatch):
    fast = skip_blocked(network(Backdrop2d(0.99), order), statistics=policy, when="always")
    x = torch.randn(4, 1, 60, 75, device="cuda")
    slow = copy.deepcopy(fast)
    with_kernels = step(fast, x)
    assert ran_windows(fast)
    monkeypatch.setattr(kernels, "_usable", lambda x: False)
    assert_same_gradients(step(slow, x), with_kernels, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu_first", [False, True])
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("norm", [None, "sampled", "frozen"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("channels", [3, 64, 96])
def test_finish_kernels(dtype, relu_first, relu_last, norm, outside, channels, monkeypatch):
    if relu_last and norm is None:
        pytest.skip("a rectifier alone counts as the first")
    make = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(5, 7, 9, channels, device="cuda", generator=make).to(dtype).permute(0, 3, 1, 2).requires_grad_()
    gamma, beta = (torch.randn(channels, device="cuda", generator=make).requires_grad_() for _ in range(2))
    mean, deviation = torch.randn(channels, device="cuda"), torch.rand(channels, device="cuda") + 0.5
    ranges = torch.tensor([[[0, 7], [0, 9]], [[2, 7], [0, 3]], [[0, 1], [8, 9]], [[0, 0], [0, 0]], [[3, 4], [2, 9]]])
    inside = ranges.int().cuda() if outside else None
    cells = 100 if norm == "sampled" else None
    how = Epilogue(relu_first, Moments(mean, deviation) if norm else None, cells, relu_last, inside, (2, 3), -2.5)
    upstream = (
        torch.randn(x.shape, device="cuda", generator=make).to(dtype).contiguous(memory_format=torch.channels_last)
    )
    inputs = [x, gamma, beta] if norm else [x]
    results = []
    for usable in (True, False):
        with monkeypatch.context() as patch:
            if not usable:
                patch.setattr(kernels, "_usable", lambda x: False)
            y = finish(x, gamma, beta, how)
            results.append((y, *torch.autograd.grad(y, inputs, upstream)))
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for fast, slow in zip(*results, strict=True):
        assert fast.stride() == slow.stride()
        assert_close(slow.float(), fast.float(), tolerance)


def normalising_call(layer, x):
    """The call that a layer makes, as a node of a graph, and the values of what it takes."""
    graph = fx.Graph()
    given = {"input": x, "running_mean": layer.running_mean, "running_var": layer.running_var}
    given |= {"weight": layer.weight, "bias": layer.bias}
    nodes = {name: graph.placeholder(name) for name in given}
    settings = {"training": True, "momentum": layer.momentum, "eps": layer.eps}
    call = graph.call_function(nn.functional.batch_norm, kwargs={**nodes, **settings})
    return call, {nodes[name]: value for name, value in given.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 33), (64, 7, 40, 50), (3, 96, 6, 6)])
@pytest.mark.parametrize("policy", ["sampled", "frozen"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_in_parts_has_the_statistics_of_the_whole(dtype, shape, policy, layout):
    if layout == torch.channels_last and len(shape) != 4:
        pytest.skip("there is no such layout")
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    layer = kinds[len(shape)](shape[1]).cuda().to(torch.float64 if dtype == torch.float64 else torch.float32)
    nn.init.normal_(layer.weight)
    other = copy.deepcopy(layer)
    x = (torch.randn(shape, device="cuda") * 3 + 100).to(dtype).contiguous(memory_format=layout)
    expected = layer(x)
    cut = max(1, shape[0] // 3)
    parts = [x[:cut].clone(), x[cut : cut + 1].clone(), x[cut + 1 :].clone()]
    call, values = normalising_call(other, x)
    got = torch.cat(statistics.normalise_together(call, values, parts, policy, reuse=True))
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}[dtype]
    assert_close(expected, got, tolerance)
    for name in ("running_mean", "running_var"):  # the number of batches is counted by the layer, not by the call
        assert_close(getattr(layer, name).double(), getattr(other, name).double(), min(tolerance, 1e-4))


def test_nothing_waits_for_the_device_where_the_gradient_is_dense(monkeypatch):
    fast = skip_blocked(network(Backdrop2d(0.99)), statistics="sampled", when="always")
    x = torch.randn(4, 1, 60, 75, device="cuda")
    step(fast, x)  # looks at the gradient
    looked = []
    monkeypatch.setattr(
        windows, "units_of", lambda plan, positions: looked.append(positions) or original(plan, positions)
    )
    step(fast, x)
    assert len(looked) == 1  # the mask, on its way to the host; not the gradient


original = windows.units_of


def test_units_without_gradient_are_left_out():
    """Two masks in a row: nearly all units that the first keeps get no gradient."""
    model = nn.Sequential(
        *block(1, 8, "no norm"), Backdrop2d(0.5), *block(8, 8, "no norm"), Backdrop2d(0.999, exact=True)
    )
    fast = skip_blocked(model.cuda().double(), when="always")
    x = torch.randn(1, 1, 40, 40, dtype=torch.float64, device="cuda")
    for _ in range(3):
        assert_same_gradients(step(copy.deepcopy(model), x), step(fast, x))
        first, second = (int(entry.last.split()[0]) for entry in fast.skip_report)
        assert first <= 9 * second


def test_few_different_numbers_of_windows(monkeypatch):
    """Bernoulli masks keep another number of units each time; the shapes are rounded up to a few."""
    counts = set()

    def watch(*args):
        found = find_windows(*args)
        counts.add(len(found))
        return found

    monkeypatch.setattr("backdrop.skip.positions.find_windows", watch)
    fast = skip_blocked(network(Backdrop2d(0.95)), statistics="sampled", when="always")
    x = torch.randn(4, 1, 64, 64, device="cuda")
    for seed in range(20):
        step(fast, x, seed=seed)
    assert len(counts) <= 6


@pytest.mark.parametrize("policy", ["exact", "sampled"])
def test_few_different_numbers_of_samples(policy):
    counts = set()
    fast = skip_blocked(
        network(Backdrop(0.8), "no norm" if policy == "exact" else "norm first"), statistics=policy, when="always"
    )
    x = torch.randn(64, 1, 24, 24, device="cuda")
    for seed in range(20):
        step(fast, x, seed=seed)
        counts.add(fast.skip_report[0].last)
    assert counts <= {f"{kept} of 64 samples ran with gradients" for kept in (8, 16, 24, 32)}
    assert len(counts) > 1


@pytest.mark.parametrize("order", ["no norm", "norm first"])
def test_samples_do_not_wait_for_the_device(order):
    fast = skip_blocked(network(Backdrop(0.8), order), statistics="sampled", when="always")
    x = torch.randn(64, 1, 24, 24, device="cuda")
    for seed in range(20):  # all shapes
        step(fast, x, seed=seed)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    slept = torch.cuda.Event()
    slept.record()
    torch.manual_seed(0)
    fast(x).sum().backward()
    assert not slept.query()
    assert "samples ran with gradients" in fast.skip_report[0].last


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [Backdrop2d(0.99), Backdrop(0.8)])
def test_autocast(dtype, mask):
    model = network(mask, "no norm")
    fast, x = skip_blocked(model, when="always"), torch.randn(12, 1, 60, 75, device="cuda")
    gradients = []
    for each in (model, fast):
        torch.manual_seed(0)
        with torch.autocast("cuda", dtype):
            loss = each(x).float().square().mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() < 0.03 * a.norm()


def test_channels_last():
    model = network(Backdrop2d(0.99), "no norm").to(memory_format=torch.channels_last)
    x = torch.randn(4, 1, 60, 75, device="cuda")
    assert_same_gradients(step(copy.deepcopy(model), x), step(skip_blocked(model, when="always"), x), 1e-4)


def test_the_cost_counts_convolutions_merged_with_rectifiers(monkeypatch):
    """Samples without gradients run both as one call of cuDNN; the estimate must not miss its multiplications."""
    seen, decide = [], engine.Part._decide
    monkeypatch.setattr(
        engine.Part, "_decide", lambda part, values: seen.append((part, values)) or decide(part, values)
    )
    x, found = torch.randn(8, 1, 32, 32), []
    for device in ("cpu", "cuda"):
        model = skip_blocked(network(Backdrop(0.5), "no norm").to(device), when="always")
        step(model, x.to(device))
        part, values = seen[-1]
        with torch.no_grad(), cost.Meter() as meter:
            part.way.lean(values, 8)
        assert meter.cost.multiplications == part.cost.multiplications
        found.append(meter.cost)
    assert found[0].multiplications == found[1].multiplications > 0
    assert found[0].calls > found[1].calls


def test_inside_a_cuda_graph_the_plain_model_runs():
    fast = skip_blocked(network(Backdrop2d(0.9, exact=True), "no norm"), when="always")
    x = torch.randn(2, 1, 32, 32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fast.zero_grad()
            fast(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    fast.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast(x).sum().backward()
    graph.replay()
    assert fast[0].weight.grad.isfinite().all()
