"""`hpctrain netlab`: runs a command on several emulated hosts of this machine."""

from __future__ import annotations

import shutil
from typing import Any

import click

from hpctrain.commands import COMMANDS
from hpctrain.core.interpreter import module_command

NETLAB_EPILOG = """\b
Examples:
  hpctrain netlab --hosts 4 train digits --epochs 1
  hpctrain netlab --hosts 2 --ranks-per-host 2 --link 2.5gbit -- python my_script.py
  hpctrain netlab --hosts 4 --elastic --spares 1 -- hpctrain train digits

Hosts are network namespaces named h1, h2, ..., joined by links of that speed. The
mpiexec of the MPI that mpi4py loads starts COMMAND, a command of hpctrain or a program, on every
rank, and netlab returns its exit code.
Hosts share all files except /dev/shm, and can reach only each other. netlab needs Linux, ip and tc,
and root or the right to create namespaces. It limits bandwidth, not latency.
"""


@click.command(
    epilog=NETLAB_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--hosts", type=int, required=True, metavar="N", help="Number of hosts.")
@click.option("--ranks-per-host", type=int, default=1, metavar="R", help="Default: 1.")
@click.option(
    "--link",
    default="1gbit",
    metavar="SPEED",
    help="Rate of each host's link in each direction; default 1gbit.",
)
@click.option(
    "--elastic", is_flag=True, help="Go on with the survivors of a lost rank (Open MPI 5)."
)
@click.option(
    "--spares",
    type=int,
    default=0,
    metavar="K",
    help="Let the last K ranks wait to replace lost ones.",
)
@click.option("--min-ranks", type=int, metavar="M", help="Do not go on with fewer ranks.")
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARGS]..."
)
@click.pass_context
def netlab(
    context: click.Context,
    /,
    hosts: int,
    ranks_per_host: int,
    link: str,
    arguments: tuple[str, ...],
    **policy_options: Any,
) -> None:
    """Run COMMAND on simulated hosts, joined by links of the same speed."""
    from hpctrain.cluster.loss_policy import LossPolicy
    from hpctrain.cluster.netlab import netlab as lab_module  # late, so that `--help` stays fast

    # A program of that name goes first: unlike launch, netlab takes both without `--`.
    if arguments[0] in COMMANDS and shutil.which(arguments[0]) is None:
        arguments = (*module_command("hpctrain"), *arguments)
    lab = lab_module.Lab(hosts, ranks_per_host, lab_module.parse_speed(link))
    context.exit(lab_module.netlab(lab, arguments, LossPolicy(**policy_options)))
