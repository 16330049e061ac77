"""The result of each trial, read from its files: summary.json and metrics.jsonl, nothing else.

A row of metrics holds rank 0's clock and the time of each rank since the start; the difference of
two rows is an interval. A trial counts with the median over its timed intervals: a disturbance of a
few (another process, a page fault) does not count, one of most of them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hpctrain.run_files import run_folder
from hpctrain.scaling.trial_recipe import INTERVALS, Timing

TIMES = ("compute_s", "wire_s", "wait_s")
#: Facts in a run's summary about its machine; jobs run elsewhere than this process.
FACTS = ("transport", "threads", "gpus", "gpu_paths")
SUMMARY = run_folder.SUMMARY
Row = dict[str, Any]


@dataclass(frozen=True)
class TrialResult:
    """Medians of one trial; seconds are those of a step, means over ranks but for `step_s`."""

    samples_per_s: float
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    algorithm: str | None
    hosts: tuple[str, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  #: FACTS in the run's summary

    @property
    def other_s(self) -> float:
        """Time in neither compute nor wait: reading data, rows of metrics, the loop itself."""
        return max(0.0, self.step_s - self.compute_s - self.wait_s)


@dataclass(frozen=True)
class Gap:
    """A missing trial, and the reason."""

    reason: str


def trial(folder: Path, timing: Timing) -> TrialResult | Gap:
    """Return the medians of the run in `folder`, a Gap where it is missing or incomplete."""
    try:
        summary = run_folder.read_summary(folder)
        rows = run_folder.rows(folder)
    except (OSError, ValueError) as error:
        return Gap(f"its files cannot be read: {error}")
    if summary is None or summary.get("status") != "done":
        return Gap(_reason(folder, summary))
    timed_intervals = list(intervals(rows, timing))
    if len(timed_intervals) != INTERVALS:
        cause = ": it was resumed on the way" if rows and rows[-1]["since_step"] else ""
        return Gap(
            f"{len(timed_intervals)} rows in {run_folder.METRICS}, expected {INTERVALS}{cause}"
        )
    step_s = {
        name: median(interval[name] for interval in timed_intervals) for name in ("step_s", *TIMES)
    }
    rate = median(interval["samples_per_s"] for interval in timed_intervals)
    hosts = tuple(summary.get("hosts") or ())
    facts = {name: summary[name] for name in FACTS if summary.get(name)}
    return TrialResult(
        rate, **step_s, algorithm=summary.get("algorithm"), hosts=hosts, machine=facts
    )


def intervals(rows: Sequence[Row], timing: Timing) -> Iterator[dict[str, float]]:
    """Yield samples/s and seconds per step of each timed interval."""
    for previous, row in pairwise(rows):
        is_complete = (
            row["steps"] == timing.interval and row["since_step"] == previous["since_step"]
        )
        if is_complete and timing.first < row["step"] <= timing.last:
            seconds_by_part = {
                name: fmean(row["ranks"][name]) - fmean(previous["ranks"][name]) for name in TIMES
            } | {"step_s": row["wall_s"] - previous["wall_s"]}
            per_step = {
                name: seconds / timing.interval for name, seconds in seconds_by_part.items()
            }
            yield per_step | {"samples_per_s": row["samples_per_s"]}


def last_step(folder: Path) -> int | None:
    """Return the last step in the metrics of the run in `folder`."""
    try:
        rows = run_folder.rows(folder)
    except OSError:  # a shared file system may take it away for a moment
        return None
    return rows[-1]["step"] if rows else None


def _reason(folder: Path, summary: dict[str, Any] | None) -> str:
    """Return the reason why a trial is not done: the summary's, else the last line of output."""
    if summary and summary.get("reason"):
        return f"{summary['status']}: {summary['reason']}"
    lines = [line.strip() for line in log_lines(folder) if line.strip()]
    hpctrain_lines = [line.partition("hpctrain: ")[2] for line in lines if "hpctrain: " in line]
    return (hpctrain_lines or lines or ["not run yet"])[-1]


def log_of(folder: Path) -> Path:
    """Return the file with the output of a trial: beside its folder, which must be new to it."""
    return folder.with_name(f"{folder.name}.log")


def job_of(folder: Path) -> Path:
    """Return the folder of the job of Slurm that makes a trial."""
    return folder.with_name(f"{folder.name}.job")


def log_lines(folder: Path) -> list[str]:
    """Return the output lines of a trial, those of its job last: they say more than Slurm does."""
    logs = [log_of(folder), *sorted(job_of(folder).glob("slurm-*.out"))]
    texts = [log.read_text(errors="replace") for log in logs if log.exists()]
    return "\n".join(texts).splitlines()
