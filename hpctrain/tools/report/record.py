"""The files of a run's folder as arrays for the axes of plots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import FileError, MissingError
from hpctrain.core.run_files import run_folder, sweep_folder

MAX_COUNTS = 10**8  #: rows times kinds of staleness
FILES = (run_folder.RECIPE, run_folder.METRICS, run_folder.SUMMARY)  #: any makes a folder a run
TIMES = ("wall_s", "compute_s", "wait_s", "wire_s")


@dataclass(frozen=True)
class Loss:
    """A loss of ranks, after which training went on from `step`."""

    step: int
    at_s: float  #: time in training, all parts of the run
    ranks: Sequence[int]  #: by their numbers in the job
    hosts: Sequence[str] = ()
    spares: Sequence[int] = ()
    lost_s: float | None = None  #: without progress; None where the files do not tell
    steps_redone: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its files; a missing file leaves its field empty."""

    folder: str
    rows: Sequence[dict[str, Any]] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    path: Path = Path()

    @property
    def name(self) -> str:
        return str(self.summary.get("recipe") or self.folder)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "no summary: still running, or killed"))

    @property
    def reason(self) -> str:
        return str(self.summary.get("reason") or "")

    def column(self, name: str) -> np.ndarray:
        """Return a value of each row, float64 (rows,), NaN where it is null or missing."""
        values = [row.get(name) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    def seconds_per_row(self, name: str) -> np.ndarray:
        """Return the seconds of each row's own interval, float64 (rows,): `name` is of TIMES.

        The clocks count from the start of their part, so they begin again when a run is resumed.
        """
        clock, part = self.column(name), self.column("since_step")
        previous_clock = np.concatenate([[0.0], clock[:-1]]) if len(clock) else clock
        return clock - np.where(np.diff(part, prepend=np.nan) == 0, previous_clock, 0.0)

    def by_rank(self) -> dict[str, np.ndarray]:
        """Return the seconds of each rank since the last resumption: {name of TIMES: (ranks,)}.

        `data_wait_s` is among them, 0 where older versions have not counted it.
        `wall_s` is rank 0's for all. Empty where no row has times of ranks.
        """
        row = self.rows[-1] if self.rows else {}
        if not row.get("ranks"):
            return {}
        seconds_by_name = {name: row["ranks"].get(name) or [] for name in TIMES[1:]}
        older = [0.0] * len(seconds_by_name["compute_s"])  # did not tell it apart
        seconds_by_name["data_wait_s"] = row["ranks"].get("data_wait_s") or older
        times = {name: np.array(seconds, np.float64) for name, seconds in seconds_by_name.items()}
        if (
            len({len(seconds) for seconds in times.values()}) != 1
            or not seconds_by_name["compute_s"]
        ):
            raise FileError(f"{self.folder}: expected times of as many ranks each in 'ranks'")
        return {**times, "wall_s": np.full_like(times["compute_s"], row.get("wall_s"))}

    def rates(self) -> tuple[np.ndarray, bool]:
        """Return steps and rates, float64 (n, 2), and whether they are a curve or lone points."""
        curves = [row.get("rates") or [[row["step"], row.get("rate")]] for row in self.rows]
        points = np.array([point for curve in curves for point in curve], np.float64)
        constant = len(set(points[:, 1].tolist())) == 1
        return points, constant or all(row.get("rates") for row in self.rows)

    @property
    def first_server(self) -> int | None:
        """The first rank that only serves; None where each works, or the summary names none."""
        ranks, workers = self.summary.get("world_size"), self.summary.get("workers")
        return workers if ranks and workers and workers < ranks else None

    @property
    def rank_hosts(self) -> list[str]:
        """The host of each rank; empty where the summary does not tell."""
        hosts, host_indexes = self.summary.get("hosts") or [], self.summary.get("rank_hosts") or []
        is_whole = len(host_indexes) == self.summary.get("world_size")
        return (
            [hosts[i] for i in host_indexes] if is_whole and max(host_indexes) < len(hosts) else []
        )

    def staleness(self) -> np.ndarray:
        """Return the histogram of staleness up to each row, int64 (rows, largest + 1).

        Counted from the first step. No columns where no gradient was stale, or could be.
        """
        histograms = [row.get("staleness_histogram") or {} for row in self.rows]
        max_staleness = max((int(s) for histogram in histograms for s in histogram), default=0)
        if len(histograms) * (max_staleness + 1) > MAX_COUNTS:
            raise FileError(
                f"{self.folder}: a staleness of {max_staleness} is too large to be drawn"
            )
        if max_staleness == 0:
            return np.zeros((len(histograms), 0), np.int64)
        table = np.zeros((len(histograms), max_staleness + 1), np.int64)
        for line, histogram in zip(table, histograms, strict=True):
            line[[int(s) for s in histogram]] = list(histogram.values())
        return table

    def losses(self) -> list[Loss]:
        """Return the losses of ranks that the run survived, in order.

        Losses in the summary's part are exact. Earlier parts record the ranks alone.
        """
        row_ends = np.cumsum(self.seconds_per_row("wall_s")).tolist()
        part = self.summary.get("since_step") if "recoveries" in self.summary else None
        losses = [
            Loss(row["step"], end, row["lost_ranks"])
            for row, end in zip(self.rows, row_ends, strict=True)
            if row.get("lost_ranks") and row.get("since_step") != part
        ]
        row_starts = [
            end - (row.get("wall_s") or 0.0)
            for row, end in zip(self.rows, row_ends, strict=True)
            if row.get("since_step") == part
        ]
        start = row_starts[0] if row_starts else 0.0
        return losses + [
            Loss(
                entry.get("step") or 0, start + (entry.get("wall_s") or 0.0),
                entry.get("ranks", []), entry.get("hosts") or [], entry.get("spares") or [],
                entry.get("lost_s"), entry.get("steps_redone"),
            )
            for entry in self.summary.get("recoveries") or []
        ]  # fmt: skip

    def resumed(self) -> list[float]:
        """Return the steps at which the run was resumed."""
        return sorted({step for step in self.column("since_step").tolist() if step > 0})


def read(run: Path) -> RunRecord:
    """Return the record of the run in folder `run`; raise UsageError if there is none."""
    if sweep_folder.is_sweep(run):
        raise UsageError(f"{run} is a sweep: name one of its runs, see `hpctrain runs {run}`")
    if not any(os.path.lexists(run / name) for name in FILES):
        raise UsageError(f"{run} holds no run: expected {', '.join(FILES[:2])} or {FILES[2]}")
    summary = run_folder.read_summary(run) or {}
    return RunRecord(run.resolve().name, _forward(run_folder.rows(run)), summary, _recipe(run), run)


def _recipe(run: Path) -> str:
    """Return the text of the recipe, empty where there is none, as in a run from Python."""
    try:
        return files.read_text(run / run_folder.RECIPE, run_folder.RECIPE_BYTES)
    except MissingError:
        return ""


def _forward(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid rows: those whose steps were not repeated by a later row."""
    valid: list[dict[str, Any]] = []
    for row in rows:
        while valid and valid[-1]["step"] >= row["step"]:
            valid.pop()
        valid.append(row)
    return valid
