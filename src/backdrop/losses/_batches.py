"""What the losses are given: checked, and gathered over processes."""

from __future__ import annotations

import math
import numbers
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from backdrop.distributed import Group, all_gather, check_group, resolve

SingleClass: TypeAlias = Literal["error", "zero"]
LEAST = {"temperature": 1e-30, "margin": 0.0, "distance": 0.0, "beta": 1e-6, "max_fpr": 1e-9}
MOST = {"max_fpr": 1.0}


class Batch(NamedTuple):
    """One or several problems of positives against negatives, over the samples of all processes.

    Samples without weight are padding: neither positive nor negative, whatever their scores and labels are.
    """

    inputs: Tensor  # (n, problems), with the graph, or (n,) where there is one; 0 for padding
    positive: Tensor  # (n, problems), or (n,) too
    negative: Tensor  # the same
    weight: Tensor | None  # (n,), float32 or float64, the largest 1; None where all are
    present: list[int]  # problems that have both
    counts: list[tuple[int, int]]  # how many of each these have
    sides: tuple[Tensor, Tensor] | None  # where there is one problem: which samples are positive, and which negative

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the problems that are present, and the weights of their positives and negatives.

        (problems, n), the weights in float64.
        """
        found = [each[:, None] if each.ndim == 1 else each for each in (self.inputs, self.positive, self.negative)]
        if len(self.present) < found[0].shape[1]:
            found = [each[:, self.present] for each in found]
        inputs, *sides = (each.T for each in found)
        sides = [each.double() for each in sides]
        if self.weight is not None:
            sides = [each.mul_(self.weight) for each in sides]
        return inputs, sides[0], sides[1]


def gather_batch(
    name: str, inputs: Tensor, labels: Tensor, weight: Tensor | None, single_class: SingleClass, group: Group
) -> Batch:
    check_inputs(name, inputs, labels, single_class, group)
    if inputs.ndim not in (1, 2):
        raise ValueError(f"{name} has to have the shape (n,), (n, 1) or (n, classes), but got {tuple(inputs.shape)}")
    n, problems = len(inputs), inputs.shape[1] if inputs.ndim == 2 else 1
    if not problems:
        raise ValueError(f"{name} has to have at least one class, but got the shape {tuple(inputs.shape)}")
    if tuple(labels.shape) not in ((n,), (n, problems)):
        raise ValueError(
            f"labels has to have the shape {(n,)} or {(n, problems)} to go with {name} of shape {tuple(inputs.shape)}, "
            f"but got {tuple(labels.shape)}"
        )
    processes = resolve(group)
    weights = None if weight is None and processes is None else make_weights(weight, inputs)
    if processes is not None and weights is not None:
        rows = [each[:, None] if each.ndim == 1 else each for each in (inputs, labels, weights)]
        packed = torch.cat([each.double() for each in rows], 1)
        sizes = [problems, packed.shape[1] - problems - 1, 1]
        parts = torch.split(all_gather(packed, processes, same_loss=True), sizes, 1)
        inputs, labels, weights = parts[0].to(inputs.dtype), parts[1].detach(), parts[2][:, 0].to(weights.dtype)
        n = len(inputs)
    single = problems == 1
    labels = labels.reshape(-1) if single else labels[:, None] if labels.ndim == 1 else labels
    indices = not single and labels.shape[1] < problems
    positive = labels == (torch.arange(problems, device=labels.device) if indices else 1)
    negative = ~positive if indices or labels.dtype == torch.bool else labels == 0
    found = []
    if weights is not None:
        legal, weights = normalise(weights)
        counted = weights > 0
        inputs = inputs.masked_fill(~(counted if inputs.ndim == 1 else counted[:, None]), 0)
        positive, negative = (each & (counted if single else counted[:, None]) for each in (positive, negative))
        found = [counted.sum()[None], legal[None]]
    sides = (positive.nonzero().view(-1), negative.nonzero().view(-1)) if single else None
    counts = [] if sides is None else [len(side) for side in sides]
    if sides is None or found:
        found = [*([positive.sum(0), negative.sum(0)] if sides is None else []), *found]
        counts += torch.cat(found).tolist()  # one wait for a GPU
    if weights is not None:
        check_weights(bool(counts.pop()))
        n = counts.pop()
    positives, negatives = counts[:problems], counts[problems:]
    right = sum(positives) == n if indices else all(a + b == n for a, b in zip(positives, negatives, strict=True))
    if not right:
        what = f"classes from 0 to {problems - 1}" if indices else "0 and 1"
        given = labels if weights is None else labels[weights > 0]
        raise ValueError(f"labels has to hold {what}, but got {torch.unique(given)[:10].tolist()}")
    both = [(i, each) for i, each in enumerate(zip(positives, negatives, strict=True)) if all(each)]
    return Batch(inputs, positive, negative, weights, [i for i, _ in both], [each for _, each in both], sides)


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def make_weights(weight: Tensor | None, inputs: Tensor) -> Tensor:
    if weight is None:
        return torch.ones(len(inputs), device=inputs.device, dtype=wide(inputs))
    if not isinstance(weight, Tensor) or weight.is_complex():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weight has to be a real tensor or None, but got {kind}")
    if weight.numel() != len(inputs) or weight.ndim not in (1, 2) or len(weight) != len(inputs):
        raise ValueError(
            f"weight has to be one number per sample, shape ({len(inputs)},), but got shape {tuple(weight.shape)}"
        )
    return weight.detach().flatten().to(inputs.device, wide(inputs))


def normalise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the weights are legal, and the weights over the largest, so that no sum of them overflows."""
    legal = ((weights >= 0) & weights.isfinite()).all()
    return legal, weights / weights.amax().clamp(min=torch.finfo(weights.dtype).tiny) if len(weights) else weights


def on_host(x: Tensor) -> list[bool]:
    """In one wait for a GPU. What its transforms wrap torch 2.6 gives one by one alone."""
    if torch._C._are_functorch_transforms_active():
        return [bool(each) for each in x]
    found: list[bool] = x.tolist()
    return found


def check_weights(legal: bool) -> None:
    if not legal:
        raise ValueError("weight has to hold finite numbers of at least 0, but got others")


def check_inputs(
    name: str, inputs: Tensor, labels: Tensor, single_class: SingleClass, group: Group, second: str = "labels"
) -> None:
    check_settings(single_class, group)
    for what, given in ((name, inputs), (second, labels)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{what} has to be a tensor, but got {type(given).__name__}")
    if not inputs.is_floating_point():
        raise TypeError(f"{name} has to be a floating-point tensor, but got {inputs.dtype}")
    if labels.is_complex() or labels.device != inputs.device:
        raise ValueError(
            f"{second} has to be a bool, integer or float tensor on the device of {name}, {inputs.device}, but got "
            f"{labels.dtype} on {labels.device}"
        )


def check_settings(single_class: SingleClass, group: Group) -> None:
    check_group(group)
    if single_class not in ("error", "zero"):
        raise ValueError(f"single_class has to be 'error' or 'zero', but got {single_class!r}")


def check_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} has to be a number, but got {value!r} of type {type(value).__name__}")
    if not LEAST[name] <= value < math.inf:
        raise ValueError(f"{name} has to be a finite number of at least {LEAST[name]:g}, but got {value}")
    if value > MOST.get(name, math.inf):
        raise ValueError(f"{name} has to be in (0, {MOST[name]:g}], but got {value}")
    return float(value)
