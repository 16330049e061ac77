"""Results of a campaign: a line of JSON per case, after a line of facts on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpctrain.core import files
from hpctrain.tools.chaos import jobs
from hpctrain.tools.chaos.campaign import LINES_LIMIT_BYTES
from hpctrain.tools.chaos.case import Case, Table, parse
from hpctrain.tools.chaos.describe import describe_kind
from hpctrain.tools.chaos.runner import FAILED, PASSED
from hpctrain.transport import machine

CaseKey = tuple[int, int]  #: seed and index


def begin(path: Path) -> None:
    """Write the line of facts, unless the file has one."""
    if not path.exists():
        version = jobs.mpi().version
        facts = {"mpi": f"{jobs.mpi_name()} {version}", "python": sys.version.split()[0],
                 "cpu": machine.cpu(), "cores": os.cpu_count(),
                 "versions": machine.versions()}  # fmt: skip
        append(path, {"campaign": facts})


def append(path: Path, table: Table) -> None:
    """Append one line; raise OSError."""
    files.append_lines(path, json.dumps(table) + "\n")


def read(path: Path) -> dict[CaseKey, Table]:
    """Return the lines of a file of results, the last one of each case."""
    if not path.exists():
        return {}
    tables = files.read_log(path, lambda table: table, LINES_LIMIT_BYTES).entries
    results = [table for table in tables if "case" in table and "verdict" in table]
    return {(table["case"]["seed"], table["case"]["index"]): table for table in results}


def remaining(cases: Iterable[Case], results: dict[CaseKey, Table]) -> list[Case]:
    """Return the cases that have not passed."""
    passed = {key for key, table in results.items() if table["verdict"] == PASSED}
    return [case for case in cases if (case.seed, case.index) not in passed]


def counts(results: Iterable[Table]) -> dict[str, dict[str, Counter[str]]]:
    """Return title -> name -> verdict -> number of cases."""
    counted: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        launcher, spares = result["case"]["launcher"], result["case"].get("spares")
        names = {
            "engine": [f"{result['mpi']} {result['case']['engine']}"],
            "launcher": [f"{result['mpi']} {launcher}" + (f", {spares} spares" if spares else "")],
            "fault": [describe_kind(fault) for fault in parse(result["case"]).faults],
            "broken promise": [problem[:70] for problem in result["problems"]],
        }
        for title, keys in names.items():
            for key in keys:
                counted.setdefault(title, {}).setdefault(key, Counter())[result["verdict"]] += 1
    return counted


def summarize(results: list[Table]) -> str:
    """Return the last line of a campaign."""
    verdicts = Counter(result["verdict"] for result in results)
    hit = sum(any(item["fired"] for item in result["attempts"]) for result in results)
    faults = sum(len(result["case"]["faults"]) for result in results)
    text = (
        f"{len(results)} cases with {faults} faults, {hit} of them hit, {verdicts[FAILED]} failed"
    )
    skipped = len(results) - verdicts[FAILED] - verdicts[PASSED]
    return f"{text}, {skipped} skipped" if skipped else text


def unchecked(results: Iterable[Table]) -> Counter[str]:
    """Return the promises that could not be checked, with numbers of cases."""
    return Counter(text for result in results for text in result.get("unchecked", ()))


def failed_keys(results: dict[CaseKey, Table]) -> set[CaseKey]:
    """Return the cases that failed."""
    return {key for key, table in results.items() if table["verdict"] == FAILED}


def losses(results: Iterable[Table]) -> dict[str, Any]:
    """Return sums over elastic runs: recoveries, and the part of time that made progress."""
    elastic = [result for result in results if "wall_s" in result]
    wall_s = sum(result["wall_s"] for result in elastic)
    lost_s = sum(result.get("lost_s") or 0.0 for result in elastic)
    recoveries = sum(len(result.get("recoveries") or ()) for result in elastic)
    return {"recoveries": recoveries, "ettr": 1 - lost_s / wall_s} if wall_s and recoveries else {}
