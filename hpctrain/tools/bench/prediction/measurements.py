"""Measurements for predictions: a file of `hpctrain bench --json` or a table of `hpctrain tune`.

If all ranks are on one host, times give the wire inside a node; with one rank per host, the wire
between nodes. With several ranks on each of several hosts both kinds mix: such all-reduces are
compared with predictions, but no wire is fitted to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic

from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED
from hpctrain.tuning import table
from hpctrain.tuning.model import cost, fit
from hpctrain.tuning.model.loggp import Wire, uniform_cluster

HOW_TO_MEASURE = "measure again: hpctrain launch -n RANKS bench allreduce --json FILE, or ... tune"
PositiveInt = Annotated[int, pydantic.Field(gt=0, le=1 << 60)]


@dataclass(frozen=True)
class Measurement:
    """The median seconds of an operation by bytes and ranks."""

    operation: str
    algorithm: str
    bytes: PositiveInt
    ranks: PositiveInt
    median_s: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Measurements:
    """Rows of a job on `hosts` hosts; fitted wires, and gamma: seconds per byte added."""

    rows: Sequence[Measurement]
    hosts: int
    inside: Wire | None = None
    between: Wire | None = None
    gamma: float | None = None


@dataclass(frozen=True)
class _JobMachine:
    hosts: PositiveInt


@dataclass(frozen=True)
class _BenchReport:
    machine: _JobMachine
    rows: list[Measurement]


_REPORT_READER = pydantic.TypeAdapter(_BenchReport)


def read_measurements(path: Path) -> Measurements:
    """Read the measurements in `path`; raise UsageError if it is damaged or of another version."""
    try:
        text = files.read_text(path, table.MAX_FILE_BYTES, NAMED)
        content = files.as_object(files.parsed_json(text, str(path)), str(path))
    except files.FileError as error:
        raise UsageError(f"--measured {error}; {HOW_TO_MEASURE}") from None
    reader = _read_tuning_table if "fingerprint" in content else _read_bench_report
    return reader(path, text.encode())


def _read_tuning_table(path: Path, text: bytes) -> Measurements:
    try:
        tuning_table = table.parse_table(text)
    except table.TableError as error:
        raise UsageError(f"--measured {path}: {error}") from None
    layout_match = re.match(r"(\d{1,9}) ranks on (\d{1,9}) node", tuning_table.fingerprint.layout)
    if layout_match is None:
        layout_text = files.brief(tuning_table.fingerprint.layout)
        raise UsageError(
            f"--measured {path}: expected a layout 'N ranks on M nodes', seen {layout_text}"
        )
    ranks, hosts = map(int, layout_match.groups())
    rows = [
        Measurement("allreduce", row.algorithm, row.bytes, ranks, row.seconds)
        for row in tuning_table.rows
        if row.in_memory
    ]
    machine = tuning_table.node or tuning_table.across
    gamma = machine.gamma if machine else None
    return Measurements(
        rows,
        hosts,
        _wire_from_machine(tuning_table.node),
        _wire_from_machine(tuning_table.across),
        gamma,
    )


def _read_bench_report(path: Path, text: bytes) -> Measurements:
    try:
        report = _REPORT_READER.validate_json(text)
    except pydantic.ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        raise UsageError(
            f"--measured {path}: damaged or of another version: {key}: "
            f"{first_error['msg'].lower()}; {HOW_TO_MEASURE}"
        ) from None
    hosts, rows = report.machine.hosts, report.rows
    is_one_rank_per_host = hosts > 1 and all(row.ranks == hosts for row in rows)
    machine = _fit_machine(rows) if hosts == 1 or is_one_rank_per_host else None
    wire = _wire_from_messages(rows) or _wire_from_machine(machine)
    gamma = machine.gamma if machine else None
    if hosts == 1:
        return Measurements(rows, hosts, inside=wire, gamma=gamma)
    return Measurements(rows, hosts, between=wire, gamma=gamma)


def _wire_from_machine(machine: cost.Machine | None) -> Wire | None:
    return uniform_cluster(machine).inside if machine else None


def _wire_from_messages(rows: Sequence[Measurement]) -> Wire | None:
    """Return the wire fitted to rows of `hpctrain bench p2p`; None if there are too few."""
    one_way, ping_pong = (
        [(row.bytes, row.median_s) for row in rows if row.algorithm == method]
        for method in ("one-way", "ping-pong")
    )
    if len(one_way) < 2 or not ping_pong:
        return None
    return fit.fit_wire(one_way, ping_pong, one_way, min(ping_pong)[1] / 4)


def _fit_machine(rows: Sequence[Measurement]) -> cost.Machine | None:
    """Return the machine fitted to the times of our algorithms; None if there are too few."""
    paths_and_times = [
        (cost.ALLREDUCE[row.algorithm](row.bytes, row.ranks), row.median_s)
        for row in rows
        if row.operation == "allreduce" and row.algorithm in cost.ALLREDUCE and row.ranks > 1
    ]
    return (
        fit.fit_machine(paths_and_times)
        if len({path.bytes for path, _ in paths_and_times}) > 2
        else None
    )
