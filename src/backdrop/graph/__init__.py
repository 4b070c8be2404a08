"""One picture of a model, for the engine and for placement: captured calls, their shapes, and one table of rules."""

from backdrop.graph import indexing as _indexing  # noqa: F401  # which fills the table
from backdrop.graph import rules as _rules  # noqa: F401
from backdrop.graph import sliding as _sliding  # noqa: F401
from backdrop.graph.table import Call, Slide, Step, Tap, UnsupportedError, Where, register_rule

__all__ = ["Call", "Slide", "Step", "Tap", "UnsupportedError", "Where", "register_rule"]
