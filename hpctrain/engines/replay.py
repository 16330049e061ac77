"""The log of an asynchronous run, and its replay: only the order of events is recorded.

A gradient depends on the worker's parameters and on its step; parameters depend on the order of
updates and averagings. So a run is replayed, bit for bit, by waiting for the next rank of the log
instead of for any rank; on MPI or with ranks as threads. Each rank that decides on an order writes
a file, whose first line describes the run and the machine:

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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import threadpoolctl
from pydantic import Field

from hpctrain.core import atomic, files
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.run_files.schemas import first_fault

log = logging.getLogger(__name__)
FOLDER = "replay"
Count = Annotated[int, Field(ge=0, lt=2**63)]
#: An event as a list of JSON: the workers that reported, the order (its second entry is a
#: Use, see shard.py), the replies, perhaps the staleness.
OrderEntry = tuple[list[Count], Annotated[int, Field(ge=0, le=5)], float, list[Count], bool]
ReplyEntries = list[tuple[Count, Count, Count, Count]]
EventEntry = (
    tuple[list[Count], OrderEntry, ReplyEntries]
    | tuple[list[Count], OrderEntry, ReplyEntries, Count | None]
)
_STRICT = pydantic.ConfigDict(strict=True, extra="forbid")
Interval = dict[str, Any]  #: the decisions of an engine from step "start" to "until"


class StalenessEntry(pydantic.BaseModel):
    """The counts of stale gradients after an interval."""

    model_config = _STRICT
    histogram: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Count]
    clock_gap_max: Count | None
    dropped: Count


class LogHead(pydantic.BaseModel):
    """The first line of a log: settings that a replay must share, and facts for the reader."""

    model_config = _STRICT
    run: dict[str, Any]
    about: dict[str, str]


class IntervalEntry(pydantic.BaseModel):
    """The other lines: the decisions of an interval, as engines record them."""

    model_config = _STRICT
    start: Count
    until: Count
    events: list[EventEntry] | None = None
    turns: list[Annotated[int, Field(ge=-(2**31), lt=2**31)]] | None = None
    clocks: list[Count] | None = None
    staleness: StalenessEntry | None = None

    @pydantic.model_validator(mode="after")
    def _complete(self) -> IntervalEntry:
        if self.start > self.until:
            raise ValueError(f"expected 'until' of at least {self.start}")
        if self.turns is None and None in (self.events, self.clocks, self.staleness):
            raise ValueError("expected 'turns', or 'events', 'clocks' and 'staleness'")
        return self


class Recorder:
    """The intervals that one rank's engine records, and those that it replays."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._log: list[Interval] | None = None
        self._next = 0  # index of the next interval of the log

    @property
    def replays(self) -> bool:
        return self._log is not None

    def note(self, start: int, until: int, **decisions: Any) -> None:
        """Record the decisions of the interval from step `start` to `until`."""
        self._intervals.append({"start": start, "until": until, **decisions})

    def take(self) -> list[Interval]:
        """Return the intervals recorded since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def replay(self, log: list[Interval], first: int) -> None:
        """Replay `log` from interval `first` on."""
        self._log, self._next = log, first

    def interval(self, start: int, until: int) -> Interval:
        """Return the next interval of the log; raise HpctrainError if it has other steps.

        Two intervals may have the same steps: one that a stop ended before all workers had done a
        step has changed the parameters nevertheless.
        """
        assert self._log is not None
        rest, self._next = self._log[self._next :], self._next + 1
        if not rest or (rest[0]["start"], rest[0]["until"]) != (start, until):
            spans = ", ".join(f"{row['start']} to {row['until']}" for row in rest[:4]) or "none"
            raise HpctrainError(
                f"the log to be replayed has no steps {start} to {until} but {spans}, ...; was the "
                "run killed before it reached them?"
            )
        return rest[0]


class ReplayLog:
    """The file of one rank's recorder; does nothing without a run's folder."""

    def __init__(
        self, recorder: Recorder | None, run: Path | None, rank: int, depends_on: Mapping[str, Any]
    ):
        self._recorder, self._depends_on = recorder, depends_on
        self._path = None if recorder is None or run is None else path_of(run, rank)
        self._due: list[str] = []  # lines that could not be written yet

    def begin(self, step: int, intervals: int | None) -> None:
        """Drop all but the first `intervals`: those after `step` will be trained again.

        None: the checkpoint is of an older version, which did not save this number. Raises
        FileError for a damaged log; a partial last line, which a crash leaves, is dropped.
        """
        if self._path is None or not os.path.lexists(self._path):
            return
        contents = _read(self._path)
        if contents.torn_bytes:
            log.warning("%s ended in half a line, which is dropped", self._path)
        if intervals is None:  # the first line, of the machine, has no start
            entries = [entry for entry in contents.entries if entry.get("start", -1) < step]
        else:
            entries = contents.entries[: intervals + 1]
            if len(entries) <= intervals:
                log.warning("%s has a gap: the run cannot be replayed", self._path)
        if len(entries) < len(contents.entries) or contents.torn_bytes:
            atomic.replace(self._path, "".join(map(_line, entries)))

    def write(self) -> None:
        """Append the intervals recorded since the last call; if that fails, training goes on.

        Lines that could not be written are tried again by the next call.
        """
        self._due += map(_line, self._recorder.take() if self._recorder else [])
        if self._path is None or not self._due:
            return
        try:
            is_new = not self._path.exists()
            self._path.parent.mkdir(exist_ok=True)
            head = [_line({"run": self._depends_on, "about": about()})] if is_new else []
            files.append_lines(self._path, "".join([*head, *self._due]))
            self._due = []
        except OSError as error:
            log.warning("%s is not written (%s); training goes on", self._path, error.strerror)

    def sync(self) -> None:
        """Flush the file to the disk, before a checkpoint refers to its intervals."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                files.sync(self._path)

    def end(self) -> None:
        """Write the remaining lines; warn if the log has a gap."""
        self.write()
        if self._path is not None and self._due:
            log.warning("%s has a gap: the run cannot be replayed", self._path)


def path_of(run: Path, rank: int) -> Path:
    """Return the path of the log of `rank`."""
    return Path(run) / FOLDER / f"rank-{rank:05d}.jsonl"


def read(
    run: Path, rank: int, depends_on: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Interval]]:
    """Return (about, intervals) of the log of `rank`, which may be empty.

    Raises UsageError if the run has no log, a damaged one, or other settings than `depends_on`.
    """
    folder = Path(run) / FOLDER
    if not folder.is_dir():
        raise UsageError(
            f"--replay {run}: there is no folder {FOLDER}; only regimes in which the order of "
            "events matters keep one"
        )
    head, *intervals = _entries(path_of(run, rank)) or [{"run": depends_on, "about": {}}]
    settings, machine = head["run"], head["about"]
    if changes := differences(settings, depends_on):
        raise UsageError(f"--replay {run}: that run had other settings: {changes}; take its recipe")
    return machine, intervals


def differences(logged: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return a text with the old and the new value of each key that differs."""
    keys = [key for key in logged if logged[key] != current.get(key)]
    return ", ".join(f"{key} was {logged[key]}, now {current.get(key)}" for key in keys)


def about() -> dict[str, str]:
    """Return the processor and the libraries, on which the last bits of products depend."""
    blas = [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    return {
        "cpu": _cpu(),
        "blas": ", ".join(sorted(f"{lib['internal_api']} {lib['version']}" for lib in blas)),
        "blas_threads": ", ".join(sorted(str(lib["num_threads"]) for lib in blas)),
        "numpy": np.__version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the head and the intervals of a log; an empty list if there is no file."""
    try:
        entries = _read(path).entries
    except files.MissingError:
        return []
    for number, entry in enumerate(entries, start=1):
        if (number == 1) != ("run" in entry):
            expected = "the line of the machine" if number == 1 else "an interval"
            raise files.FileError(f"{path}, line {number}: expected {expected}")
    return entries


def _line(entry: Mapping[str, Any]) -> str:
    """Return `entry` as a line with a checksum: a changed bit could change the order."""
    return json.dumps({**entry, "crc32": zlib.crc32(json.dumps(entry).encode())}) + "\n"


def _read(path: Path) -> files.Log[dict[str, Any]]:
    return files.read_log(path, _checked)


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """Check an entry; return it without its checksum, which older versions did not write."""
    checksum, text = entry.pop("crc32", None), json.dumps(entry)
    if checksum is not None and checksum != zlib.crc32(text.encode()):
        raise ValueError("expected a line that has its CRC-32, seen one that was altered")
    try:
        (LogHead if "run" in entry else IntervalEntry).model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValueError(first_fault(error)) from None
    return entry
