"""The order of tests on the ranks of an MPI job."""

from __future__ import annotations

import time

import pytest

STRAGGLER_S = 5.0  # how long a rank whose test failed waits for the others


class Lockstep:
    """Ranks go from test to test together; one that fails alone ends the job with its report.

    Otherwise the others would wait in a collective for the rank that left it by an exception.
    """

    def __init__(self, config: pytest.Config, comm) -> None:
        self._writer = config.get_terminal_writer
        self._comm = comm
        self._failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(f"{report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_runtest_logfinish(self) -> None:
        everyone = self._comm.Ibarrier()
        limit = time.monotonic() + STRAGGLER_S
        while not everyone.Test():
            if self._failures and time.monotonic() > limit:
                self._abort()
            time.sleep(0.001)  # ranks share cores with those still at work
        self._failures.clear()

    def _abort(self) -> None:
        self._writer().line("\n" + "\n".join(self._failures))
        self._writer().line(f"rank {self._comm.rank} failed, others did not come: ending the job")
        self._writer().flush()
        self._comm.Abort(1)
