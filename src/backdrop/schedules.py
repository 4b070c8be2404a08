"""The drop probability p over training, with the habits of torch's learning-rate schedulers.

A schedule sets p of some layers when it is made and after every `step()`. The paper finds the best results at very
high p (section 4), which learn slowly at first: letting p rise is one way to have both.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> from backdrop.schedules import LinearP
>>> model = nn.Sequential(nn.Conv2d(1, 4, 3), Backdrop2d(0.9), nn.Conv2d(4, 4, 3), Backdrop2d(0.5))
>>> schedule = LinearP(model, start=0.0, steps=2)  # from 0 to each layer's own p
>>> schedule.get_last_p()
[0.0, 0.0]
>>> schedule.step()
>>> schedule.get_last_p()
[0.45, 0.25]
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._core.checks import check_int, check_p, check_positive
from backdrop._core.regression import Regression
from backdrop.layers import Backdrop

__all__ = ["ConstantP", "CosineP", "LambdaP", "LinearP", "Schedule", "StepP", "VarianceBudget"]


class Schedule(ABC):
    """Sets p of its layers to `p_at(step, own)` at each step; `own` is the p a layer had when the schedule was made.

    Args:
        target: a model, whose every Backdrop layer is scheduled, or the layers themselves.
    """

    def __init__(self, target: nn.Module | Iterable[Backdrop]) -> None:
        if isinstance(target, nn.Module):
            layers = [module for module in target.modules() if isinstance(module, Backdrop)]
        else:
            if not isinstance(target, Iterable) or isinstance(target, str):
                raise TypeError(f"target has to be a model or several Backdrop layers, but got {type(target).__name__}")
            layers = list(target)
        for layer in layers:
            if not isinstance(layer, Backdrop):
                raise TypeError(f"target has to hold Backdrop layers only, but got {type(layer).__name__}")
        if not layers:
            raise ValueError("target has to hold at least one Backdrop layer, but got none; insert one first")
        self.layers = layers
        self.own_p = [float(layer.p) for layer in layers]
        self._set(0)

    @abstractmethod
    def p_at(self, step: int, own: float) -> float:
        """The probability after `step` steps for a layer that had `own` at first."""

    def observe(self) -> None:  # noqa: B027
        """Look at the gradients of this step, for schedules that do; `step` does it where nobody has."""

    def step(self) -> None:
        """Move on by one step. If the new p is refused, the schedule and its layers stay as they are."""
        self._set(self.last_step + 1)

    def get_last_p(self) -> list[float]:
        """The probability last set, for each layer."""
        return list(self._last_p)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume, in plain types: not the layers, and not the function of a `LambdaP`."""
        left_out = ("layers", "function", "parameters", "_places")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, and set p of the layers to what it was then."""
        if set(state_dict) != set(self.state_dict()):
            raise ValueError(
                f"state_dict has to come from a {type(self).__name__}, with the keys {sorted(self.state_dict())}, "
                f"but got {sorted(state_dict)}"
            )
        own_p, step = state_dict["own_p"], state_dict["last_step"]
        if not isinstance(own_p, list) or len(own_p) != len(self.layers):
            count = len(own_p) if isinstance(own_p, list) else repr(own_p)
            raise ValueError(
                f"state_dict has to be for {len(self.layers)} layers, but got one for {count}; "
                "build the schedule on the model it was saved with"
            )
        check_int("last_step", step, 0)
        before = dict(self.__dict__)
        try:
            self.__dict__.update(state_dict)
            self._set(step)
        except Exception as error:  # whatever is wrong with it, nothing of it stays
            self.__dict__.clear()
            self.__dict__.update(before)
            raise ValueError(f"state_dict has to be as {type(self).__name__} saved it, but: {error}") from error

    def _set(self, step: int) -> None:
        values = [float(check_p(p)) for p in self._all_at(step)]
        for layer, value in zip(self.layers, values, strict=True):
            layer.p = value
        self.last_step = step
        self._last_p = values

    def _all_at(self, step: int) -> list[float]:
        return [self.p_at(step, own) for own in self.own_p]


class ConstantP(Schedule):
    """The same `p` throughout."""

    def __init__(self, target: nn.Module | Iterable[Backdrop], p: float) -> None:
        self.p = float(check_p(p))
        super().__init__(target)

    def p_at(self, step: int, own: float) -> float:
        return self.p


class _Ramp(Schedule):
    def __init__(
        self, target: nn.Module | Iterable[Backdrop], *, start: float | None = 0.0, end: float | None = None, steps: int
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps has to be an integer of at least 1, but got {steps!r}")
        self.start = None if start is None else float(check_p(start))
        self.end = None if end is None else float(check_p(end))
        self.steps = steps
        super().__init__(target)

    def _between(self, own: float, fraction: float) -> float:
        start = own if self.start is None else self.start
        end = own if self.end is None else self.end
        return start + (end - start) * fraction


class LinearP(_Ramp):
    """From `start` to `end` in a straight line over `steps` steps, then `end`. None stands for the layer's own p."""

    def p_at(self, step: int, own: float) -> float:
        return self._between(own, min(step / self.steps, 1.0))


class CosineP(_Ramp):
    """From `start` to `end` along half a cosine over `steps` steps, then `end`. None stands for the layer's own p."""

    def p_at(self, step: int, own: float) -> float:
        return self._between(own, (1 - math.cos(math.pi * min(step / self.steps, 1.0))) / 2)


class StepP(Schedule):
    """The layer's own p, then from each step in `milestones` the p given there.

    Examples:
        >>> from backdrop import Backdrop2d
        >>> schedule = StepP([Backdrop2d(0.5)], {2: 0.9, 4: 0.99})
        >>> [schedule.p_at(step, own=0.5) for step in range(6)]
        [0.5, 0.5, 0.9, 0.9, 0.99, 0.99]
    """

    def __init__(self, target: nn.Module | Iterable[Backdrop], milestones: Mapping[int, float]) -> None:
        if not isinstance(milestones, Mapping):
            raise TypeError(
                f"milestones has to map steps to p, such as {{2: 0.9}}, but got {type(milestones).__name__}"
            )
        for step in milestones:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"milestones has to map steps of at least 0 to p, but got the step {step!r}")
        self.milestones = {step: float(check_p(milestones[step])) for step in sorted(milestones)}
        super().__init__(target)

    def p_at(self, step: int, own: float) -> float:
        return ([own] + [p for milestone, p in self.milestones.items() if milestone <= step])[-1]


class LambdaP(Schedule):
    """p as a function of the step: `function(step)`, called with 0 when the schedule is made."""

    def __init__(self, target: nn.Module | Iterable[Backdrop], function: Callable[[int], float]) -> None:
        if not callable(function):
            raise TypeError(f"function has to be callable with the step, but got {type(function).__name__}")
        self.function = function
        super().__init__(target)

    def p_at(self, step: int, own: float) -> float:
        return self.function(step)


class VarianceBudget(Schedule):
    """p such that masks add `share` times the variance that the gradient has from batch to batch, found while training.

    The gradients of two steps differ by the noise of their batches and by that of their masks, which grows with
    h = p / (1 - p), the number of dropped units for each kept one. So p is varied from step to step, and half the
    squared difference of gradients that follow each other is regressed on the h they had:

        |g_t - g_t-1|^2 / 2  =  B + sum over masks of C_k (h_k,t + h_k,t-1) / 2  +  chance.

    B is the variance from batch to batch, C_k h what mask k adds; each mask gets an equal part of the budget. Most
    steps have half of the h that fits, and a few have more of it, so that its mean is what fits. Nothing is computed
    besides: `step` reads some of the numbers in `.grad`, which have to be there, so it goes between `backward()` and
    `zero_grad()`. For uniform masks this is what the theory says (docs/theory.md). That of informed ones grows faster
    than h, and is then overestimated.

    Args:
        target: a model, or Backdrop layers; then say `parameters`.
        share: of the variance from batch to batch, which masks may add in all.
        parameters: whose gradients count; those of the model otherwise. Those below the masks alone, if there are many
            others.
        largest: the highest p that a step may have.
        memory: how many steps an estimate looks back. Small shares need long ones.
        start: the step from which p follows the estimate; a fourth of `memory` otherwise. Before, it varies around the
            layers' own.

    Examples:
        >>> from torch import nn
        >>> from backdrop import Backdrop
        >>> model = nn.Sequential(nn.Linear(4, 1), Backdrop(0.5, exact=True))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.01)
        >>> budget = VarianceBudget(model, share=0.5)
        >>> for _ in range(3):
        ...     model(torch.randn(64, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     budget.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        target: nn.Module | Iterable[Backdrop],
        *,
        share: float,
        parameters: Iterable[Tensor] | None = None,
        largest: float = 0.99,
        memory: int = 400,
        start: int | None = None,
    ) -> None:
        check_positive("share", share)
        self.share, self.largest = float(share), float(check_p(largest))
        self.memory = check_int("memory", memory, 10)
        self.start = self.memory // 4 if start is None else check_int("start", start, 1)
        if parameters is None and not isinstance(target, nn.Module):
            raise ValueError(
                "parameters has to say whose gradients count where target is layers alone; give model.parameters()"
            )
        found = target.parameters() if parameters is None and isinstance(target, nn.Module) else parameters
        self.parameters = [x for x in found or () if x.requires_grad]
        if not self.parameters:
            raise ValueError("parameters has to hold at least one that requires a gradient, but got none")
        if any(hasattr(x, "full_tensor") for x in self.parameters):
            raise TypeError("parameters has to hold whole tensors, but got some that are sharded over processes")
        self._places = _places([x.numel() for x in self.parameters])
        self._before: list[float] | None = None  # gradients of the last step,
        self._odds_before: list[float] = []  # and the odds it had
        self._seen = -1  # the step whose gradients were looked at last
        super().__init__(target)

    def p_at(self, step: int, own: float) -> float:
        """Where p starts; what became of it is in `get_last_p`."""
        return own

    def observe(self) -> None:
        if self._seen == self.last_step:
            return
        now = self._read()
        odds = [p / (1 - p) for p in self._last_p]
        if self._before is not None and all(map(math.isfinite, now)):
            half = 0.5 * math.fsum((a - b) ** 2 for a, b in zip(now, self._before, strict=True))
            self._regression.add([(a + b) / 2 for a, b in zip(odds, self._odds_before, strict=True)], half)
        self._before, self._odds_before = (now, odds) if all(map(math.isfinite, now)) else (None, [])
        self._seen = self.last_step

    def step(self) -> None:
        self.observe()
        if self._regression.count >= self.start:
            self._follow()
        super().step()

    def shares(self) -> list[float]:
        """What each mask adds to the variance, over that from batch to batch; NaN before there is an estimate."""
        batch, *slopes = self._regression.solve()
        if not batch:
            return [math.inf if slope else math.nan for slope in slopes]
        return [slope * odds / batch for slope, odds in zip(slopes, self._odds, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_regression": self._regression.state_dict(), "_odds": list(self._odds)}

    def _all_at(self, step: int) -> list[float]:
        if not hasattr(self, "_regression"):
            self._regression = Regression(len(self.own_p), self.memory)
            self._odds = [max(LEAST_ODDS, own / (1 - own)) for own in self.own_p]
        elif not isinstance(self._regression, Regression):  # from a state_dict
            self._regression = Regression.of(self._regression, len(self.own_p), self.memory)
            self._odds = list(map(float, self._odds))
            looked_at = sum(len(at) * (1 + x.is_complex()) for x, at in zip(self.parameters, self._places, strict=True))
            if len(self._odds) != len(self.own_p) or (self._before is not None and len(self._before) != looked_at):
                raise ValueError(f"it is for {len(self._odds)} masks, or for a model with other parameters")
        return [self._level(step, i, odds) for i, odds in enumerate(self._odds)]

    def _level(self, step: int, mask: int, odds: float) -> float:
        """Half of the odds, or now and then so many times as many that their mean stays."""
        high = min(16.0, max(2.5, 1 / self.share))
        chosen = random.Random(f"{step} {mask}").random() < 0.5 / (high - 0.5)
        odds *= high if chosen else 0.5
        return min(self.largest, odds / (1 + odds))

    def _follow(self) -> None:
        """Go towards the odds that fit, a little at a time."""
        self._regression.solution = self._regression.solve()
        batch, *slopes = self._regression.solution
        top = self.largest / (1 - self.largest)
        for i, slope in enumerate(slopes):
            fits = self.share * batch / (slope * len(slopes)) if slope > 0 else math.inf
            change = min(PACE, max(1 / PACE, fits / self._odds[i]))
            self._odds[i] = min(top, max(LEAST_ODDS, self._odds[i] * change))

    def _read(self) -> list[float]:
        """Some of the numbers in the gradient, the same at every step."""
        if all(x.grad is None for x in self.parameters):
            raise RuntimeError(
                "there are no gradients to look at: call step() of a VarianceBudget after backward() and before "
                "zero_grad(), or observe() where there are some"
            )
        parts: list[float] = []
        for x, places in zip(self.parameters, self._places, strict=True):
            if x.grad is None:
                parts += [0.0] * (len(places) * (1 + x.is_complex()))
                continue
            grad = x.grad.detach()
            grad = (grad.to_dense() if grad.is_sparse else grad).flatten()
            taken = grad[places.to(grad.device)]
            parts += torch.view_as_real(taken).flatten().tolist() if taken.is_complex() else taken.double().tolist()
        return parts


LEAST_ODDS = 0.01  # at least so many units are dropped for each that is kept
PACE = 1.02  # by which odds change at most in a step
LOOKED_AT = 4096  # numbers of a gradient


def _places(sizes: list[int]) -> list[Tensor]:
    """Which numbers of each parameter are looked at: all of few, some of many."""
    total = sum(sizes)
    if total <= LOOKED_AT:
        return [torch.arange(size) for size in sizes]
    chosen = torch.randint(total, (LOOKED_AT,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [chosen[(chosen >= first) & (chosen < last)] - first for first, last in itertools.pairwise(ends)]
