"""The subcommands, a thin file each, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import click


def _load(module: str, name: str) -> click.Command:
    return getattr(import_module(f"hpctrain.commands.{module}"), name)


COMMANDS: dict[str, Callable[[], click.Command]] = {
    name: partial(_load, name, name)
    for name in ("train", "launch", "evaluate", "report", "checkpoint")
}
