"""timm: masks behind the stages of a model, found by what timm knows of them.

    model = insert_masks(timm.create_model("convnext_atto"), {"stages.2": 0.9})

Whatever has a `feature_info` as timm's models have it will do; timm itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from backdrop.graph.trace import first_line
from backdrop.graph.untouched import check_model, mode, quiet
from backdrop.layers import Backdrop, Backdrop2d
from backdrop.placement.surgery import insert

__all__ = ["Stage", "insert_masks", "stages"]

BY_NAME = "name modules as in named_modules(), with Backdrop layers to put behind them"


class Stage(NamedTuple):
    """A part of a model whose output timm calls a feature.

    Attributes:
        name: of the module.
        channels: of its output.
        reduction: how many cells of the input lie between two positions of its output.
    """

    name: str
    channels: int
    reduction: int


def stages(model: nn.Module) -> list[Stage]:
    """The stages of a model in order, as its `feature_info` has them: the numbers are those of timm's `out_indices`."""
    check_model(model)
    known = getattr(model, "feature_info", None)
    if not known:
        raise ValueError(f"{type(model).__name__} has no feature_info, so it has no stages to go by; {BY_NAME}")
    modules = dict(model.named_modules())
    found = []
    for info in getattr(known, "info", known):  # features_only=True makes an object of it, and flat names
        name = str(info["module"])
        flat = name.replace(".", "_")
        is_flat = name not in modules and flat in modules
        found.append(Stage(flat if is_flat else name, info["num_chs"], info["reduction"]))
    return found


def insert_masks(
    model: nn.Module,
    masks: Mapping[str, Backdrop | float] | Mapping[int, Backdrop | float],
    *,
    by: Literal["name", "stage", "reduction"] = "name",
    input_shape: Sequence[int] | None = None,
) -> nn.Module:
    """A copy of a model with masks behind some of its stages; what `backdrop.insert` says of copies holds here too.

    The `state_dict` keeps its keys, so weights go from one to the other, and `backdrop.remove` takes the masks out.

    Args:
        model: a model of timm.
        masks: a stage, and the layer to put behind it. Instead of a layer also its p: then the mask drops positions, in
            the layout that the stage has: `Backdrop2d(p)` for (N, C, H, W), `Backdrop(p, dims=(0, 1, 2))` for
            (N, H, W, C), `Backdrop(p, dims=(0, 1))` for tokens (N, T, C).
        by: what stages go by: "name" of any module (with a p, of a stage), "stage" for their number from 0 as in timm's
            `out_indices`, or "reduction" for the cells of the input between two positions.
        input_shape: of a batch, to find the layout; else (1, C, H, W) as in the `pretrained_cfg` of the model.
    """
    check_model(model)
    if by not in ("name", "stage", "reduction"):
        raise ValueError(f"by has to be 'name', 'stage' or 'reduction', but got {by!r}")
    named = {key if by == "name" else _find(model, key, by): mask for key, mask in masks.items()}
    if len(named) < len(masks):
        raise ValueError(f"masks names a stage twice: {', '.join(map(repr, masks))} are {', '.join(map(repr, named))}")
    unmade = [str(name) for name, mask in named.items() if not isinstance(mask, Backdrop)]
    shapes = _output_shapes(model, unmade, input_shape) if unmade else {}
    return insert(
        model,
        {
            str(name): mask if isinstance(mask, Backdrop) else _make(model, str(name), mask, shapes)
            for name, mask in named.items()
        },
    )


def _find(model: nn.Module, key: str | int, by: str) -> str:
    known = stages(model)
    if by == "stage":
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < len(known):
            raise ValueError(f"stage has to be a number from 0 to {len(known) - 1}, but got {key!r}")
        return known[key].name
    fitting = [stage.name for stage in known if stage.reduction == key]
    if len(fitting) != 1:
        have = ", ".join(f"{stage.name} ({stage.reduction})" for stage in known)
        raise ValueError(f"{len(fitting)} stages have a reduction of {key!r}; there are {have}; choose by 'stage'")
    return fitting[0]


def _output_shapes(model: nn.Module, names: list[str], input_shape: Sequence[int] | None) -> dict[str, tuple[int, ...]]:
    """What the modules of these names return, from a run on tensors that hold nothing."""
    settings = getattr(model, "pretrained_cfg", None) or {}
    shape = tuple(input_shape or (1, *settings.get("input_size", (3, 224, 224))))
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    found: dict[str, tuple[int, ...]] = {}

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            found[places[module]] = tuple(output.shape)

    places = {module: name for name, module in model.named_modules() if name in names}
    hooks = [module.register_forward_hook(note) for module in places]
    try:
        with mode(model, training=False), torch.no_grad(), quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.zeros(shape, dtype=like.dtype, device=like.device))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not take an input of shape {shape} ({first_line(error)}); give input_shape"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _make(model: nn.Module, name: str, p: float, shapes: Mapping[str, tuple[int, ...]]) -> Backdrop:
    channels = next((stage.channels for stage in stages(model) if stage.name == name), None)
    shape = shapes.get(name)
    if channels is not None and shape is not None:
        if len(shape) == 4 and shape[1] == channels:
            return Backdrop2d(p)
        if len(shape) in (3, 4) and shape[-1] == channels:
            return Backdrop(p, dims=tuple(range(len(shape) - 1)))
    if name not in dict(model.named_modules()):
        what = f"is no module of {type(model).__name__}"
    else:
        what = "is no stage of timm's" if channels is None else f"returns {shape or 'something else than a tensor'}"
    raise ValueError(f"the layout of {name!r} is not known, because it {what}; give a Backdrop layer instead of p")
