"""The numbers that the paper prints: its Table 2. Its figures have none."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GP_TABLE", "TableRow"]


class TableRow(NamedTuple):
    """A row of Table 2: masks, crop, and accuracies in percent."""

    p_small: float
    p_large: float
    crop: int | None
    accuracy: float
    small: float
    large: float


GP_TABLE = (
    TableRow(0.0, 0.0, None, 45.9, 64.7, 74.1),
    TableRow(0.0, 0.75, None, 54.1, 67.4, 82.9),
    TableRow(0.0, 0.94, None, 49.1, 55.3, 88.2),
    TableRow(0.99, 0.0, None, 57.1, 77.9, 73.8),
    TableRow(0.999, 0.0, None, 57.4, 68.2, 84.1),
    TableRow(0.99, 0.75, None, 53.5, 55.0, 98.2),
    TableRow(0.99, 0.94, None, 66.2, 78.7, 84.6),
    TableRow(0.999, 0.75, None, 54.7, 61.5, 88.8),
    TableRow(0.999, 0.94, None, 55.0, 58.5, 95.0),
    TableRow(0.0, 0.0, 512, 45.3, 50.9, 87.9),
    TableRow(0.0, 0.0, 256, 34.3, 53.9, 55.3),
)
