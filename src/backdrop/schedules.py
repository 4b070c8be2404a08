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

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from backdrop._core.checks import check_int, check_p
from backdrop.layers import Backdrop

__all__ = ["ConstantP", "CosineP", "LambdaP", "LinearP", "Schedule", "StepP"]


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

    def step(self) -> None:
        """Move on by one step. If the new p is refused, the schedule and its layers stay as they are."""
        self._set(self.last_step + 1)

    def get_last_p(self) -> list[float]:
        """The probability last set, for each layer."""
        return list(self._last_p)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume, in plain types: not the layers, and not the function of a `LambdaP`."""
        return {key: value for key, value in self.__dict__.items() if key not in ("layers", "function")}

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
        values = [float(check_p(self.p_at(step, own))) for own in self.own_p]
        for layer, value in zip(self.layers, values, strict=True):
            layer.p = value
        self.last_step = step
        self._last_p = values


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
