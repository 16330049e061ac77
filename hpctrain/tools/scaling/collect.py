"""The result of each trial, read only from its files: summary.json and metrics.jsonl.

A row of metrics holds rank 0's clock and the times of each rank since the start; the difference of
two rows is an interval. The result of a trial is the median over its timed intervals. It ignores
disturbances of a few intervals, such as another process or page faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hpctrain.core import files, opening
from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling.trial_recipe import TIMED_INTERVALS, Timing
from hpctrain.tuning.measure import summarize_times

TIME_COLUMNS = ("compute_s", "wire_s", "wait_s")
#: Facts about the machine in a run's summary: jobs may run on other nodes than this process.
MACHINE_FACTS = ("transport", "threads", "gpus", "gpu_paths")
LEVELS = 3  #: of a log, STUDY/trials/SIZE/FILE, see core/opening.py
LOG_BYTES = 1 << 30
Row = dict[str, Any]


@dataclass(frozen=True)
class TrialResult:
    """Medians of a trial: seconds per step; all but `step_s` are means over ranks."""

    samples_per_s: float
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    algorithm: str | None
    hosts: tuple[str, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  #: FACTS in the run's summary
    spread: float = 0.0  #: interquartile range of the intervals' steps over their median

    @property
    def other_s(self) -> float:
        """The rest of a step: reading data, writing metrics, the training loop."""
        return max(0.0, self.step_s - self.compute_s - self.wait_s)


@dataclass(frozen=True)
class Gap:
    """A missing trial, with the reason."""

    reason: str


def read_trial(folder: Path, timing: Timing) -> TrialResult | Gap:
    """Return the medians of the run in `folder`; a Gap if the run is missing or incomplete."""
    try:
        summary = run_folder.read_summary(folder)
        rows = run_folder.rows(folder)
    except (OSError, ValueError) as error:
        return Gap(f"its files cannot be read: {error}")
    if summary is None or summary.get("status") != "done":
        return Gap(_gap_reason(folder, summary))
    interval_list = list(timed_intervals(rows, timing))
    if len(interval_list) != TIMED_INTERVALS:
        resume_note = ": it was resumed on the way" if rows and rows[-1]["since_step"] else ""
        return Gap(
            f"{len(interval_list)} rows in {run_folder.METRICS}, expected {TIMED_INTERVALS}"
            f"{resume_note}"
        )
    median_times = {
        name: median(interval[name] for interval in interval_list)
        for name in ("step_s", *TIME_COLUMNS)
    }
    samples_per_s_median = median(interval["samples_per_s"] for interval in interval_list)
    hosts = tuple(summary.get("hosts") or ())
    machine_facts = {name: summary[name] for name in MACHINE_FACTS if summary.get(name)}
    return TrialResult(
        samples_per_s_median,
        **median_times,
        algorithm=summary.get("algorithm"),
        hosts=hosts,
        machine=machine_facts,
        spread=summarize_times([interval["step_s"] for interval in interval_list])["spread"],
    )


def timed_intervals(rows: Sequence[Row], timing: Timing) -> Iterator[dict[str, float]]:
    """Yield samples/s and seconds per step of each timed interval."""
    for previous, row in pairwise(rows):
        is_complete = (
            row["steps"] == timing.interval and row["since_step"] == previous["since_step"]
        )
        if is_complete and timing.first < row["step"] <= timing.last:
            seconds_by_part = {
                name: fmean(row["ranks"][name]) - fmean(previous["ranks"][name])
                for name in TIME_COLUMNS
            } | {"step_s": row["wall_s"] - previous["wall_s"]}
            per_step = {
                name: seconds / timing.interval for name, seconds in seconds_by_part.items()
            }
            yield per_step | {"samples_per_s": row["samples_per_s"]}


def read_last_step(folder: Path) -> int | None:
    """Return the last step in the metrics of the run in `folder`."""
    try:
        rows = run_folder.rows(folder)
    except OSError:  # the file may vanish briefly on a shared file system
        return None
    return rows[-1]["step"] if rows else None


def _gap_reason(folder: Path, summary: dict[str, Any] | None) -> str:
    """Return the reason for a gap: the summary's, otherwise the last line of output."""
    if summary and summary.get("reason"):
        return f"{summary['status']}: {summary['reason']}"
    nonempty_lines = [line.strip() for line in read_log_lines(folder) if line.strip()]
    hpctrain_lines = [
        line.partition("hpctrain: ")[2] for line in nonempty_lines if "hpctrain: " in line
    ]
    return (hpctrain_lines or nonempty_lines or ["not run yet"])[-1]


def log_path(folder: Path) -> Path:
    """Return the log file of a trial; it lies beside the folder, which the trial must create."""
    return folder.with_name(f"{folder.name}.log")


def write_log(folder: Path, text: str) -> None:
    """Write a message about a trial to its log."""
    with opening.create(log_path(folder), LEVELS) as file:
        file.write(f"hpctrain: {text}\n".encode())


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a trial, as far as its job writes none."""
    with suppress(OSError):
        opening.remove_folder(folder / "checkpoints", LEVELS + 1)


def job_folder(folder: Path) -> Path:
    """Return the folder of the Slurm job that runs a trial."""
    return folder.with_name(f"{folder.name}.job")


def read_log_lines(folder: Path) -> list[str]:
    """Return a trial's output lines, its Slurm job's last, since they are the most precise."""
    logs = [log_path(folder), *sorted(job_folder(folder).glob("slurm-*.out"))]
    log_texts = [
        files.read_bytes(log_file, LOG_BYTES, LEVELS).decode(errors="replace")
        for log_file in logs
        if log_file.exists()
    ]
    return "\n".join(log_texts).splitlines()
