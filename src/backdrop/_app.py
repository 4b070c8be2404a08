"""The command `backdrop` before it has commands: `cli`, `experiments.commands` and `placement.command` add theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from backdrop._core.installed import how_to_install

__all__ = ["App", "app"]


class App(typer.Typer):
    """Commands that say in one message, without a traceback, what a user can do something about."""

    def command(  # type: ignore[override]  # takes what Typer's own takes
        self, *args: Any, **kwargs: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        add = super().command(*args, **kwargs)
        return lambda command: add(_errors_in_red(command))


app = App(no_args_is_help=True, add_completion=False, help="Stochastic backpropagation: the experiments of the paper.")


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
