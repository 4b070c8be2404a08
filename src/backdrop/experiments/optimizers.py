"""Optimisers and learning rates of trials."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from backdrop.experiments.task import Settings

__all__ = ["check_alike", "load_state", "make_optimizer", "make_schedule"]


def make_optimizer(model: nn.Module, s: Settings, device: torch.device, *, recorded: bool = False) -> Optimizer:
    """Of a trial with these settings; with a learning rate that a graph can read where its steps are `recorded`."""
    if s.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), s.lr, momentum=0.9, nesterov=True, weight_decay=s.weight_decay)
    if recorded:
        lr = torch.tensor(s.lr, device=device)
        return torch.optim.AdamW(model.parameters(), lr, weight_decay=s.weight_decay, fused=True, capturable=True)
    return torch.optim.AdamW(model.parameters(), s.lr, weight_decay=s.weight_decay)


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes up the state of an optimiser, whose steps may have been recorded where these are not, or the other way."""
    rates = [group["lr"] for group in optimizer.param_groups]
    usual = optimizer.state_dict()["param_groups"]
    ways = [{name: group.get(name) for name in ("fused", "capturable")} for group in usual]
    groups = [
        {name: value for name, value in {**group, **way}.items() if name in own}
        for group, way, own in zip(state["param_groups"], ways, usual, strict=True)
    ]
    check_alike("param_groups", groups, usual)
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        if values.keys() != next(iter(optimizer.state.values())).keys():
            raise ValueError(f"the optimiser has {', '.join(values)} for a parameter of shape {tuple(parameter.shape)}")
        for name, value in values.items():
            shape = () if name == "step" else parameter.shape
            if not isinstance(value, Tensor) or value.shape != shape or value.is_complex():
                raise ValueError(f"{name} does not fit a parameter of shape {tuple(parameter.shape)}")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate.fill_(group["lr"]) if isinstance(rate, Tensor) else float(group["lr"])
        for values in (optimizer.state[parameter] for parameter in group["params"]):
            if "step" in values and not group["capturable"]:
                values["step"] = values["step"].cpu()


def check_alike(what: str, found: Any, usual: Any) -> None:
    """An error unless a state is built like another one: names, kinds and lengths, not the numbers."""
    if isinstance(usual, dict) and isinstance(found, dict) and usual.keys() == found.keys():
        for name in usual:
            check_alike(f"{what}[{name!r}]", found[name], usual[name])
    elif isinstance(usual, (list, tuple)) and isinstance(found, (list, tuple)) and len(usual) == len(found):
        for i, (one, other) in enumerate(zip(found, usual, strict=True)):
            check_alike(f"{what}[{i}]", one, other)
    elif not (_is_number(found) and _is_number(usual)) and (usual != found or type(usual) is not type(found)):
        raise ValueError(f"{what} has to be like {str(usual)[:80]!r}, but is {str(found)[:80]!r}")


def _is_number(value: Any) -> bool:
    """Learning rates may be tensors."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def make_schedule(optimizer: Optimizer, s: Settings, steps: int) -> lr_scheduler.LRScheduler:
    """The learning rate over so many steps."""
    if s.lr_schedule == "one-cycle":
        # One step more than there are: the last call of step() is for a step that is never taken.
        return lr_scheduler.OneCycleLR(optimizer, s.lr, total_steps=steps + 1, cycle_momentum=False)
    if s.lr_schedule == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
