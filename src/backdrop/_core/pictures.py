"""What all pictures share: a palette with partners for dark pages, Matplotlib's own settings and no user's, SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6c7b", "#d9dee4"
DARK = {INK: "#e8ecf1", MUTED: "#a3afbd", GRID: "#3b4653"}
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that all machines draw the same
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is one
    "svg.fonttype": "path",
    "svg.hashsalt": "backdrop",
}


@contextmanager
def style(more: Any = None) -> Iterator[None]:
    """Matplotlib's own settings and these, whatever the user or a matplotlibrc has set; afterwards the user's again."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({**STYLE, **(more or {})})
        yield


def svg(figure: Figure, more: Any = None, **options: Any) -> str:
    """A figure, drawn in this style, without anything that changes from run to run or refers to elsewhere."""
    file = io.BytesIO()
    with style(more):
        figure.savefig(file, format="svg", **options)
    content = file.getvalue().decode()
    return re.sub(r"<metadata>.*?</metadata>\s*", "", content[content.index("<svg ") :], flags=re.DOTALL)
