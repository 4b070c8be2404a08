"""Settings for the whole suite: every run draws the same examples and the same random numbers."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")

collect_ignore = ["sound"]  # cases that a test imports: looked through for doctests they would stand in the table twice


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)
