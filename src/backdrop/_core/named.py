"""Python files that a user names, such as `FILE.py:NAME` on the command line: they are run."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def run_file(path: Path) -> ModuleType:
    """The module that a file makes. It is run once in a process, so that a class in it stays the same class."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"backdrop_named_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where its classes look for themselves
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
