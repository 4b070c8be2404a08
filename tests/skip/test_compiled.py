"""Skipping models under torch.compile: what is skipped and what is not runs as Inductor makes it, to the same end."""

import copy
import shutil

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, Skip, skip_blocked

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it compiles
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled_graphs():
    return torch._dynamo.utils.counters["inductor"].get("fxgraph_cache_miss", 0) + torch._dynamo.utils.counters[
        "inductor"
    ].get("fxgraph_cache_hit", 0)


def convolutions(mask):
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
    return nn.Sequential(*first, nn.ReLU(), *mask, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(72, 5))


CASES = {
    "positions": (lambda: convolutions([Backdrop2d(0.9, exact=True)]), (6, 3, 20, 20), {"statistics": "sampled"}),
    "samples": (
        lambda: nn.Sequential(convolutions([]), Backdrop(0.8, exact=True)),
        (16, 3, 20, 20),
        {"statistics": "sampled"},
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.3), nn.ReLU(), nn.Linear(20, 4), Backdrop(0.7)),
        (50, 10),
        {},
    ),
    "parts": (
        lambda: nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.3), nn.ReLU(), nn.Linear(20, 4), Backdrop(0.3)),
        (50, 10),
        {"at_once": 8},
    ),
}


def train(model, inputs):
    """Outputs, gradients and buffers of some steps."""
    seen = []
    for seed, x in enumerate(inputs):
        torch.manual_seed(seed)
        model.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        out.square().mean().backward()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        seen += [b.clone().double() for b in model.buffers()]
    return seen


@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_are_the_uncompiled_ones(case):
    make, shape, settings = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    fast = skip_blocked(model, when="always", **settings)
    wanted = train(copy.deepcopy(fast), inputs)
    assert not compiled_graphs()
    found = train(torch.compile(fast), inputs)
    assert compiled_graphs() > 1
    assert "plain" not in fast.skip_report[0].last
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).abs().max() <= 1e-10 * (1 + a.abs().max())


def test_a_module_compiled_inside_is_compiled():
    """Whichever way round: captured graphs hold its calls, so that what torch has made of it is not used."""
    encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(12, 4, dtype=torch.float64)
    mask = Backdrop(0.5, exact=True)
    wanted = train(Skip(encoder, mask, when="always"), [x])
    assert not compiled_graphs()
    compiled = Skip(torch.compile(encoder), mask, when="always")
    found = train(compiled, [x])
    assert compiled_graphs()
    assert "6 of 12" in compiled.report[0].last
    assert next(name for name, _ in compiled.named_parameters()) == "module._orig_mod.0.weight"
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_compiled_model_stays_one():
    model = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), Backdrop(0.5)).double())
    fast = skip_blocked(model, when="always")
    assert type(fast) is type(model)
    assert fast.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(12, 4, dtype=torch.float64)
    wanted, found = train(model._orig_mod, [x, x]), train(fast, [x, x])
    assert compiled_graphs()
    assert fast.skip_report[0].skipped == ["0", "1", "2"]
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_evaluation_is_compiled_too():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), Backdrop(0.5)).eval()
    fast = torch.compile(skip_blocked(model))
    x = torch.randn(12, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert compiled_graphs() == 1
    fast(x)
    assert "eval" in fast.skip_report[0].last


def test_one_model_with_and_without():
    """A plan that is compiled is never taken for one that is not."""
    model = skip_blocked(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Backdrop(0.5)), when="always")
    compiled = torch.compile(model)
    x = torch.randn(12, 4)
    compiled(x).sum().backward()
    many = compiled_graphs()
    model(x).sum().backward()
    assert many
    assert compiled_graphs() == many
    assert len(model.forward.graphs[-1].plans) == 2 or len(model.forward.graphs) == 2
