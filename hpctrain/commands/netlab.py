"""`hpctrain netlab`: runs a command on several emulated hosts of this machine."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  hpctrain netlab --hosts 4 -- hpctrain train digits --epochs 1
  hpctrain netlab --hosts 2 --ranks-per-host 2 --link 2.5gbit -- python my_script.py

Hosts are network namespaces named h1, h2, ..., joined by links of that speed; COMMAND is started on
every rank by the mpiexec of the MPI that mpi4py loads, and its exit code is netlab's. Hosts see
the same files, but /dev/shm, and reach nothing but each other. Needs Linux, ip and tc, and root or
the right to make namespaces. Bandwidth is shaped, latency is not.
"""


@click.command(
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--hosts", type=int, required=True, metavar="N", help="Number of hosts.")
@click.option("--ranks-per-host", type=int, default=1, metavar="R", help="1 unless given.")
@click.option(
    "--link", default="1gbit", metavar="SPEED", help="Of each host's link, each way: 1gbit."
)
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARGS]..."
)
@click.pass_context
def netlab(
    context: click.Context, hosts: int, ranks_per_host: int, link: str, arguments: tuple[str, ...]
) -> None:
    """Run COMMAND on N hosts x R ranks, with MPI over TCP on links of a given speed."""
    from hpctrain.cluster.netlab import netlab as module  # `--help` stays quick

    lab = module.Lab(hosts, ranks_per_host, module.parse_speed(link))
    context.exit(module.netlab(lab, arguments))
