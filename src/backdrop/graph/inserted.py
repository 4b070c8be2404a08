"""Masks that were put behind a module without touching its code: a child of the module and a hook that calls it.

The child makes the mask part of the model: it follows `train`, `eval`, `to` and schedules. It has no parameters, so the
keys of `state_dict` stay as they were. `placement.insert` puts masks in; `skip` sees them as calls of their own.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backdrop import functional
from backdrop._core import marks, tree
from backdrop._core.draw import is_zero
from backdrop._core.product import multiply, names_backdrop
from backdrop._shared import Draw
from backdrop.layers import Backdrop, drops_samples

NAME = "backdrop"  # of the child


def mask_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: the output, with its gradient masked."""
    mask = inserted_mask(module)
    assert mask is not None
    return apply_mask(mask, output)


def apply_mask(mask: Backdrop, output: Any) -> Any:
    """Also to tensors in a tuple or a dictionary, if samples are dropped: all get the same mask."""
    if isinstance(output, Tensor):
        return mask(output)
    if not drops_samples(mask):
        raise TypeError(
            f"{type(mask).__name__} was put behind a module and needs a tensor, but got {type(output).__name__}; "
            "put it behind a module that returns one, or use Backdrop, which drops samples"
        )
    leaves = [leaf for _, leaf in tree.leaves(output)]
    if marks.CAPTURING and torch.compiler.is_compiling():
        number, masked = 0, []
        for leaf in leaves:
            if is_differentiable(leaf):
                masked.append(marks.mark(leaf, mask, number))
                number += 1
            else:
                masked.append(leaf)
    else:
        found = iter(mask_tensors(mask, [leaf for leaf in leaves if is_differentiable(leaf)]))
        masked = [next(found) if is_differentiable(leaf) else leaf for leaf in leaves]
    return tree.with_leaves(output, masked)


def mask_tensors(mask: Backdrop, tensors: list[Tensor]) -> list[Tensor]:
    """One mask for all of several tensors."""
    if len(tensors) == 1:
        return [Backdrop.forward(mask, tensors[0])]  # hooks on it, or what a subclass adds, are followed by themselves
    if not tensors or not mask.training:
        return tensors
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    widest = max(tensors, key=lambda t: t.dtype.itemsize)
    shared = mask.shared_draw(widest, wanted)
    if shared is not None and mask.choose == "gradient":
        return list(_ChosenTogether.apply(shared, *tensors))  # type: ignore[no-untyped-call]
    if shared is not None:
        return [shared(t) for t in tensors]
    if not wanted or is_zero(mask.p):
        return tensors
    if mask.choose == "gradient":
        return list(_ChosenTogether.apply(mask, *tensors))  # type: ignore[no-untyped-call]
    weight = mask.draw_weight(widest[:, ...])
    return [functional.mask_gradient(t, weight.view(-1, *[1] * (t.ndim - 1))) for t in tensors]


@names_backdrop
class _ChosenTogether(torch.autograd.Function):
    """One choice by the gradients of all tensors, drawn in the first backward pass."""

    @staticmethod
    def forward(ctx: Any, mask: Backdrop | Draw, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mask, ctx.weight = mask, None
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        arrived = [grad for grad in grads if grad is not None]
        if ctx.weight is None and arrived:
            ctx.weight = ctx.mask.choose_weight_and_count(*arrived)[0].flatten()
        masked = [
            None if grad is None else multiply(grad, ctx.weight.view(-1, *[1] * (grad.ndim - 1))) for grad in grads
        ]
        return None, *masked


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def mask_and_copy_output(module: nn.Module, args: Any, output: Any) -> Any:
    """The same for an output that may be changed in place, which torch refuses for what shares its memory with another.

    Where the graph is captured that is seen to there.
    """
    mask, masked = inserted_mask(module), mask_output(module, args, output)
    if mask is None or not mask.training or (marks.CAPTURING and torch.compiler.is_compiling()):
        return masked
    if isinstance(masked, Tensor):
        return masked if masked is output else masked.clone()
    return tree.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, masked)


HOOKS = (mask_output, mask_and_copy_output)


def inserted_mask(module: nn.Module) -> Backdrop | None:
    """The mask that a hook of this module calls, if any."""
    child = module._modules.get(NAME)
    hooked = any(hook in HOOKS for hook in module._forward_hooks.values())
    return child if hooked and isinstance(child, Backdrop) else None


def has_other_hooks(module: nn.Module) -> bool:
    """Whether anything else hooks in on the module."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    behind = module._forward_hooks
    return bool(behind) and any(hook not in HOOKS for hook in behind.values())


def unhook(module: nn.Module) -> None:
    """Take the hook away; the mask stays a child."""
    for key in [key for key, hook in module._forward_hooks.items() if hook in HOOKS]:
        del module._forward_hooks[key]


def copy_hooks(model: nn.Module, made: nn.Module, memo: dict[int, Any]) -> None:
    """Give the parameters of a deep copy, made with this memo, the hooks that torch's copies leave behind."""
    for given, copied in zip(model.parameters(), made.parameters(), strict=True):
        if copied is given:  # by a __deepcopy__ of somebody's own
            continue
        both: tuple[tuple[Callable[..., Any], Any], ...] = (
            (copied.register_hook, given._backward_hooks),
            (copied.register_post_accumulate_grad_hook, getattr(given, "_post_accumulate_grad_hooks", None)),
        )
        for register, hooks in both:
            for hook in (hooks or {}).values():
                of = memo.get(id(hook.__self__)) if isinstance(hook, types.MethodType) else None
                register(hook if of is None else types.MethodType(hook.__func__, of))  # of the model: of the copy
