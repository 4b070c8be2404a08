"""The space in which masks are searched for: which masks, from how many units each chooses, and where to start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from backdrop._core.checks import check_int, check_p
from backdrop._core.draw import make_lattice
from backdrop.experiments import search
from backdrop.experiments.settings import nearest
from backdrop.layers import Backdrop

__all__ = ["find", "starts", "units"]


def find(model: nn.Module, leave: Iterable[str]) -> dict[str, Backdrop]:
    """The masks to search for, by their paths: all but those to leave alone."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be a torch.nn.Module, but got {type(model).__name__}")
    masks = {path: module for path, module in model.named_modules() if isinstance(module, Backdrop)}
    if not masks:
        raise ValueError("model has no Backdrop layer to search p for; put some in with backdrop.placement.insert")
    left = [leave] if isinstance(leave, str) else list(leave)
    for path in left:
        _check_path("leave", path, masks)
    found = {path: mask for path, mask in masks.items() if path not in left}
    if not found:
        raise ValueError("leave names all Backdrop layers of the model, so there is no p to search for")
    return found


def units(
    model: nn.Module,
    masks: Mapping[str, Backdrop],
    input_shape: Sequence[int] | None,
    given: Mapping[str, int] | int | None,
) -> dict[str, int]:
    """Of each mask, as given or as counted for this shape of a batch."""
    if isinstance(given, Mapping):
        for path in given:
            _check_path("units", path, masks)
        known = {path: check_int(f"units of {path}", count, 1) for path, count in given.items()}
    else:
        known = {} if given is None else dict.fromkeys(masks, check_int("units", given, 1))
    missing = {path: mask for path, mask in masks.items() if path not in known}
    if missing and input_shape is not None:
        known |= _count(model, missing, input_shape)
    for path in masks:
        if path not in known:
            why = "no call of it was seen, so" if input_shape else "give input_shape, the shape of a batch, or"
            raise ValueError(
                f"it is not known from how many units the mask {path!r} chooses; {why} give units={{{path!r}: NUMBER}}"
            )
    return {path: known[path] for path in masks}


def _count(model: nn.Module, masks: Mapping[str, Backdrop], input_shape: Sequence[int]) -> dict[str, int]:
    """Units in a group of each mask that the model calls; the most, where it is called with several shapes."""
    from backdrop.graph.look import look

    try:
        calls = look(model, input_shape)
    except ValueError as error:
        raise ValueError(f"the units of masks cannot be counted, so give units: {error}") from error
    found: dict[str, int] = {}
    paths = {id(mask): path for path, mask in masks.items()}
    for node, called in calls.layers.items():
        module, shape = model.get_submodule(called), calls.shape(node)
        if isinstance(module, Backdrop) and id(module) in paths and shape is not None:
            path = paths[id(module)]
            found[path] = max(found.get(path, 1), make_lattice(shape, module.dims, module.patch).size)
    return found


def starts(
    masks: Mapping[str, Backdrop], units: Mapping[str, int], more: Iterable[Mapping[str, float]]
) -> list[dict[str, float]]:
    """What to try first, as Optuna's parameters: no masks, the model's own, and what the user gives."""
    own = {path: float(mask.p) for path, mask in masks.items()}
    points = [dict.fromkeys(masks, 0.0), own]
    for point in more:
        for path in point:
            _check_path("start", path, masks)
        points.append({**own, **{path: float(check_p(p)) for path, p in point.items()}})
    distinct = [point for i, point in enumerate(points) if point not in points[:i]]
    return [{search.keep(path): max(1 - p, 1 / units[path]) for path, p in point.items()} for point in distinct]


def _check_path(argument: str, path: str, masks: Mapping[str, Backdrop]) -> None:
    if path not in masks:
        raise ValueError(
            f"{argument} names {path!r}, which is not a mask to search for{nearest(str(path), masks)}; there are "
            f"{', '.join(map(repr, masks))}"
        )
