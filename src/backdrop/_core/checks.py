"""What users may pass, in one place: every check names the argument, its value and what is allowed."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Probability: TypeAlias = float | Tensor
Dims: TypeAlias = int | Sequence[int]
Patch: TypeAlias = int | Sequence[int]
Scale: TypeAlias = Literal["count", "eq1", "probability"] | None

Choose: TypeAlias = Literal["uniform", "gradient"]

CHOICES: tuple[Choose, ...] = ("uniform", "gradient")
SCALES: tuple[Scale, ...] = ("count", "eq1", "probability", None)


def check_p(p: Probability) -> Probability:
    if isinstance(p, Tensor):
        if p.ndim != 0 or not p.is_floating_point() or p.requires_grad:
            raise TypeError(
                "p has to be a number or a 0-d floating-point tensor that needs no gradient, "
                f"but got a tensor with shape {tuple(p.shape)}, dtype {p.dtype}, requires_grad={p.requires_grad}"
            )
        if is_readable(p):
            _check_p_range(p.item())
        return p
    if not isinstance(p, float):
        if isinstance(p, bool) or not isinstance(p, numbers.Real):
            raise TypeError(f"p has to be a number or a 0-d tensor, but got {p!r} of type {type(p).__name__}")
        p = float(p)
    _check_p_range(p)
    return p


def _check_p_range(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(
            f"p has to be in [0, 1), but got {p}: it is the probability that a unit's gradient is dropped, "
            "and dropping all of them would leave nothing to learn from"
        )


def is_readable(p: Tensor) -> bool:
    """Whether the value of p can be read at once: not on a device that would have to be waited for."""
    return p.device.type == "cpu" and not torch.compiler.is_compiling()


def check_dims(dims: Dims, ndim: int | None = None) -> tuple[int, ...]:
    """The axes in the order given, counted from 0 where `ndim` is known."""
    axes = _as_ints("dims", dims)
    if not axes:
        raise ValueError(f"dims has to name at least one axis, but got {dims!r}")
    if ndim is not None:
        if not all(-ndim <= axis < ndim for axis in axes):
            allowed = f"in [{-ndim}, {ndim - 1}] for an input with {ndim} axes" if ndim else "but a 0-d input has none"
            raise ValueError(f"dims has to name axes of the input, {allowed}, but got dims={dims!r}")
        axes = tuple(axis % ndim for axis in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"dims has to name each axis once, but got dims={dims!r}")
    return axes


def check_patch(patch: Patch, count: int | None = None, dims: Dims | None = None) -> tuple[int, ...]:
    """The patch size along each masked axis other than 0, of which there are `count`."""
    sizes = _as_ints("patch", patch)
    if any(size < 1 for size in sizes):
        raise ValueError(f"patch has to be at least 1 position along every axis, but got patch={patch!r}")
    if count is None or len(sizes) == count:
        return sizes
    if not isinstance(patch, Sequence):
        return sizes * count
    raise ValueError(
        f"patch has to be one size, or one for each of the {count} axes other than 0 in dims={dims!r}, "
        f"but got patch={patch!r}"
    )


def check_scale(scale: Scale) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale has to be one of {', '.join(map(repr, SCALES))}, but got {scale!r}")


def check_choose(choose: Choose, floor: float) -> None:
    if choose not in CHOICES:
        raise ValueError(f"choose has to be one of {', '.join(map(repr, CHOICES))}, but got {choose!r}")
    if isinstance(floor, bool) or not isinstance(floor, numbers.Real):
        raise TypeError(f"floor has to be a number, but got {floor!r} of type {type(floor).__name__}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor has to be in [0, 1], the share of the choice that stays uniform, but got {floor}")


def check_shape(shape: Sequence[int]) -> Sequence[int]:
    if not isinstance(shape, Sequence) or any(size < 0 for size in _as_ints("shape", shape)):
        raise ValueError(f"shape has to be a sequence of sizes of at least 0, but got {shape!r}")
    return shape


def check_differentiable(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x has to be a tensor, but got {type(x).__name__}")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"x has to be a floating-point or complex tensor, but got {x.dtype}, which cannot carry gradients; "
            "put Backdrop after the layer that turns it into features"
        )


def check_weight(x: Tensor, weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.is_complex():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weight has to be a real or boolean tensor, but got {kind}")
    check_weight_shape(tuple(weight.shape), tuple(x.shape))
    if weight.device != x.device:
        raise ValueError(f"weight has to be on the device of x, {x.device}, but got it on {weight.device}")


def check_weight_shape(weight: tuple[int, ...], x: tuple[int, ...]) -> None:
    trailing = x[len(x) - len(weight) :] if len(weight) <= len(x) else ()
    if len(weight) > len(x) or any(w not in (1, size) for w, size in zip(weight, trailing, strict=True)):
        raise ValueError(
            f"weight has to broadcast against x without enlarging it, but got weight with shape {weight} and x with "
            f"shape {x}; give it the rank of x, with size 1 on the axes that share a value"
        )


def check_generator(generator: torch.Generator | None) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator has to be a torch.Generator or None, but got {type(generator).__name__}")


def check_devices(p: Probability, generator: torch.Generator | None, device: torch.device) -> None:
    check_generator(generator)
    if generator is not None and device.type != "meta" and not _same_device(generator.device, device):
        raise ValueError(
            f"generator has to be on the device of the mask, {device}, but got one on {generator.device}; "
            f"make it with torch.Generator(device={str(device)!r})"
        )
    if isinstance(p, Tensor) and p.device.type != "cpu" and not _same_device(p.device, device):
        raise ValueError(f"p has to be on the CPU or on the device of the mask, {device}, but got it on {p.device}")


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name that does not exist: those that are much like it, or else the first ones."""
    known = list(names)
    near = difflib.get_close_matches(str(name), known, 3, 0.5) or known[:3]
    return f"; the nearest are {', '.join(map(repr, near))}" if near else ""


def check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} has to be a number, but got {value!r} of type {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} has to be positive and finite, but got {value}")


def check_size(size: int | Sequence[int]) -> tuple[int, ...]:
    """Pixels per axis; one number is a square."""
    sizes = _as_ints("size", size)
    if not isinstance(size, Sequence):
        sizes *= 2
    if not 1 <= len(sizes) <= 3 or min(sizes) < 2:
        raise ValueError(f"size has to have one to three axes of at least 2 pixels each, but got {size!r}")
    return tuple(map(int, sizes))


def check_crop(crop: int | Sequence[int], size: tuple[int, ...]) -> tuple[int, ...]:
    tile = _as_ints("crop", crop)
    if not isinstance(crop, Sequence):
        tile *= len(size)
    if len(tile) != len(size) or any(length < 1 or n % length for length, n in zip(tile, size, strict=False)):
        raise ValueError(f"crop has to divide the size, {size}, along every axis, but got {crop!r}")
    return tile


def check_scale_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    real = isinstance(weights, Iterable) and all(isinstance(weight, numbers.Real) for weight in weights)
    if isinstance(weights, str) or not real:
        raise TypeError(f"weights has to be a sequence of numbers, one per kernel, but got {weights!r}")
    if len(weights) != count:
        raise ValueError(f"weights has to have one number for each of the {count} kernels, but got {tuple(weights)}")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights have to be finite, but got {tuple(weights)}")
    return tuple(map(float, weights))


def check_int(name: str, value: int, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} has to be an integer, but got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} has to be at least {least}, but got {value}")
    return int(value)


def _as_ints(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    items = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, numbers.Integral)):
            raise TypeError(f"{name} has to be an integer or a sequence of integers, but got {value!r}")
    return items


def check_no_transforms() -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "choose='gradient' is not there under torch.func's transforms: use torch.autograd, or 'uniform'"
        )


def check_not_batched(grad: Tensor) -> None:
    if torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "choose='gradient' makes one choice for all passes through a call, by the gradient of the first, but "
            "several came at once (is_grads_batched, vectorize=True or vmap); go back once by itself first, or one "
            "after the other"
        )
