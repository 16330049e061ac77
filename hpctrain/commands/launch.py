"""`hpctrain launch`: start ranks with the mpiexec that belongs to the MPI mpi4py loads."""

from __future__ import annotations

import click

from hpctrain.commands._complete import ForwardingCommand, complete_command_line

EPILOG = """\b
Examples:
  hpctrain launch -n 4 train digits --epochs 3
  hpctrain -q launch -n 2 train digits --out runs/digits --resume

SIGTERM and the first Ctrl-C stop a training run: it saves a checkpoint and exits with 75. A second
Ctrl-C kills the run, and launch exits with 130.
"""


@click.command(
    cls=ForwardingCommand,
    epilog=EPILOG,
    options_metavar="-n N",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=int, required=True, metavar="N", help="Number of MPI ranks.")
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="COMMAND [ARGS]...",
    shell_complete=complete_command_line,
)
@click.pass_context
def launch(context: click.Context, ranks: int, arguments: tuple[str, ...]) -> None:
    """Run an hpctrain COMMAND on N ranks; the exit code is the job's."""
    from hpctrain.cluster.launch import launch as start  # late, so that `--help` stays fast

    context.exit(start(ranks, [*_verbosity_options(context), *arguments]))


def _verbosity_options(context: click.Context) -> list[str]:
    """Return the -v and -q before `launch`, which apply to the ranks."""
    parameters = context.parent.params if context.parent else {}
    return [f"--{name}" for name in ("verbose", "quiet") if parameters.get(name)]
