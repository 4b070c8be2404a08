"""Does it work on this machine? `python -m backdrop.selftest` compares layers, losses and the engine with plain code.

It takes some seconds and needs nothing but torch. The test suite has the rest.

>>> from backdrop import selftest
>>> selftest.masks(torch.float64)
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import backdrop
from backdrop import Backdrop, Backdrop2d, Skip, insert, receptive_fields, remove, skip_blocked
from backdrop.losses import average_precision_loss, contrastive_loss, cox_loss, rank_statistic_loss

__all__ = ["main"]


def masks(dtype: torch.dtype) -> None:
    """A mask leaves values alone, multiplies gradients by the weight that the same seed draws, and rests in eval."""
    x = torch.randn(32, 3, dtype=dtype, requires_grad=True)
    layer = Backdrop(0.75)
    torch.manual_seed(1)
    weight = layer.draw_weight(x)
    torch.manual_seed(1)
    y = layer(x)
    y.square().sum().backward()
    assert torch.equal(y, x), "a mask changed values"
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach() * weight.to(dtype))
    assert layer.eval()(x) is x, "a mask did something in eval mode"


def losses(dtype: torch.dtype) -> None:
    """Losses in n log n against all pairs."""
    scores, labels = torch.randn(60, dtype=dtype), torch.arange(60) % 3 == 0
    pairs = torch.sigmoid((scores[~labels][None, :] - scores[labels][:, None]) / 0.5)
    _same(rank_statistic_loss(scores, labels, temperature=0.5), pairs.mean())
    above = torch.sigmoid((scores[None, :] - scores[:, None]) / 0.5).fill_diagonal_(0)
    precision = (1 + above[labels][:, labels].sum(1)) / (1 + above[labels].sum(1))
    _same(average_precision_loss(scores, labels, temperature=0.5), 1 - precision.mean())
    times, at_risk = torch.rand(60, dtype=dtype), torch.zeros((), dtype=dtype)
    for i in range(60):
        at_risk = at_risk + (torch.logsumexp(scores[times >= times[i]], 0) - scores[i]) * labels[i]
    _same(cox_loss(scores, times, labels), at_risk / labels.sum())
    a, b = (nn.functional.normalize(torch.randn(60, 4, dtype=dtype), dim=1) for _ in range(2))
    s = a @ b.T / 0.3
    both = nn.functional.cross_entropy(s, torch.arange(60)) + nn.functional.cross_entropy(s.T, torch.arange(60))
    _same(contrastive_loss(a, b, temperature=0.3), both / 2)


def samples(dtype: torch.dtype) -> None:
    """`Skip` gives the gradients of the plain pair where samples are dropped, also in parts."""
    encoder = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    x = torch.randn(64, 5, dtype=dtype)
    for at_once in (None, 16):
        skip = Skip(copy.deepcopy(encoder), Backdrop(0.75, exact=True), when="always", at_once=at_once)
        plain = nn.Sequential(encoder, Backdrop(0.75, exact=True))
        _same_gradients(plain, skip, x)
        assert "with gradients" in str(skip.report), f"nothing was skipped: {skip.report}"


def positions(dtype: torch.dtype) -> None:
    """`insert` and `skip_blocked` give the gradients of the plain masked model where positions are dropped."""
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(dtype)
    masked = insert(model, {"4": Backdrop2d(0.9, exact=True)})
    skip = skip_blocked(masked, when="always")
    _same_gradients(masked, skip, torch.randn(2, 1, 64, 64, dtype=dtype))
    assert "computed again" in str(skip.skip_report), f"nothing was skipped: {skip.skip_report}"
    assert remove(masked).state_dict().keys() == model.state_dict().keys()
    assert receptive_fields(model.float(), (1, 1, 64, 64))["4"].size == (13, 13)


def _same(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-4 if value.dtype == torch.float32 else 1e-9, atol=1e-6)


def _same_gradients(plain: nn.Module, skip: nn.Module, x: Tensor) -> None:
    outputs = []
    for model in (plain, skip):
        model.zero_grad()
        torch.manual_seed(2)
        outputs.append(model(x))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    for a, b in zip(plain.parameters(), skip.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


CHECKS: tuple[Callable[[torch.dtype], None], ...] = (masks, losses, samples, positions)


def main() -> int:
    """Runs all checks, says what came of them, and returns how many failed."""
    failed = 0
    print(f"backdrop {backdrop.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for check in CHECKS:
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            begin, said = time.perf_counter(), "ok"
            try:
                check(dtype)
            except Exception as error:  # whatever it is, the others are worth a try
                failed, said = failed + 1, f"FAILED: {type(error).__name__}: {error}"
            name = f"{check.__name__} in {str(dtype).removeprefix('torch.')}"
            print(f"{name:24} {time.perf_counter() - begin:5.1f} s  {said}")
    print("all is well" if not failed else f"{failed} checks failed; please report this with the lines above")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
