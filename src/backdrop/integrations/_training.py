"""What the callbacks for other libraries' training loops share: p over training, and what to log of every mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from backdrop._core.checks import check_dims
from backdrop._core.draw import make_lattice
from backdrop.distributed import resolve
from backdrop.functional import effective_batch_size
from backdrop.layers import Backdrop, drops_samples
from backdrop.placement.inspection import expected_kept
from backdrop.schedules import Schedule, VarianceBudget

MakeSchedule: TypeAlias = Callable[[nn.Module], Schedule]
Interval: TypeAlias = Literal["step", "epoch"]
Shape: TypeAlias = tuple[int, ...]


class Masks:
    """The Backdrop layers of a model while it is trained: p follows the counter of the training loop.

    Args:
        make_schedule: makes the schedule from the model, when training starts; None leaves p alone.
        interval: whether the loop counts steps of the optimiser or epochs.
    """

    def __init__(self, make_schedule: MakeSchedule | None, interval: Interval) -> None:
        if make_schedule is not None and not callable(make_schedule):
            raise TypeError(
                "schedule has to be a function that makes a schedule from the model, such as "
                f"functools.partial(CosineP, start=0.0, steps=1000), but got {type(make_schedule).__name__}"
            )
        if interval not in ("step", "epoch"):
            raise ValueError(f"interval has to be 'step' or 'epoch', but got {interval!r}")
        self.make_schedule, self.interval = make_schedule, interval
        self.schedule: Schedule | None = None
        self.saved: Mapping[str, Any] | None = None  # the state of a schedule that is still to be made
        self.layers: dict[str, Backdrop] = {}
        self.shapes: dict[str, Shape] = {}  # of what each mask was last drawn for
        self.hooks: list[RemovableHandle] = []

    def start(self, model: nn.Module) -> None:
        """Find the masks and make the schedule. One that was made for these very masks stays, with their own p."""
        self.stop()
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, Backdrop)}
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no Backdrop layer; put one in, for example with insert")
        known = set(self.layers.values())
        if self.make_schedule is not None and (self.schedule is None or not known.issuperset(self.schedule.layers)):
            self.schedule = self.make_schedule(model)
            if not isinstance(self.schedule, Schedule):
                raise TypeError(f"schedule has to make a Schedule, but made a {type(self.schedule).__name__}")
            if isinstance(self.schedule, VarianceBudget) and self.interval == "epoch":
                raise ValueError("a VarianceBudget looks at the gradients of every step: use interval='step'")
        if self.saved is not None and self.schedule is not None:
            self.schedule.load_state_dict(self.saved)
        self.saved = None
        self.shapes.clear()
        for name, layer in self.layers.items():
            self.hooks.append(layer.register_forward_pre_hook(partial(_called, self.shapes, name)))
            # Where gradients are skipped the layer is not called, but draws its weight by itself.
            layer.draw_weight = partial(_drawn, self.shapes, name, layer)  # type: ignore[method-assign]

    def move(self, count: int) -> None:
        """Set p to that of the step or epoch `count`."""
        if self.schedule is None or count == self.schedule.last_step:
            return
        if count == self.schedule.last_step + 1:
            self.schedule.step()
        else:
            self.schedule.load_state_dict({**self.schedule.state_dict(), "last_step": count})

    def observe(self) -> None:
        """A step of the optimiser was taken, and its gradients are still there."""
        if self.schedule is not None and self.interval == "step":
            self.schedule.observe()

    def numbers(self) -> dict[str, float]:
        """What to log, found on the host alone; only a p that is a tensor on a device is waited for."""
        found: dict[str, float] = {}
        if isinstance(self.schedule, VarianceBudget):
            names = {layer: name for name, layer in self.layers.items()}
            for layer, share in zip(self.schedule.layers, self.schedule.shares(), strict=True):
                found[f"backdrop/{names[layer]}/share_of_variance"] = share
        for name, layer in self.layers.items():
            p = float(layer.p)
            found[f"backdrop/{name}/p"] = p
            if name in self.shapes:
                rows, units = _drawn_for(layer, self.shapes[name])
                found[f"backdrop/{name}/kept_units"] = expected_kept(units, p, exact=layer.exact)
                if drops_samples(layer, len(self.shapes[name])):  # else it depends on the gradients
                    found[f"backdrop/{name}/effective_batch_size"] = effective_batch_size(rows, p)
        return found

    def stop(self) -> None:
        """Leave the layers as they were found, but for their p."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers.values():
            layer.__dict__.pop("draw_weight", None)
        self.hooks, self.layers = [], {}


def _called(shapes: dict[str, Shape], name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    if layer.training and torch.is_grad_enabled():
        shapes[name] = tuple(args[0].shape)


def _drawn(shapes: dict[str, Shape], name: str, layer: Backdrop, x: Tensor) -> Tensor:
    shapes[name] = tuple(x.shape)
    return type(layer).draw_weight(layer, x)


def _drawn_for(layer: Backdrop, shape: Shape) -> tuple[int, int]:
    """How many samples and how many units in a group there are, over all processes that draw the mask together."""
    processes = resolve(layer.group)
    together = 1 if processes is None else processes.size()
    over_samples = 0 in check_dims(layer.dims, len(shape))
    whole = (shape[0] * together, *shape[1:]) if over_samples else shape
    return shape[0] * together, make_lattice(whole, layer.dims, layer.patch).size
