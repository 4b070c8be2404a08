"""Random models of all kinds: a skipping copy takes the same steps as the plain model, whatever it is made of."""

import math
import os
from collections import Counter
from dataclasses import dataclass
from random import Random, SystemRandom

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, find, given, seed, settings

from backdrop import skip_blocked
from backdrop.graph import table
from backdrop.skip import positions, segments
from random_models import examples

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about what nobody would write
TOLERANCE = 1e-10
FRESH = int(os.environ.get("BACKDROP_FRESH", "0"))  # so many new examples instead of the same few
NUMBER = SystemRandom().randrange(2**32) if FRESH else 0
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclass
class Step:
    outputs: dict
    gradients: dict
    state: dict


def steps(model, example, nudge=0.0):
    """All steps of an example; a nudge of the input shows what hangs on the last digits."""
    return [step(model, example, number, nudge) for number in range(len(example.changes))]


def step(model, example, number, nudge):
    exec(example.changes[number], {"model": model})
    model.zero_grad()
    x = example.input(number)
    x = (x + nudge * torch.randn_like(x)).requires_grad_(example.wanted)
    before = x.detach().clone()
    with torch.enable_grad():  # also behind a model that leaves it off and fails
        output = model(x if example.leaf else x * 1)
    outputs = [*(output if isinstance(output, tuple) else [output]), model.seen]
    model.seen = None
    outputs = [value for value in outputs if value is not None]
    generator = torch.Generator().manual_seed(number)
    upstream = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for value in outputs]
    wanted = [(value, grad) for value, grad in zip(outputs, upstream, strict=True) if value.requires_grad]
    torch.autograd.backward([value for value, _ in wanted], [grad for _, grad in wanted])
    return Step(
        {str(i): value.detach().clone() for i, value in enumerate(outputs)},
        {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}},
        {"x": x.detach() - before, **{name: value.clone() for name, value in model.state_dict().items()}},
    )


def differences(expected, actual, tolerance):
    """What of two runs is not the same, relative to the largest value of its kind; a gradient of None is zero."""
    found = []
    for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for kind in ("outputs", "gradients", "state"):
            a, b = getattr(left, kind), getattr(right, kind)
            assert a.keys() == b.keys()
            size = max((norm(value) for value in a.values()), default=0.0)
            for name in a:
                error = distance(a[name], b[name])
                if not error <= tolerance * size + 1e-12:
                    found.append(f"step {i}, {kind}, {name}: {error:.1e} of {size:.1e}")
    return found


def distance(a, b):
    if a is None or b is None:
        return norm(b if a is None else a)
    return norm(b.double() - a.double()) if a.shape == b.shape and a.dtype == b.dtype else math.inf


def norm(value):
    return 0.0 if value is None else value.double().norm().item()


def plain_steps(example):
    """The steps of the plain model; passed over is what torch itself refuses, or cannot compute to so many digits."""
    try:
        expected = steps(example.model(), example)
        nudged = steps(example.model(), example, nudge=1e-14)
    except (RuntimeError, ValueError):
        assume(False)
    values = [value for each in expected for value in (*each.outputs.values(), *each.gradients.values())]
    assume(all(math.isfinite(norm(value)) for value in values))
    assume(not differences(expected, nudged, TOLERANCE / 10))
    return expected


def compare(example, expected):
    """What a skipping copy gets wrong, and its report."""
    try:
        model = skip_blocked(example.model(), when="always")
        return differences(expected, steps(model, example), TOLERANCE), model.skip_report
    finally:
        torch._dynamo.reset()


def test_random_models_take_the_steps_of_the_plain_ones():
    seen = Counter()

    @seed(NUMBER)
    @settings(SETTINGS, max_examples=FRESH or 30, derandomize=not FRESH)
    @given(examples())
    def run(example):
        wrong, report = compare(example, plain_steps(example))
        assert not wrong, "\n".join(wrong)
        for entry in report:
            assert 0 <= entry.share <= 1
            assert entry.share == 0 or not entry.last.startswith("plain")
        seen.update(["all"] + ["skipped"] * any(entry.skipped for entry in report))

    print(f"seed {NUMBER}")
    run()
    assert seen["skipped"] > (0.2 if FRESH else 0.3) * seen["all"], seen  # or nothing was tested; of new ones a third


FAULTS = {"borders": 9, "uses elsewhere": 2, "axes": 24}  # and a seed with which models that show it come soon


def plant(monkeypatch, fault):
    """Make the engine wrong."""
    if fault == "borders":  # cells of windows that lie outside the map hold anything
        monkeypatch.setattr(positions, "_fill", lambda x, *args: x)
    elif fault == "uses elsewhere":  # what the mask blocks is left out, also where it has another way
        monkeypatch.setattr(segments._Walk, "_reason", lambda walk, node: "")
    elif fault == "axes":  # samples and positions may be mixed
        monkeypatch.setattr(table.Call, "refuse_along", lambda call, *axes: None)


def is_wrong(example):
    expected = plain_steps(example)
    try:
        return bool(compare(example, expected)[0])
    except Exception:
        return True


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    plant(monkeypatch, fault)
    patient = settings(SETTINGS, max_examples=300, derandomize=False, phases=[Phase.generate])
    example = find(examples(), is_wrong, settings=patient, random=Random(FAULTS[fault]))
    monkeypatch.undo()
    assert not is_wrong(example)
