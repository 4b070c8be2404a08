"""Values for `fuzz.py`: right, on the edge, or nonsense."""

import math

import torch

NONSENSE = [None, True, "x", "", (), [], {}, -1, 0, 1.5, math.nan, math.inf, 2**70, 1j, b"p", object, [None]]


class WrongError(AssertionError):
    """A call did something else than it promises."""


def check(condition, what):
    if not condition:
        raise WrongError(what)


def mostly(r, good, share=0.92):
    """`good()`, or now and then nonsense."""
    return good() if r.random() < share else r.choice(NONSENSE)


def a_shape(r, most=4):
    return tuple(r.choice([0, 1, 1, 2, 3, 4, 5, 8]) for _ in range(r.randint(0, most)))


def a_tensor(r, shape, floating=True):
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]
    dtypes += [] if floating else [torch.int64, torch.bool, torch.complex64]
    x = torch.randn(shape).to(r.choice(dtypes))
    if x.is_floating_point() and x.numel() and r.random() < 0.08:
        x.view(-1)[r.randrange(x.numel())] = r.choice([math.nan, math.inf, -math.inf, 1e30, 1e-30, 6e4])
    if x.ndim > 1 and r.random() < 0.2:
        x = x.transpose(r.randrange(x.ndim), r.randrange(x.ndim))
    return x
