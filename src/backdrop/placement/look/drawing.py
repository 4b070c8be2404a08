"""The picture of an inspection: the network from left to right, receptive fields below it, masks where they are.

Everything is placed in inches on one pair of axes, and text is measured before it is placed, so that nothing lies on
anything else. The same inspection gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from backdrop._core.code import how_to_install
from backdrop.placement.look import layout, wording
from backdrop.placement.look.layout import Bar, Block, Box, Layout
from backdrop.placement.look.pen import (
    ALL,
    BOX,
    EDGE,
    FIELD,
    FIELD_TEXT,
    GRID,
    IMAGE,
    MASK,
    MUTED,
    SMALL,
    WORDS,
    Pen,
    Picture,
    style,
)

if TYPE_CHECKING:
    from backdrop.placement.inspection import Inspection

__all__ = ["draw"]

LEFT, RIGHT, EDGE_SPACE = 0.85, 0.25, 0.2  # the first has room for the names of the two rows
LOWEST, HIGHEST = 1.1, 2.3  # of a block
FIELDS = 1.45  # the height of the bars
CARD, THUMB = 1.3, 0.95  # heights of what is said of a mask, and of the small picture beside it
CARDS = 8  # so many masks are explained; of more, tables tell
LINE = 0.165  # from one line of words to the next


def draw(found: Inspection, *, titled: bool = True) -> Picture:
    """Draw the picture, with or without a title of its own; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; pictures need matplotlib: {how_to_install('experiments')}") from None
    with style():
        placed = layout.lay_out(found)
        bounded = any(row.receptive_field for row in found.rows)
        width = max(7.0, LEFT + placed.width + RIGHT)
        shown = placed.bars[:CARDS]
        columns = 2 if width > 8.4 and len(shown) > 1 else 1
        room = width - 2 * EDGE_SPACE
        legend = layout.wrapped(_legend(found), WORDS, room)
        top = (0.5 if titled else 0.05) + (0.55 if placed.bars else 0.3)
        tallest = max(_height(block, placed) for block in placed.blocks)
        below = CARD * -(-len(shown) // columns) + LINE * (len(legend) + (len(shown) < len(placed.bars))) + 0.3
        height = top + tallest + (FIELDS + 0.4 if bounded else 0.1) + below
        figure = Figure(figsize=(width, height), facecolor="none")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        pen = Pen(axes)

        if titled:
            pen.text(EDGE_SPACE, height - 0.3, layout.cut(wording.heading(found), 11, 0.93 * room), 11, bold=True)
        middle = height - top - tallest / 2
        sized = "layers, as high\nas their lattice" if tallest > LOWEST else "layers"
        pen.text(0.3, middle, sized, WORDS, MUTED, turned=True, centred=True)
        floor = middle - tallest / 2 - (FIELDS + 0.3 if bounded else 0)
        _network(pen, placed, middle)
        if bounded:
            _fields(pen, placed, found.input_shape[2:], floor)
        for bar in placed.bars:
            _bar(pen, placed, bar, middle + tallest / 2, floor)
        each = room / columns
        for i, bar in enumerate(shown):
            corner = (EDGE_SPACE + each * (i % columns), floor - 0.3 - CARD * (i // columns))
            _card(pen, bar, found.input_shape[2:], corner, each)
        y = floor - 0.32 - CARD * -(-len(shown) // columns)
        if len(shown) < len(placed.bars):
            legend = [f"and {len(placed.bars) - len(shown)} more masks: see the table", *legend]
        for i, line in enumerate(legend):
            pen.text(EDGE_SPACE, y - LINE * i, line, WORDS, MUTED)
        return Picture(figure, _alt(found))


def _network(pen: Pen, placed: Layout, middle: float) -> None:
    heights = [_height(block, placed) for block in placed.blocks]
    free = -LEFT  # where the last label ends
    for block, high in zip(placed.blocks, heights, strict=True):
        x, low = LEFT + (block.left + block.right) / 2, middle - high / 2
        if block.boxes[0].width >= layout.WITH_WORDS[-1]:
            for box in block.boxes:
                pen.box(LEFT + box.left, low, box.width, high, BOX if box.step else IMAGE, EDGE)
                words = wording.short_kinds(box.step.rows) if box.step else "input"
                pen.words(LEFT + box.left + box.width / 2, middle, words, box.width, high)
        else:
            narrow = block.right - block.left < 0.06
            fill = BOX if block.boxes[0].step else IMAGE
            pen.box(LEFT + block.left, low, block.right - block.left, high, fill, "none" if narrow else EDGE)
            rows = [row for box in block.boxes if box.step for row in box.step.rows]
            words = f"{len(rows)} layers: {wording.short_kinds(rows)}" if rows else "input"
            pen.words(x, middle, words, block.right - block.left, high)
        label = wording.compact(block.lattice)
        reach = layout.width_of(label, layout.LATTICE) / 2
        start, end = x - LEFT - reach, x - LEFT + reach
        higher = [
            other
            for other, height in zip(placed.blocks, heights, strict=True)
            if other is not block and height >= high and other.left < end and other.right > start
        ]
        crossing = [bar for bar in placed.bars if start - 0.04 < bar.middle < end + 0.04]
        if label and start >= free and not higher and not crossing:
            pen.text(x, middle + high / 2 + 0.06, label, layout.LATTICE, align="center")
            free = end


def _tick(power: int) -> str:
    """A power of ten in little room: 1,000 and 10k."""
    return f"{10**power:,}" if power < 4 else f"{10 ** (power % 3)}{'kMGT'[power // 3 - 1]}"


def _height(block: Block, placed: Layout) -> float:
    """Between the lowest and the highest, by the logarithm of the number of positions."""
    largest = max(_side(other.lattice) for other in placed.blocks)
    return LOWEST + (HIGHEST - LOWEST) * (math.log(_side(block.lattice)) / math.log(largest) if largest > 1 else 0.0)


def _fields(pen: Pen, placed: Layout, inputs: tuple[int, ...], floor: float) -> None:
    """Bars on a logarithmic axis, with the numbers that find room in them."""
    boxes = [box for block in placed.blocks for box in block.boxes if box.step]
    largest = max(max(field) for box in boxes if (field := _field(box)))
    top = math.log(2.2 * max(largest, *inputs))
    right = LEFT + placed.width

    def at(size: float) -> float:
        return floor + FIELDS * math.log(size) / top

    pen.text(0.3, floor + FIELDS / 2, "receptive field,\ncells of the input", WORDS, MUTED, turned=True, centred=True)
    for power in range(int(top / math.log(10)) + 1):
        pen.line(LEFT, right, at(10**power), GRID)
        pen.text(LEFT - 0.06, at(10**power) - 0.04, _tick(power), SMALL, MUTED, align="right")
    for box in boxes:
        field = _field(box)
        high = at(max(field)) - floor if field else FIELDS
        pen.box(LEFT + box.left, floor, box.width, max(high, 0.015), *(FIELD if field else ALL,) * 2)
    whole = at(max(inputs))
    pen.line(LEFT, right, whole, MUTED, "--")
    words = "the whole input"
    reach = layout.width_of(words, SMALL)
    crossed = any(whole < at(10**power) < whole + 0.16 for power in range(9))  # by a line of the axis
    y = whole - 0.13 if crossed else whole + 0.04
    free = all((field := _field(box)) and at(max(field)) < min(whole, y) for box in boxes if box.left < reach)
    if free and all(bar.middle > reach + 0.05 for bar in placed.bars):
        pen.text(LEFT, y, words, SMALL, MUTED)
    for block in placed.blocks:
        numbers = [_number(pen, box, floor, at) for box in block.boxes if box.step]
        field = _field(block.boxes[-1])
        if not any(numbers) and field:
            label, end = wording.side(field), block.right
            room = layout.width_of(label, SMALL)
            over = [at(max(_field(box) or field)) for box in block.boxes if box.right > end - room]
            if room <= end - block.left and min(over) - floor > 0.16:
                pen.text(LEFT + end - 0.02, min(over) - 0.13, label, SMALL, FIELD_TEXT, align="right")


def _number(pen: Pen, box: Box, floor: float, at: Callable[[float], float]) -> bool:
    """The size of a receptive field in its bar, if it finds room there."""
    field = _field(box)
    label = wording.side(field) if field else "all"
    room, high = layout.width_of(label, SMALL), at(max(field)) - floor if field else FIELDS
    x = LEFT + box.left + box.width / 2
    if room <= box.width and high > 0.16:
        pen.text(x, floor + high - 0.13, label, SMALL, FIELD_TEXT, align="center")
        return True
    if box.width >= layout.WITH_WORDS[-1] and room + 0.04 <= high:
        pen.text(x, floor + high - room / 2 - 0.02, label, SMALL, FIELD_TEXT, turned=True, centred=True)
        return True
    return False


def _bar(pen: Pen, placed: Layout, bar: Bar, ceiling: float, floor: float) -> None:
    assert bar.row.mask is not None
    x = LEFT + bar.middle
    pen.box(x - 0.035, floor, 0.07, ceiling - floor + 0.2, MASK)
    neighbours = [abs(bar.middle - other.middle) for other in placed.bars if other is not bar]
    if min(neighbours, default=1.0) > 0.21:
        pen.dot(x, ceiling + 0.25, str(bar.number))
    label = f"p {wording.probability(bar.row.mask)}"
    if min(neighbours, default=1.0) > layout.width_of(label, layout.P):
        pen.text(x, ceiling + 0.42, label, layout.P, MASK, align="center")


def _card(pen: Pen, bar: Bar, inputs: tuple[int, ...], corner: tuple[float, float], width: float) -> None:
    """What is to be said of a mask, beside the input with its receptive field, to scale."""
    x, y = corner
    mask = bar.row.mask
    assert mask is not None
    if inputs and mask.unit != "sample" and len(bar.row.receptive_field or inputs) == len(inputs):
        _thumbnail(pen, inputs, bar.row.receptive_field, x + 0.08, y - THUMB - 0.1)
        x += THUMB + 0.3
        width -= THUMB + 0.3
    pen.dot(x + 0.11, y - 0.13, str(bar.number))
    title = f"{bar.row.name}: {bar.row.kind}, p = {wording.probability(mask)}"
    pen.text(x + 0.28, y - 0.18, layout.cut(title, WORDS + 0.5, (width - 0.4) * 0.93), WORDS + 0.5, bold=True)
    said = [
        f"keeps {wording.kept(mask)} {wording.units(mask)}",
        wording.saving(mask),
    ]
    if mask.effective_batch is not None:
        said.insert(1, f"effective batch size {wording.effective_batch(mask)}")
    if mask.unit != "sample":
        said.insert(0, f"a position sees {_seen(bar.row.receptive_field, inputs)}")
    for i, line in enumerate(said):
        pen.text(x, y - 0.42 - LINE * 1.1 * i, layout.cut(line, WORDS, width - 0.15), WORDS)


def _seen(field: tuple[int, ...] | None, inputs: tuple[int, ...]) -> str:
    if field is None:
        return "the whole input"
    if len(field) == len(inputs) and all(size >= whole for size, whole in zip(field, inputs, strict=True)):
        return f"the whole input ({wording.by(field)} cells)"
    return f"{wording.by(field)} of {wording.by(inputs)} cells"


def _thumbnail(pen: Pen, inputs: tuple[int, ...], field: tuple[int, ...] | None, x: float, y: float) -> None:
    """The input and, in its middle, what a position sees of it."""
    scale = THUMB * (0.78 if len(inputs) == 3 else 1.0) / max(inputs)
    seen = [size if field is None else min(size, field[i]) for i, size in enumerate(inputs)]
    sides = [(max(0.025, scale * size), max(0.025, scale * part)) for size, part in zip(inputs, seen, strict=True)]
    if len(sides) == 1:
        sides.insert(0, (0.16, 0.16))
    *depth, (high, part_high), (wide, part_wide) = sides
    left, low = x + (THUMB - wide) / 2, y + (THUMB - high) / 2
    if not depth:
        pen.box(left, low, wide, high, IMAGE, MUTED)
        pen.box(left + (wide - part_wide) / 2, low + (high - part_high) / 2, part_wide, part_high, FIELD, FIELD_TEXT)
        return
    # Three axes: boxes seen from the front, the first axis going back to the upper right.
    slant = 0.28
    deep, part_deep = depth[0][0] * slant, depth[0][1] * slant
    left, low = left - deep / 2, low - deep / 2
    shift = (deep - part_deep) / 2
    for a, b, w, h, d, fill, edge in (
        (left, low, wide, high, deep, IMAGE, MUTED),
        (
            left + (wide - part_wide) / 2 + shift,
            low + (high - part_high) / 2 + shift,
            part_wide,
            part_high,
            part_deep,
            FIELD,
            FIELD_TEXT,
        ),
    ):
        pen.shape([(a, b), (a + w, b), (a + w, b + h), (a, b + h)], fill, edge)
        pen.shape([(a, b + h), (a + w, b + h), (a + w + d, b + h + d), (a + d, b + h + d)], fill, edge)
        pen.shape([(a + w, b), (a + w + d, b + d), (a + w + d, b + h + d), (a + w, b + h)], fill, edge)


def _side(lattice: tuple[int, ...]) -> float:
    return math.prod(lattice) ** (1 / len(lattice)) if lattice else 1.0


def _field(box: Box) -> tuple[int, ...] | None:
    """None where it is unbounded, and where there are no positions."""
    return (box.step.last.receptive_field if box.step else None) or None


def _legend(found: Inspection) -> str:
    said = ["Blue: layers in the order of execution, with their lattice (the positions of their output) above."]
    if any(row.receptive_field for row in found.rows):
        said.append("Green: how much of the input a position sees; the dashed line is the whole input.")
        if not all(row.receptive_field for row in found.rows):
            said[-1] = f"{said[-1][:-1]}, all means unbounded."
    if found.masks:
        said.append(
            "Orange: masks. Skip: what it would save of a training step, by its cost model, on "
            f'{found.device} with statistics="{found.statistics}".'
        )
    return " ".join(said)


def _alt(found: Inspection) -> str:
    masks = [
        f"{row.name} with p = {wording.probability(row.mask)} keeps {wording.kept(row.mask)} {wording.units(row.mask)}"
        for row in found.masks
        if row.mask
    ]
    return ". ".join([wording.heading(found), *masks])
