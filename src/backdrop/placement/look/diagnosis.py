"""What `doctor` found, in words: as text, and as a page with the picture of `inspect`."""

from __future__ import annotations

import math
import textwrap
from html import escape
from typing import TYPE_CHECKING

from backdrop.placement.look import page as pages
from backdrop.placement.look import wording
from backdrop.placement.look.tables import aligned
from backdrop.placement.sites import WORTH, SiteFound, Way

if TYPE_CHECKING:
    from backdrop.placement.diagnosis import Diagnosis
    from backdrop.placement.rooms import Room

__all__ = ["advice", "as_text", "fragment", "page"]

WIDTH = 100
NOTABLY = 1.05
HEADINGS = ("way", "time of a step", "times faster", "memory of a step")


def heading(found: Diagnosis) -> str:
    shapes = " and ".join(wording.by(shape) for shape in found.inputs) or "a batch"
    return f"{found.model} on {shapes}, measured on {found.device}"


def advice(found: Diagnosis) -> str:
    best = found.sites[0] if found.sites else None
    way = best.advised if best is not None else None
    if best is None or way is None or best.plain is None:
        if found.loss == "is a mean over samples":
            return "Backdrop gains nothing here: the loss is a mean over samples, so use smaller batches."
        return "Backdrop gains no time and no memory here; as a regulariser it may, if learning rates are tuned."
    less = wording.share(way.memory / max(best.plain.memory, 1))
    where = f"behind {best.after}" if best.after else "on the samples, behind the output"
    said = f"A mask {where} with p = {way.p:.6g}: a step is {way.faster:.2g} times as fast, with {less} memory."
    if best.after and found.loss == "is a mean over samples" and found.samples > 1:
        said += " Smaller batches are an option too: compare at tuned learning rates."
    return said


def as_text(found: Diagnosis) -> str:
    parts = [heading(found), "\n".join(map(_wrapped, _first(found)))]
    for site in found.sites:
        lines = [_wrapped(_title(site))]
        if site.problem:
            lines.append(_wrapped(f"Not measured: {site.problem}"))
        else:
            lines += [aligned(HEADINGS, _rows(site), 1), *map(_wrapped, _about(site))]
            lines += ["", *(f"    {line}" for line in site.report.splitlines())]
        parts.append("\n".join(lines))
    parts += ["\n".join(_wrapped(_room(room)) for room in found.rooms)] if found.rooms else []
    parts.append("\n".join(_wrapped(text) for text in _last(found)))
    if found.code:
        parts.append("\n".join(f"    {line}".rstrip() for line in found.code.splitlines()))
    return "\n\n".join(part for part in parts if part)


def page(found: Diagnosis) -> str:
    """A whole page; needs matplotlib."""
    picture = pages.drawn(found.inspection) if found.inspection is not None else ""
    return pages.PAGE.format(title=escape(heading(found)), content=_content(found, picture))


def fragment(found: Diagnosis) -> str:
    """What a notebook shows: without the picture where matplotlib is missing."""
    try:
        picture = pages.drawn(found.inspection) if found.inspection is not None else ""
    except ModuleNotFoundError as error:
        picture = f'<p class="note">{escape(str(error))}</p>'
    return _content(found, picture)


def _content(found: Diagnosis, picture: str) -> str:
    def paragraphs(lines: list[str]) -> list[str]:
        return [f"<p>{escape(line)}</p>" for line in lines]

    parts = [f"<style>{pages.style()}</style>", f"<h1>{escape(heading(found))}</h1>", *paragraphs(_last(found))]
    if found.code:
        parts.append(f'<pre class="scroll">{escape(found.code)}</pre>')
    parts += [picture, *paragraphs(_first(found))]
    for site in found.sites:
        parts.append(f"<h2>{escape(_title(site))}</h2>")
        if site.problem:
            parts += paragraphs([f"Not measured: {site.problem}"])
            continue
        parts.append(pages.table("steps", HEADINGS, [(cells, "", "") for cells in _rows(site)], 1))
        parts += [*paragraphs(_about(site)), f'<pre class="scroll">{escape(site.report)}</pre>']
    if found.rooms:
        parts += ["<h2>What fits</h2>", *paragraphs([_room(room) for room in found.rooms])]
    return "\n".join(['<div class="backdrop-inspection">', *parts, "</div>"])


def _first(found: Diagnosis) -> list[str]:
    far = found.distortion
    measured = ""
    if not math.isnan(far):
        measured = (
            " (small batches of the same outputs give none)"
            if math.isinf(far)
            else f" (small batches of the same outputs give a gradient that is {far:.1%} away)"
        )
    lines = [
        f"A plain step takes {_time(found.plain.seconds)} and {_bytes(found.plain.memory)}.",
        f"What the loss needs: it {found.loss}{measured}." if found.loss != "is not known" else "",
        "What the loss needs is not known: give doctor a batch and a loss." if found.loss == "is not known" else "",
    ]
    return [*filter(None, lines), *(f"Note: {note}." for note in found.notes)]


def _title(site: SiteFound) -> str:
    return f"{f'Mask behind {site.after}' if site.after else 'Mask on the samples, behind the output'}: {site.why}"


def _rows(site: SiteFound) -> list[tuple[str, ...]]:
    assert site.plain is not None
    first = ("plain", _time(site.plain.seconds), "1", _bytes(site.plain.memory))
    ways = ((_name(way), _time(way.seconds), f"{way.faster:.2f}", _bytes(way.memory)) for way in site.ways)
    return [first, *ways]


def _name(way: Way) -> str:
    more = ", chosen by gradients" if way.informed else ""
    return f"p = {way.p:.6g}{more}{f', at_once={way.at_once}' if way.at_once else ''}"


def _about(site: SiteFound) -> list[str]:
    if site.pays_from is None:
        pays = "Skipping saves no time here at any p."
    else:
        pays = f"Skipping saves time from p = {_rounded(site.pays_from)} on, by a line through these measurements."
    policy = f' Batch statistics: statistics="{site.statistics}".' if site.statistics != "exact" else ""
    lines = [pays + policy]
    if not math.isnan(site.informed):
        less = f"{site.informed:.2g} times less" if site.informed >= NOTABLY else "no less"
        worth = "worth it" if site.informed >= WORTH else "not worth it"
        lines.append(
            f"Units chosen by their gradients have {less} variance than uniform ones, for this batch and these "
            f"weights: {worth}."
        )
    if site.after and site.rule != (site.advised.p if site.advised else site.rule):
        lines.append(f"As a regulariser start from p = {site.rule:.6g}, which keeps as many units as do not overlap.")
    return lines


def _rounded(p: float) -> str:
    return f"{p:.2f}" if p < 0.95 else f"{p:.4g}"


def _room(room: Room) -> str:
    def size(numbers: tuple[int, ...]) -> str:
        if not any(numbers):
            return "none"
        return f"{numbers[0]:,} samples" if room.what == "samples" else wording.by(numbers)

    skipped = f"; with the mask and Skip {size(room.skip)}" if room.skip is not None else ""
    return (
        f"In {_bytes(room.memory)} fit {size(room.plain)}{skipped} (with Adam; measured at {size(room.base)} and less)."
    )


def _last(found: Diagnosis) -> list[str]:
    return [advice(found)]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
