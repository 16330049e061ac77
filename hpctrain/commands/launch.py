"""`hpctrain launch | netlab`: start ranks with the mpiexec that belongs to the MPI mpi4py loads.

netlab starts them on several emulated hosts of this machine.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hpctrain.cluster.schedulers import in_job
from hpctrain.commands import COMMANDS
from hpctrain.commands._options import (
    ForwardingCommand,
    complete_command_line,
    may_be_sweep,
    verbosity,
)
from hpctrain.core.interpreter import module_command

if TYPE_CHECKING:
    from hpctrain.cluster.loss_policy import LossPolicy

EPILOG = """\b
Examples:
  hpctrain launch -n 4 train digits --epochs 3
  hpctrain -q launch -n 2 train digits --out runs/digits --resume
  hpctrain launch -n 4 -- python my_script.py --epochs 3
  hpctrain launch -n 4 --trace runs/traced -- python ddp.py
  hpctrain launch -n 4 --max-restarts 5 --min-ranks 2 train my.toml
  hpctrain launch -n 4 --elastic --spares 1 train my.toml
  hpctrain launch -n 4 train my.toml --set optimizer.rate=0.1,0.3     a job for each rate

After the loss of a rank the survivors of an elastic job go on (Open MPI 5 with ULFM). With any MPI,
--max-restarts starts the job again: `train` from its newest checkpoint, a program as it is.

The script of `hpctrain slurm render` calls `hpctrain launch --in-slurm`, which starts the ranks of
a job of Slurm by srun, and requeues the job. --in-pbs and --in-flux do the same for jobs of PBS and
Flux (not run on real ones).

A program after -- is started N times with its arguments, as one MPI job. A program in Python has
RANK, LOCAL_RANK, WORLD_SIZE and the other variables that torchrun sets.

SIGTERM and the first Ctrl-C reach the ranks as SIGUSR1. A training run saves a checkpoint and exits
with 75; another program ends unless it handles SIGUSR1. A second Ctrl-C kills the ranks, and launch
exits with 130. The exit code of a program is the one that MPI's launcher returns.
"""
IS_PROGRAM_KEY = "hpctrain.commands.launch.program"  #: key in click's context
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


class LaunchCommand(ForwardingCommand):
    """A command whose arguments are a command line of hpctrain or, after `--`, of a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] and args[0] in in_job.JOBS:  # a job script calls it
            try:
                ctx.exit(in_job.main(args[0], args[1:]))
            except SystemExit as refusal:  # of an option, by argparse
                ctx.exit(int(refusal.code or 0))
        words = list(args)
        remaining_words: list[str] = super().parse_args(ctx, args)
        argument_count = len(ctx.params.get("arguments") or ())
        ctx.meta[IS_PROGRAM_KEY] = words[: len(words) - argument_count][-1:] == ["--"]
        return remaining_words

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.meta.get(IS_PROGRAM_KEY):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


@click.command(
    cls=LaunchCommand,
    epilog=EPILOG,
    options_metavar="-n N [OPTIONS]",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=int, required=True, metavar="N", help="Number of MPI ranks.")
@click.option("--elastic", is_flag=True, help="Go on with the survivors of a lost rank.")
@click.option(
    "--spares", type=int, default=0, metavar="K", help="Ranks that wait to replace lost ones."
)
@click.option("--min-ranks", type=int, metavar="M", help="Do not go on with fewer ranks.")
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    metavar="R",
    help="Start the job again after a lost rank or host, a hang or a crash.",
)
@click.option(
    "--trace",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the timeline of a PROGRAM that trains with PyTorch.",
)
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="COMMAND [ARGS]... | -- PROGRAM [ARGS]...",
    shell_complete=complete_command_line,
)
@click.pass_context
def launch(
    context: click.Context,
    /,
    ranks: int,
    arguments: tuple[str, ...],
    trace: Path | None,
    **policy_options: Any,
) -> None:
    """Run an hpctrain COMMAND, or any PROGRAM, on N ranks.

    It exits with the job's exit code.
    """
    from hpctrain.cluster import launch as launcher  # late, so that `--help` stays fast
    from hpctrain.cluster.loss_policy import LossPolicy

    is_program = context.meta[IS_PROGRAM_KEY]
    word = arguments[0]
    is_script = word.endswith(".py")
    if not is_program and word not in COMMANDS and (is_script or shutil.which(word) is not None):
        argv = ["python"] * is_script + list(arguments)
        raise click.UsageError(
            f"to start a program: hpctrain launch -n {ranks} -- {shlex.join(argv)}"
        )
    policy = LossPolicy(**policy_options)
    if is_program:
        context.exit(launcher.launch_program(ranks, arguments, policy, trace))
    if trace is not None:
        raise click.UsageError("--trace is of a program after `--`; a recipe has train --trace")
    code = _train_sweep(context, ranks, arguments, policy)
    if code is not None:
        context.exit(code)
    context.exit(launcher.launch(ranks, [*verbosity(context), *arguments], policy))


def _train_sweep(
    context: click.Context, ranks: int, arguments: Sequence[str], policy: LossPolicy
) -> int | None:
    """Train the sweep that `train ...` describes; return None for one run, or another command."""
    folders = [Path(word.partition("=")[2]) for word in arguments if word.startswith("--resume=")]
    if arguments[0] != "train" or not may_be_sweep(arguments, *folders[:1]):
        return None
    from hpctrain.commands import train  # late, so that other commands start fast

    options = train.train.make_context("train", [*arguments[1:]], parent=context.parent).params
    policy_words = [
        f"--{name.replace('_', '-')}" + f"={value}" * (value is not True)
        for name, value in asdict(policy).items()
        if value
    ]
    start = [*verbosity(context), "launch", "-n", str(ranks), *policy_words]
    return train.train_sweep(options, start, ranks)


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
