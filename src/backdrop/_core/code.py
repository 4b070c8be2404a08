"""Code that is not ours: modules of the user's own, extras that may be missing, a package that must not be there.

What goes wrong in the user's modules is told with their lines and without ours.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

OURS = str(Path(__file__).parent.parent)


def from_name(name: str) -> ModuleType:
    """An installed module, or one that lies where Python looks."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {name!r}, neither here nor among the installed ones; a file is given as "
                "path/to/file.py:NAME"
            ) from None
        raise shown(error, f"{name} cannot be imported") from None


def from_file(path: Path, given: str) -> ModuleType:
    """The module that a file holds, which is run once, so that a class in it stays the same; `given` is what the user
    calls it."""
    if "\0" in given or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    path = path.resolve()
    name = f"backdrop_named_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its classes look for themselves
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise shown(error, f"{given} cannot be imported") from None
    finally:
        if sys.exc_info()[0] is not None:
            del sys.modules[name]
    return module


def shown(error: BaseException, problem: str) -> RuntimeError:
    """What is wrong, with the first lines of the user's that it comes from."""
    frames = itertools.dropwhile(_is_ours, traceback.extract_tb(error.__traceback__))
    kept = [frame for frame in frames if not _is_importing(frame)][:3]
    lines = "".join([*traceback.format_list(kept), *traceback.format_exception_only(error)])
    return RuntimeError(f"{problem}:\n{lines.rstrip()}")


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(OURS) or _is_importing(frame)


def _is_importing(frame: traceback.FrameSummary) -> bool:
    return re.match(r"<frozen importlib|.*\bimportlib\b.__init__", frame.filename) is not None


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
