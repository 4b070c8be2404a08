"""An inspection as one HTML page, or as a part of one for notebooks: the picture, the masks, the layers.

It needs no network, no scripts and no fonts, and is readable on light and dark pages and on a phone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from backdrop.placement.look import tables, wording

if TYPE_CHECKING:
    from backdrop.placement.inspection import Inspection

__all__ = ["PAGE", "drawn", "fragment", "page", "style", "table"]

STYLE = """
.backdrop-inspection { LIGHT; --page: #fff; --tint: #fdf1e8; --shade: #1f293326; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  padding: 1rem; text-align: left; -webkit-text-size-adjust: 100%; }
@media (prefers-color-scheme: dark) {
  .backdrop-inspection { DARK; --page: #161c23; --tint: #3a2718; --shade: #0009; }
}
.backdrop-inspection * { box-sizing: border-box; }
.backdrop-inspection h1 { font-size: clamp(1.2rem, 1rem + 1.2vw, 1.7rem); line-height: 1.25; margin: .2rem 0 1rem;
  overflow-wrap: anywhere; color: inherit; }
.backdrop-inspection h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; color: inherit; }
.backdrop-inspection p { margin: .4rem 0; max-width: 60rem; overflow-wrap: anywhere; }
.backdrop-inspection .note { color: var(--muted); font-size: .875rem; }
.backdrop-inspection .scroll { overflow-x: auto; margin: 0; background:
  linear-gradient(to left, var(--page) 30%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100% no-repeat scroll; }
.backdrop-inspection svg { display: block; width: 100%; height: auto; }
.backdrop-inspection svg * { stroke-linejoin: round; stroke-linecap: butt; }
.backdrop-inspection table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums;
  background: none; }
.backdrop-inspection th, .backdrop-inspection td { padding: .3rem .8rem .3rem 0; text-align: left;
  vertical-align: top; white-space: nowrap; border: 0; border-bottom: 1px solid var(--grid);
  background: none; color: inherit; }
.backdrop-inspection th { color: var(--muted); font-weight: 600; font-size: .8125rem; vertical-align: bottom; }
.backdrop-inspection td.number, .backdrop-inspection th.number { text-align: right;
  padding: .3rem 0 .3rem 1.2rem; }
.backdrop-inspection td small { display: block; color: var(--muted); font-size: .78rem; max-width: 24rem;
  white-space: normal; }
.backdrop-inspection tr.mask td { background: var(--tint); color: var(--mask); font-weight: 650; }
.backdrop-inspection tr.mask td small { font-weight: 400; }
.backdrop-inspection summary { cursor: pointer; font-weight: 600; margin: 1.2rem 0 .5rem; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; }}
main {{ max-width: 76rem; margin: 0 auto; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #161c23; }} }}
</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def page(found: Inspection) -> str:
    """A whole page; needs matplotlib."""
    return PAGE.format(title=escape(wording.heading(found)), content=_content(found, drawn(found)))


def fragment(found: Inspection) -> str:
    """What a notebook shows: the same, without the picture where matplotlib is missing."""
    try:
        picture = drawn(found)
    except ModuleNotFoundError as error:
        picture = f'<p class="note">{escape(str(error))}</p>'
    return _content(found, picture)


def _content(found: Inspection, picture: str) -> str:
    parts = [f"<style>{style()}</style>", f"<h1>{escape(wording.heading(found))}</h1>", picture]
    if found.masks:
        cells = [(tables.mask_cells(row), "", "") for row in found.masks]
        parts += ["<h2>Masks</h2>", table("masks", tables.MASKS, cells, tables.FIRST_NUMBERS[1])]
    parts += [f"<p>{escape(note)}</p>" for note in tables.mask_notes(found)]
    parts += ["<h2>Layers</h2>", _layers(found)]
    parts += [f'<p class="note">{escape(note)}</p>' for note in tables.remarks(found)]
    if found.folded and len(found.steps()) < len(found.rows):
        parts.append(f"<details><summary>Every layer</summary>{_layers(found.unfolded())}</details>")
    return "\n".join(['<div class="backdrop-inspection">', *parts, "</div>"])


def _layers(found: Inspection) -> str:
    steps = found.lines()
    cells = [
        (tables.layer_cells(step), "mask" if step.mask else "", "" if found.folded else step.last.note)
        for step in steps
    ]
    return table("layers", tables.LAYERS, cells, tables.FIRST_NUMBERS[0])


def table(name: str, headings: Sequence[str], rows: Iterable[tuple[Sequence[str], str, str]], first_number: int) -> str:
    """Rows are cells, a class for their style, and a remark for the first of them."""

    def cell(tag: str, i: int, text: str, remark: str = "") -> str:
        kind = ' class="number"' if i >= first_number else ""
        small = f"<small>{escape(remark)}</small>" if remark and i == 0 else ""
        return f"<{tag}{kind}>{escape(text)}{small}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(headings))
    body = []
    for cells, kind, remark in rows:
        line = "".join(cell("td", i, text, remark) for i, text in enumerate(cells))
        body.append(f'<tr class="{kind}">{line}</tr>' if kind else f"<tr>{line}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><thead><tr>{head}</tr></thead>\n'
        "<tbody>" + "\n".join(body) + "</tbody></table></div>"
    )


def drawn(found: Inspection) -> str:
    """As a part of the page, whose colours it takes."""
    from backdrop.placement.look.drawing import draw
    from backdrop.placement.look.pen import NAMES

    picture = draw(found, titled=False)
    start, _, rest = picture.svg(background="none").partition(">")
    start = re.sub(r' (width|height)="[^"]*"', "", start)
    rest = re.sub(r"<style type=\"text/css\">.*?</style>", "", rest, flags=re.DOTALL)  # would be one of the whole page
    names = {colour: name for name, colour in NAMES.items()}
    rest = re.sub(r"#[0-9a-f]{6}\b", lambda hit: f"var(--{names[hit[0]]})" if hit[0] in names else hit[0], rest)
    # As large as in print where there is room; on a phone it scrolls sideways and stays readable.
    inches = picture.figure.get_figwidth()
    sizes = f"max-width: {7.1 * inches:.0f}rem; min-width: {4.9 * inches:.0f}rem"
    svg = f'{start} role="img" aria-label="{escape(picture.alt)}" style="{sizes}">{rest}'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="picture">{svg}</div>'


def style() -> str:
    from backdrop.placement.look.pen import DARK, NAMES

    light = "; ".join(f"--{name}: {colour}" for name, colour in NAMES.items())
    dark = "; ".join(f"--{name}: {DARK[colour]}" for name, colour in NAMES.items())
    return STYLE.replace("LIGHT", light).replace("DARK", dark)
