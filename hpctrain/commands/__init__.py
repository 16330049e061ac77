"""The subcommands: thin files, each imported when a command of it is used."""

from __future__ import annotations

from functools import partial

from hpctrain.commands._lazy import LazyGroup, load_command

#: file: its commands
FILES = {
    **{name: (name,) for name in ("train", "bench", "doctor", "scale", "recipe", "chaos", "data")},
    "slurm": ("slurm", "pbs", "flux"),
    "horovodrun": ("horovodrun",),
    "pipeline": ("pipeline",),
    "bench_measured": ("tune",),
    "launch": ("launch", "netlab"),
    "runs": ("runs", "compare", "follow", "hang", "report"),
    "checkpoint": ("checkpoint", "evaluate"),
}
COMMANDS = {name: partial(load_command, file, name) for file in FILES for name in FILES[file]}

__all__ = ["COMMANDS", "LazyGroup"]
