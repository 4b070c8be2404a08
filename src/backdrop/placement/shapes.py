"""A model as a graph of calls with the shapes of their results, found without computing anything."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from backdrop._checks import check_int
from backdrop.skip import graph

__all__ = ["Traced", "as_value_error", "check_model", "mode", "name_of", "quiet", "shapes_of", "traced"]

NAMED = "backdrop_name"  # where a node keeps the name that it was given


class Traced(NamedTuple):
    """The calls of a model on an input of one shape."""

    graph: fx.Graph
    shapes: dict[fx.Node, torch.Size]  # of the results that are tensors
    reasons: dict[str, str]  # why modules, by their paths, could not be followed and stay one call


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be a torch.nn.Module, but got {type(model).__name__}")


def traced(model: nn.Module, input_shape: Sequence[int]) -> Traced:
    """Follow a model that takes one tensor of this shape; the model is as before afterwards."""
    check_model(model)
    with mode(model, training=False), as_value_error(model):
        calls, reasons = graph.trace(model, {})
    return Traced(calls, shapes_of(model, calls, input_shape), reasons)


@contextmanager
def as_value_error(model: nn.Module) -> Iterator[None]:
    """Say what to do about a model that torch.fx cannot follow."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot follow the forward of {type(model).__name__} ({graph.first_line(error)}); give the part "
            "of it that holds the layers"
        ) from error


def name_of(node: fx.Node) -> str:
    """The dotted path of the layer, or of the module that makes the call, and the call; unique in a graph."""
    if NAMED not in node.meta:
        times: Counter[str] = Counter()
        for other in node.graph.nodes:
            name = graph.name_of(other)
            times[name] += other.op.startswith("call")
            other.meta[NAMED] = f"{name} ({times[name]})" if times[name] > 1 else name
    return str(node.meta[NAMED])


def shapes_of(model: nn.Module, calls: fx.Graph, input_shape: Sequence[int]) -> dict[fx.Node, torch.Size]:
    """The shapes of all results that are tensors, from a run on tensors that hold nothing.

    Where a part that torch.fx cannot follow looks at values, there has to be a run that computes them.
    """
    shape = _check_input_shape(input_shape)
    inputs = sum(node.op == "placeholder" and not node.args for node in calls.nodes)
    if inputs != 1:
        raise ValueError(f"model has to take one tensor, but {type(model).__name__} takes {inputs}; wrap it")
    with mode(model, training=False), torch.no_grad(), quiet():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _run(model, calls, shape)
        except NeedsValuesError:
            return _run(model, calls, shape)


class NeedsValuesError(Exception):
    """A call looks at values that a tensor that holds nothing does not have."""


def _run(model: nn.Module, calls: fx.Graph, shape: Sequence[int]) -> dict[fx.Node, torch.Size]:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    found: dict[fx.Node, torch.Size] = {}
    values: dict[fx.Node, Any] = {}
    for node in calls.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = node.args[0] if node.args else torch.zeros(shape, dtype=like.dtype, device=like.device)
        else:
            try:
                # A mask reads its p, which a tensor that holds nothing would not tell.
                with unset_fake_temporarily() if graph.is_mask(model, node) else nullcontext():
                    values[node] = graph.call(model, node, values)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise NeedsValuesError from error
            except Exception as error:
                raise ValueError(
                    f"{type(model).__name__} cannot take an input of shape {tuple(shape)}: {name_of(node)} says: "
                    f"{graph.first_line(error)}"
                ) from error
        if isinstance(values[node], Tensor):
            found[node] = values[node].shape
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's log about a shape that does not fit, which is an error that we raise, and without its warnings
    about the speed of what is not computed."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def _check_input_shape(input_shape: Sequence[int]) -> list[int]:
    if isinstance(input_shape, (str, int)) or len(input_shape) < 2:
        raise ValueError(
            "input_shape has to be the shape of a batch, (samples, channels, positions...), such as (1, 3, 224, 224), "
            f"but got {input_shape!r}"
        )
    return [check_int("input_shape", size, 1) for size in input_shape]


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A model in one mode for a while. In evaluation no buffer changes and no random number is drawn."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was
