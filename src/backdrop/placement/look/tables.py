"""The tables of an inspection, as plain text and for rich."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backdrop._core.code import how_to_install
from backdrop.placement.look import wording

if TYPE_CHECKING:
    from rich.console import Group

    from backdrop.placement.inspection import Inspection, Row, Step

__all__ = [
    "LAYERS",
    "MASKS",
    "aligned",
    "as_rich",
    "as_text",
    "layer_cells",
    "mask_cells",
    "mask_notes",
    "remarks",
]

LAYERS = ("layer", "kind", "lattice", "receptive field", "stride")
MASKS = ("mask", "units", "p", "kept in a step", "effective batch", "Skip: time", "Skip: memory")
WIDTH = 100  # of remarks in plain text
FIRST_NUMBERS = (2, 2)  # the first column of each table that is set to the right


def layer_cells(step: Step) -> tuple[str, ...]:
    row = step.last
    return (
        wording.names(step),
        step.last.kind if len(step.rows) == 1 else wording.short_kinds(step.rows),
        wording.by(row.lattice),
        wording.field(row),
        wording.by(row.stride),
    )


def mask_cells(row: Row) -> tuple[str, ...]:
    mask = row.mask
    assert mask is not None
    time, memory = (mask.saving.time, mask.saving.memory) if mask.saving else (None, None)
    return (
        row.name,
        wording.units(mask),
        wording.probability(mask),
        wording.kept(mask),
        wording.effective_batch(mask),
        wording.share(time),
        wording.share(memory),
    )


def mask_notes(found: Inspection) -> list[str]:
    """What Skip would do at each mask, and why."""
    notes = [(row.name, row.mask.saving.note) for row in found.masks if row.mask and row.mask.saving]
    told = [f"Skip at {name}: {note}" for name, note in notes if note]
    pooled = [(row.name, row.mask.pooled) for row in found.masks if row.mask and row.mask.pooled]
    return told + [f"{name}: {wording.pooled(above)}" for name, above in pooled]


def remarks(found: Inspection) -> list[str]:
    """How to read the tables."""
    said = [
        "lattice: the positions of the output; receptive field: the cells of the input that one of them sees; "
        "stride: the cells from one position to the next."
    ]
    if found.masks:
        said.append(
            "Skip: of a whole training step, estimated by the cost model for "
            f'{found.device} with statistics="{found.statistics}".'
        )
        if any(row.mask and row.mask.effective_batch is None for row in found.masks):
            said.append(
                "The effective batch of masks on positions depends on the gradients: gradient_noise measures it."
            )
    else:
        said.append("There are no masks yet: backdrop.placement.suggest says where, insert puts them there.")
    return said


def as_text(found: Inspection) -> str:
    layers = aligned(LAYERS, [layer_cells(step) for step in found.lines()], FIRST_NUMBERS[0])
    masks = aligned(MASKS, [mask_cells(row) for row in found.masks], FIRST_NUMBERS[1]) if found.masks else ""
    said = "\n".join(textwrap.fill(text, WIDTH) for text in (*mask_notes(found), *remarks(found)))
    return "\n\n".join(part for part in (wording.heading(found), layers, masks, said) if part)


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sized = [
            cell.rjust(width) if i >= first_number else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(sized).rstrip()

    return "\n".join(map(line, (headings, ["-" * width for width in widths], *rows)))


def as_rich(found: Inspection) -> Group:
    try:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; tables in colour need rich: {how_to_install('experiments')} (print() needs nothing)"
        ) from None

    def table(headings: Sequence[str], first_number: int) -> Table:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(headings):
            side: Any = "right" if i >= first_number else "left"
            made.add_column(heading.replace(" ", "\n", 1), justify=side, overflow="fold")
        return made

    layers = table(LAYERS, FIRST_NUMBERS[0])
    for step in found.lines():
        layers.add_row(*map(Text, layer_cells(step)), style="bold dark_orange3" if step.mask else "")
    parts: list[Table | Text] = [Text(wording.heading(found), "bold"), layers]
    if found.masks:
        masks = table(MASKS, FIRST_NUMBERS[1])
        for row in found.masks:
            masks.add_row(*map(Text, mask_cells(row)))
        parts.append(masks)
    parts += [Text(note) for note in mask_notes(found)]
    parts += [Text(note, "dim") for note in remarks(found)]
    return Group(*parts)
