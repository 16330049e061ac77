"""The state of each rank of a job, read from the marks that ranks write to their mpiexec.

They decide what the mpiexec of an elastic job, or of MPICH, does not: whether its 0 is true,
whether the ranks that are left wait in MPI_Init for one that was lost, and whether mpiexec itself
waits for a lost host. See core/rank_marks.py.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence

from hpctrain.core import rank_marks
from hpctrain.core.rank_marks import ABORTS, ENDED, FINISHES, HAS_MPI, LOSES, STARTS_MPI

_MARK = re.compile(re.escape(rank_marks.MARK.encode()).replace(b"\\{\\}", b"([a-z0-9-]+)"))
_BEGIN, _MAX_BYTES = rank_marks.MARK[0].encode(), 64
#: Time for ranks to end by themselves after one was lost that will not join them in MPI.
GRACE_S = 5.0
_NAMES = 8  #: lost ranks that a message names


def command(argv: Sequence[str]) -> list[str]:
    """Return the command line of a rank that runs `argv` and marks its end."""
    return [sys.executable, "-I", "-S", rank_marks.__file__, *argv]


class RankStates:
    """The ranks that have started MPI, and the codes of those that have ended, of `size` ranks."""

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._clock, self._pending = size, clock, b""
        self._starting, self._joined, self._finishing = set[str](), set[str](), set[str]()
        self._lost = set[str]()  # says a rank that is left
        self._codes: dict[str, int] = {}  # as in subprocess, in the order of the ends
        self._aborts: list[int] = []
        self._doomed_s: float | None = None
        self._over_s: float | None = None

    def feed(self, data: bytes) -> bytes:
        """Return the output without the marks in it; keep the beginning of a mark back."""
        data = self._pending + data
        for rank, event, value in _MARK.findall(data):
            self._take_mark(rank.decode(), event.decode(), int(value))
        data = _MARK.sub(b"", data)
        start = data.rfind(_BEGIN)
        end = start if start >= 0 and len(data) - start < _MAX_BYTES else len(data)
        self._pending = data[end:]
        return data[:end]

    def end(self) -> bytes:
        """Return the remaining output."""
        return self._pending

    def _take_mark(self, rank: str, event: str, value: int) -> None:
        if event == STARTS_MPI:
            self._starting.add(rank)
        elif event == HAS_MPI:
            self._joined.add(rank)
        elif event == FINISHES:
            self._finishing.add(rank)
        elif event == ABORTS:
            self._aborts.append(value)
        elif event == ENDED:
            self._codes[rank] = value
        elif event == LOSES:
            self._lost.add(str(value))
        if self._over_s is None and self._lost and len({*self._codes} | self._lost) == self._size:
            self._over_s = self._clock()
        if self._doomed_s is None and self._starting and self._missing:
            self._doomed_s = self._clock()

    @property
    def _missing(self) -> list[str]:
        """The ranks that ended before they had MPI: no other rank can have it any more."""
        return [rank for rank in self._codes if rank not in self._joined]

    def find_fault(self) -> str:
        """Return why mpiexec must be ended; '' if it need not.

        Ranks wait in MPI_Init for one that was lost, or all have ended but ranks of lost hosts.
        """
        if self._over_s is not None and self._clock() >= self._over_s + GRACE_S:
            return "all ranks left have ended: mpiexec, which waits for a lost host, is ended"
        is_due = self._doomed_s is not None and self._clock() >= self._doomed_s + GRACE_S
        is_over = len(self._codes) == self._size  # else some wait, or are stopped before that
        if not is_due or is_over or not self._starting - self._joined:
            return ""
        return (
            f"{self._describe_codes(self._missing)} before MPI had started, for which the other "
            "ranks would wait for ever: the job is ended"
        )

    def exit_code(self, launcher_code: int, was_ended: bool) -> tuple[int, str]:
        """Return the exit code of the job, and the reason for another than `launcher_code`.

        `was_ended`: by us. A job ends with 0 only if a rank ended with 0, not in the midst of MPI,
        and if each rank that ended with another code was lost from a running MPI, or by a signal:
        others went on.
        """
        if was_ended and self._over_s is not None:  # mpiexec was, which has no code to tell
            launcher_code, was_ended = 0, False
        # of ranks that ended by themselves, with an error, and not from a running MPI
        refusal_codes = [c for rank, c in self._codes.items() if c > 0 and rank not in self._joined]
        if launcher_code and not was_ended:
            return launcher_code, ""
        has_success = any(self._is_success(rank, code) for rank, code in self._codes.items())
        if has_success and not refusal_codes and not was_ended:
            return 0, ""
        if codes := [*self._aborts, *refusal_codes]:
            return codes[0], ""
        failures = [rank for rank, code in self._codes.items() if not self._is_success(rank, code)]
        code = self._codes[failures[0]] or 1 if failures else 1
        failures_text = f": {self._describe_codes(failures)}" if failures else ""
        reason = "" if was_ended else f"no rank came to its end{failures_text}"
        return code if code > 0 else 128 - code, reason

    def _is_success(self, rank: str, code: int) -> bool:
        """Return whether a rank ended with 0, and not without a word while it used MPI."""
        return code == 0 and (rank in self._finishing or rank not in self._starting | self._joined)

    def _describe_codes(self, ranks: Sequence[str]) -> str:
        rank_texts = [
            f"rank {rank} ended with {_name(self._codes[rank])}" for rank in ranks[:_NAMES]
        ]
        return ", ".join([*rank_texts, *["..."] * (len(ranks) > _NAMES)])


def _name(code: int) -> str:
    return str(code) if code >= 0 else signal.Signals(-code).name
