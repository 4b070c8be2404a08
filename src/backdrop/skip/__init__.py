"""The same gradients, without computing the blocked ones.

A mask tells in advance which samples or positions get no gradient, so their backward pass need not be computed, nor
their activations kept. `Skip(module, mask)` is `mask(module(x))` computed that way; `skip_blocked(model)` does it for
every Backdrop layer of a model. The paper names this as future work.

>>> import torch
>>> from torch import nn
>>> from backdrop import Backdrop2d, skip_blocked
>>> stage = [nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
>>> plain = nn.Sequential(*stage, Backdrop2d(0.99, exact=True), nn.Flatten(), nn.Linear(8 * 255 * 255, 2))
>>> model = skip_blocked(plain)
>>> model(torch.randn(1, 1, 1023, 1023)).sum().backward()
>>> print(model.skip_report)
3: drops positions
  skipped: 0, 1, 2
  last step: 650 of 65025 units were computed again
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, fx, nn

from backdrop._inserted import NAME, inserted_mask, unhook
from backdrop.layers import Backdrop
from backdrop.skip import graph, samples
from backdrop.skip.program import Programs, untraceable
from backdrop.skip.report import Entry, Report
from backdrop.skip.statistics import Statistics, check_statistics

__all__ = ["Report", "Skip", "skip_blocked"]


class Skip(nn.Module):
    """Compute `mask(module(x))`: the same output and the same gradients, without computing the blocked ones.

    Args:
        module: what lies before the mask. Under a mask that drops samples, any module whose outputs depend on one
            sample each, with any nesting of tensors in and out; a tensor whose axis 0 has the size of the batch is
            taken to hold one row per sample, and all tensors of the output get the same mask. Under a mask that drops
            positions, a module that takes one tensor and is made of layers that `backdrop.skip.rules` knows.
        mask: a Backdrop layer.
        statistics: what layers with batch statistics do in training: "exact" (the plain gradient; nothing below such a
            layer is skipped), "sampled" (their gradient is estimated from what is computed) or "frozen" (their
            statistics are constants). Where skipping would not pay, the plain gradient is computed whatever this says.

    `report` says what the last call skipped, what not, and why. In `eval()`, with p = 0 and where no gradient is wanted
    this is the plain pair. What cannot run on windows is an error that names it. Gradients of gradients are an error
    too, except where samples are dropped and no layer has batch statistics.

    Examples:
        >>> import torch
        >>> from backdrop import Backdrop
        >>> encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        >>> skip = Skip(encoder, Backdrop(0.9, exact=True))
        >>> skip(torch.randn(5000, 64)).sum().backward()
        >>> print(skip.report)
        mask: drops samples
          skipped: module.0, module.1, module.2
          last step: 500 of 5000 samples ran with gradients
    """

    def __init__(self, module: nn.Module, mask: Backdrop, *, statistics: Statistics = "exact") -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module has to be a torch.nn.Module, but got {type(module).__name__}")
        if not isinstance(mask, Backdrop):
            raise TypeError(f"mask has to be a Backdrop layer, but got {type(mask).__name__}")
        check_statistics(statistics)
        self.module = module
        self.mask = mask
        self.statistics = statistics
        self.report = Report()
        self._programs = Programs(self, "", statistics, self.report, strict=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return self._programs(*args)
        return self._programs.on_samples(self.module, self.mask, args, kwargs)

    def _backdrop_plain(self, x: Tensor) -> Any:
        out = self.module(x)
        return self.mask(out) if isinstance(out, (Tensor, fx.Proxy)) else samples.mask_outputs(self.mask, out)

    def extra_repr(self) -> str:
        return "" if self.statistics == "exact" else f"statistics={self.statistics!r}"


def skip_blocked(model: nn.Module, *, statistics: Statistics = "exact") -> nn.Module:
    """A copy of a model that computes no gradient that a Backdrop layer would block.

    The copy has the same class and the same `state_dict` keys, gives the same output and, with `statistics="exact"`,
    the same gradients. Every stretch that ends in a Backdrop layer runs as `Skip` would run it; calls that cannot are
    left as they are. `skip_report` on the copy says after a training step what was skipped, what not, and why.

    The model's calls are found with torch.fx. A module that torch.fx cannot follow stays one call, which can be skipped
    where samples are dropped, and ends the stretch where positions are.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be a torch.nn.Module, but got {type(model).__name__}")
    check_statistics(statistics)
    if isinstance(model, (Backdrop, Skip)):
        raise ValueError(f"model has to hold a Backdrop layer and what lies before it, but got {type(model).__name__}")
    if not any(isinstance(module, Backdrop) for module in model.modules()):
        raise ValueError("model has no Backdrop layer, so there is nothing to skip; insert one first")
    model = copy.deepcopy(model)
    report = Report()
    if not _convert(model, "", statistics, report):
        raise ValueError(f"torch.fx cannot follow the model ({untraceable(model)}); use Skip on the part before a mask")
    model.skip_report = report  # type: ignore[assignment]
    return model


def _convert(module: nn.Module, path: str, policy: Statistics, report: Report) -> bool:
    """Let the largest modules around masks that torch.fx can follow run as programs; say whether there are any."""
    if isinstance(module, (Backdrop, Skip)) or not any(isinstance(m, Backdrop) for m in module.modules()):
        return False
    if untraceable(module) is None:
        if inserted_mask(module) is not None:  # what follows the module cannot be followed, so it runs the mask itself
            if graph.returns_one_value(module):
                unhook(module)
                setattr(module, graph.ENDS_IN_MASK, True)
            else:
                last = "plain: the module before it returns several values, and torch.fx cannot follow what takes them"
                report.append(Entry(f"{path}{NAME}", last=last))
        module.forward = Programs(module, path, policy, report)
        return True
    found = [_convert(child, f"{path}{name}.", policy, report) for name, child in module.named_children()]
    return any(found)
