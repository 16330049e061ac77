"""Types of the entries in a run's files: rows of metrics.jsonl, and summary.json.

Only entries that are read again have a type, and any may be missing: older versions did not write
every entry, newer ones add some, and wrote NaN and Infinity where null stands now.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field

from hpctrain.core.files import brief

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = float | None
Histogram = dict[Annotated[str, Field(pattern=r"^[0-9]{1,6}$")], Count]
METRICS = ("train_", "test_")  #: beginnings of the names of metrics
_OPEN = pydantic.ConfigDict(strict=True, extra="allow", defer_build=True)


class Metrics(pydantic.BaseModel):
    """The entries that rows and summaries share."""

    model_config = _OPEN
    samples: Count | None = None
    train_loss: Number = None
    test_loss: Number = None
    test_accuracy: Number = None
    test_rmse: Number = None
    test_r2: Number = None
    test_confusion: list[list[Count]] | None = None
    samples_per_s: Number = None
    wall_s: Number = None
    compute_s: Number = None
    wait_s: Number = None
    wire_s: Number = None
    data_wait_s: Number = None
    since_step: Count | None = None
    staleness_mean: Number = None
    staleness_max: Count | None = None
    staleness_histogram: Histogram | None = None
    clock_gap_max: Count | None = None
    dropped_gradients: Count | None = None
    idle_fraction: list[Number] | None = None
    straggler_scores: list[Number] | None = None


class RankTimes(pydantic.BaseModel):
    """The seconds of each rank since the last resumption."""

    model_config = _OPEN
    compute_s: list[Number] | None = None
    wait_s: list[Number] | None = None
    wire_s: list[Number] | None = None
    data_wait_s: list[Number] | None = None


class MetricsRow(Metrics):
    """A row of metrics.jsonl."""

    step: Annotated[int, Field(ge=1, lt=2**63)]
    total_steps: Count | None = None
    steps: Count | None = None
    epoch: Count | None = None
    train_accuracy: Number = None
    rate: Number = None
    ranks: RankTimes | None = None
    interrupted: bool = False
    lost_ranks: list[Count] | None = None


class Recovery(pydantic.BaseModel):
    """A loss of ranks that a run survived; ranks are numbered as in the job."""

    model_config = _OPEN
    step: Count | None = None
    wall_s: Number = None
    lost_s: Number = None
    ranks: list[Count] = []
    hosts: list[str] | None = None
    spares: list[Count] | None = None
    steps_redone: Count | None = None


class Summary(Metrics):
    """The entries of summary.json; of a run that failed early there are few."""

    status: str
    exit_code: int | None = None
    reason: str | None = None
    recipe: str | None = None
    engine: str | None = None
    algorithm: str | None = None
    transport: str | None = None
    world_size: Count | None = None
    workers: Count | None = None
    servers: Count | None = None
    hosts: list[str] | None = None
    rank_hosts: list[Count] | None = None
    epochs: Number = None
    steps: Count | None = None
    steps_redone: Count | None = None
    recoveries: list[Recovery] | None = None
    lost_s: Number = None
    ettr: Number = None
    spares_used: Count | None = None
    bytes_sent_per_rank: Count | None = None
    params_sha256: str | None = None
    seed: Count | None = None
    versions: dict[str, Any] | None = None
    loggers: list[dict[str, Any]] | None = None


def row(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a row of metrics.jsonl as it is; raise ValueError if an entry has a wrong type."""
    return _validate(MetricsRow, entry)


def summary(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a summary as it is; raise ValueError if an entry has a wrong type."""
    return _validate(Summary, entry)


def _validate(model: type[pydantic.BaseModel], entry: dict[str, Any]) -> dict[str, Any]:
    try:
        model.model_validate(entry)
    except pydantic.ValidationError as error:
        raise ValueError(first_fault(error)) from None
    for key, value in entry.items():
        if key.startswith(METRICS) and key != "test_confusion" and not _is_number(value):
            raise ValueError(f"'{brief(key)[1:-1]}': expected a number, seen {brief(value)}")
    return entry


def _is_number(value: Any) -> bool:
    """Return whether `value` is a metric: a float, an integer of 64 bits, or null."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def first_fault(error: pydantic.ValidationError, within: str = "") -> str:
    """Return the first fault of a validation in a line: key, expected and actual value."""
    first_error = error.errors(include_url=False)[0]
    key = ".".join(map(str, (*[within] * bool(within), *first_error["loc"])))
    seen_text = "nothing" if first_error["type"] == "missing" else brief(first_error["input"])
    return f"'{brief(key)[1:-1]}': {first_error['msg'].lower()}, seen {seen_text}"
