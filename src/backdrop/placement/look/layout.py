"""Where the boxes of a picture go: a box per step, boxes with one lattice side by side as a block, masks in between.

All lengths are in inches. Text is measured with the font that draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from backdrop.placement.look import wording

if TYPE_CHECKING:
    from backdrop.placement.inspection import Inspection, Row, Step

__all__ = ["FONT", "Bar", "Block", "Box", "Layout", "cut", "lay_out", "width_of", "wrapped"]

FONT = "DejaVu Sans"  # comes with Matplotlib, so that all machines draw the same
WIDE = (1.2, 0.9, 0.75, 0.6, 0.5, 0.42)  # widths of a box in a small network
WITH_WORDS = (0.36, 0.32, 0.28, 0.25, 0.22, 0.2)  # of one that still has room for the names of its layers
WITHOUT = (0.17, 0.14, 0.11, 0.09, 0.07, 0.05)
SMALL, MOST = 5.9, 9.6  # for the network
GAP = 0.08  # between blocks
LATTICE, P = 9.0, 8.5  # points, of the numbers above blocks and masks


class Box(NamedTuple):
    """A step; without one, the input."""

    step: Step | None
    left: float
    width: float

    @property
    def right(self) -> float:
        return self.left + self.width


class Block(NamedTuple):
    """Boxes with one lattice."""

    lattice: tuple[int, ...]
    boxes: list[Box]

    @property
    def left(self) -> float:
        return self.boxes[0].left

    @property
    def right(self) -> float:
        return self.boxes[-1].right


class Bar(NamedTuple):
    """A mask."""

    row: Row
    number: int
    middle: float


class Layout(NamedTuple):
    """Of the network, from 0 to its width."""

    blocks: list[Block]
    bars: list[Bar]
    width: float


def lay_out(found: Inspection) -> Layout:
    """As wide as looks good, and never wider than a page."""
    parts, shape = list(_parts(found)), found.input_shape[2:]
    for width in (*WIDE, *WITH_WORDS, *WITHOUT):
        for p_room in (True, False):
            layout = _place(parts, width, shape, p_room)
            if layout.width <= (SMALL if width in WIDE else MOST):
                return layout
    return _squeezed(layout, MOST / layout.width)


def _parts(found: Inspection) -> Iterator[list[Step | None] | Row]:
    """Runs of steps with one lattice, and masks; the input comes first."""
    yield [None]
    for (_, mask), steps in groupby(found.steps(), lambda step: (step.last.lattice, step.mask and step.last.name)):
        if mask is None:
            yield list(steps)
        else:
            yield from (step.last for step in steps)


def _place(parts: list[list[Step | None] | Row], width: float, lattice: tuple[int, ...], p_room: bool) -> Layout:
    blocks: list[Block] = []
    bars: list[Bar] = []
    x = 0.0
    for part in parts:
        if not isinstance(part, list):
            assert part.mask is not None
            room = max(0.24, width_of(f"p {wording.probability(part.mask)}", P) + 0.04) if p_room else 0.24
            bars.append(Bar(part, len(bars) + 1, x + room / 2))
            x += room + GAP
            continue
        if part[0] is not None:
            lattice = part[0].last.lattice
        each = max(width, (width_of(wording.compact(lattice), LATTICE) + 0.02) / len(part))
        blocks.append(Block(lattice, [Box(step, x + i * each, each) for i, step in enumerate(part)]))
        x += len(part) * each + GAP
    return Layout(blocks, bars, x - GAP)


def _squeezed(layout: Layout, factor: float) -> Layout:
    """A network of very many blocks: numbers above them find no room, and are left out."""
    blocks = [
        block._replace(boxes=[Box(box.step, factor * box.left, factor * box.width) for box in block.boxes])
        for block in layout.blocks
    ]
    bars = [bar._replace(middle=factor * bar.middle) for bar in layout.bars]
    return Layout(blocks, bars, factor * layout.width)


@lru_cache(maxsize=4096)
def width_of(text: str, size: float, bold: bool = False) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family=FONT, weight="bold" if bold else "normal")
    # Spaces at the ends would not count.
    return float(TextPath((0, 0), f".{text}.", size=size, prop=font).get_extents().width) / 72 if text else 0.0


def cut(text: str, size: float, room: float) -> str:
    """As much of a list of words as there is room for."""
    if width_of(text, size) <= room:
        return text
    words = text.split(", ")
    while len(words) > 1:
        words.pop()
        shorter = f"{', '.join(words)}, \N{HORIZONTAL ELLIPSIS}"
        if width_of(shorter, size) <= room:
            return shorter
    while text and width_of(f"{text}\N{HORIZONTAL ELLIPSIS}", size) > room:
        text = text[:-1]
    return f"{text}\N{HORIZONTAL ELLIPSIS}" if text else ""


def wrapped(text: str, size: float, room: float) -> list[str]:
    """Lines that are no longer than there is room for."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return [cut(line, size, room) for line in lines]
