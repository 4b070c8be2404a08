"""What is installed beside the library: extras that it needs now and then, and a package that must not be there."""

from __future__ import annotations

import importlib.metadata


def how_to_install(extra: str) -> str:
    """What to type to get an extra."""
    return f"pip install '.[{extra}]' in a clone of torch-backdrop"


def refuse_namesake() -> None:
    """Another package, `backdrop` on PyPI, has the same import name: each overwrites files of the other."""
    try:
        found = importlib.metadata.distribution("backdrop")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the unrelated package 'backdrop' {found.version} is installed, whose files lie where those of torch-backdrop "
        "do: pip uninstall backdrop, then install torch-backdrop again"
    )
