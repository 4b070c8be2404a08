"""What a user may rely on: names and their parameters, as listed in public_api.txt and announced in the changelog.

`python tests/test_public_api.py` writes the list anew.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import backdrop

HERE = Path(__file__).parent
LIST = HERE / "public_api.txt"
MODULES = [
    "backdrop",
    "backdrop.functional",
    "backdrop.graph",
    "backdrop.skip",
    "backdrop.placement",
    "backdrop.losses",
    "backdrop.distributed",
    "backdrop.schedules",
    "backdrop.textures",
    "backdrop.experiments",
    "backdrop.experiments.attacks",
    "backdrop.experiments.data",
    "backdrop.experiments.generate",
    "backdrop.experiments.masks",
    "backdrop.experiments.models",
    "backdrop.experiments.task",
    "backdrop.experiments.tasks",
    "backdrop.experiments.train",
    "backdrop.integrations.jax",
    "backdrop.integrations.lightning",
    "backdrop.integrations.sources",
    "backdrop.integrations.timm",
    "backdrop.integrations.transformers",
]


def names(module):
    """A line for each public name, with the names of its parameters."""
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        parameters = ""
        is_class = inspect.isclass(thing) and not issubclass(thing, Exception)
        if inspect.isroutine(thing) or (is_class and thing.__module__.startswith("backdrop")):
            parameters = f"({', '.join(inspect.signature(thing).parameters)})"
        yield f"{module.__name__}.{name}{parameters}"


def written(module):
    return [line for line in LIST.read_text().splitlines() if re.match(rf"{re.escape(module)}\.\w+(\(|$)", line)]


def load(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} needs what is not installed here: {error}")


@pytest.mark.parametrize("name", MODULES)
def test_no_public_name_appears_or_disappears_unannounced(name):
    now, then = list(names(load(name))), written(name)
    assert then, f"nothing of {name} is listed"
    assert now == then, "announce this in CHANGELOG.md, then run: python tests/test_public_api.py"


def test_every_public_name_is_in_the_changelog():
    changelog = (HERE.parent / "CHANGELOG.md").read_text()
    told = set(re.findall(r"\w+", changelog))
    listed = {re.match(r"[\w.]+", line)[0].rpartition(".")[2] for line in LIST.read_text().splitlines()}
    assert listed - told == set()


def test_every_module_that_is_listed_is_looked_at():
    listed = {re.match(r"[\w.]+", line)[0].rpartition(".")[0] for line in LIST.read_text().splitlines()}
    assert listed == set(MODULES)


def test_the_core_has_what_its_modules_promise():
    assert set(backdrop.__all__) <= set(dir(backdrop))


if __name__ == "__main__":
    found = [line for name in MODULES for line in names(importlib.import_module(name))]
    LIST.write_text("".join(f"{line}\n" for line in found))
    sys.exit(f"{len(found)} names are in {LIST}")
