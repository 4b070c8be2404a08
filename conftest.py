"""For the whole suite, the doctests of `src` among it: every run draws the same examples and the same random numbers.

With BACKDROP_FRESH=300 the tests that draw random models draw so many new ones instead (see `make fuzz`).
"""

import ctypes
import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, too: workers have the cores already

import pytest
import torch
from hypothesis import settings

LARGE = 1 << 30  # bytes that a worker may keep from one module of tests to the next

fresh = bool(int(os.environ.get("BACKDROP_FRESH", "0")))
settings.register_profile("repeatable", derandomize=not fresh, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _short_doctests(request, monkeypatch):
    if type(request.node).__name__ == "DoctestItem":
        monkeypatch.setattr("backdrop.placement.diagnosis.ROUNDS", 1)


@pytest.fixture(autouse=True, scope="module")
def _without_leftovers():
    """What torch has captured is forgotten, and memory goes back: a worker that keeps it grows to 6 GB."""
    yield
    if "torch._dynamo" in sys.modules and _resident() > LARGE:
        torch._dynamo.reset()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


def _resident():
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        return LARGE + 1
