"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, content: bytes, what: str) -> None:
    """Write a file, in place of one that is there; `what` it is, for an error."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, f"{what} cannot be written: {error.strerror}", str(path)) from error
