"""README and documentation: code runs, commands exist, links lead somewhere.

A block of `python` needs what the tests need; one of `py` something more (a data set, timm), and runs where that is
there. Blocks without a language are commands, blocks of `text` show what something prints.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch

from foreign import import_or_skip

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]


def blocks(page):
    """Language and content of each."""
    return re.findall(r"^```([a-z]*)[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def with_blocks(*languages):
    found = [page for page in PAGES if any(language in languages for language, _ in blocks(page))]
    return pytest.mark.parametrize("page", found, ids=lambda page: page.stem)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")  # Lightning's own
@with_blocks("python")
def test_code_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("backdrop.placement.diagnosis.ROUNDS", 1)  # what doctor says is not looked at
    torch.manual_seed(0)
    code = "\n".join(content for language, content in blocks(page) if language == "python")
    exec(compile(code, str(page), "exec"), {"__name__": "page"})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")
@with_blocks("py")
def test_code_that_needs_something_more_runs_where_that_is_there(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = [(language, content) for language, content in blocks(page) if language in ("python", "py")]
    for name in re.findall(
        r"^import (mlflow|sentence_transformers|timm|wandb)$", "\n".join(content for _, content in found), re.MULTILINE
    ):
        import_or_skip(name)
    try:
        exec(compile("\n".join(content for _, content in found), str(page), "exec"), {"__name__": "page"})
    except FileNotFoundError as error:
        if "backdrop data fetch" not in str(error):
            raise
        pytest.skip(str(error))


def commands():
    for page in PAGES:
        for language, content in blocks(page):
            if not language:
                for line in content.replace("\\\n", " ").splitlines():
                    yield pytest.param(line, id=f"{page.stem}: {line[:40]}")
        for line in re.findall(r"`((?:backdrop|python|torchrun) [^`]*(?: --|\.py)[^`]*)`", page.read_text()):
            yield pytest.param(line, id=f"{page.stem}: {line[:40]}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_exist(line):
    word, *rest = shlex.split(line, comments=True)
    if word == "backdrop":
        check_backdrop(rest)
    elif word == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets
        assert all(re.match(r"(VENV|TORCH|PYTHON)=", more) for more in rest[1:])
    elif word in ("python", "torchrun"):
        if rest[:2] == ["-m", "backdrop.selftest"]:
            return
        scripts = [argument.partition("::")[0] for argument in rest if argument.partition("::")[0].endswith(".py")]
        assert scripts
        assert all((ROOT / script).exists() for script in scripts)
    else:
        assert (word, rest[0]) == ("pip", "install")
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        named = re.findall(r"(?:torch-backdrop|\.)\[(.*?)\]", " ".join(rest))
        assert all(extra in extras for names in named for extra in names.split(","))


def check_backdrop(arguments):
    """Whether the command takes these arguments; it is not run."""
    import typer

    from backdrop import cli

    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)  # refuses unknown options and wrong values


def named_tests():
    for page in PAGES:
        for line in re.findall(r"`(?:python -m )?pytest ([^`]+)`", page.read_text()):
            yield pytest.param(line, id=f"{page.stem}: {line}")
        for name in re.findall(r"`(tests/[^`]+)`", page.read_text()):
            yield pytest.param(name, id=f"{page.stem}: {name}")


@pytest.mark.parametrize("line", list(named_tests()))
def test_tests_that_pages_name_exist(line):
    """Files, tests in them, and what `-k` picks."""
    paths, _, wanted = line.partition(" -k ")
    for path in paths.split():
        name, _, test = path.partition("::")
        assert list(ROOT.glob(name)), name
        assert not test or f"\ndef {test}(" in text_of(name), test
    for word in wanted.strip('"').split(" or ") if wanted else []:
        assert any(re.search(rf"^def test_\w*{word}", text_of(path), re.MULTILINE) for path in paths.split()), word


def text_of(path):
    return (ROOT / path).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in menu, page.name


def test_the_cheat_sheet_to_print_is_one_page():
    written = (ROOT / "docs" / "cheatsheet.pdf").read_bytes()
    assert written.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", written)) == 1
