"""Measurements for predictions: a file of `hpctrain bench --json` or a table of `hpctrain tune`.

Ranks that all lie on one host measure wires inside a node; ranks on a host each, wires between
nodes. With several ranks on each of several hosts both kinds mix: all-reduces there are compared
with predictions, and nothing is fitted to them.
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
from hpctrain.cost_model import cost, fit
from hpctrain.cost_model.loggp import Wire, uniform_cluster
from hpctrain.tuning import table

HOW_TO_MEASURE = "measure again: hpctrain launch -n RANKS bench allreduce --json FILE, or ... tune"
Positive = Annotated[int, pydantic.Field(gt=0, le=1 << 60)]


@dataclass(frozen=True)
class Measurement:
    """The median seconds of an operation by bytes and ranks."""

    operation: str
    algorithm: str
    bytes: Positive
    ranks: Positive
    median_s: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Measurements:
    """Rows of one job on `hosts`; wires and seconds per byte added, where they could be fitted."""

    rows: Sequence[Measurement]
    hosts: int
    inside: Wire | None = None
    between: Wire | None = None
    gamma: float | None = None


@dataclass(frozen=True)
class _Machine:
    hosts: Positive


@dataclass(frozen=True)
class _Bench:
    machine: _Machine
    rows: list[Measurement]


_READER = pydantic.TypeAdapter(_Bench)


def read(path: Path) -> Measurements:
    """Return the measurements in file `path`; raise UsageError if damaged or of another version."""
    try:
        text = files.read_text(path, table.LIMIT_BYTES)
        content = files.as_object(files.parsed_json(text, str(path)), str(path))
    except files.FileError as error:
        raise UsageError(f"--measured {error}; {HOW_TO_MEASURE}") from None
    read_as = _from_table if "fingerprint" in content else _from_bench
    return read_as(path, text.encode())


def _from_table(path: Path, text: bytes) -> Measurements:
    try:
        tuning_table = table.parse_table(text)
    except table.TableError as error:
        raise UsageError(f"--measured {path}: {error}") from None
    layout = re.match(r"(\d{1,9}) ranks on (\d{1,9}) node", tuning_table.fingerprint.layout)
    if layout is None:
        actual = files.brief(tuning_table.fingerprint.layout)
        raise UsageError(
            f"--measured {path}: expected a layout 'N ranks on M nodes', seen {actual}"
        )
    ranks, hosts = map(int, layout.groups())
    rows = [
        Measurement("allreduce", row.algorithm, row.bytes, ranks, row.seconds)
        for row in tuning_table.rows
        if row.in_memory
    ]
    machine = tuning_table.node or tuning_table.across
    gamma = machine.gamma if machine else None
    return Measurements(rows, hosts, _wire(tuning_table.node), _wire(tuning_table.across), gamma)


def _from_bench(path: Path, text: bytes) -> Measurements:
    try:
        bench = _READER.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"--measured {path}: damaged or of another version: {place}: {first['msg'].lower()}; "
            f"{HOW_TO_MEASURE}"
        ) from None
    hosts, rows = bench.machine.hosts, bench.rows
    apart = hosts > 1 and all(row.ranks == hosts for row in rows)
    machine = _fitted(rows) if hosts == 1 or apart else None
    wire = _of_messages(rows) or _wire(machine)
    gamma = machine.gamma if machine else None
    if hosts == 1:
        return Measurements(rows, hosts, inside=wire, gamma=gamma)
    return Measurements(rows, hosts, between=wire, gamma=gamma)


def _wire(machine: cost.Machine | None) -> Wire | None:
    return uniform_cluster(machine).inside if machine else None


def _of_messages(rows: Sequence[Measurement]) -> Wire | None:
    """Return the wire measured by `hpctrain bench p2p`, between two hosts if there are two."""
    one_way, ping_pong = (
        [(row.bytes, row.median_s) for row in rows if row.algorithm == way]
        for way in ("one-way", "ping-pong")
    )
    if len(one_way) < 2 or not ping_pong:
        return None
    return fit.wire(one_way, ping_pong, one_way, min(ping_pong)[1] / 4)


def _fitted(rows: Sequence[Measurement]) -> cost.Machine | None:
    """Return the machine fitted to the times of our algorithms; None if there are too few."""
    timings = [
        (cost.ALLREDUCE[row.algorithm](row.bytes, row.ranks), row.median_s)
        for row in rows
        if row.operation == "allreduce" and row.algorithm in cost.ALLREDUCE and row.ranks > 1
    ]
    return fit.machine(timings) if len({path.bytes for path, _ in timings}) > 2 else None
