"""The subcommands, a thin file each, imported on use."""

from __future__ import annotations

from functools import partial

from hpctrain.commands._lazy import LazyGroup, load

COMMANDS = {
    name: partial(load, name, name)
    for name in (
        *("train", "launch", "netlab", "evaluate", "report", "checkpoint", "bench", "tune"),
        *("doctor", "scale", "slurm"),
    )
}

__all__ = ["COMMANDS", "LazyGroup"]
