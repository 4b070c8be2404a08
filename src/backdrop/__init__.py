"""Stochastic backpropagation for PyTorch: layers that mask gradients and leave the forward pass alone.

>>> import backdrop
>>> backdrop.Backdrop2d(0.99, patch=4)
Backdrop2d(p=0.99, patch=4)
"""

from backdrop._core.code import refuse_namesake

refuse_namesake()  # before anything of it may be imported

# ruff: noqa: E402
from backdrop import functional, schedules
from backdrop._source import Source
from backdrop.functional import effective_batch_size
from backdrop.graph import register_rule
from backdrop.layers import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d
from backdrop.placement import doctor, gradient_noise, insert, inspect, receptive_fields, remove, suggest
from backdrop.skip import Skip, skip_blocked

__all__ = [
    "Backdrop",
    "Backdrop1d",
    "Backdrop2d",
    "Backdrop3d",
    "Skip",
    "Source",
    "doctor",
    "effective_batch_size",
    "functional",
    "gradient_noise",
    "insert",
    "inspect",
    "receptive_fields",
    "register_rule",
    "remove",
    "schedules",
    "skip_blocked",
    "suggest",
]
__version__ = "0.1.0"
