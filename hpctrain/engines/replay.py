"""The log of an asynchronous run, and its replay: only the order of events is recorded.

A gradient depends on the worker's parameters and on its step; parameters depend on the order of
updates and averagings. A replay waits for the next rank of the log instead of for any rank, and so
repeats the run bit for bit, over MPI or with ranks as threads. Each rank that decides on an order
writes a file, whose first line describes the run and the machine. It has the rank's number along
the data axis of a mesh, so that a run repeats on any number of ranks along pipe:

    DIR/replay/rank-00003.jsonl    {"run": {...}, "about": {...}}
                                   {"start": 0, "until": 12, ...}      an interval of training
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import threadpoolctl
from pydantic import Field

from hpctrain.checkpoint.about import StalenessFacts
from hpctrain.core import atomic, files, opening
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.run_files.schemas import first_fault

log = logging.getLogger(__name__)
LEVELS = 2  #: of a log, RUN/replay/FILE, see core/opening.py
FOLDER, LOST_RANKS = "replay", "lost ranks"
Count = Annotated[int, Field(ge=0, lt=2**63)]
#: An event as a JSON list: the workers that reported, the order (its second entry is a
#: GradientAction, see shard.py), the replies, and the staleness if the gradient may be stale.
OrderEntry = tuple[list[Count], Annotated[int, Field(ge=0, le=5)], float, list[Count], bool]
ReplyEntries = list[tuple[Count, Count, Count, Count]]
EventEntry = (
    tuple[list[Count], OrderEntry, ReplyEntries]
    | tuple[list[Count], OrderEntry, ReplyEntries, Count | None]
)
_STRICT_CONFIG = pydantic.ConfigDict(strict=True, extra="forbid")
Interval = dict[str, Any]  #: the decisions of an engine from step "start" to "until"


class LogHead(pydantic.BaseModel):
    """The first line of a log: the settings that a replay must share, and the machine."""

    model_config = _STRICT_CONFIG
    run: dict[str, Any]
    about: dict[str, str]


class IntervalEntry(pydantic.BaseModel):
    """The other lines: the decisions of an interval, as engines record them."""

    model_config = _STRICT_CONFIG
    start: Count
    until: Count
    events: list[EventEntry] | None = None
    turns: list[Annotated[int, Field(ge=-(2**31), lt=2**31)]] | None = None
    clocks: list[Count] | None = None
    staleness: StalenessFacts | None = None

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> IntervalEntry:
        if self.start > self.until:
            raise ValueError(f"expected 'until' of at least {self.start}")
        if self.turns is None and None in (self.events, self.clocks, self.staleness):
            raise ValueError("expected 'turns', or 'events', 'clocks' and 'staleness'")
        return self


class Recorder:
    """The intervals that a rank's engine records, or replays from a log."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._logged_intervals: list[Interval] | None = None
        self._next_index = 0  # index of the next interval of the log

    @property
    def is_replay(self) -> bool:
        return self._logged_intervals is not None

    def record_interval(self, start: int, until: int, **decisions: Any) -> None:
        """Record the decisions of the interval from step `start` to `until`."""
        self._intervals.append({"start": start, "until": until, **decisions})

    def take_intervals(self) -> list[Interval]:
        """Return the intervals recorded since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def start_replay(self, intervals: list[Interval], first_index: int) -> None:
        """Replay the logged `intervals`, from index `first_index` on."""
        self._logged_intervals, self._next_index = intervals, first_index

    def next_interval(self, start: int, until: int) -> Interval:
        """Return the next interval of the log; raise HpctrainError if it has other steps.

        Two intervals may have the same steps: a stop may end an interval before all workers have
        done a step, but the parameters have changed.
        """
        assert self._logged_intervals is not None
        intervals = self._logged_intervals[self._next_index :]
        self._next_index += 1
        if not intervals or (intervals[0]["start"], intervals[0]["until"]) != (start, until):
            steps = (
                ", ".join(f"{row['start']} to {row['until']}" for row in intervals[:4]) or "none"
            )
            raise HpctrainError(
                f"the log to be replayed has no steps {start} to {until} but {steps}, ...; was the "
                "run killed before it reached them?"
            )
        return intervals[0]


class ReplayLog:
    """A rank's log file; without a recorder or a run folder the methods do nothing."""

    def __init__(
        self, recorder: Recorder | None, run: Path | None, rank: int, settings: Mapping[str, Any]
    ):
        """Write the intervals of `recorder`; a replay must have equal `settings`."""
        self._recorder, self._settings = recorder, settings
        self._path = None if recorder is None or run is None else log_path(run, rank)
        self._unwritten_lines: list[str] = []

    def truncate(
        self, step: int, interval_count: int | None, lost_ranks: Sequence[int] = ()
    ) -> None:
        """Keep the first `interval_count` intervals: steps after `step` will be trained again.

        With None, from checkpoints of older versions, keep the intervals that begin before `step`.
        Drop a partial last line, which a crash leaves. Raises FileError for a damaged log. After a
        rank loss the log is marked: the surviving ranks went on from another state than the logged
        intervals lead to.
        """
        if lost_ranks:
            self._settings = {**self._settings, LOST_RANKS: list(lost_ranks)}
        if self._path is None or not os.path.lexists(self._path):
            return
        contents = _read_file(self._path)
        if contents.torn_bytes:
            log.warning("%s ended in half a line, which is dropped", self._path)
        if interval_count is None:  # the first line describes the machine and has no start
            entries = [entry for entry in contents.entries if entry.get("start", -1) < step]
        else:
            entries = contents.entries[: interval_count + 1]
            if len(entries) <= interval_count:
                log.warning("%s has a gap: the run cannot be replayed", self._path)
        if lost_ranks and entries:
            entries[0] = {**entries[0], "run": self._settings}
        if len(entries) < len(contents.entries) or contents.torn_bytes or lost_ranks:
            atomic.replace(self._path, "".join(map(_encode_line, entries)), LEVELS)

    def write(self) -> None:
        """Append the intervals recorded since the last call.

        After a write error training goes on; the next call tries again to write these lines.
        """
        intervals = self._recorder.take_intervals() if self._recorder else []
        self._unwritten_lines += map(_encode_line, intervals)
        if self._path is None or not self._unwritten_lines:
            return
        try:
            lines = list(self._unwritten_lines)
            if not self._path.exists():
                lines.insert(0, _encode_line({"run": self._settings, "about": describe_machine()}))
            opening.make_folder(self._path.parent)
            files.append_lines(self._path, "".join(lines), LEVELS)
            self._unwritten_lines = []
        except OSError as error:
            log.warning("%s is not written (%s); training goes on", self._path, error.strerror)

    def sync(self) -> None:
        """Flush the file to the disk, before a checkpoint refers to its intervals."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                files.sync(self._path, LEVELS)

    def end(self) -> None:
        """Write the remaining lines; warn if the log has a gap."""
        self.write()
        if self._path is not None and self._unwritten_lines:
            log.warning("%s has a gap: the run cannot be replayed", self._path)


def log_path(run: Path, rank: int) -> Path:
    """Return the path of the log of `rank`."""
    return Path(run) / FOLDER / f"rank-{rank:05d}.jsonl"


def read_log(
    run: Path, rank: int, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Interval]]:
    """Return (about, intervals) of the log of `rank`, which may be empty.

    Raises UsageError if the run has no log, a damaged one, or other `settings`.
    """
    folder = Path(run) / FOLDER
    if not folder.is_dir():
        raise UsageError(
            f"--replay {run}: there is no folder {FOLDER}; only regimes in which the order of "
            "events matters write one"
        )
    head, *intervals = _read_entries(log_path(run, rank)) or [{"run": settings, "about": {}}]
    if lost_ranks := head["run"].get(LOST_RANKS):
        raise UsageError(
            f"--replay {run}: that run lost ranks ({', '.join(map(str, lost_ranks))}) and went on "
            "with the others; a replay repeats only runs of which no rank was lost"
        )
    if differences := describe_differences(head["run"], settings):
        raise UsageError(
            f"--replay {run}: that run had other settings: {differences}; take its recipe"
        )
    return head["about"], intervals


def describe_differences(old_facts: Mapping[str, Any], new_facts: Mapping[str, Any]) -> str:
    """Return a text with the old and the new value of each key that differs."""
    keys = [key for key in old_facts if old_facts[key] != new_facts.get(key)]
    return ", ".join(f"{key} was {old_facts[key]}, now {new_facts.get(key)}" for key in keys)


def describe_machine() -> dict[str, str]:
    """Return the processor and the libraries, on which the last bits of matrix products depend."""
    libraries = [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    return {
        "cpu": _cpu_model(),
        "blas": ", ".join(sorted(f"{lib['internal_api']} {lib['version']}" for lib in libraries)),
        "blas_threads": ", ".join(sorted(str(lib["num_threads"]) for lib in libraries)),
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model_names = [
        line.partition(":")[2].strip() for line in lines if line.startswith("model name")
    ]
    return model_names[0] if model_names else platform.processor() or platform.machine()


def _read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the first line and the intervals of a log; an empty list if there is no file."""
    try:
        entries = _read_file(path).entries
    except files.MissingError:
        return []
    for line_number, entry in enumerate(entries, start=1):
        if (line_number == 1) != ("run" in entry):
            expected_text = "the line of the machine" if line_number == 1 else "an interval"
            raise files.FileError(f"{path}, line {line_number}: expected {expected_text}")
    return entries


def _encode_line(entry: Mapping[str, Any]) -> str:
    """Return `entry` as a line with a checksum: a changed bit could change the order."""
    return json.dumps({**entry, "crc32": zlib.crc32(json.dumps(entry).encode())}) + "\n"


def _read_file(path: Path) -> files.Log[dict[str, Any]]:
    return files.read_log(path, _check_entry, levels=LEVELS)


def _check_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a valid `entry` without its checksum, which older versions did not write."""
    checksum, payload = entry.pop("crc32", None), json.dumps(entry)
    if checksum is not None and checksum != zlib.crc32(payload.encode()):
        raise ValueError("expected a line that has its CRC-32, seen one that was altered")
    try:
        (LogHead if "run" in entry else IntervalEntry).model_validate_json(payload)
    except pydantic.ValidationError as error:
        raise ValueError(first_fault(error)) from None
    return entry
