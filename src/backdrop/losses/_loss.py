"""What all losses share: their form as modules, and what they do where there is nothing to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from backdrop.distributed import Group
from backdrop.losses._batches import LEAST, SingleClass, check_number, check_settings, wide
from backdrop.losses._soft_ranks import NO_SECOND, signed


def nothing_to_compare(inputs: Tensor, single_class: SingleClass, what: str = "one class only") -> Tensor:
    if single_class == "zero":
        return inputs.masked_fill(torch.ones_like(inputs, dtype=torch.bool), 0).sum(dtype=wide(inputs))
    raise ValueError(
        f"the batch of {len(inputs)} samples has {what}, so there is nothing to compare; take a larger batch, "
        "or sample by class, or let such a batch count as zero with single_class='zero'"
    )


class Loss(nn.Module):
    """A loss with its settings as attributes: `loss(inputs, labels, weight=None)`."""

    _function: ClassVar[Callable[..., Tensor]]

    def __init__(self, single_class: SingleClass, group: Group, **settings: Any) -> None:
        super().__init__()
        check_settings(single_class, group)
        for name, value in settings.items():
            setattr(self, name, check_number(name, value) if name in LEAST else value)
        self._settings = tuple(settings)
        self.single_class, self.group = single_class, group

    def forward(self, inputs: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        return self._call(inputs, labels, weight=weight)

    def _call(self, *inputs: Tensor, weight: Tensor | None) -> Tensor:
        settings = {name: getattr(self, name) for name in self._settings}
        return type(self)._function(
            *inputs, weight=weight, single_class=self.single_class, group=self.group, **settings
        )

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self._settings]
        shown += [] if self.single_class == "error" else [f"single_class={self.single_class!r}"]
        shown += [] if self.group is None else [f"group={self.group if isinstance(self.group, str) else '...'}"]
        return ", ".join(shown)


def once(gradient: Tensor, *inputs: Tensor) -> Tensor:
    """A gradient that was computed by hand: differentiating it once more is an error."""
    result: Tensor = _Once.apply(gradient, *inputs)  # type: ignore[no-untyped-call]
    return result


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_SECOND)
