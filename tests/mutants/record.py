"""A plugin of pytest that records, for each test, its seconds and the lines that it executes.

`make mutants` loads it in every job of `make test` by PYTEST_ADDOPTS. Each job writes two files in
RECORD: NAME.jsonl (row, seconds, outcome) and NAME.coverage, whose contexts are the rows. Processes
that a test starts record the modules that they import: children/sitecustomize.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import coverage
import pytest


class Recorder:
    """The rows of one job of pytest; on ranks of MPI one per rank."""

    def __init__(self, folder: Path) -> None:
        ranks = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
        name = f"{Path(sys.prefix).name}-{ranks}-{os.getpid()}-{rank}"
        job = {"python": f"{Path(sys.prefix).name}/bin/python", "ranks": int(ranks)}
        self._rows = open(folder / f"{name}.jsonl", "w")  # noqa: SIM115
        self._rows.write(json.dumps(job | {"rank": int(rank)}) + "\n")
        self._data = str(folder / f"{name}.coverage")
        self._seconds = 0.0
        self._outcome = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        package = str(session.config.rootpath / "hpctrain")
        self._coverage = coverage.Coverage(self._data, source=[package], config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._coverage.switch_context(item.nodeid)
        self._seconds, self._outcome = 0.0, ""
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        row = {"row": nodeid, "seconds": round(self._seconds, 4), "outcome": self._outcome}
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTEST_ADDOPTS", None)  # else pytest in a test would load this, too
    config.pluginmanager.register(Recorder(Path(os.environ["RECORD"])))
