"""`hpctrain launch --max-restarts`: a job that has lost a rank is started again.

    start 1 --- rank lost ---> start 2, from the newest checkpoint --- rank lost ---> ... ---> done

A start that reaches no step beyond those before it is followed by a pause, twice as long each time.
After the third such start in a row no other one is made: it would end in the same way.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster.hosts import Host, remaining_hosts
from hpctrain.cluster.loss_policy import LossPolicy
from hpctrain.cluster.slurm.job_end import print_message
from hpctrain.core import files
from hpctrain.core.files import FileError
from hpctrain.core.names import counted
from hpctrain.core.run_files import run_folder

_EXIT_LOST, _EXIT_HUNG, _EXIT_INTERRUPTED = 1, 86, 130
# Of a program that a signal has ended MPICH's mpiexec returns the number of the signal.
_CRASH_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
MAX_FUTILE_STARTS = 3
FIRST_PAUSE_S = 2.0
#: A program that has announced no run has made progress if it ran for so long.
LONG_START_S = 60.0
_STEP = re.compile(r"step-(\d+)")
_BATCH_PER_RANK = re.compile(r"^batch_per_rank\b", re.M)


class Start(NamedTuple):
    """A start of a job."""

    ranks: int  #: without spares
    spares: int
    hosts: Sequence[Host] = ()  #: empty: all of the allocation
    restarts: int = 0
    run: Path | None = None  #: the folder of the run that it resumes


class JobEnd(NamedTuple):
    """The end of a job: its exit code, its run, and whether a signal asked it to stop."""

    code: int
    run: Path | None
    is_stopped: bool

    @property
    def is_loss(self) -> bool:
        """Whether another start may succeed: a lost rank or host, a hang, a crash."""
        is_crash = self.code in (_EXIT_LOST, _EXIT_HUNG, *_CRASH_SIGNALS) or self.code > 128
        return is_crash and self.code != _EXIT_INTERRUPTED and not self.is_stopped


@dataclass(frozen=True)
class Progress:
    """The newest step of all starts, and the number of the last starts that did not exceed it."""

    step: int = 0
    futile_starts: int = 0

    def after(self, step: int | None, duration_s: float) -> Progress:
        """Return the progress after another start; `step`: its newest, None without a run."""
        has_advanced = duration_s >= LONG_START_S if step is None else step > self.step
        return Progress(max(self.step, step or 0), 0 if has_advanced else self.futile_starts + 1)

    @property
    def pause_s(self) -> float:
        """The time to wait before the next start."""
        return FIRST_PAUSE_S * 2.0 ** (self.futile_starts - 1) if self.futile_starts else 0.0


def run_until_done(
    start_job: Callable[[Start], JobEnd], n: int, policy: LossPolicy, hosts: Sequence[Host]
) -> int:
    """Start a job of `n` ranks, again after each loss; return the exit code of its last start.

    `hosts`: those of the allocation, empty outside of one.
    """
    start, progress = Start(n, policy.spares), Progress()
    while True:
        start_time_s = time.monotonic()
        end = start_job(start)
        if not end.is_loss or not policy.max_restarts:
            return end.code
        progress = progress.after(_newest_step(end.run), time.monotonic() - start_time_s)
        next_start = plan_start(n, policy, hosts, remaining_hosts(hosts))
        next_start = next_start._replace(restarts=start.restarts + 1, run=end.run or start.run)
        if fault := _refusal(next_start, progress, policy):
            print_message(f"{_describe_loss(end)}; not started again: {fault}")
            return end.code
        _announce_start(end, start, next_start, progress, policy.max_restarts)
        time.sleep(progress.pause_s)
        start = next_start


def plan_start(
    n: int, policy: LossPolicy, hosts: Sequence[Host], remaining: Sequence[Host]
) -> Start:
    """Return the ranks, spares and hosts of a start on the `remaining` ones of `hosts`."""
    if len(remaining) == len(hosts):
        return Start(n, policy.spares)
    slots = sum(host.slots for host in remaining)
    ranks = min(n, slots)
    return Start(ranks, min(policy.spares, slots - ranks), remaining)


def _newest_step(run: Path | None) -> int | None:
    """Return the newest step of a run in its rows and checkpoints; None without a run."""
    if run is None:
        return None
    names = [path.parent.name for path in run.glob("checkpoints/step-*/manifest.json")]
    steps = [int(match[1]) for match in map(_STEP.match, names) if match]
    with suppress(FileError):  # the next start reports it
        steps += [row["step"] for row in run_folder.rows(run)[-1:]]
    return max(steps, default=0)


def _refusal(start: Start, progress: Progress, policy: LossPolicy) -> str:
    """Return the reason against another start; empty if there is none."""
    min_ranks = policy.min_ranks or 1
    if start.restarts > policy.max_restarts:
        return f"--max-restarts {policy.max_restarts} is reached"
    if progress.futile_starts >= MAX_FUTILE_STARTS:
        return f"{MAX_FUTILE_STARTS} starts in a row reached no new step after {progress.step}"
    if start.ranks < min_ranks:
        names = ", ".join(host.name for host in start.hosts) or "none"
        return f"the remaining hosts ({names}) have {start.ranks} of --min-ranks {min_ranks} slots"
    return ""


def _announce_start(
    end: JobEnd, previous: Start, start: Start, progress: Progress, max_restarts: int
) -> None:
    """Print why and how the job is started again."""
    pause = f", in {progress.pause_s:g} s" * bool(progress.pause_s)
    target = f"; resumes {start.run}, which was at step {progress.step}" if start.run else ""
    print_message(
        f"{_describe_loss(end)}; restart {start.restarts} of {max_restarts} on "
        f"{counted(start.ranks, 'rank')}{pause}{target}"
    )
    if start.ranks != previous.ranks and start.run and _has_batch_per_rank(start.run):
        print_message(
            f"warning: the recipe has batch_per_rank: with {counted(start.ranks, 'rank')} instead "
            f"of {previous.ranks} the batch and the number of steps change; `batch` keeps both"
        )


def _describe_loss(end: JobEnd) -> str:
    """Return the reason of a loss in a line."""
    summary = (run_folder.read_summary(end.run) if end.run else None) or {}
    reason = str(summary.get("reason") or f"the job ended with {end.code}")
    return reason.partition("\n")[0]


def _has_batch_per_rank(run: Path) -> bool:
    try:
        recipe = files.read_text(run / run_folder.RECIPE, run_folder.RECIPE_BYTES)
        return bool(_BATCH_PER_RANK.search(recipe))
    except FileError:  # a run of `ht.Trainer` has no recipe
        return False
