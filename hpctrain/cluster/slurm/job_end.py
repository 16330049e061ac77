"""The exit code of a job, from the summary of its run: launchers lose codes, some end with 0."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.run_files import last_lines, run_folder

_EXIT_CODES = (0, 1, 2, 3, 75, 86, 130)  # the exit codes with a meaning in hpctrain
_REFUSED, STOPPED, _INTERRUPTED = 2, 75, 130
_FINAL_STATUSES = ("done", "stopped", "failed", "hung")
_BUS_ERROR = ": a bus error; is /dev/shm full? See `hpctrain doctor`"
# Launchers report a rank that SIGUSR1 has ended as 128 + its number, or as the number; MPICH then
# kills the other ranks, and returns the bitwise or of all codes.
_ENDED_BY_STOP = (signal.SIGUSR1, signal.SIGUSR1 | signal.SIGKILL)
_SAME_TIME_S = 0.05  # file times come from a clock that ticks more coarsely than time.time()


class LauncherExit(NamedTuple):
    """How mpiexec ended (as in subprocess) and the signals that asked us to stop."""

    code: int
    signals: tuple[int, ...]

    @property
    def killed(self) -> bool:
        """Whether a second Ctrl-C ended it."""
        return self.signals.count(signal.SIGINT) > 1


CodeWithoutRun = Callable[[LauncherExit], int]


def exit_code(
    launcher_exit: LauncherExit, note: bytes, started: float, without_run: CodeWithoutRun
) -> int:
    """Return the exit code of a job that began at `started`, seconds since the epoch.

    `note`: the folder of its run, as rank 0 announced it; `without_run` gives the code of a job
    that has none. Writes a summary where ranks could not.
    """
    run = Path(os.fsdecode(note)) if note else None
    run = run if run and run.is_dir() else None
    summary = _new_summary(run, started) if run else None
    was_refused = launcher_exit.code == _REFUSED and not launcher_exit.killed
    if run and summary is None and not was_refused:
        summary = _record_loss(run, launcher_exit)
    if launcher_exit.killed:
        return _INTERRUPTED
    return int(summary["exit_code"]) if summary else without_run(launcher_exit)


def _record_loss(run: Path, launcher_exit: LauncherExit) -> dict[str, Any]:
    code = _INTERRUPTED if launcher_exit.killed else 1
    reason = (
        "interrupted twice"
        if launcher_exit.killed
        else f"a rank was lost: {_exit_text(launcher_exit.code)}"
    )
    loss_summary = {"status": "failed", "exit_code": code, "reason": reason}
    summary = (
        (run_folder.read_summary(run) or {})
        | loss_summary
        | {"launcher_exit_code": launcher_exit.code}
    )
    run_folder.write_summary(run, summary)
    print_line("\nhpctrain: ".join([reason, *last_lines.last_lines(run)]))
    return summary


def code_of_command(launcher_exit: LauncherExit) -> int:
    """Return the code of a command of hpctrain that is no training, or that trained nothing."""
    if launcher_exit.code in _EXIT_CODES:
        return launcher_exit.code
    if launcher_exit.signals:  # nothing can be lost yet: to start again is to resume
        print_line("stopped before a run began")
        return _INTERRUPTED if signal.SIGINT in launcher_exit.signals else STOPPED
    print_line(f"before a run began, {_exit_text(launcher_exit.code)}")
    return 1


def code_of_program(launcher_exit: LauncherExit) -> int:
    """Return the code of any other program: the launcher's, or 128 + N if signal N stopped it."""
    if launcher_exit.signals and abs(launcher_exit.code) % 128 in _ENDED_BY_STOP:
        number = signal.Signals(launcher_exit.signals[0])
        print_line(f"stopped by {number.name}, which the program does not handle")
        return 128 + number
    return launcher_exit.code if launcher_exit.code >= 0 else 128 - launcher_exit.code


def _new_summary(run: Path, started: float) -> dict[str, Any] | None:
    """Return the summary that this job wrote, None if there is none."""
    summary = run_folder.read_summary(run)
    if summary is None or summary.get("status") not in _FINAL_STATUSES:
        return None
    written = (run / run_folder.SUMMARY).stat().st_mtime
    return summary if written >= started - _SAME_TIME_S else None


def _exit_text(code: int) -> str:
    name = code if code >= 0 else signal.Signals(-code).name
    return f"mpiexec ended with {name}{_BUS_ERROR * (code % 128 == signal.SIGBUS)}"


def print_line(text: str) -> None:
    """Print `text` on stderr, as launch."""
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)
