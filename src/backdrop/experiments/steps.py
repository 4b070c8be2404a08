"""Steps of training: optimisers, learning rates, and steps recorded as CUDA graphs.

Small networks keep a GPU waiting for Python, and a graph does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from backdrop.experiments.task import Settings

__all__ = ["Recorded", "RecordingError", "check_alike", "load_state", "make_optimizer", "make_schedule"]

WARM = 3  # steps before a step is recorded: libraries choose their algorithms, optimisers make their state


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


class RecordingError(RuntimeError):
    """A step could not be recorded, after which torch draws no more random numbers on this process's GPU."""


class _Record(NamedTuple):
    forward: torch.cuda.CUDAGraph
    rows: Tensor
    outputs: Any
    gradients: list[Tensor]
    update: torch.cuda.CUDAGraph


class Recorded:
    """A training step that is recorded when it has run a few times, for every size of batch, and then replayed.

    There are two graphs, for what comes before the loss and after it. The loss itself may wait for the GPU.

    Args:
        forward: takes the rows of a batch and returns the network's outputs, a tensor or several.
        loss: takes outputs and rows.
        update: takes a loss, goes back from it and changes the weights.
        generators: that they draw from, besides the device's own.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Any],
        loss: Callable[[Any, Tensor], Tensor],
        update: Callable[[Tensor], None],
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self.forward, self.loss, self.update, self.generators = forward, loss, update, list(generators)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()  # for all records: each is done with before the next begins
        self.runs: Counter[int] = Counter()
        self.records: dict[int, _Record] = {}

    def __call__(self, rows: Tensor) -> Tensor:
        """The loss."""
        size = len(rows)
        if size not in self.records:
            if self.runs[size] < WARM:
                self.runs[size] += 1
                return self._run(rows)
            try:
                self.records[size] = self._record(rows)
            except RuntimeError as error:  # what ended the recording lies behind the error of its end
                raise RecordingError(
                    f"a training step could not be recorded: {error.__context__ or error}; this process has to end, so "
                    "start again, with fewer workers if memory ran out, or without graphs"
                ) from error
        record = self.records[size]
        record.rows.copy_(rows)
        record.forward.replay()
        leaves = [part.detach().requires_grad_() for part in _parts(record.outputs)]
        loss = self.loss(leaves[0] if isinstance(record.outputs, Tensor) else leaves, rows)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        for place, gradient in zip(record.gradients, found, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)
        record.update.replay()
        return loss.detach()

    def _run(self, rows: Tensor) -> Tensor:
        """On the stream on which it will be recorded, which torch asks for."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.loss(self.forward(rows), rows)
            self.update(loss)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss.detach()

    def _record(self, rows: Tensor) -> _Record:
        forward, update, place = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), rows.clone()
        for generator in self.generators:
            forward.register_generator_state(generator)
            update.register_generator_state(generator)
        with torch.cuda.graph(forward, pool=self.pool, stream=self.stream):
            outputs = self.forward(place)
        gradients = [torch.zeros_like(part) for part in _parts(outputs)]
        with torch.cuda.graph(update, pool=self.pool, stream=self.stream):
            # A number whose gradient is the one given.
            products = [(part * gradient).sum() for part, gradient in zip(_parts(outputs), gradients, strict=True)]
            self.update(torch.stack(products).sum())
        return _Record(forward, place, outputs, gradients, update)


def _parts(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
