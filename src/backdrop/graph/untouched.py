"""A model that is only looked at: what it is given is checked, and it is left as it was.

`look` and the estimates of `savings` follow models in this way, without computing anything.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._core.checks import check_int
from backdrop.graph.trace import first_line

__all__ = [
    "as_value_error",
    "check_arguments",
    "check_input_shape",
    "check_model",
    "mode",
    "plainly",
    "quiet",
    "unchanged",
    "zeros",
    "zeros_for",
]

LARGE = 2**31  # bytes: stand-ins above that are views of a single number
PLAIN = {"automatic_dynamic_shapes": False, "specialize_float": True, "specialize_int": True}


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be a torch.nn.Module, but got {type(model).__name__}")


def check_input_shape(input_shape: Sequence[int] | Tensor) -> list[int]:
    """Of a batch, or of the tensor that is one."""
    if isinstance(input_shape, Tensor):
        input_shape = tuple(input_shape.shape)
    if isinstance(input_shape, str) or not hasattr(input_shape, "__len__") or len(input_shape) < 2:
        raise ValueError(
            "input_shape has to be the shape of a batch, (samples, channels, positions...), such as (1, 3, 224, 224), "
            f"but got {input_shape!r}"
        )
    return [check_int("input_shape", size, 1) for size in input_shape]


def check_arguments(model: nn.Module) -> None:
    """One tensor has to be enough."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    if needed > 1 or (not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        raise ValueError(f"model has to take one tensor, but {type(model).__name__} takes {needed}; wrap it")


def zeros_for(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """An input for a model, of the kind of its parameters."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return zeros(shape, None, like)


def zeros(shape: Sequence[int], stride: Sequence[int] | None, like: Tensor) -> Tensor:
    """Of any size: the system gives memory only to what is written."""
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if stride is not None else 0
    if 0 in shape or torch.Size(shape).numel() * like.element_size() > LARGE or size * like.element_size() > LARGE:
        return torch.zeros((), **kind).expand(shape)
    if stride is None:
        return torch.zeros(shape, **kind)
    return torch.zeros(size, **kind).as_strided(shape, stride)


def as_value_error(model: nn.Module, shape: Sequence[int], error: Exception) -> ValueError:
    """Say which layer does not take what it gets, or that torch cannot follow the model."""
    found = _failing(model, shape)
    if found is not None:
        return ValueError(f"{type(model).__name__} cannot take an input of shape {tuple(shape)}: {found}")
    said = first_line(error)
    return ValueError(
        f"torch cannot follow the forward of {type(model).__name__} ({said}); give the part of it that holds the layers"
    )


def _failing(model: nn.Module, shape: Sequence[int]) -> str | None:
    """What the innermost module says that does not take what it gets, from a run on tensors that hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    open_calls: list[str] = []
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: open_calls.append(path)))
        hooks.append(module.register_forward_hook(lambda *_: open_calls.pop() and None))
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with unchanged(model), mode(model, training=False), torch.no_grad(), quiet(), fake:
            model(torch.zeros(tuple(shape), dtype=like.dtype, device=like.device))
    except Exception as error:
        where = open_calls[-1] if open_calls else ""
        said = first_line(error)
        return f"{where} says: {said}" if where else said
    finally:
        for hook in hooks:
            hook.remove()
    return None


@contextmanager
def plainly(*, recurrent: bool) -> Iterator[None]:
    """Sizes and numbers as they are, and layers as they are written: attention takes no shortcut that only eval mode
    has, and recurrent layers are followed if that is wanted."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        wanted = PLAIN | {"allow_rnn": recurrent}
        with config.patch(**{name: value for name, value in wanted.items() if name in config._config}):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever the code of a model does to its attributes and buffers is undone; no random number is used up."""
    kept = [
        (module, dict(module.__dict__), {n: dict(v) for n, v in module.__dict__.items() if type(v) is dict})
        for module in model.modules()
    ]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    random = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, was in buffers:
                if not torch.equal(buffer, was):
                    buffer.copy_(was)
        for module, attributes, dictionaries in kept:
            for name, contents in dictionaries.items():
                if module.__dict__.get(name) is not attributes[name] or attributes[name] != contents:
                    attributes[name].clear()
                    attributes[name].update(contents)
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)


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
