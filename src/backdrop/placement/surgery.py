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
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from backdrop._checks import nearest
from backdrop._inserted import NAME, inserted_mask, mask_and_copy_output, mask_output, unhook
from backdrop.layers import Backdrop
from backdrop.placement.shapes import check_model
from backdrop.skip import graph

__all__ = ["insert", "remove"]

COPY = f"{NAME}_copy"
WAS_INPLACE = f"_{NAME}_was_inplace"  # an attribute of layers that were told not to write into a mask's output
VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd)
VIEW_FUNCTIONS = (
    *("view", "view_as", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze", "unsqueeze"),
    *("expand", "expand_as", "getitem", "chunk", "split", "unbind", "narrow", "select", "contiguous", "dropout", "to"),
)


class _Copy(nn.Module):
    """Behind a mask whose output is changed in place, which torch refuses for what shares its memory with another."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if self.training else x


def insert(model: nn.Module, masks: Mapping[str, Backdrop]) -> nn.Module:
    """A copy of a model with masks behind some of its modules.

    Whatever takes the output of such a module gets it from the mask. The copy has the same class, its modules have the
    same names and classes, and its `state_dict` has the same keys; each mask is one more child, named "backdrop", of
    the module that it follows. A module that is called several times in a step draws a mask each time. Where the output
    of a mask is changed in place, the layer that does so is told not to, or gets a copy.

    Args:
        model: any module; it stays as it is.
        masks: the name of a submodule, as in `model.named_modules()`, and the layer to put behind it. The copy uses
            this very layer, so that its p can be changed later.

    Examples:
        >>> from backdrop import Backdrop
        >>> masked = insert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), {"2": Backdrop(0.9)})
        >>> [name for name, module in masked.named_modules() if isinstance(module, Backdrop)]
        ['2.backdrop']
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
    for name, mask in masks.items():
        _check(model, name, mask, names)
    # The layers that are given are put in as they are, also if the model holds one of them already.
    result = copy.deepcopy(model)
    for name, mask in masks.items():
        _put(result.get_submodule(name), mask)
    _keep_from_writing(result, masks)
    return result


def remove(model: nn.Module) -> nn.Module:
    """A copy of a model without the masks that `insert` put in: its inverse.

    Masks that the model's own code calls stay; set their p to 0 to switch them off.
    """
    check_model(model)
    result = copy.deepcopy(model)
    found = False
    for module in list(result.modules()):
        if WAS_INPLACE in module.__dict__:
            module.inplace = True  # type: ignore[assignment]
            delattr(module, WAS_INPLACE)
        appended = type(module).forward is nn.Sequential.forward and isinstance(module._modules.get(NAME), Backdrop)
        if appended or inserted_mask(module) is not None:
            unhook(module)
            del module._modules[NAME]
            module._modules.pop(COPY, None)
            found = True
    if not found:
        raise ValueError("model has no masks that insert put in, so there is nothing to remove")
    return result


def _check(model: nn.Module, name: str, mask: Backdrop, names: list[str]) -> None:
    if not isinstance(mask, Backdrop):
        raise TypeError(f"masks[{name!r}] has to be a Backdrop layer, but got {type(mask).__name__}")
    if name not in names:
        raise ValueError(f"masks names {name!r}, but {type(model).__name__} has no such module{nearest(name, names)}")
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


def _is_masked(module: nn.Module) -> bool:
    return isinstance(module._modules.get(NAME), Backdrop)


def _put(module: nn.Module, mask: Backdrop) -> None:
    module.add_module(NAME, mask)
    if not isinstance(module, nn.Sequential):  # which calls its last child by itself
        module.register_forward_hook(mask_output)


def _keep_from_writing(model: nn.Module, names: Iterable[str]) -> None:
    """Let nothing change the output of a mask in place."""
    try:
        calls, opaque = graph.trace(model, {})
    except Exception:
        calls, opaque = fx.Graph(), {}
    for name in names:
        nodes = [node for node in calls.nodes if node.op == "call_module" and node.target == f"{name}.{NAME}"]
        known, calls_of = bool(nodes), sum(name in node.meta.get("outputs_of", ()) for node in calls.nodes)
        if 0 < calls_of < len(nodes):
            raise ValueError(
                f"masks names {name!r}, whose forward calls all modules in it, so that it would call the mask too; "
                "name the last module in it"
            )
        for writer in {writer for node in nodes for writer in _writers(model, node, opaque)}:
            if writer.op == "call_module" and writer.target not in opaque:
                layer = graph.attribute(model, str(writer.target))
                layer.inplace = False
                setattr(layer, WAS_INPLACE, True)
            else:
                known = False
        if not known:
            _copy_behind(model.get_submodule(name))


def _writers(model: nn.Module, value: fx.Node, opaque: Mapping[str, str]) -> Iterator[fx.Node]:
    """The calls that change a value in place, or might: torch.fx shows `x += y` as `x + y`."""
    for user in value.users:
        first = bool(user.args) and user.args[0] is value
        layer = graph.attribute(model, str(user.target)) if user.op == "call_module" else None
        augmented = first and user.op == "call_function" and user.target in graph.OUT_OF_PLACE.values()
        if augmented or user.target in opaque or graph.writes_in_place(model, user):
            yield user
        elif isinstance(layer, VIEWS) or (layer is None and _called(user) in VIEW_FUNCTIONS):
            yield from _writers(model, user, opaque)


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _copy_behind(module: nn.Module) -> None:
    if isinstance(module, nn.Sequential):
        module.add_module(COPY, _Copy())
    else:
        unhook(module)
        module.register_forward_hook(mask_and_copy_output)
