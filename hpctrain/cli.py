"""The command line: finds the subcommand, prints from one rank, ends with one exit code."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

import click

from hpctrain import __version__
from hpctrain.commands import COMMANDS, LazyGroup
from hpctrain.commands._lazy import HelpFormatter
from hpctrain.core import launchers
from hpctrain.core.errors import AGREED_ERRORS, HpctrainError
from hpctrain.core.printing import LogFormat

if TYPE_CHECKING:
    from hpctrain.world import World

INTERRUPTED, BUG = 130, 1
click.Context.formatter_class = HelpFormatter
STDOUT, STDERR = 1, 2
COMPLETION = "_HPCTRAIN_COMPLETE"  #: set by a shell that asks click for completions
PRINTED_BY_RANK_0 = {"--help", "--version"}


@click.command(
    cls=LazyGroup,
    loaders=COMMANDS,
    epilog="""\b
Examples:
  hpctrain train digits                          on one device
  mpirun -n 4 hpctrain train digits              on four ranks; also srun
  hpctrain launch -n 4 train digits              with the mpiexec of the MPI that mpi4py loads
  hpctrain train --help

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
As root, in a container, its `mpirun` also needs OMPI_ALLOW_RUN_AS_ROOT=1 and
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; `hpctrain launch` sets them.
""",
)
@click.option("-v", "--verbose", is_flag=True, help="Also log where one-line errors come from.")
@click.option("-q", "--quiet", is_flag=True, help="Log only warnings and errors.")
@click.version_option(__version__, package_name="hpctrain")
def hpctrain(verbose: bool, quiet: bool) -> None:
    """Train neural networks with the MPI you have, and measure how that scales."""
    _set_up_logging(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def main() -> None:
    """Run the command line; every rank of a job ends with the same exit code."""
    _open_streams()
    if os.environ.get(COMPLETION):
        hpctrain.main(prog_name="hpctrain")  # click answers the shell, and exits
    sys.exit(_guarded())


def _open_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Else the next file that is opened gets its number, and the messages of MPI.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)  # noqa: FBT003
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _guarded() -> int:
    launchers.set_home(os.environ)  # of launchers, too
    try:
        if launchers.launched(os.environ).rank > 0 and PRINTED_BY_RANK_0 & set(sys.argv):
            return 0  # rank 0 answers
        # Not standalone: there click would print its messages on all ranks.
        code = hpctrain.main(prog_name="hpctrain", standalone_mode=False)
        return _finish(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        from hpctrain.transport import abort

        return abort.refuse(error, error.format_message(), _hint(error))
    except (click.Abort, KeyboardInterrupt):
        return _end_job(INTERRUPTED)
    except AGREED_ERRORS as error:
        if _world() is None:
            from hpctrain.transport import abort

            return abort.refuse(error, str(error))
        from hpctrain import world

        world.report_agreed(error)
        return _finish(error.exit_code)
    except (Exception, SystemExit) as error:  # also sys.exit in a user's code, on this rank alone
        if _world() is None and _output_closed(error):
            return BUG
        from hpctrain import world

        world.fail_alone(error)
        return error.exit_code if isinstance(error, HpctrainError) else BUG


def _world() -> World | None:
    """Return the World of this process; None before `init`, whose module may not be imported."""
    process = sys.modules.get("hpctrain.world.process")
    return process.current_world() if process is not None else None


def _output_closed(error: BaseException) -> bool:
    """Return whether the reader of our output has closed it, as `| head` does; then be silent.

    click makes a SystemExit of the BrokenPipeError, without its context.
    """
    output = select.poll()
    output.register(STDOUT, 0)
    has_no_reader = any(event & select.POLLERR for _, event in output.poll(0))
    closed = has_no_reader and isinstance(error, BrokenPipeError | SystemExit)
    if closed:  # else Python would complain when it flushes at its end
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), STDOUT)
    return closed


def _end_job(code: int) -> int:
    """End the whole job, if there is one: the other ranks wait for this one."""
    job = _world()
    if job is not None and job.size > 1:
        from hpctrain.transport import abort

        abort.abort(code)
    return code


def _finish(code: int) -> int:
    """Wait for all ranks, end MPI, and return the code on which they agree."""
    if _world() is not None:
        from hpctrain import world

        world.finish(code)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from `srun -K1`, once a rank has failed
    return code


def _hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"\nTry '{context.command_path} --help'." if context else ""


def _set_up_logging(level: int) -> None:
    """Log to stderr, with the rank as a prefix if there are several."""
    launched = launchers.launched(os.environ)
    rank = f"[{launched.rank}] " if launched.size > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormat(f"{rank}%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("hpctrain").setLevel(level)
