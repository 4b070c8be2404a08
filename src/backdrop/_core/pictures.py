"""What all pictures share: a palette with partners for dark pages, Matplotlib's own settings instead of a user's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def bare(svg: str) -> str:
    """Matplotlib's SVG without what changes from run to run or refers to elsewhere: description and document type."""
    return re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg ") :], flags=re.DOTALL)
