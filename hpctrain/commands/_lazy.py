"""Groups whose subcommands are imported on use: MPI and CuPy cost seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import click

from hpctrain import config

Loaders = Mapping[str, Callable[[], click.Command]]


def load(module: str, name: str) -> click.Command:
    """Return the command `name` of `hpctrain.commands.MODULE`."""
    return getattr(import_module(f"hpctrain.commands.{module}"), name)


class LazyGroup(click.Group):
    """A group of the subcommands in `loaders`, a table of functions that import them."""

    def __init__(self, *args: object, loaders: Loaders, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.loaders = loaders

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(self.loaders)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if context.resilient_parsing and name not in self.loaders:
            return None  # a shell completes a partial word
        return config.pick(self.loaders, name, "command")()
