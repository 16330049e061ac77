"""How a job ends before its time: at once, on all ranks, after somebody has said why."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hpctrain import rundir
from hpctrain.errors import HungError
from hpctrain.watch import dump_stacks, write_report

SPEAK_FIRST_S = 3.0  #: how long whoever reports a hang first is given to say so


def abort(code: int) -> None:
    """End the whole job at once with exit code `code`."""
    from hpctrain.transport import mpi

    mpi.abort(code)


def hung(rank: int, run: Path | None, report: str) -> None:
    """Report a hang, in folder `run` if there is one, and end the job; called on every rank.

    It ends whatever goes wrong on the way: the others wait for it.
    """
    try:
        if run is not None:
            dump_stacks(run / "watch" / f"stacks-{rank:05d}.txt")
        if run is None or write_report(run / "watch", report):
            _speak(run, report)
        else:
            time.sleep(SPEAK_FIRST_S)
    finally:
        abort(HungError.exit_code)


def _speak(run: Path | None, report: str) -> None:
    print(report, file=sys.stderr, flush=True)
    told = {"status": "hung", "exit_code": HungError.exit_code, "reason": report}
    if run is not None:
        rundir.write_summary(run, told)
