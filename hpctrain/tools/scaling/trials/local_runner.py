"""Run trials from this process: ranks on this machine, or on the hosts of a netlab.

A trial is a command of its own, `hpctrain launch` or `hpctrain netlab`, with a log of its own. It
ends when this process does, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster.launch import MpiInstallation, find_mpi
from hpctrain.cluster.netlab import netlab
from hpctrain.cluster.supervision import stop_launcher
from hpctrain.core import launchers, opening, progress
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.rank_marks import end_with_parent
from hpctrain.tools.scaling.collect import LEVELS
from hpctrain.tools.scaling.study import Study
from hpctrain.tools.scaling.trial_recipe import Size

PLACES = ("local", "netlab", "slurm")
LIMIT_S = 3600.0  #: a trial that takes longer is ended; one that hangs is ended by its own watch
POLL_S = 2.0  #: more often would take time from the timed ranks


def must_work(on: str, sizes: Sequence[Size], link: str | None) -> MpiInstallation | None:
    """Raise UsageError where trials cannot run; return the MPI that they will use, if known."""
    launchers.must_not_be_rank(os.environ, "`hpctrain scale` starts ranks itself")
    if link is not None and on != "netlab":
        raise UsageError(f"--link shapes the links of a netlab; seen --on {on}")
    if on == "slurm":
        if shutil.which("sbatch") is None:
            raise UsageError(
                "--on slurm: there is no sbatch on the PATH; load the site's Slurm, or take --on "
                "local or --on netlab"
            )
        return None
    if on == "netlab":
        speed = netlab.parse_speed(link or "")
        for size in sizes:
            netlab.Lab(size.nodes, size.per_node, speed)
        if (reason := netlab.unavailable_reason()) is not None:
            raise UsageError(f"--on netlab: {reason}")
    mpi = find_mpi()
    if mpi.mpiexec is None:
        raise UsageError(
            f"no mpiexec belongs to {mpi.vendor} ({mpi.libmpi}), which mpi4py loads; "
            "`hpctrain doctor` tells more"
        )
    return mpi


def line(study: Study, size: Size, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `hpctrain ARGUMENTS`, or `-- PROGRAM`, on ranks of `size`."""
    program = module_command("hpctrain")
    if study.on == "local":
        return [*program, "launch", "-n", str(size.ranks), *arguments]
    hosts = ["--hosts", str(size.nodes), "--ranks-per-host", str(size.per_node)]
    words = arguments if arguments[0] == "--" else ["--", *program, *arguments]
    return [*program, "netlab", *hosts, "--link", str(study.link), *words]


def run(
    command: Sequence[str],
    log: Path,
    threads: int | None,
    limit_s: float = LIMIT_S,
    on_poll: Callable[[], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run `command` to its end with its output in `log`; return its exit code.

    Meanwhile `on_poll` is called every POLL_S. A command that takes longer than `limit_s` is
    stopped, and `log` reports it.
    """
    environ = {k: v for k, v in os.environ.items() if k != progress.TERMINAL} | {
        **(variables or {})
    }
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    with opening.create(log, LEVELS) as out:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=end_with_parent,  # `launch` then stops its ranks
        )
        try:
            return _wait_for_exit(process, limit_s, on_poll)
        except subprocess.TimeoutExpired:
            stop_launcher(process)
            out.write(f"hpctrain: ended after {limit_s:g} s, the limit of a trial\n".encode())
            return 1
        except BaseException:
            stop_launcher(process)
            raise


def _wait_for_exit(
    process: subprocess.Popen[bytes], limit_s: float, on_poll: Callable[[], None] | None
) -> int:
    """Return the exit code of `process`; raise TimeoutExpired after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while on_poll is not None and time.monotonic() + POLL_S < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        on_poll()
    return process.wait(max(0.0, deadline - time.monotonic()))
