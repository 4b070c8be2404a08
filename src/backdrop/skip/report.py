"""What was skipped, what was not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SHOWN = 12  # names in a line of the report


@dataclass
class Entry:
    """What the report says of one mask.

    Attributes:
        mask: its dotted path.
        drops: "samples" or "positions".
        skipped: the calls whose blocked gradients are not computed.
        kept: where that ends, path and reason.
        last: how the last step was computed.
        share: of the multiplications before the mask, those whose blocked gradients were not computed in the last step.
        tiles: where the segment runs in tiles, how many, what they take, and what lies behind the mask takes beside it.
    """

    mask: str
    drops: str = ""
    skipped: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    last: str = "not run yet"
    share: float = 0.0
    tiles: str = ""

    def __str__(self) -> str:
        lines = [f"{self.mask}: drops {self.drops}" if self.drops else f"{self.mask}:"]
        if self.skipped:
            more = f" and {len(self.skipped) - SHOWN} more" if len(self.skipped) > SHOWN else ""
            lines.append(f"  skipped: {', '.join(self.skipped[:SHOWN])}{more}")
        lines += [f"  not skipped from {path} down: {reason}" for path, reason in self.kept]
        lines += [f"  in tiles: {self.tiles}"] if self.tiles else []
        return "\n".join([*lines, f"  last step: {self.last}"])

    def ran_plain(self, reason: str) -> None:
        """Nothing was skipped in this step."""
        self.last = f"plain: {reason}" if reason else "plain"
        self.skipped, self.share, self.tiles = [], 0.0, ""


class Report(list[Entry]):
    """What is skipped, what is not, and why: one entry per mask."""

    def update(self, entries: Sequence[Entry]) -> None:
        """Replace the entries of these masks."""
        known = {entry.mask: entry for entry in (*self, *entries)}
        self[:] = known.values()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no training step was run yet"
