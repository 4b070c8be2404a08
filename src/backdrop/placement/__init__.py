"""Where to put masks and how strong."""

from backdrop.placement.surgery import insert, remove

__all__ = ["insert", "remove"]
