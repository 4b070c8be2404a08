"""The search for new examples that fail: that it runs, and that it would find something."""

import functools
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fuzz
import fuzz_losses
from backdrop import Backdrop, functional
from backdrop._core import product

SCRIPT = Path(__file__).parent / "fuzz.py"


def raised(call):
    with pytest.raises(Exception) as error:  # noqa: PT011  # of any kind
        call()
    return error.value


def test_errors_of_ours_are_told_from_others():
    assert fuzz.is_ours(raised(lambda: Backdrop(2)))
    assert fuzz.is_ours(raised(lambda: functional.draw_mask((3,), 0.5, generator=3)))
    assert not fuzz.is_ours(raised(lambda: product.multiply(torch.ones(2), torch.ones(3))))  # torch's own
    assert not fuzz.is_ours(raised(lambda: int("x")))
    assert not fuzz.is_ours(raised(lambda: {}[3]))


@pytest.fixture
def _without_alarms(monkeypatch):
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(signal, "setitimer", lambda kind, seconds: None)


@pytest.mark.usefixtures("_without_alarms")
def test_a_fault_is_found_and_found_again(monkeypatch):
    """Masks that drop everything, now and then."""
    monkeypatch.setattr(functional, "draw_units", functools.partial(broken, functional.draw_units))
    monkeypatch.setattr(fuzz, "TARGETS", {fuzz.functions: 1})
    found = [number for number in range(300) if fuzz.try_one(5, number)[2] is not None]
    assert found
    _, _, error = fuzz.try_one(5, found[0])
    assert isinstance(error, fuzz.WrongError)


def without_padding(original, x, *others, weight=None, **settings):
    return original(x.nan_to_num(), *others, **settings)


def in_this_order(original, x, *others, **settings):
    return original(x, *others, **settings) + 0.01 * x.flatten()[0].detach()


def out_of_range(original, *given, **settings):
    return original(*given, **settings) * 3


@pytest.mark.usefixtures("_without_alarms")
@pytest.mark.parametrize("fault", [without_padding, in_this_order, out_of_range])
def test_faults_of_losses_are_found(monkeypatch, fault):
    name = "average_precision_loss"
    monkeypatch.setattr(fuzz_losses.losses, name, functools.partial(fault, getattr(fuzz_losses.losses, name)))
    monkeypatch.setattr(fuzz_losses, "KINDS", {name: fuzz_losses.KINDS[name]})
    monkeypatch.setattr(fuzz, "TARGETS", {fuzz.a_loss: 1})
    found = [error for _, _, error in (fuzz.try_one(5, number) for number in range(60)) if error is not None]
    assert any(isinstance(error, fuzz.WrongError) for error in found)


def broken(original, *args):
    units = original(*args)
    return units * 0 if random.Random(units.numel()).random() < 0.3 else units


def test_it_runs_with_new_examples_each_time():
    code = """
import runpy, sys
for more in ([], [], ["--seed", "11"]):
    sys.argv[1:] = ["--examples", "40" if more else "0", *more]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("CODE", int(end.code))
"""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); sys.argv[0] = {str(SCRIPT)!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("CODE 0\n") == 3, done.stdout[-2000:] + done.stderr[-2000:]
    seeds = re.findall(r"^seed (\d+)\n", done.stdout, re.MULTILINE)
    assert seeds[0] != seeds[1]
    assert "40 examples with the seed 11: 0 failures" in done.stdout
