"""The command `backdrop`: errors in one message, and all commands. What they do is imported when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from backdrop._core.code import how_to_install

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; the command needs: {how_to_install('experiments')}") from None


class App(typer.Typer):
    """Commands that say in one message, without a traceback, what a user can do something about."""

    def command(  # type: ignore[override]  # takes what Typer's own takes
        self, *args: Any, **kwargs: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        add = super().command(*args, **kwargs)
        return lambda command: add(_errors_in_red(command))


class All(TyperGroup):
    """With the commands of studies and of models, which are imported when a command is asked for."""

    def __init__(self, **settings: Any) -> None:
        from backdrop.experiments import commands as studies
        from backdrop.placement import command as models

        super().__init__(**settings)
        more = App()
        for each in (*studies.COMMANDS, *models.COMMANDS):
            more.command()(each)
        self.commands.update(typer.main.get_group(more).commands)


about = "Stochastic backpropagation: the experiments of the paper."
app = App(cls=All, no_args_is_help=True, add_completion=False, help=about)


def _errors_in_red(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except ModuleNotFoundError as error:
            problem = f"{error}; it comes with: {how_to_install('experiments')}"
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            problem = str(error)
        Console(stderr=True).print(Text(problem, "red"), soft_wrap=True)
        raise typer.Exit(1)

    return call


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        import backdrop

        typer.echo(f"backdrop {backdrop.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


data = App(no_args_is_help=True, help="The data sets: get them, see what is there.")
app.add_typer(data, name="data")

Root = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie. Else $BACKDROP_DATA, else ~/.cache/backdrop.", show_default=False),
]


class Lists(TyperCommand):
    """Takes `--small 9.5 10` for `--small 9.5,10`: options with as many numbers as one likes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        listing = False
        for arg in args:
            if listing and not (arg.startswith("-") and not arg[1:].replace(".", "")[:1].isdigit()):
                joined[-1] += f",{arg}" if joined[-1] else arg
                continue
            listing = arg in ("--small", "--scale", "--large", "--weights", "--size")
            joined += [arg, ""] if listing else [arg]
        return super().parse_args(ctx, joined)


@app.command(cls=Lists)
def textures(
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    small: Annotated[
        str | None, typer.Option(metavar="LENGTH...", help="Lengths of the small scale, in pixels.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(metavar="LENGTH...", help="Lengths of one more scale; may come several times.")
    ] = None,
    large: Annotated[str | None, typer.Option(metavar="LENGTH...", help="Lengths of the large scale.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="WEIGHT...", help="One per scale; for two 0.75 and 1.25 as in the paper, else 1."),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="PIXELS...", help="Of a square, or one for each of 2 or 3 axes.")
    ] = "1024",
    per_class: Annotated[int, typer.Option(help="Images per class.")] = 1,
    seed: Annotated[int, typer.Option(help="Of all images.")] = 0,
    split: Annotated[str, typer.Option(help="Images of one split are independent of those of another.")] = "train",
    combine: Annotated[str, typer.Option(help="sum, product or convolve.")] = "sum",
    patchwork: Annotated[bool, typer.Option("--patchwork", help="Effective lengths of the authors' program.")] = False,
    periodic: Annotated[bool, typer.Option("--periodic", help="Opposite borders fit together.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    preview: Annotated[
        Path | None, typer.Option(help="A picture to draw: an image of each class, scale by scale.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a data set that is there.")] = False,
) -> None:
    """Draw Gaussian-process textures: a class for every choice of one length per scale.

    The paper's test set: backdrop textures --small 9.5 10 --large 80 140 --per-class 25 --split test --out DIR
    """
    console = Console(stderr=True)
    from rich.progress import track

    from backdrop._core.checks import check_size
    from backdrop.experiments.generate import generate
    from backdrop.textures import plot
    from backdrop.textures.texture import split_seed

    groups = [_numbers(text) for text in (small, *(scale or ()), large) if text is not None]
    if not groups:
        raise ValueError("at least one scale is needed: --small, --scale or --large, with one or more lengths")
    pixels = [int(number) if number.is_integer() else number for number in _numbers(size)]
    shape = check_size(pixels * 2 if len(pixels) == 1 else pixels)  # type: ignore[arg-type]
    if preview is not None:
        _check_preview(preview.expanduser())
    classes = generate(
        out,
        groups,
        per_class=per_class,
        size=shape,
        seed=seed,
        split=split,
        weights=None if weights is None else _numbers(weights),
        combine=combine,  # type: ignore[arg-type]  # checked there
        patchwork=patchwork,
        periodic=periodic,
        device=device,
        force=force,
        progress=lambda indices: track(indices, "drawing", console=console),
        say=lambda text: console.print(text, soft_wrap=True, markup=False, highlight=False),
    )
    if preview is not None:
        plot(classes, shape, seed=split_seed(seed, split), periodic=periodic, path=preview.expanduser())


def _check_preview(path: Path) -> None:
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if not path.parent.is_dir() or path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(
            f"--preview has to name a picture ({', '.join(sorted(kinds))}) in a folder that is there, but got {path}"
        )


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"a list of numbers such as 9.5 10 is needed, but got {text.replace(',', ' ')!r}") from None


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10 or uiuc", show_default=False)],
    root: Root = None,
    source: Annotated[
        Path | None, typer.Option(help="An archive or folder to take instead of downloading.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Get a data set, unless it is there already.

    Nothing in an archive is run or unpacked onto the disk.
    """
    from backdrop.experiments import data as data_sets

    data_sets.fetch(name, root, source=source, force=force)


@data.command()
def info(root: Root = None) -> None:
    """Show which data sets are there, and whether their files are as they were fetched."""
    from backdrop.experiments import data as data_sets

    found = data_sets.info(root)
    table = Table()
    for heading in ("name", "images", "size on disk", "source", "verified", "path"):
        table.add_column(heading, overflow="fold")
    for row in found:
        if row.present:
            verified = Text("yes", "green") if row.verified else Text("NO", "bold red")
            cells = (row.name, f"{row.images:,}", f"{row.bytes / 1e6:.1f} MB", row.source or "")
            table.add_row(*map(Text, cells), verified, Text(str(row.path)))
    console = Console()
    if table.row_count:
        console.print(table)
    for row in found:
        if row.problem:
            console.print(Text(row.problem, "red" if row.present else ""), soft_wrap=True)


def main() -> None:
    app()
