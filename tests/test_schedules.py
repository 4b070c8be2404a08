"""Schedules against their formulas, and resumed ones against ones that were never stopped."""

import json
import math

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d
from backdrop.schedules import ConstantP, CosineP, LambdaP, LinearP, Schedule, StepP

FORMULAS = {
    "constant": (lambda target: ConstantP(target, 0.3), lambda t, own: 0.3),
    "linear": (
        lambda target: LinearP(target, start=0.1, end=0.9, steps=4),
        lambda t, own: [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9][t],
    ),
    "linear to own p": (lambda target: LinearP(target, steps=5), lambda t, own: own * min(t, 5) / 5),
    "linear from own p": (
        lambda target: LinearP(target, start=None, end=0.0, steps=5),
        lambda t, own: own * (1 - min(t, 5) / 5),
    ),
    "cosine": (
        lambda target: CosineP(target, start=0.2, end=0.8, steps=5),
        lambda t, own: 0.5 - 0.3 * math.cos(math.pi * min(t, 5) / 5),
    ),
    "step": (
        lambda target: StepP(target, {5: 0.99, 2: 0.9}),
        lambda t, own: [own, own, 0.9, 0.9, 0.9, 0.99, 0.99][t],
    ),
    "function": (lambda target: LambdaP(target, lambda step: 1 - 0.5**step), lambda t, own: 1 - 0.5**t),
}


def model():
    return nn.Sequential(nn.Linear(2, 2), Backdrop(0.6), nn.Sequential(Backdrop2d(torch.tensor(0.9))), nn.ReLU())


def current(network):
    return [float(layer.p) for layer in network.modules() if isinstance(layer, Backdrop)]


@pytest.mark.parametrize("name", FORMULAS)
def test_follows_its_formula(name):
    make, formula = FORMULAS[name]
    network = model()
    own = current(network)
    schedule = make(network)
    for t in range(7):
        expected = [formula(t, p) for p in own]
        assert schedule.last_step == t
        assert schedule.get_last_p() == pytest.approx(expected, abs=1e-12)
        assert current(network) == pytest.approx(expected, abs=1e-6)  # one p is a float32 tensor
        schedule.step()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("stop", [0, 3, 6])
def test_resumes_exactly(name, stop):
    make, _ = FORMULAS[name]
    network, other = model(), model()
    schedule = make(network)
    for _ in range(stop):
        schedule.step()
    saved = schedule.state_dict()
    other[1].p = 0.123  # whatever the layers held, p comes back from the saved state
    resumed = make(other)
    resumed.load_state_dict(saved)
    for _ in range(4):
        assert current(other) == current(network)
        assert resumed.get_last_p() == schedule.get_last_p()
        assert resumed.state_dict() == schedule.state_dict()
        schedule.step()
        resumed.step()


@pytest.mark.parametrize("name", FORMULAS)
def test_state_is_plain_data(name, tmp_path):
    schedule = FORMULAS[name][0](model())
    torch.save(schedule.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == schedule.state_dict()
    json.dumps(schedule.state_dict())


def test_chosen_layers_only():
    network = model()
    schedule = ConstantP([network[1]], 0.25)
    assert current(network) == pytest.approx([0.25, 0.9])
    assert schedule.get_last_p() == [0.25]


def test_a_refused_p_changes_nothing():
    network = model()
    schedule = LambdaP(network, lambda step: 0.1 * step if step < 3 else 1.0)
    schedule.step()
    schedule.step()
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        schedule.step()
    assert schedule.last_step == 2
    assert current(network) == pytest.approx([0.2, 0.2])


def test_state_of_another_schedule_is_refused():
    schedule = LinearP(model(), steps=3)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match="LinearP"):
        schedule.load_state_dict(ConstantP(model(), 0.5).state_dict())
    with pytest.raises(ValueError, match="2 layers"):
        schedule.load_state_dict(LinearP(Backdrop(), steps=3).state_dict())
    assert schedule.state_dict() == before


def test_a_schedule_of_ones_own():
    class Alternating(Schedule):
        def p_at(self, step, own):
            return own if step % 2 else 0.0

    network = model()
    schedule = Alternating(network)
    assert current(network) == [0.0, 0.0]
    schedule.step()
    assert current(network) == pytest.approx([0.6, 0.9])


def test_a_refused_state_leaves_everything_as_it_was():
    layers = [Backdrop(0.5), Backdrop(0.9)]
    schedule = LinearP(layers, steps=4)
    schedule.step()
    before = schedule.state_dict(), [layer.p for layer in layers]
    for change in ({"steps": 0}, {"end": 7.0, "last_step": 4}, {"own_p": [0.5, "x"], "start": None}):
        with pytest.raises(ValueError, match="state_dict has to be as LinearP saved it"):
            schedule.load_state_dict(schedule.state_dict() | change)
        assert (schedule.state_dict(), [layer.p for layer in layers]) == before
