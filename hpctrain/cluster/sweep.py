"""A sweep on this machine: its members train one after the other, each as a job of its own.

A member is a child process, `hpctrain [launch -n N] train RECIPE --set ... --out DIR/NAME
--resume`: MPI starts once in each, and one that crashes does not end the others.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.launch import guard_job
from hpctrain.cluster.slurm.job_end import EXIT_STOPPED
from hpctrain.cluster.supervision import catch_stop_signals
from hpctrain.core import files, launchers
from hpctrain.core.config import sweep as settings
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.run_files import run_folder, sweep_folder
from hpctrain.core.run_files.sweep_folder import SweepFile
from hpctrain.training.sweep import Member

log = logging.getLogger(__name__)
_STOPPED_CODES = (EXIT_STOPPED, 130)


@dataclass(frozen=True)
class Sweep:
    """A sweep with the members that it trains."""

    recipe: str  #: as a rank of `hpctrain train` gets it
    file: SweepFile
    members: Sequence[Member]


def must_be_alone(launched: launchers.Launched) -> None:
    """Raise UsageError in a rank of a job: each member is a job of its own."""
    if launched.name != "none":
        raise UsageError(
            f"a sweep starts a job for each member, and this is rank {launched.rank} of "
            f"{launched.size} that {launchers.TITLES[launched.name]} started: call `hpctrain "
            f"launch -n {launched.size} train ...`, or `hpctrain slurm submit`"
        )


def train(sweep: Sweep, out: Path, resume: bool, start: Sequence[str]) -> int:
    """Train the members of `sweep` that are not done, in folder `out`; return the exit code.

    `start`: the words of hpctrain's command line before `train`. The code is 0 if all members are
    done. A stopped member ends the sweep, with its code. Else it is the failed members' code, 1 if
    their codes differ. Raises UsageError for a used folder without `resume`, or another sweep.
    """
    if out.is_dir() and resume:
        sweep_folder.must_fit(out, sweep.file)
    with run_folder.claim(out, resume), catch_stop_signals() as read_signals:
        sweep_folder.write(out, sweep.file)
        codes: list[int] = []
        for number, member in enumerate(sweep.members, start=1):
            title = f"member {number} of {len(sweep.members)}: {settings.describe(member.values)}"
            run = out / member.name
            if sweep_folder.is_done(run):
                log.info("%s: done before", title)
                _warn_of_changes(member, run)
                continue
            log.info(title)
            words = [*start, "train", sweep.recipe]
            words += [word for text in member.settings for word in ("--set", text)]
            code, is_stopped = _run_job([*words, "--out", str(run), "--resume"], read_signals)
            codes.append(max(code, 0) or int(code < 0))
            if code and code not in _STOPPED_CODES:
                end = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                log.warning("%s: failed with %s", title, end)
            if code in _STOPPED_CODES or (is_stopped and number < len(sweep.members)):
                log.warning("stopped; the same command with --out %s --resume goes on", out)
                return code if code in _STOPPED_CODES else EXIT_STOPPED
    failure_codes = {code for code in codes if code}
    if failure_codes:
        log.warning("not all members are done; the same command with --resume repeats them")
    return 0 if not failure_codes else 1 if len(failure_codes) > 1 else failure_codes.pop()


def _warn_of_changes(member: Member, run: Path) -> None:
    """Warn if a member that is done has another recipe than it would have now."""
    trained_file = run / run_folder.RECIPE
    if files.read_text(trained_file, run_folder.RECIPE_BYTES) != member.spec.toml():
        log.warning("%s was trained by another recipe, and stays as it is", run)


def _run_job(words: Sequence[str], read_signals: Callable[[], list[int]]) -> tuple[int, bool]:
    """Run `hpctrain WORDS` and pass stop signals on; return its code, and whether one came.

    If this process is killed, a guard ends the job.
    """
    with guard_job(uuid.uuid4().hex) as variables:
        process = subprocess.Popen(
            [*module_command("hpctrain"), *words],
            env=launchers.without_rank_variables(os.environ) | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        is_stopped = False
        while process.poll() is None:
            for number in read_signals():
                process.send_signal(number)
                is_stopped = True
    return process.returncode, is_stopped
