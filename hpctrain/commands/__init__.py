"""The subcommands: one thin file per command, imported when the command is used."""

from __future__ import annotations

from functools import partial

from hpctrain.commands._lazy import LazyGroup, load_command

COMMANDS = {
    name: partial(load_command, name, name)
    for name in (
        *("train", "launch", "netlab", "evaluate", "report", "checkpoint", "bench", "tune"),
        *("doctor", "scale", "slurm", "runs", "compare", "follow", "hang", "recipe", "pipeline"),
        "chaos",
    )
}

__all__ = ["COMMANDS", "LazyGroup"]
