"""Shapes and words in the colours of an inspection's picture, and the bytes that it is stored as.

Colours are chosen for readers who do not tell red from green, and each has a partner for dark pages.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from backdrop._core import pictures
from backdrop._core.pictures import GRID, INK, MUTED, style
from backdrop.placement.look import layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DARK", "GRID", "MUTED", "NAMES", "Pen", "Picture", "style"]

PAPER = "#fefefe"
BOX, EDGE, IMAGE = "#d5e6f3", "#7fb2d8", "#e9ecef"
FIELD, FIELD_TEXT, ALL = "#7fcbb3", "#00513b", "#d3ece4"
MASK = "#d55e00"
WORDS, SMALL = 8.5, 7.5  # points, of words and of numbers in bars
NAMES = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "paper": PAPER,
    "box": BOX,
    "edge": EDGE,
    "image": IMAGE,
    "field": FIELD,
    "field-text": FIELD_TEXT,
    "all": ALL,
    "mask": MASK,
}
DARK = {
    **pictures.DARK,
    PAPER: "#12171d",
    BOX: "#24435c",
    EDGE: "#4f86b0",
    IMAGE: "#2c3640",
    FIELD: "#1f8a6a",
    FIELD_TEXT: "#d9fbef",
    ALL: "#1d3b33",
    MASK: "#ff8f45",
}


class Picture(NamedTuple):
    """A figure and what it shows, for those who do not see it."""

    figure: Figure
    alt: str

    def svg(self, background: str = "white") -> str:
        """Without anything that changes from run to run or refers to elsewhere."""
        return pictures.svg(self.figure, facecolor=background)

    def png(self) -> bytes:
        from PIL import Image  # which Matplotlib needs, too

        drawn, file = io.BytesIO(), io.BytesIO()
        with style():
            self.figure.savefig(drawn, format="png", dpi=160, facecolor="white")
        # A few flat colours: with a palette the file has a third of the size.
        Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        return file.getvalue()


class Pen:
    """Shapes and words in the style of the picture."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float,
        colour: str = INK,
        *,
        align: str = "left",
        bold: bool = False,
        turned: bool = False,
        centred: bool = False,
    ) -> None:
        style: Any = {"ha": "center" if centred else align, "va": "center" if centred or turned else "baseline"}
        self.axes.text(
            x,
            y,
            words,
            fontsize=size,
            color=colour,
            fontweight="bold" if bold else "normal",
            rotation=90 if turned else 0,
            zorder=5,
            **style,
        )

    def words(self, x: float, y: float, words: str, width: float, height: float) -> None:
        """In a box around this point: level if that gives them more room, or not at all if there is none."""
        level = width > height
        words = layout.cut(words, WORDS, max(width, height) - 0.1)
        if min(width, height) >= 0.18:
            self.text(x, y, words, WORDS, turned=not level, centred=True)

    def box(self, left: float, low: float, width: float, height: float, fill: str, edge: str = "none") -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((left, low), width, height, facecolor=fill, edgecolor=edge, linewidth=0.8))

    def shape(self, corners: Sequence[tuple[float, float]], fill: str, edge: str = "none") -> None:
        from matplotlib.patches import Polygon

        self.axes.add_patch(Polygon(corners, facecolor=fill, edgecolor=edge, linewidth=0.8))

    def line(self, left: float, right: float, y: float, colour: str, dashes: str = "-") -> None:
        self.axes.plot([left, right], [y, y], color=colour, linewidth=0.8, linestyle=dashes, zorder=0.5)

    def dot(self, x: float, y: float, words: str) -> None:
        from matplotlib.patches import Circle

        self.axes.add_patch(Circle((x, y), 0.105, facecolor=MASK, edgecolor="none", zorder=4))
        self.text(x, y - 0.005, words, WORDS if len(words) == 1 else 7, PAPER, bold=True, centred=True)
