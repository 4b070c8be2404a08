"""What was skipped, what was not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Entry:
    """What the report says of one mask."""

    mask: str  # its dotted path
    drops: str = ""  # samples or positions
    skipped: list[str] = field(default_factory=list)  # the calls whose blocked gradients are not computed
    kept: list[tuple[str, str]] = field(default_factory=list)  # where that ends: path and reason
    last: str = "not run yet"  # how the last step was computed

    def __str__(self) -> str:
        lines = [f"{self.mask}: drops {self.drops}" if self.drops else f"{self.mask}:"]
        if self.skipped:
            lines.append(f"  skipped: {', '.join(self.skipped)}")
        lines += [f"  not skipped from {path} down: {reason}" for path, reason in self.kept]
        return "\n".join([*lines, f"  last step: {self.last}"])


class Report(list[Entry]):
    """What is skipped, what is not, and why: one entry per mask."""

    def update(self, entries: Sequence[Entry]) -> None:
        """Replace the entries of these masks."""
        known = {entry.mask: entry for entry in (*self, *entries)}
        self[:] = known.values()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no training step was run yet"
