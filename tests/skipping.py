"""Compares a model with its skipping copy: outputs, gradients and buffers of one training step each."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from backdrop.graph import cost
from backdrop.skip import skip_blocked

# torch's own, while it captures
captures = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# torch 2.6 captures some of them otherwise: then less is skipped, and the report says so.
followed_later = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 does not follow all of it")


@dataclass
class Step:
    output: torch.Tensor
    inputs: list
    parameters: dict
    buffers: dict


def step(model, *inputs, seed=0, differentiate=True):
    """One forward and backward pass of a copy, from given random numbers; the upstream gradient is random."""
    inputs = [x.detach().clone().requires_grad_(differentiate and x.is_floating_point()) for x in inputs]
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(*(x * 1 if x.requires_grad else x for x in inputs))  # which a layer may overwrite
    generator = torch.Generator(device=output.device).manual_seed(seed + 1)
    upstream = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    output.backward(upstream)
    return Step(
        output.detach().clone(),
        [x.grad for x in inputs],
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def assert_same_gradients(a, b, tolerance=1e-10):
    for i, (left, right) in enumerate(zip(a.inputs, b.inputs, strict=True)):
        assert_close(left, right, tolerance, f"input {i}")
    assert a.parameters.keys() == b.parameters.keys()
    for name, left in a.parameters.items():
        assert_close(left, b.parameters[name], tolerance, name)


def assert_close(expected, actual, tolerance, what=""):
    """Relative to the norm; a gradient that is zero but for rounding has to stay so."""
    if expected is None or actual is None:
        assert expected is None or not expected.any(), what
        assert actual is None or not actual.any(), what
        return
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    error, size = (actual - expected).norm().item(), expected.norm().item()
    assert error <= tolerance * size + 1e-3 * tolerance, f"{what}: {error:.2e} of {size:.2e}"


def check(model, *inputs, seed=0, tolerance=1e-10, when="always", **settings):
    """The skipping copy of a model in training gives the same step; returns the copy. It skips even where that costs.

    Outputs come from the same calls, but torch's libraries may round float64 sums differently from call to call.
    """
    fast = skip_blocked(model, when=when, **settings)
    plain = copy.deepcopy(model)
    a, b = step(plain, *inputs, seed=seed), step(fast, *inputs, seed=seed)
    assert_close(a.output, b.output, tolerance, "output")
    assert_same_gradients(a, b, tolerance)
    for name, buffer in a.buffers.items():
        assert_close(buffer.double(), b.buffers[name].double(), tolerance, name)
    return fast


def always_skip(monkeypatch):
    """Skip even where it does not pay."""
    monkeypatch.setattr(cost, "pays", lambda spent, saved: True)


def ran_windows(model, mask=0):
    return "computed again" in model.skip_report[mask].last


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of every position."""

    def __init__(self, channels, spatial):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        axes = range(2, 2 + spatial)
        self.there, self.back = (0, *axes, 1), (0, 1 + spatial, *range(1, 1 + spatial))

    def forward(self, x):
        return self.norm(x.permute(self.there)).permute(self.back)
