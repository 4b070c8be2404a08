"""The same gradients, without computing the blocked ones.

A mask tells in advance which samples or positions get no gradient, so their backward pass need not be computed, nor
their activations kept. `Skip(module, mask)` is `mask(module(x))` computed that way; `skip_blocked(model)` does it for
every Backdrop layer of a model. The paper names this as future work.

>>> import torch
>>> from torch import nn
>>> from backdrop import Backdrop2d, skip_blocked
>>> stage = [nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
>>> plain = nn.Sequential(*stage, Backdrop2d(0.99, exact=True), nn.Flatten(), nn.Linear(8 * 255 * 255, 2))
>>> model = skip_blocked(plain, when="always")  # without it, where this machine gains by it
>>> model(torch.randn(1, 1, 1023, 1023)).sum().backward()
>>> print(model.skip_report)
3: drops positions
  skipped: 0, 1, 2
  last step: 650 of 65025 units were computed again
"""

from __future__ import annotations

import copy
import numbers
from typing import Any

from torch import Tensor, nn

from backdrop.graph.inserted import apply_mask, copy_hooks
from backdrop.graph.table import Statistics
from backdrop.layers import Backdrop
from backdrop.skip.budget import Memory, TileSize, check_memory, check_tile
from backdrop.skip.engine import WHEN, Engine, Settings, When
from backdrop.skip.report import Entry, Report
from backdrop.skip.statistics import check_statistics

__all__ = ["Entry", "Report", "Skip", "skip_blocked"]


class Skip(nn.Module):
    """Compute `mask(module(...))`: the same output and the same gradients, without computing the blocked ones.

    Args:
        module: what lies before the mask, with any arguments. It may return tensors in tuples, lists, dictionaries and
            dataclasses if the mask drops samples; all tensors get the same mask.
        mask: a Backdrop layer.
        statistics: what calls with statistics over the batch or over space do in training: "exact" (the plain gradient;
            nothing below such a call is skipped), "sampled" (their gradient is estimated from what is computed) or
            "frozen" (their statistics are constants). Where skipping would not pay, the plain gradient is computed
            whatever this says. "running" is another model: batch normalisation by its running statistics, which follow.
        when: "pays" skips where it saves time, "lean" also where it saves memory only, "always" wherever it can.
        at_once: the most samples in work at a time, in every pass; for masks that drop samples. With p = 0 this is
            gradient caching.
        tile: cells of the input along each axis, or one for each axis, that the segment before a mask of positions is
            computed in at a time, with what lies around them; "auto" takes as many as `memory` allows. Inputs may then
            be sources (`backdrop.Source`), which are read region by region.
        memory: a budget for what is kept and what is in work: bytes, or a text such as "4GB" or "800MiB".

    `report` says what the last call skipped, what not, and why. In `eval()`, with p = 0 and where no gradient is wanted
    this is the plain pair. Gradients of gradients are an error, except where samples are dropped without `at_once`
    and no call has batch statistics.

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

    def __init__(
        self,
        module: nn.Module,
        mask: Backdrop,
        *,
        statistics: Statistics = "exact",
        when: When = "pays",
        at_once: int | None = None,
        tile: TileSize = None,
        memory: Memory = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module has to be a torch.nn.Module, but got {type(module).__name__}")
        if not isinstance(mask, Backdrop):
            raise TypeError(f"mask has to be a Backdrop layer, but got {type(mask).__name__}")
        settings = _check(statistics, when, at_once, tile, memory)
        self.module = module
        self.mask = mask
        self.statistics, self.when, self.at_once, self.tile, self.memory = settings
        self.report = Report()
        self.engine = Engine(self, settings, self.report, "_plain")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return apply_mask(self.mask, self.module(*args, **kwargs))

    def extra_repr(self) -> str:
        given = (("statistics", "exact"), ("when", "pays"), ("at_once", None), ("tile", None), ("memory", None))
        changed = [(name, getattr(self, name)) for name, default in given if getattr(self, name) != default]
        return ", ".join(f"{name}={value!r}" for name, value in changed)


def skip_blocked(
    model: nn.Module,
    *,
    statistics: Statistics = "exact",
    when: When = "pays",
    at_once: int | None = None,
    tile: TileSize = None,
    memory: Memory = None,
) -> nn.Module:
    """A copy of a model that computes no gradient that a Backdrop layer would block.

    The copy has the same class and the same `state_dict` keys, gives the same output and, with `statistics="exact"`,
    the same gradients. Every segment that ends in a Backdrop layer runs as `Skip` would run it, with the same
    arguments; calls that cannot are left as they are. `skip_report` on the copy says after a training step what was
    skipped, what not, and why.

    The model's calls are found by torch.compile's front end, which follows ordinary Python code and captures anew when
    an attribute, a mode or a flag changes. Nothing is compiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be a torch.nn.Module, but got {type(model).__name__}")
    settings = _check(statistics, when, at_once, tile, memory)
    if isinstance(model, (Backdrop, Skip)):
        raise ValueError(f"model has to hold a Backdrop layer and what lies before it, but got {type(model).__name__}")
    if not any(isinstance(module, Backdrop) for module in model.modules()):
        raise ValueError("model has no Backdrop layer, so there is nothing to skip; insert one first")
    if isinstance(model.__dict__.get("forward"), Engine):
        raise ValueError("model was made by skip_blocked already; give it the model that it was made from")
    if hasattr(model, "_orig_mod"):  # by torch.compile, which is to stay around it
        compiled: Any = model
        inside = skip_blocked(
            compiled._orig_mod, statistics=statistics, when=when, at_once=at_once, tile=tile, memory=memory
        )
        made: nn.Module = type(compiled)(inside, compiled.dynamo_ctx)
        return made
    model = _copied(model)
    report = Report()
    model.forward = Engine(model, settings, report)
    model.skip_report = report  # type: ignore[assignment]
    return model


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters can be trained, or an error that names the module that cannot be copied."""
    memo = _made_anew(model)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(_cannot_copy(model, said)) from error
    pairs = zip(model.named_parameters(), made.parameters(), strict=True)
    if any(given.is_leaf and not copied.is_leaf for (_, given), copied in pairs):  # torch's copies of scripted modules
        raise ValueError(_cannot_copy(model, "its copy has parameters that get no gradient"))
    copy_hooks(model, made, memo)
    return made


def _made_anew(model: nn.Module) -> dict[int, Any]:
    """What copies of weights are that a hook computes before every call, as torch's first weight_norm, spectral_norm
    and pruning do: no tensors that could be copied, but none that a copy has to start with either."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            value = module.__dict__.get(name) if isinstance(name, str) else None
            if type(hook).__module__.startswith("torch.nn.utils.") and isinstance(value, Tensor) and not value.is_leaf:
                found[id(value)] = value.detach().clone()
    return found


def _cannot_copy(model: nn.Module, said: str) -> str:
    where = next(
        (f"{path or 'itself'} ({type(module).__name__})" for path, module in _leaves_first(model) if _fails(module)), ""
    )
    of = f" because of {where}" if where else ""
    results = [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    do = (
        f"set {', '.join(results)} to None, results of an earlier call"
        if results
        else "use modules that are not scripted"
    )
    return f"model cannot be copied{of}: {said}. Use Skip(module, mask), which copies nothing, or {do}"


def _leaves_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return sorted(model.named_modules(), key=lambda named: -named[0].count(".") - bool(named[0]))


def _fails(module: nn.Module) -> bool:
    try:
        made = copy.deepcopy(module, _made_anew(module))
    except Exception:
        return True
    return any(a.is_leaf and not b.is_leaf for a, b in zip(module.parameters(), made.parameters(), strict=True))


def _check(statistics: Statistics, when: When, at_once: int | None, tile: TileSize, memory: Memory) -> Settings:
    check_statistics(statistics)
    if when not in WHEN:
        raise ValueError(f"when has to be one of {', '.join(map(repr, WHEN))}, but got {when!r}")
    if at_once is not None:
        if isinstance(at_once, bool) or not isinstance(at_once, numbers.Integral):
            raise TypeError(f"at_once has to be a whole number or None, but got {at_once!r}")
        if at_once < 1:
            raise ValueError(f"at_once has to be at least 1, the most samples in work at a time, but got {at_once}")
        at_once = int(at_once)
    return Settings(statistics, when, at_once, check_tile(tile, memory), check_memory(memory))
