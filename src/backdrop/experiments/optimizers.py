"""Optimisers and learning rates of trials."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from backdrop.experiments.task import Settings

__all__ = ["load_state", "make_optimizer", "make_schedule"]


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
    ways = [{name: group.get(name) for name in ("fused", "capturable")} for group in optimizer.param_groups]
    groups = [{**group, **way} for group, way in zip(state["param_groups"], ways, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate.fill_(group["lr"]) if isinstance(rate, Tensor) else float(group["lr"])
        for values in (optimizer.state[parameter] for parameter in group["params"]):
            if "step" in values and not group["capturable"]:
                values["step"] = values["step"].cpu()


def make_schedule(optimizer: Optimizer, s: Settings, steps: int) -> lr_scheduler.LRScheduler:
    """The learning rate over so many steps."""
    if s.lr_schedule == "one-cycle":
        # One step more than there are: the last call of step() is for a step that is never taken.
        return lr_scheduler.OneCycleLR(optimizer, s.lr, total_steps=steps + 1, cycle_momentum=False)
    if s.lr_schedule == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
