"""`hpctrain bench`: a group of subcommands, imported when they are used."""

from __future__ import annotations

from functools import partial

import click

from hpctrain.commands._lazy import LazyGroup, load_command

EPILOG = """\b
Examples:
  mpirun -n 4 hpctrain bench allreduce --sizes 4B:128MiB --algorithms auto,ring,native
  mpirun -n 2 hpctrain bench p2p --sizes 4B:64MiB --json p2p.json --plot p2p.png
  hpctrain bench predict --ranks 4096 --link 400Gbit --ranks-per-node 8

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
"""

#: {name: (file in commands/, function in this file)}
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "allreduce": ("bench_measured", "allreduce"),
    "reduce-scatter": ("bench_measured", "reduce_scatter"),
    "all-gather": ("bench_measured", "all_gather"),
    "broadcast": ("bench_measured", "broadcast"),
    "predict": ("bench_predict", "bench_predict"),
    "p2p": ("bench_measured", "p2p"),
    "step": ("bench_measured", "step"),
}
LOADERS = {name: partial(load_command, *target) for name, target in SUBCOMMANDS.items()}


@click.command(cls=LazyGroup, loaders=LOADERS, epilog=EPILOG)
def bench() -> None:
    """Measure collectives, links, training steps and other libraries."""
