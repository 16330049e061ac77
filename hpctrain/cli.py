"""The command line: finds the subcommand, speaks with one rank's voice, ends with one code."""

from __future__ import annotations

import logging
import os
import sys
import time

import click

from hpctrain import config, launchers, world
from hpctrain.commands import COMMANDS
from hpctrain.errors import HpctrainError, SaveError, Stopped, TrainingError, UsageError

#: Errors that all ranks raise together; any other means that this rank leaves the others alone.
AGREED = (UsageError, TrainingError, SaveError, Stopped)
INTERRUPTED, BUG = 130, 1


class Commands(click.Group):
    """Subcommands that are imported when they are asked for: MPI and CuPy cost seconds."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return config.pick(COMMANDS, name, "command")()


@click.command(
    cls=Commands,
    epilog="""\b
Examples:
  hpctrain train digits                          on one device
  mpirun -n 4 hpctrain train digits              on four ranks; also srun
  hpctrain launch -n 4 train digits              with the mpiexec of the MPI that mpi4py loads
  hpctrain train --help
""",
)
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@click.version_option(package_name="hpctrain")
def hpctrain(verbose: bool, quiet: bool) -> None:
    """Train neural networks with the MPI you have, and measure how that scales."""
    _set_up_logging(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def main() -> None:
    """Run the command line; every rank of a job ends with the same exit code."""
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        # Click prints what it has to say itself only in standalone mode: there all ranks would.
        code = hpctrain.main(prog_name="hpctrain", standalone_mode=False)
        return _leave(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        return _refuse(_usage(error))
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except AGREED as error:
        if world.current() is None:
            return _refuse(str(error))
        _say(f"hpctrain: {error}")
        return _leave(error.exit_code)
    except Exception as error:
        world.fail_alone(error)
        return error.exit_code if isinstance(error, HpctrainError) else BUG


def _refuse(message: str) -> int:
    """Say, before MPI starts, what is wrong; all ranks have seen the same.

    The silent ranks give rank 0 a second to speak: launchers kill all when the first one fails.
    """
    if launchers.launched(os.environ).rank > 0:
        time.sleep(1.0)
    _say(f"hpctrain: {message}")
    return UsageError.exit_code


def _leave(code: int) -> int:
    """Wait for all ranks, end MPI, and return the code on which they agree."""
    world.finish()
    return code


def _say(message: str) -> None:
    """Print on stderr, from one rank of the job."""
    here = world.current()
    if (here.rank if here else launchers.launched(os.environ).rank) == 0:
        print(message, file=sys.stderr, flush=True)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f"\nTry '{context.command_path} --help'." if context else ""
    return error.format_message() + hint


def _set_up_logging(level: int) -> None:
    """Log to stderr with the rank in front, where there is more than one."""
    launched = launchers.launched(os.environ)
    rank = f"[{launched.rank}] " if launched.size > 1 else ""
    logging.basicConfig(level=logging.WARNING, format=f"{rank}%(message)s", stream=sys.stderr)
    logging.getLogger("hpctrain").setLevel(level)
