"""Masks put into a model that is there already, and taken out again, without touching its code.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3))
>>> masked = insert(model, {"1": Backdrop2d(0.9)})
>>> masked[1]
ReLU(
  inplace=True
  (backdrop): Backdrop2d(p=0.9)
)
>>> masked.state_dict().keys() == model.state_dict().keys()
True
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backdrop._core import marks
from backdrop._core.checks import nearest
from backdrop.graph.inserted import NAME, copy_hooks, inserted_mask, mask_and_copy_output, unhook
from backdrop.graph.untouched import check_input_shape, check_model
from backdrop.layers import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d
from backdrop.placement.fields import follow

__all__ = ["insert", "remove"]

COPY = f"{NAME}_copy"
ALL = ("children", "named_children", "modules", "named_modules", "_modules")  # how a forward gets at all modules in it


class _Copy(nn.Module):
    """Behind a mask: whatever follows may change it in place, which torch refuses for what shares its memory."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or (marks.CAPTURING and torch.compiler.is_compiling()):
            return x
        return x.clone()


def insert(
    model: nn.Module, masks: Mapping[str, Backdrop | float], *, input_shape: Sequence[int] | Tensor | None = None
) -> nn.Module:
    """A copy of a model with masks behind some of its modules.

    Whatever takes the output of such a module gets it from the mask. The copy has the same class, its modules have the
    same names and classes, and its `state_dict` has the same keys; each mask is one more child, named "backdrop", of
    the module that it follows. A module that is called several times in a step draws a mask each time. In training
    what follows a mask gets a copy of its output, so that it may be changed in place.

    Args:
        model: any module; it stays as it is.
        masks: the name of a submodule, as in `model.named_modules()`, and the layer to put behind it. The copy uses
            this very layer, so that its p can be changed later. A number is the p of a mask on the positions that the
            output has, or on samples where it has none; that needs `input_shape`.
        input_shape: of a batch, or a batch, to find out what lies along which axis.

    Examples:
        >>> from backdrop import Backdrop
        >>> masked = insert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), {"2": Backdrop(0.9)})
        >>> [name for name, module in masked.named_modules() if isinstance(module, Backdrop)]
        ['2.backdrop']
        >>> insert(nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU()), {"1": 0.9}, input_shape=(4, 1, 100))[1].backdrop
        Backdrop1d(p=0.9)
    """
    check_model(model)
    if not isinstance(masks, Mapping):
        raise TypeError(
            "masks has to be a dictionary from names of modules to Backdrop layers, such as "
            f"{{'features.12': Backdrop2d(0.99)}}, but got {type(masks).__name__}"
        )
    if not masks:
        raise ValueError("masks has to name at least one module, but is empty")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)][1:]
    if any(_is_number(mask) for mask in masks.values()):
        masks = _with_layers(model, masks, names, input_shape)
    for name, mask in masks.items():
        _check(model, name, mask, names)
    # The layers that are given are put in as they are, also if the model holds one of them already.
    memo: dict[int, Any] = {}
    result = copy.deepcopy(model, memo)
    copy_hooks(model, result, memo)
    for name, mask in masks.items():
        assert isinstance(mask, Backdrop)
        _put(result.get_submodule(name), mask)
    return result


def remove(model: nn.Module) -> nn.Module:
    """A copy of a model without the masks that `insert` put in: its inverse.

    Masks that the model's own code calls stay; set their p to 0 to switch them off.
    """
    check_model(model)
    memo: dict[int, Any] = {}
    result = copy.deepcopy(model, memo)
    copy_hooks(model, result, memo)
    found = False
    for module in list(result.modules()):
        appended = type(module).forward is nn.Sequential.forward and isinstance(module._modules.get(NAME), Backdrop)
        if appended or inserted_mask(module) is not None:
            unhook(module)
            del module._modules[NAME]
            module._modules.pop(COPY, None)
            found = True
    if not found:
        raise ValueError("model has no masks that insert put in, so there is nothing to remove")
    return result


def _is_number(mask: object) -> bool:
    return isinstance(mask, (int, float)) and not isinstance(mask, bool)


def _with_layers(
    model: nn.Module,
    masks: Mapping[str, Backdrop | float],
    names: list[str],
    input_shape: Sequence[int] | Tensor | None,
) -> dict[str, Backdrop | float]:
    """Layers for the numbers among the masks."""
    wanted = next(name for name, mask in masks.items() if _is_number(mask))
    if input_shape is None:
        raise TypeError(
            f"masks[{wanted!r}] is the number {masks[wanted]!r}: give input_shape=, such as (1, 3, 224, 224), to find "
            f"out what lies along which axis, or a layer, such as Backdrop2d({masks[wanted]!r})"
        )
    followed = follow(model, input_shape)
    outputs = {path: node for node, paths in followed.look.outputs_of.items() for path in paths}
    made = dict(masks)
    for name, p in masks.items():
        if not _is_number(p) or name not in names:
            continue
        value = followed.values.get(outputs[name]) if name in outputs else None
        shape = followed.look.shape(outputs[name]) if name in outputs else None
        of_samples = shape is not None and len(shape) <= 2 and shape[0] == check_input_shape(input_shape)[0]
        if value is None or not (of_samples or (value.axes and value.batch == 0)):
            raise ValueError(
                f"masks[{name!r}] is the number {p!r}, but what lies along which axis of its output is not known; give "
                "a Backdrop layer"
            )
        made[name] = mask_on(() if of_samples else value.axes)(p)
    return made


def mask_on(axes: tuple[int, ...]) -> Callable[..., Backdrop]:
    """The layer that drops positions along these axes, each sample's by themselves; whole samples if there are none."""
    if axes and axes == tuple(range(2, 2 + len(axes))) and len(axes) <= 3:
        return (Backdrop1d, Backdrop2d, Backdrop3d)[len(axes) - 1]
    return functools.partial(Backdrop, dims=(0, *axes)) if axes else Backdrop


def _check(model: nn.Module, name: str, mask: object, names: list[str]) -> None:
    if name not in names:
        raise ValueError(f"masks names {name!r}, but {type(model).__name__} has no such module{nearest(name, names)}")
    if not isinstance(mask, Backdrop):
        raise TypeError(f"masks[{name!r}] has to be a Backdrop layer, but got {type(mask).__name__}")
    module = model.get_submodule(name)
    if isinstance(module, Backdrop):
        raise ValueError(f"masks names {name!r}, which is a mask itself; set its p instead")
    if NAME in module._modules or hasattr(module, NAME):
        has = "has a mask behind it already; remove the masks first, or set its p" if _is_masked(module) else None
        raise ValueError(f"masks names {name!r}, which {has or f'has something else called {NAME}'}")
    forward = type(module).forward
    if forward is nn.Module.forward:
        raise ValueError(
            f"masks names {name!r}, a {type(module).__name__}, which is never called itself; name a module in it"
        )
    if isinstance(module, nn.Sequential) and forward is not nn.Sequential.forward:
        raise ValueError(
            f"masks names {name!r}, a {type(module).__name__}, which is a Sequential with a forward of its own: a mask "
            "in it might be called twice; name the last module in it"
        )
    if _calls_all(module):
        raise ValueError(
            f"masks names {name!r}, whose forward calls all modules in it, so that it would call the mask too; name "
            "the last module in it"
        )


def _is_masked(module: nn.Module) -> bool:
    return isinstance(module._modules.get(NAME), Backdrop)


def _calls_all(module: nn.Module) -> bool:
    """Whether its forward goes through all modules in it, so that it would come upon a mask among them."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return any(_takes_all(code) for code in _codes(type(module)))


def _takes_all(code: types.CodeType) -> bool:
    """Whether it says self.children() or the like."""
    for before, after in itertools.pairwise(dis.get_instructions(code)):
        loads = before.opname.startswith("LOAD_") and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if loads and before.argval == "self" and after.argval in ALL:
            return True
    return False


def _codes(kind: type[nn.Module]) -> Iterator[types.CodeType]:
    """The code of forward and of the methods that it calls, but for those of torch."""
    waiting, seen = ["forward"], {"forward", *ALL}
    while waiting:
        function = getattr(kind, waiting.pop(), None)
        if not isinstance(function, types.FunctionType) or function.__module__.startswith("torch.nn."):
            continue
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            yield code
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            waiting += [name for name in code.co_names if name not in seen]
            seen.update(code.co_names)


def _put(module: nn.Module, mask: Backdrop) -> None:
    module.add_module(NAME, mask)
    if isinstance(module, nn.Sequential):  # which calls its last children by itself
        module.add_module(COPY, _Copy())
    else:
        module.register_forward_hook(mask_and_copy_output)
