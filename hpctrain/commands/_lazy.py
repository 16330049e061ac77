"""Command groups that import a subcommand when it is used, since MPI and CuPy load slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import click

from hpctrain.core.errors import UsageError
from hpctrain.core.names import pick

WHOLE = 1000  #: characters, more than any first sentence of a help text
HYPHEN = "\u2011"  #: a hyphen at which no line ends
CommandLoaders = Mapping[str, Callable[[], click.Command]]


def load_command(module: str, name: str) -> click.Command:
    """Return the command `name` of `hpctrain.commands.MODULE`."""
    return getattr(import_module(f"hpctrain.commands.{module}"), name)


class HelpFormatter(click.HelpFormatter):
    """A formatter of help that breaks no name at its hyphens, such as breadth-first."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **options: Any) -> None:
        unbroken = [(term, text.replace("-", HYPHEN)) for term, text in rows]
        super().write_dl(unbroken, *args, **options)

    def getvalue(self) -> str:
        return super().getvalue().replace(HYPHEN, "-")


class WholeGroup(click.Group):
    """A command group whose help has each subcommand's whole first sentence."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands; click would cut their sentences at the edge of the terminal."""
        commands = {name: self.get_command(context, name) for name in self.list_commands(context)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, item.get_short_help_str(WHOLE)) for name, item in commands.items() if item]
            )


class LazyGroup(WholeGroup):
    """A command group; `loaders` maps the names of subcommands to functions that import them."""

    def __init__(self, *args: object, loaders: CommandLoaders, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.loaders = loaders

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(self.loaders)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if context.resilient_parsing and name not in self.loaders:
            return None  # a shell asks to complete a partial word
        if name not in self.loaders and any(
            f"--{name}" in option.opts for option in self.get_params(context)
        ):
            raise UsageError(f"unknown command '{name}'; did you mean '--{name}'?")
        return pick(self.loaders, name, "command")()
