"""How tables and pictures of a model put numbers and layers into words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backdrop.placement.inspection import Inspection, Mask, Row, Step

# Long names of layers, and what a picture calls them.
SHORT = (
    (r"ConvTranspose\dd", "up-conv"),
    (r"Conv\dd\w*", "conv"),
    (r"\w*(Batch|Group|Layer|Instance|RMS)Norm\w*|(batch|group|layer|instance|rms)_norm", "norm"),
    (r"AdaptiveAvgPool\dd|SelectAdaptivePool\dd", "average"),
    (r"AvgPool\dd", "avg-pool"),
    (r"\w*MaxPool\dd", "max-pool"),
    (r"LeakyReLU|ReLU6?|relu_?", "relu"),
    (r"adaptive_avg_pool\dd", "average"),
    (r"i?add_?", "add"),
)
SILENT = ("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropPath", "dropout")


def by(sizes: Sequence[int | Fraction] | None, none: str = "-") -> str:
    """Sizes along the axes: 64 x 64."""
    return none if sizes is None or len(sizes) == 0 else " x ".join(map(str, sizes))


def compact(sizes: Sequence[int]) -> str:
    """The same for little room: 64² instead of 64 x 64."""
    if len(set(sizes)) == 1 and len(sizes) > 1 and sizes[0] != 1:
        return f"{sizes[0]}{'²³'[len(sizes) - 2]}" if len(sizes) < 4 else f"{sizes[0]}^{len(sizes)}"
    return "1" if set(sizes) == {1} else " x ".join(map(str, sizes))


def side(sizes: Sequence[int]) -> str:
    """One number where all axes have it."""
    return str(sizes[0]) if len(set(sizes)) == 1 else " x ".join(map(str, sizes))


def field(row: Row) -> str:
    return by(row.receptive_field, "unbounded")


def names(step: Step) -> str:
    """The first and the last of them, what their paths have in common only once."""
    first, last = step.rows[0].name, step.last.name
    if first == last:
        return first
    parts, others = first.split("."), last.split(".")
    while len(parts) > 1 and len(others) > 1 and parts[0] == others[0]:
        parts, others = parts[1:], others[1:]
    return f"{first} to {'.'.join(others)}"


def short_kinds(rows: Iterable[Row]) -> str:
    """Each kind once, in few words and in the order of execution, without layers that are nothing but a name."""
    rows = list(rows)
    heard = [row for row in rows if row.kind not in SILENT] or rows
    return ", ".join(dict.fromkeys(_short(row.kind) for row in heard))


def _short(kind: str) -> str:
    return next((word for pattern, word in SHORT if re.fullmatch(pattern, kind)), kind.lower())


def kept(mask: Mask) -> str:
    """41 of 4,096."""
    number = f"{mask.kept:,.0f}" if mask.exact or mask.kept >= 10 else f"{mask.kept:.2g}"
    number = number if mask.exact else f"about {number}"
    return f"{number} of {mask.units:,}"


def units(mask: Mask) -> str:
    """What is kept or dropped as a whole: units in each sample."""
    if mask.unit == "sample":
        return "samples"
    several = "units" if mask.unit == "unit" else f"patches of {by(mask.patch)}"
    return f"{several}, the same in all samples" if mask.shared else f"{several} in each sample"


def probability(mask: Mask) -> str:
    return f"{mask.p:.6g}"


def effective_batch(mask: Mask) -> str:
    size = mask.effective_batch
    if size is None:
        return "-"
    return f"{size:,.0f} of {mask.batch:,}" if size >= 100 else f"{size:.3g} of {mask.batch:,}"


def share(ratio: float | None) -> str:
    """What a ratio of costs saves: 57 % less."""
    if ratio is None:
        return "unknown"
    percent = round(100 * (1 - ratio))
    return "the same" if percent == 0 else f"{abs(percent)} % {'less' if percent > 0 else 'more'}"


def saving(mask: Mask) -> str:
    if mask.saving is None:
        return "what Skip would save is not known"
    time, memory = share(mask.saving.time), share(mask.saving.memory)
    return "Skip would save nothing here" if time == memory == "the same" else f"Skip: {time} time, {memory} memory"


def pooled(above: str) -> str:
    return (
        f"{above} takes the mean over all positions, which gives them about the same gradient: "
        "choose='gradient' cannot help here"
    )


def heading(found: Inspection) -> str:
    masks = len(found.masks)
    number = f"{masks} of them masks" if masks > 1 else "one of them a mask" if masks else "no masks"
    layers = f"{len(found.rows)} layer{'' if len(found.rows) == 1 else 's'}"
    return f"{found.model} on an input of {by(found.input_shape)}: {layers}, {number}"
