"""Least squares with a constant and few slopes, none below zero, over numbers that come one by one.

Old numbers count less and less, and large ones no more than small ones: squares are relative to the running mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SWEEPS = 200
CLOSE = 1e-9  # a change that ends them, relative


class Regression:
    """y = a + sum of b_k x_k, with a and all b_k >= 0.

    Args:
        slopes: how many x there are.
        memory: after so many numbers one counts 1/e.
    """

    def __init__(self, slopes: int, memory: int) -> None:
        size = slopes + 1
        self.memory, self.count, self.mean = memory, 0, 0.0
        self.products = [[0.0] * size for _ in range(size)]
        self.with_y = [0.0] * size
        self.solution = [0.0] * size

    def add(self, x: Sequence[float], y: float) -> None:
        keep = 1 - 1 / self.memory
        self.count += 1
        self.mean += (y - self.mean) * max(1 / self.count, 1 / self.memory)
        if not self.mean > 0:
            return
        row, weight = [1.0, *x], self.mean**-2
        for i, a in enumerate(row):
            self.with_y[i] = keep * self.with_y[i] + weight * a * y
            for j, b in enumerate(row):
                self.products[i][j] = keep * self.products[i][j] + weight * a * b

    def solve(self) -> list[float]:
        """By going down one coordinate at a time, from the solution that was kept last."""
        found = list(self.solution)
        for _ in range(SWEEPS):
            largest = 0.0
            for i, row in enumerate(self.products):
                if row[i] <= 0:
                    continue
                rest = self.with_y[i] - sum(a * b for j, (a, b) in enumerate(zip(row, found, strict=True)) if j != i)
                new = max(0.0, rest / row[i])
                largest = max(largest, abs(new - found[i]) / (new or 1.0))
                found[i] = new
            if largest < CLOSE:
                break
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, none of them its own."""
        return {
            "memory": self.memory,
            "count": self.count,
            "mean": self.mean,
            "products": [list(row) for row in self.products],
            "with_y": list(self.with_y),
            "solution": list(self.solution),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], slopes: int, memory: int) -> Regression:
        """As it was stored."""
        made = cls(slopes, memory)
        if set(state) != set(made.__dict__) or len(state["with_y"]) != slopes + 1:
            raise ValueError(f"a regression with {slopes} slopes has to be stored as such, but got {state!r}")
        made.__dict__.update(state)
        made.__dict__.update(cls.state_dict(made))  # lists of its own
        return made
