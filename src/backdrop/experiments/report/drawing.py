"""How the pictures of a report look, and as which bytes they are stored. What is in them, `figures` says.

Colours are chosen for readers who do not tell red from green, and each has a partner for dark pages. The same records
give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from backdrop._core import pictures
from backdrop._core.pictures import GRID, INK, MUTED
from backdrop.experiments.report.statistics import Estimate

__all__ = ["INK", "MUTED", "Line", "Picture", "dots", "heat_map", "lines", "style"]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8568f", "#a67600", "#3d9bd4", "#7a4fa3", "#6b6b00")
RAMP = tuple(to_hex(mpl.colormaps["viridis"](0.82 * i / 7)) for i in range(8))
MARKERS = "osD^vPX*"
DARK_PALETTE = ("#4fb3f2", "#ff8f45", "#2fd1a2", "#ec9fcb", "#f0bd45", "#a5dcff", "#c3a1ea", "#d4d46a")
DARK = pictures.DARK | dict(zip(PALETTE, DARK_PALETTE, strict=True))
DARK |= {light: to_hex(mpl.colormaps["viridis"](0.45 + 0.55 * i / 7)) for i, light in enumerate(RAMP)}
STYLE: Any = {
    "font.size": 12,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "savefig.dpi": 160,
}
WIDTH = 5.4  # inches: shrunk to a phone's width, the print is still large enough


def style() -> AbstractContextManager[None]:
    """In which all of this is to be drawn."""
    return pictures.style(STYLE)


class Picture(NamedTuple):
    """A figure and what it shows."""

    name: str  # of its file
    title: str  # what is drawn
    alt: str  # what is to be seen, for those who do not see it
    figure: Figure
    note: str = ""  # how to read it

    def svg(self) -> tuple[bytes, bytes]:
        """For light and for dark pages, without anything that changes from run to run or refers to elsewhere."""
        content = pictures.svg(self.figure, STYLE)
        dark = re.sub(r"#[0-9a-f]{6}\b", lambda found: DARK.get(found[0], found[0]), content)
        return content.encode(), dark.encode()

    def png(self) -> bytes:
        file = io.BytesIO()
        with style():
            self.figure.savefig(file, format="png", facecolor="white", metadata={"Software": None})
        return file.getvalue()


class Line(NamedTuple):
    """Points to join: where they are, what was found there, and how to draw them."""

    label: str
    points: Sequence[tuple[float, Estimate]]
    colour: str
    marker: str = "o"
    dashed: bool = False


def new_figure(height: float = 4.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def shades(count: int) -> list[str]:
    """Colours for a rising order."""
    return [RAMP[round(i * 7 / max(1, count - 1))] for i in range(count)]


def place(p: float) -> float:
    """Where a mask probability goes on an axis on which every halving of what is kept is one step."""
    return -math.log2(1 - p) if p < 1 else 10.0


def p_axis(axes: Axes, values: Sequence[float], name: str) -> None:
    """Ticks at the probabilities that were measured, as far as there is room."""
    values = sorted(values)
    room = 0.075 * (place(values[-1]) - place(values[0]))
    kept = [values[0]]
    for p in values[1:-1]:
        if place(p) - place(kept[-1]) > room and place(values[-1]) - place(p) > room:
            kept.append(p)
    kept += values[-1:] if len(values) > 1 else []
    axes.set_xticks([place(p) for p in kept], [f"{p:.4g}" for p in kept])
    axes.set_xlabel(f"mask probability {name}, spaced by what is kept")


def logarithmic(axis: Axis) -> None:
    """Plain numbers, as many as there is room for; Matplotlib's own are formulas. To be called after drawing."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 2.6 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def lines(axes: Axes, drawn: Sequence[Line]) -> None:
    """Means as lines; their intervals as bands behind one or two of them, else as bars that stand side by side."""
    solid = [line for line in drawn if not line.dashed]
    width = max((at for line in drawn for at, _ in line.points), default=0.0)
    for i, line in enumerate(drawn):
        shift = 0.0 if len(solid) <= 2 else 0.008 * width * (i - (len(drawn) - 1) / 2)
        x = [at + shift for at, _ in line.points]
        ends = [(at + shift, e.low, e.high) for at, e in line.points if e.low is not None and e.high is not None]
        if ends and not line.dashed:
            where, low, high = zip(*ends, strict=True)
            if len(solid) <= 2 and len(ends) > 1:
                axes.fill_between(where, low, high, color=line.colour, alpha=0.16, linewidth=0)
            else:
                axes.vlines(where, low, high, color=line.colour, linewidth=1.6, alpha=0.7)
        axes.plot(
            x,
            [e.mean for _, e in line.points],
            color=line.colour,
            marker=line.marker,
            linestyle="--" if line.dashed else "-",
            markerfacecolor="none" if line.dashed else line.colour,
            label=short(line.label),
        )


def short(text: str) -> str:
    """What fits beside an axis or into a legend."""
    return text if len(text) <= 40 else f"{text[:39]}\N{HORIZONTAL ELLIPSIS}"


def legend(figure: Figure, labels: Sequence[str]) -> None:
    """Below the axes, in as many columns as there is room for."""
    if len(labels) > 1 or (labels and labels[0]):
        longest = max(len(short(label)) for label in labels)
        figure.legend(loc="outside lower center", ncols=max(1, min(len(labels), 4, 62 // (longest + 7))))


def dots(
    axes: Axes,
    rows: Sequence[str],
    series: Mapping[str, Sequence[Estimate | None]],
    references: Mapping[str, Sequence[float | None]] | None = None,
) -> None:
    """Rows of means with their intervals, from top to bottom: for each series an estimate a row.

    The numbers to compare with, for some of the series, are hollow diamonds.
    """
    shift = 0.3 / max(1, len(series))
    for i, (name, estimates) in enumerate(series.items()):
        colour, down = PALETTE[i % len(PALETTE)], (2 * i - len(series) + 1) * shift
        for row, found in enumerate(estimates):
            if found is not None and found.low is not None and found.high is not None:
                axes.hlines(row + down, found.low, found.high, color=colour, linewidth=2.5, alpha=0.55)
        known = [(e.mean, row + down) for row, e in enumerate(estimates) if e is not None]
        if known:
            axes.plot(*zip(*known, strict=True), MARKERS[i], color=colour, markersize=8, label=name)
        others = [(x, row + down) for row, x in enumerate((references or {}).get(name, ())) if x is not None]
        if others:
            label = f"{name}, the paper"
            axes.plot(*zip(*others, strict=True), "D", color=colour, markerfacecolor="none", label=label)
    axes.set_yticks(range(len(rows)), [short(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def heat_map(
    figure: Figure,
    axes: Axes,
    names: tuple[str, str],
    cells: Mapping[tuple[float, float], float],
    best: tuple[float, float],
    digits: int,
) -> None:
    """A number per pair of probabilities, the first across and the second upwards, with a frame around the best."""
    across, upwards = (sorted({pair[i] for pair in cells}) for i in range(2))
    grid = [[cells.get((x, y), math.nan) for x in across] for y in upwards]
    mesh = axes.pcolormesh(grid, cmap="cividis", edgecolors="face")
    low, high = min(cells.values()), max(cells.values())
    for (x, y), value in cells.items():
        bright = high > low and (value - low) / (high - low) > 0.55
        at = (across.index(x) + 0.5, upwards.index(y) + 0.5)
        size = 11 if len(across) <= 5 else 9
        axes.annotate(f"{value:.{digits}f}", at, ha="center", va="center", fontsize=size, color="k" if bright else "w")
    corner = (across.index(best[0]), upwards.index(best[1]))
    axes.add_patch(mpl.patches.Rectangle(corner, 1, 1, fill=False, edgecolor=PALETTE[1], linewidth=3, clip_on=False))
    axes.set_xticks([i + 0.5 for i in range(len(across))], [f"{p:.4g}" for p in across])
    axes.set_yticks([i + 0.5 for i in range(len(upwards))], [f"{p:.4g}" for p in upwards])
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.grid(visible=False)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.outline.set_visible(False)
