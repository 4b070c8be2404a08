"""Masks that were put behind a module without touching its code: a child of the module and a hook that calls it.

The child makes the mask part of the model: it follows `train`, `eval`, `to` and schedules. It has no parameters, so the
keys of `state_dict` stay as they were. `placement.insert` puts masks in; `skip` sees them as calls of their own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from backdrop.layers import Backdrop, drops_samples

NAME = "backdrop"  # of the child


def mask_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: the output, with its gradient masked."""
    mask = inserted_mask(module)
    assert mask is not None
    return apply_mask(mask, output)


def apply_mask(mask: Backdrop, output: Any) -> Any:
    """Also to tensors in a tuple or a dictionary, if samples are dropped: all get the same mask."""
    if isinstance(output, (Tensor, fx.Proxy)):
        return mask(output)
    if not drops_samples(mask):
        raise TypeError(
            f"{type(mask).__name__} was put behind a module and needs a tensor, but got {type(output).__name__}; "
            "put it behind a module that returns one, or use Backdrop, which drops samples"
        )
    from backdrop.skip.samples import mask_outputs

    return mask_outputs(mask, output)


def mask_and_copy_output(module: nn.Module, args: Any, output: Any) -> Any:
    """The same for an output that is changed in place, which torch refuses for what shares its memory with another."""
    masked = mask_output(module, args, output)
    if masked is output:
        return output
    if isinstance(masked, (Tensor, fx.Proxy)):
        return masked.clone()
    from backdrop.skip.tree import map_leaves

    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, masked)


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
