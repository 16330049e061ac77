"""The log of an asynchronous run, and its repetition: what happened in which order, no more.

A gradient depends on the parameters that a worker held and on its step; parameters depend on the
order in which ranks met. So a run is repeated, bit for bit, by waiting for the rank that came next
in the log, instead of for any; on MPI or with ranks as threads. Each rank that decides on an order
keeps a file, of which the first line tells of the machine:

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

from hpctrain import atomic, files
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.schemas import first_fault

log = logging.getLogger(__name__)
FOLDER = "replay"
Count = Annotated[int, Field(ge=0, lt=2**63)]
#: An event as a list of JSON: who has reported, the order (the second number is a
#: Use, see shard.py), the answers, perhaps the staleness.
OrderEntry = tuple[list[Count], Annotated[int, Field(ge=0, le=5)], float, list[Count], bool]
Answers = list[tuple[Count, Count, Count, Count]]
EventEntry = (
    tuple[list[Count], OrderEntry, Answers] | tuple[list[Count], OrderEntry, Answers, Count | None]
)
_STRICT = pydantic.ConfigDict(strict=True, extra="forbid")
Interval = dict[str, Any]  #: what an engine notes of the steps from "start" to "until"


class StalenessEntry(pydantic.BaseModel):
    """The counts of stale gradients after an interval."""

    model_config = _STRICT
    histogram: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Count]
    clock_gap_max: Count | None
    dropped: Count


class Head(pydantic.BaseModel):
    """The first line of a log: what must be alike in a replay, and what is of interest."""

    model_config = _STRICT
    run: dict[str, Any]
    about: dict[str, str]


class IntervalEntry(pydantic.BaseModel):
    """The other lines: the decisions of an interval, as engines note them."""

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
    """What one rank's engine notes of its intervals, and what it is to repeat."""

    def __init__(self) -> None:
        self._noted: list[Interval] = []
        self._log: list[Interval] | None = None
        self._next = 0  # the interval of the log that is repeated next

    @property
    def repeats(self) -> bool:
        return self._log is not None

    def note(self, start: int, until: int, **what: Any) -> None:
        """Keep what happened from step `start`, where the trainer had asked for `until`."""
        self._noted.append({"start": start, "until": until, **what})

    def take(self) -> list[Interval]:
        """Return what was noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def repeat(self, log: list[Interval], first: int) -> None:
        """Do from now on what the log says, from interval `first` on."""
        self._log, self._next = log, first

    def interval(self, start: int, until: int) -> Interval:
        """Return the next interval of the log; raise HpctrainError if it has other steps.

        Two may have the same steps: one in which a stop was asked for before all workers had done
        a step has changed the parameters nevertheless.
        """
        assert self._log is not None
        rest, self._next = self._log[self._next :], self._next + 1
        if not rest or (rest[0]["start"], rest[0]["until"]) != (start, until):
            known = ", ".join(f"{one['start']} to {one['until']}" for one in rest[:4]) or "none"
            raise HpctrainError(
                f"the log to be replayed has no steps {start} to {until} but {known}, ...; was the "
                "run killed before it came so far?"
            )
        return rest[0]


class Log:
    """The file in which one rank's recorder is kept; nothing without a run's folder."""

    def __init__(
        self, recorder: Recorder | None, run: Path | None, rank: int, depends_on: Mapping[str, Any]
    ):
        self._recorder, self._depends_on = recorder, depends_on
        self._path = None if recorder is None or run is None else path_of(run, rank)
        self._due: list[str] = []  # lines for which there was no room yet

    def begin(self, step: int, intervals: int | None) -> None:
        """Drop all but the first `intervals`: what came after `step` will be done again.

        An older checkpoint does not tell how many there were before it: None. Raises FileError for
        a damaged log; half a last line, which a crash leaves, is dropped.
        """
        if self._path is None or not os.path.lexists(self._path):
            return
        there = _read(self._path)
        if there.torn_bytes:
            log.warning("%s ended in half a line, which is dropped", self._path)
        if intervals is None:  # the first line, of the machine, has no start
            kept = [one for one in there.entries if one.get("start", -1) < step]
        else:
            kept = there.entries[: intervals + 1]
            if len(kept) <= intervals:
                log.warning("%s has a gap: the run cannot be replayed", self._path)
        if len(kept) < len(there.entries) or there.torn_bytes:
            atomic.replace(self._path, "".join(map(_line, kept)))

    def keep(self) -> None:
        """Add what was noted since the last call; where that fails, training goes on.

        What could not be written is tried again with the next call.
        """
        self._due += map(_line, self._recorder.take() if self._recorder else [])
        if self._path is None or not self._due:
            return
        try:
            new = not self._path.exists()
            self._path.parent.mkdir(exist_ok=True)
            head = [_line({"run": self._depends_on, "about": about()})] if new else []
            files.append_lines(self._path, "".join([*head, *self._due]))
            self._due = []
        except OSError as error:
            log.warning("%s is not written (%s); training goes on", self._path, error.strerror)

    def sync(self) -> None:
        """Write the file through to the disk, before a checkpoint tells of what it has."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                files.sync(self._path)

    def end(self) -> None:
        """Try for the last time to write what is due; say it if the log has a gap."""
        self.keep()
        if self._path is not None and self._due:
            log.warning("%s has a gap: the run cannot be replayed", self._path)


def path_of(run: Path, rank: int) -> Path:
    """Return where the log of `rank` lies."""
    return Path(run) / FOLDER / f"rank-{rank:05d}.jsonl"


def read(
    run: Path, rank: int, depends_on: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Interval]]:
    """Return (about, intervals) of the log of `rank`, which may be empty.

    Raises UsageError where the run has no log at all, a damaged one, or one of another run than
    `depends_on` tells of.
    """
    folder = Path(run) / FOLDER
    if not folder.is_dir():
        raise UsageError(
            f"--replay {run}: there is no folder {FOLDER}; only regimes in which the order of "
            "events matters keep one"
        )
    head, *intervals = _entries(path_of(run, rank)) or [{"run": depends_on, "about": {}}]
    told, before = head["run"], head["about"]
    if said := differences(told, depends_on):
        raise UsageError(f"--replay {run}: that run had other settings: {said}; take its recipe")
    return before, intervals


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs, in words."""
    keys = [key for key in before if before[key] != now.get(key)]
    return ", ".join(f"{key} was {before[key]}, now {now.get(key)}" for key in keys)


def about() -> dict[str, str]:
    """Return what the last bits of a rank's products depend on."""
    blas = [one for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
    return {
        "cpu": _cpu(),
        "blas": ", ".join(sorted(f"{one['internal_api']} {one['version']}" for one in blas)),
        "blas_threads": ", ".join(sorted(str(one["num_threads"]) for one in blas)),
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
    """Return the head and the intervals of a log, none where there is no file."""
    try:
        entries = _read(path).entries
    except files.MissingError:
        return []
    for number, entry in enumerate(entries, start=1):
        if (number == 1) != ("run" in entry):
            expected = "the line of the machine" if number == 1 else "an interval"
            raise files.FileError(f"{path}, line {number}: expected {expected}")
    return entries


def _line(one: Mapping[str, Any]) -> str:
    """Return a line with a checksum: with a bit changed the order could be another."""
    return json.dumps({**one, "crc32": zlib.crc32(json.dumps(one).encode())}) + "\n"


def _read(path: Path) -> files.Log[dict[str, Any]]:
    return files.read_log(path, _checked)


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry without its checksum, which older versions did not write."""
    seen, text = entry.pop("crc32", None), json.dumps(entry)
    if seen is not None and seen != zlib.crc32(text.encode()):
        raise ValueError("expected a line that has its CRC-32, seen one that was altered")
    try:
        (Head if "run" in entry else IntervalEntry).model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValueError(first_fault(error)) from None
    return entry
