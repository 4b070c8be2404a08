"""The command `backdrop`. What it does lives elsewhere, and is imported only when it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; the command needs: pip install 'torch-backdrop[experiments]'") from None

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Stochastic backpropagation: the experiments of the paper."
)
data = typer.Typer(no_args_is_help=True, help="The data sets: get them, see what is there.")
app.add_typer(data, name="data")

Root = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie. Else $BACKDROP_DATA, else ~/.cache/backdrop.", show_default=False),
]


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10 or uiuc", show_default=False)],
    root: Root = None,
    source: Annotated[
        Path | None, typer.Option(help="An archive or folder to take instead of downloading.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Get a data set, unless it is there already."""
    with errors_in_red():
        from backdrop.experiments import data as data_sets

        data_sets.fetch(name, root, source=source, force=force)


@data.command()
def info(root: Root = None) -> None:
    """Show which data sets are there, and whether their files are as they were fetched."""
    with errors_in_red():
        from backdrop.experiments import data as data_sets

        found = data_sets.info(root)
    table = Table("name", "images", "size on disk", "source", "verified", "path")
    for row in found:
        if row.present:
            verified = Text("yes", "green") if row.verified else Text("NO", "bold red")
            images = f"{row.images:,}" if row.verified else "?"
            cells = (row.name, images, f"{row.bytes / 1e6:.1f} MB", row.source or "")
            table.add_row(*map(Text, cells), verified, Text(str(row.path), overflow="fold"))
    console = Console()
    if table.row_count:
        console.print(table)
    for row in found:
        if row.problem:
            console.print(Text(row.problem, "red" if row.present else ""), soft_wrap=True)


@contextlib.contextmanager
def errors_in_red() -> Iterator[None]:
    """What a user can do something about is said in one message, without a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = f"{error}; it comes with: pip install 'torch-backdrop[experiments]'"
    except (OSError, ValueError, RuntimeError) as error:
        problem = str(error)
    else:
        return
    Console(stderr=True).print(Text(problem, "red"), soft_wrap=True)
    raise typer.Exit(1)


def main() -> None:
    app()
