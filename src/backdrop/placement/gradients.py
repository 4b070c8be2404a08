"""Forward and backward passes of one training step: gradients as vectors, one for each layer."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backdrop._core import tree
from backdrop.skip import Skip

__all__ = ["Layer", "Step", "Sums", "call", "scalar", "tensors", "total"]


class Sums(NamedTuple):
    """What is known of the masked gradient of a layer; of several layers it is added up."""

    parameters: int
    squared: float  # |g|^2
    off: float  # |mean - g|^2
    scatter: float  # sum of |masked gradient - mean|^2 over draws
    spread: float  # S^2
    dots: list[float]  # <masked gradient, g> of each draw


class Layer:
    """The parameters of one module: their gradient without masks, and running moments of the masked one."""

    def __init__(self, name: str, gradient: Tensor) -> None:
        self.name, self.gradient = name, gradient
        self.mean = torch.zeros_like(gradient)
        self.scatter, self.spread = 0.0, math.nan
        self.dots: list[float] = []

    def add(self, masked: Tensor) -> None:
        """Welford's update; all that is summed up is positive, so nothing cancels."""
        self.dots.append(float(masked @ self.gradient))
        count = len(self.dots)
        change = masked - self.mean
        self.mean += change / count
        self.scatter += float(change @ change) * (count - 1) / count

    def sums(self) -> Sums:
        off = self.mean - self.gradient
        squared = float(self.gradient @ self.gradient)
        return Sums(self.gradient.numel(), squared, float(off @ off), self.scatter, self.spread, self.dots)


def total(sums: Sequence[Sums]) -> Sums:
    """Of all layers as one vector."""
    parameters, squared, off, scatter, spread, dots = zip(*sums, strict=True)
    draws = [math.fsum(draw) for draw in zip(*dots, strict=True)]
    return Sums(sum(parameters), math.fsum(squared), math.fsum(off), math.fsum(scatter), math.fsum(spread), draws)


class Step:
    """Forward and backward passes of a training step, each from the same state."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Sequence[Any]) -> None:
        self.model, self.loss, self.inputs, self.targets = model, loss, inputs, targets
        named = [(path, x) for path, x in model.named_parameters() if x.requires_grad]
        if not named:
            raise ValueError("model has no parameter that requires a gradient, so there is none to measure")
        self.parameters = [x for _, x in named]
        self.owners = [path.rpartition(".")[0] for path, _ in named]
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def layers(self) -> list[Layer]:
        """With the gradient as it is now."""
        found = [Layer(*pair) for pair in zip(dict.fromkeys(self.owners), self.gradient(), strict=True)]
        if not any(bool(layer.gradient.any()) for layer in found):
            raise ValueError("without masks the gradient is zero everywhere, so there is nothing to compare with")
        return found

    def value(self) -> Tensor:
        """The loss."""
        return self._value(self._outputs())

    def gradient(self) -> Iterator[Tensor]:
        """For each layer one vector."""
        return self._by_layer(self.value(), None)

    def add_spread(self, layers: Sequence[Layer], chosen: Sequence[int], n: int) -> bool:
        """Give layers their S^2, from backward passes for the chosen of n samples; False if there are no samples."""
        outputs = self._outputs()
        # The loss on outputs cut off from the model: one output may be computed from another.
        cut = tree.map_leaves(lambda x: x.detach().requires_grad_() if _has_graph(x) else x, outputs)
        pairs = [(x, y) for x, y in zip(*(tensors("outputs", t) for t in (outputs, cut)), strict=True) if _has_graph(x)]
        arriving = torch.autograd.grad(self._value(cut), [y for _, y in pairs], allow_unused=True)
        reached = [(x, grad) for (x, _), grad in zip(pairs, arriving, strict=True) if grad is not None]
        if not any(x.ndim and len(x) == n for x, _ in reached):
            return False
        squares = [0.0] * len(layers)
        for i in chosen:
            kept = [_only(grad, i, n) for _, grad in reached]
            for j, vector in enumerate(self._by_layer([x for x, _ in reached], kept)):
                off = vector - layers[j].gradient
                squares[j] += float(off @ off)
        for layer, square in zip(layers, squares, strict=True):
            layer.spread = square / len(chosen) * n / (n - 1)
        return True

    def _outputs(self) -> Any:
        for buffer, before in self.buffers:
            buffer.copy_(before)
        return call(self.model, self.inputs)

    def _value(self, outputs: Any) -> Tensor:
        value = scalar(self.loss(outputs, *self.targets))
        if not bool(value.isfinite()):
            raise ValueError(f"loss has to be finite, but got {value.item()}")
        return value

    def _by_layer(self, values: Tensor | Sequence[Tensor], arriving: Sequence[Tensor] | None) -> Iterator[Tensor]:
        """One after the other, because in float64 they are large."""
        found = torch.autograd.grad(
            values, self.parameters, arriving, retain_graph=arriving is not None, allow_unused=True
        )
        given = zip(self.owners, self.parameters, found, strict=True)
        for _, part in itertools.groupby(given, key=lambda one: one[0]):
            yield torch.cat([_as_vector(torch.zeros_like(x) if grad is None else grad) for _, x, grad in part])


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on these inputs; those of a dictionary by their names, where forward takes such names."""
    if not isinstance(inputs, Mapping):
        return model(inputs)
    asked = model.module if isinstance(model, Skip) else model
    parameters = inspect.signature(type(asked).forward).parameters.values()  # that of the instance may be an engine's
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_name = set(inputs) <= named or (bool(inputs) and any(p.kind is p.VAR_KEYWORD for p in parameters))
    return model(**inputs) if by_name else model(inputs)


def scalar(value: Any) -> Tensor:
    """What a loss returned, if a gradient can be taken of it."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss has to return a tensor with one number, but got {got}; take its mean or its sum")
    if not value.requires_grad:
        raise ValueError("loss has to depend on the model's parameters, but what it returned carries no gradient")
    return value


def _as_vector(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.is_sparse else grad
    return (torch.view_as_real(grad) if grad.is_complex() else grad).double().flatten()


def _only(grad: Tensor, i: int, n: int) -> Tensor:
    """The gradient of sample i, n times; that of an output without samples as it is."""
    if not grad.ndim or len(grad) != n:
        return grad
    kept = torch.zeros_like(grad)
    kept[i] = n * grad[i]
    return kept


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def tensors(name: str, values: Any) -> list[Tensor]:
    try:
        return [leaf for _, leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    except TypeError as error:
        raise TypeError(
            f"the {name} of the model have to be a tensor, or tensors in tuples, lists, dictionaries and dataclasses, "
            f"but got {type(values).__name__}"
        ) from error
