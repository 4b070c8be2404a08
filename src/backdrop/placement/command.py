"""`backdrop inspect` and `backdrop doctor MODULE:FUNCTION --input 1,1,1024,1024`: a look at a model of one's own."""

from __future__ import annotations

import difflib
import inspect as python
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from torch import nn

from backdrop._core import code

__all__ = ["COMMANDS", "find_model"]

Named = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        help="A function without arguments that returns a model, or a model or its class: MODULE:NAME or "
        "FILE.py:NAME. The module or the file is run.",
        show_default=False,
    ),
]
Shape = Annotated[
    str,
    typer.Option(
        "--input", metavar="SHAPE", help="Samples, channels and positions: 1,1,1024,1024.", show_default=False
    ),
]


def inspect(
    model: Named,
    input_: Shape,
    out: Annotated[
        Path | None,
        typer.Option(help="A page (.html) or a picture (.png, .svg) to write as well.", show_default=False),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...", help="Sizes of structures in the input: say where to mask for them.", show_default=False
        ),
    ] = None,
    statistics: Annotated[
        str, typer.Option(help="What Skip would do with batch statistics: exact, sampled or frozen.")
    ] = "exact",
    device: Annotated[
        str | None,
        typer.Option(help="Where the model would be trained, such as cuda. Else where it is.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="A budget to run in tiles with, such as 4GB.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for every layer.")] = False,
) -> None:
    """Show a model's lattices, receptive fields and masks, and what Skip would save.

    backdrop inspect my_nets.py:network --input 4,3,256,256 --out network.html
    """
    from backdrop.placement.inspection import check_path
    from backdrop.placement.inspection import inspect as look_at
    from backdrop.skip.statistics import check_statistics

    shape = _numbers("--input", input_, int, "1,3,224,224")
    wanted = None if sizes is None else _numbers("--sizes", sizes, float, "16,256")
    check_statistics(statistics)  # type: ignore[arg-type]
    path = None if out is None else check_path(out)
    found_model = find_model(model)
    found = look_at(found_model, shape, statistics=statistics, device=device, memory=memory)  # type: ignore[arg-type]
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(200, console.width))  # a file or another program takes lines of any length
    console.print(found.unfolded() if every else found)
    if wanted is not None:
        from backdrop.placement.suggest import suggest

        console.print(Text(f"\n{suggest(found_model, shape, wanted)}"))
    if path is not None:
        found.save(path)
        console.print(Text(str(path)), soft_wrap=True)


def doctor(
    model: Named,
    input_: Shape,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Sizes of structures in the input: masks go there.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="What there is, such as 8G. Else what is free.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A page (.html) to write as well.", show_default=False)] = None,
    statistics: Annotated[
        str | None,
        typer.Option(help="Of batches: exact, sampled or frozen. Else exact, or sampled where that is in the way."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, such as cuda.", show_default=False)] = None,
) -> None:
    """Run a few training steps with masks and without, and say what they gain on this machine.

    backdrop doctor my_nets.py:network --input 2,3,2048,2048 --sizes 20,200 --memory 8G
    """
    from backdrop.graph.untouched import check_input_shape
    from backdrop.placement.diagnosis import check_page
    from backdrop.placement.diagnosis import doctor as examine
    from backdrop.placement.inspection import device_of
    from backdrop.placement.rooms import check_memory, random_batch
    from backdrop.skip.statistics import check_statistics

    shape = check_input_shape(_numbers("--input", input_, int, "2,3,224,224"))
    wanted = None if sizes is None else _numbers("--sizes", sizes, float, "16,256")
    if statistics is not None:
        check_statistics(statistics)  # type: ignore[arg-type]
    path = None if out is None else check_page(out)
    found_model = find_model(model)
    place = device_of(found_model, device)
    room = check_memory(memory, place)
    error = Console(stderr=True)
    batch, note = random_batch(found_model.to(place), shape, room)
    with error.status("") as status:
        found = examine(
            found_model,
            batch,
            sizes=wanted,
            memory=room,
            statistics=statistics,  # type: ignore[arg-type]
            progress=status.update,
        )
    console = Console()
    for text in (note, str(found)):
        if text:
            console.print(Text(text), soft_wrap=True)
    if path is not None:
        found.save(path)
        console.print(Text(str(path)), soft_wrap=True)


def find_model(name: str) -> nn.Module:
    """The model that `module:name` or `path/to/file.py:name` gives: itself, from its class, or from a function."""
    where, colon, which = name.rpartition(":")
    if not colon or not where or not which:
        raise ValueError(f"the model has to be given as MODULE:NAME or FILE.py:NAME, but got {name!r}")
    module = _load(where)
    if not hasattr(module, which):
        raise ValueError(f"{where} has no {which!r}{_nearest(which, module)}")
    found = getattr(module, which)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ValueError(f"{name} has to be a model or a function that returns one, but is {_kind(found)}")
    needed = _needed(found)
    if needed:
        raise ValueError(
            f"{name} needs arguments ({', '.join(needed)}); name a function without any that calls it and returns the "
            "model"
        )
    try:
        made = found()
    except Exception as error:
        raise code.shown(error, f"{name} gave no model") from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"{name} has to return a torch.nn.Module, but returned {_kind(made)}")
    return made


def _load(where: str) -> ModuleType:
    """Modules find their neighbours, as if they were run."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return code.from_name(where)
    path = Path(where).expanduser().resolve()
    sys.path.insert(0, str(path.parent))
    return code.from_file(path, where)


def _needed(found: Callable[..., Any]) -> list[str]:
    """The parameters without a default."""
    try:
        parameters = python.signature(found).parameters.values()
    except (TypeError, ValueError):  # something built in
        return []
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _nearest(which: str, module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, nn.Module) or callable(value))
    ]
    near = difflib.get_close_matches(which, names, 3, 0.5)
    if near:
        return f"; the nearest are {', '.join(near)}"
    return f"; it has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "; it is empty"


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _numbers(option: str, text: str, kind: type[int] | type[float], example: str) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option} has to be numbers with commas between them, such as {example}, but got {text!r}"
        ) from None


COMMANDS = (inspect, doctor)
