"""A model at a glance: the lattice and the receptive field of every layer, and what its masks do in a training step.

>>> from torch import nn
>>> from backdrop import Backdrop2d
>>> layers = [nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3), Backdrop2d(0.99, exact=True)]
>>> print(inspect(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), (2, 1, 1021, 1021)))  # doctest: +ELLIPSIS
Sequential on an input of 2 x 1 x 1021 x 1021: 5 layers, one of them a mask
<BLANKLINE>
layer   kind                 lattice  receptive field  stride
------  -----------------  ---------  ---------------  ------
0 to 1  conv, relu         255 x 255            5 x 5   4 x 4
2       Conv2d             253 x 253          13 x 13   4 x 4
3       Backdrop2d         253 x 253          13 x 13   4 x 4
4       AdaptiveAvgPool2d      1 x 1        unbounded       -
<BLANKLINE>
mask  units                    p  kept in a step  effective batch  Skip: time  Skip: memory
----  --------------------  ----  --------------  ---------------  ----------  ------------
3     units in each sample  0.99   640 of 64,009                -...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from backdrop._core.draw import make_lattice
from backdrop._core.files import put
from backdrop.functional import effective_batch_size
from backdrop.graph.table import Statistics
from backdrop.graph.untouched import check_input_shape, check_model
from backdrop.layers import Backdrop, drops_samples
from backdrop.placement.fields import Field, follow
from backdrop.placement.pooled import pooled_by
from backdrop.placement.savings import Saving, savings
from backdrop.skip.budget import Memory, TileSize, check_memory, check_tile
from backdrop.skip.statistics import check_statistics

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Inspection", "Mask", "Row", "Step", "check_path", "device_of", "inspect"]

SUFFIXES = (".html", ".png", ".svg")


@dataclass(frozen=True)
class Mask:
    """What a Backdrop layer does in a training step.

    Args:
        p: the probability that a unit's gradient is dropped.
        unit: what is kept or dropped as a whole: a "sample", a "unit" (one position), or a "patch" of them.
        patch: how many positions it has along each axis.
        groups: how many times such units are drawn: once for each sample, or once.
        units: how many there are in a group, the N of Eq. 1.
        kept: how many of them are kept, on average if that is random; never less than one.
        exact: whether that number is always the same.
        shared: whether all samples of a batch share a mask over positions.
        batch: how many samples there are.
        effective_batch: the samples of a minibatch that would be as noisy, `batch * (1 - p)`, of masks on samples; None
            for masks on positions, where it depends on the gradients: `gradient_noise` measures it.
        saving: what Skip would save of a training step, if that is known.
        pooled: the mean over all positions above a mask on positions; "" where there is none. Below it all positions
            have about the same gradient, so choose="gradient" cannot help.
    """

    p: float
    unit: str
    patch: tuple[int, ...]
    groups: int
    units: int
    kept: float
    exact: bool
    shared: bool
    batch: int
    effective_batch: float | None
    saving: Saving | None
    pooled: str = ""


@dataclass(frozen=True)
class Row:
    """A layer, or a function such as an addition, in the order of execution.

    Args:
        name: its dotted path.
        kind: its class, or the name of the function.
        shape: of its output.
        lattice: the positions of its output along each spatial axis; none where there are none any more.
        receptive_field: how many cells of the input a position sees along each axis; None where it sees everything.
        stride: how many cells of the input lie between two positions.
        note: what there is to say of its receptive field.
        mask: of Backdrop layers, what they do.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    lattice: tuple[int, ...]
    receptive_field: tuple[int, ...] | None
    stride: tuple[Fraction, ...] | None
    note: str = ""
    mask: Mask | None = None


@dataclass(frozen=True)
class Step:
    """Layers in a row with one lattice and one receptive field, such as a convolution, its norm and its rectifier."""

    rows: tuple[Row, ...]

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def mask(self) -> Mask | None:
        return self.last.mask


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. It prints as a table; `save` writes a page or a picture.

    Args:
        model: the name of its class.
        input_shape: of the batch that was looked at.
        rows: one per layer.
        statistics: what Skip would do with batch statistics.
        device: where the time that Skip would save was estimated for.
        folded: whether tables show layers with one lattice and one receptive field as one line.
    """

    model: str
    input_shape: tuple[int, ...]
    rows: tuple[Row, ...]
    statistics: Statistics
    device: str
    folded: bool = True

    @property
    def masks(self) -> list[Row]:
        """The rows of the Backdrop layers."""
        return [row for row in self.rows if row.mask is not None]

    def steps(self) -> list[Step]:
        """The rows, those of layers with one lattice and one receptive field together; masks stand alone."""
        same = groupby(self.rows, lambda row: (row.lattice, row.receptive_field, row.mask and row.name))
        return [Step(tuple(rows)) for _, rows in same]

    def lines(self) -> list[Step]:
        """What tables have a line for."""
        return self.steps() if self.folded else [Step((row,)) for row in self.rows]

    def unfolded(self) -> Inspection:
        """The same with a line for every layer."""
        return replace(self, folded=False)

    def __str__(self) -> str:
        from backdrop.placement.look.tables import as_text

        return as_text(self)

    def __rich__(self) -> Group:
        from backdrop.placement.look.tables import as_rich

        return as_rich(self)

    def _repr_html_(self) -> str:
        from backdrop.placement.look.page import fragment

        return fragment(self)

    def save(self, path: str | Path) -> None:
        """Write a page (.html) with picture and tables, or the picture alone (.png or .svg).

        The file is put in place whole; one that is there is replaced. Needs matplotlib.
        """
        path = check_path(path)
        if path.suffix.lower() == ".html":
            from backdrop.placement.look.page import page

            content = page(self).encode()
        else:
            from backdrop.placement.look.drawing import draw

            picture = draw(self)
            content = picture.png() if path.suffix.lower() == ".png" else picture.svg().encode()
        put(path, content, "the picture")


def inspect(
    model: nn.Module,
    input_shape: Sequence[int] | Tensor,
    *,
    statistics: Statistics = "exact",
    device: torch.device | str | None = None,
    tile: TileSize = None,
    memory: Memory = None,
) -> Inspection:
    """Look at every layer of a model, and at what its masks do in a training step; nothing is computed.

    Args:
        model: any module that takes one tensor.
        input_shape: of a batch, (samples, channels, positions...), or such a batch.
        statistics: what Skip would do with batch statistics, "exact", "sampled" or "frozen".
        device: where the model would be trained, such as "cuda", to estimate what Skip would save there. Else where it
            is now.
        tile: of `skip_blocked`, if it is to run in tiles.
        memory: the budget of `skip_blocked`, such as "4GB".

    Examples:
        >>> found = inspect(nn.Sequential(nn.Conv1d(1, 4, 9), Backdrop(0.75)), (128, 1, 1000))
        >>> found.rows[0].receptive_field
        (9,)
        >>> found.masks[0].mask.kept
        32.0
    """
    check_model(model)
    check_statistics(statistics)
    tiles = check_tile(tile, memory) is not None or check_memory(memory) is not None
    place = device_of(model, device)
    shape = tuple(check_input_shape(input_shape))
    followed = follow(model, shape)
    fields = [(node, followed.fields[node]) for node in followed.look.rows if node in followed.fields]
    try:
        saved = savings(model, shape, statistics=statistics, device=place, tile=tile, memory=memory)
    except ValueError:  # it looks at values; all else has been checked above
        if tiles:  # or nothing fits in the budget, which the error says
            raise
        saved = {}
    layers = dict(model.named_modules(remove_duplicate=False))
    rows = tuple(_row(field, layers, shape[0], saved, pooled_by(followed, node)) for node, field in fields)
    return Inspection(type(model).__name__, shape, rows, statistics, str(place))


def check_path(path: str | Path) -> Path:
    """A file that `save` can write."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path has to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, but got {str(path)!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder")
    return path


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The one that is asked for, or that of the model."""
    if device is None:
        return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device has to be one that torch knows, such as 'cuda', but got {device!r}") from None


def _row(field: Field, layers: dict[str, nn.Module], batch: int, saved: dict[str, Saving], pooled: str) -> Row:
    path = field.name.partition(" (")[0]  # a second call of the same layer has a number behind its name
    layer = layers.get(path)
    mask = _mask(layer, field.shape, batch, saved.get(path), pooled) if isinstance(layer, Backdrop) else None
    return Row(field.name, field.kind, field.shape, field.lattice, field.size, field.stride, field.note, mask)


def _mask(layer: Backdrop, shape: tuple[int, ...], batch: int, saving: Saving | None, pooled: str) -> Mask:
    lattice, p = make_lattice(shape, layer.dims, layer.patch), float(layer.p)
    patch = tuple(size for axis, size in zip(lattice.axes, lattice.patch, strict=True) if axis != 0)
    return Mask(
        p=p,
        unit="sample" if not patch else "patch" if max(patch) > 1 else "unit",
        patch=patch,
        groups=lattice.groups,
        units=lattice.size,
        kept=expected_kept(lattice.size, p, exact=layer.exact),
        exact=layer.exact or p == 0,
        shared=0 not in lattice.axes,
        batch=batch,
        effective_batch=effective_batch_size(batch, p) if drops_samples(layer, len(shape)) else None,
        saving=saving,
        pooled=pooled if patch else "",
    )


def expected_kept(units: int, p: float, *, exact: bool) -> float:
    """Of a group of so many units, at least one is kept: a draw that drops all of them, which happens with
    probability p^N, keeps one."""
    if exact or p == 0 or units == 0:
        return float(min(units, max(1, round(units * (1 - p)))))
    return units * (1 - p) + p**units
