"""Attempts by launcher: processes, or threads of this process, of which thousands are cheap.

Threads run in the process of the case, which ends with it: a thread that hangs ends there, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hpctrain import world as worlds
from hpctrain.core.errors import HpctrainError
from hpctrain.core.printing import say
from hpctrain.tools.chaos import attempt
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import Case, Fault
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Scope
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.hub import Job
from hpctrain.transport.threads.link import LocalLink
from hpctrain.transport.threads.ranks import run_ranks

TIMEOUT_S = 20.0  #: of a wait of a thread


class OutOfTimeError(Exception):
    """The attempt has taken longer than its limit."""


def train(
    case: Case, place: Place, scope: Scope, order: Order, faults: list[Fault], log: Path
) -> Attempt:
    """Train `case` under `faults`; return the outcome."""
    if order.launcher != "threads":
        return attempt.attempt(case, place, scope, order, faults, log)
    start_s = time.monotonic()
    with _output_in(log):
        code, job = _train(case, place, order)
    calls = [job.calls[number] for number in range(case.job_ranks)]
    seconds, text = time.monotonic() - start_s, log.read_text(errors="replace")
    fired = any(calls[rank] >= number for rank, number in order.kills.items())
    return Attempt(code, seconds, fired, text, calls=calls)


def _train(case: Case, place: Place, order: Order) -> tuple[int | None, Job]:
    """Return the exit code, None after the limit, and the job with the ranks that were killed."""
    spec = recipe.load(str(place.recipe), order.settings)
    jobs: list[Job] = []

    def rank(link: LocalLink) -> bool:
        jobs.append(link.hub.job)
        world = worlds.over_threads(link, spares=case.spares)
        runs.train(spec, world, place.run, order.resume, order.replay)
        return True

    # Calls are counted only if a rank is to be killed: that one does not exist.
    kills = order.kills or {case.job_ranks: 1}
    try:
        with _limited(case.limit_s):
            results = run_ranks(case.job_ranks, rank, TIMEOUT_S, kills)
        return (0 if any(results) else 1), jobs[0]  # 1: all ranks were killed
    except HpctrainError as error:
        say(error, err=True)
        return error.exit_code, jobs[0]
    except OutOfTimeError:
        faulthandler.dump_traceback(all_threads=True)
        return None, jobs[0]
    except Exception:
        traceback.print_exc()
        return 1, jobs[0]


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the main thread after `seconds`."""

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    previous_handler = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


@contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """Write what this process prints into `log`."""
    saved_stderr = os.dup(2)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
