"""The log of an asynchronous run, and its repetition: what happened in which order, no more.

A gradient depends on the parameters that a worker held and on its step; parameters depend on the
order in which ranks met. So a run is repeated, bit for bit, by waiting for the rank that came next
in the log, instead of for any; on MPI or with ranks as threads. Each rank that decides on an order
keeps a file, of which the first line tells of the machine:

    DIR/replay/rank-00003.jsonl    {"run": {...}, "about": {...}}
                                   {"start": 0, "until": 12, ...}      an interval of training
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from hpctrain.errors import HpctrainError, UsageError

log = logging.getLogger(__name__)
FOLDER = "replay"
Interval = dict[str, Any]  #: what an engine notes of the steps from "start" to "until"


class Recorder:
    """What one rank's engine notes of its intervals, and what it is to repeat."""

    def __init__(self) -> None:
        self._noted: list[Interval] = []
        self._log: dict[tuple[int, int], Interval] | None = None

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

    def repeat(self, log: list[Interval]) -> None:
        """Do from now on what the log says."""
        self._log = {(one["start"], one["until"]): one for one in log}

    def interval(self, start: int, until: int) -> Interval:
        """Return what the log has of the steps from `start`; raise HpctrainError if it has none."""
        assert self._log is not None
        if (start, until) not in self._log:
            known = ", ".join(f"{a} to {b}" for a, b in list(self._log)[:4]) or "none"
            raise HpctrainError(
                f"the log to be replayed has no steps {start} to {until} but {known}, ...; was the "
                "run killed before it came so far?"
            )
        return self._log[start, until]


class Log:
    """The file in which one rank's recorder is kept; nothing without a run's folder."""

    def __init__(
        self, recorder: Recorder | None, run: Path | None, rank: int, depends_on: Mapping[str, Any]
    ):
        self._recorder, self._depends_on = recorder, depends_on
        self._path = None if recorder is None or run is None else path_of(run, rank)

    def begin(self, step: int) -> None:
        """Drop what an earlier part of the run did after `step`: it will be done again."""
        if self._path is not None and self._path.exists():
            # One that began before `step` ended by then, whatever it was asked for: checkpoints
            # are made between intervals. The first line, of the machine, has no start.
            kept = [one for one in _lines(self._path) if one.get("start", -1) < step]
            self._path.write_text("".join(map(_line, kept)))

    def keep(self) -> None:
        """Add what was noted since the last call; where that fails, training goes on."""
        noted = self._recorder.take() if self._recorder else []
        if self._path is None or not noted:
            return
        try:
            if not self._path.exists():
                self._path.parent.mkdir(exist_ok=True)
                self._path.write_text(_line({"run": self._depends_on, "about": about()}))
            with open(self._path, "a") as file:
                file.writelines(map(_line, noted))
        except OSError as error:
            log.warning("%s has a gap and cannot be replayed: %s", self._path, error.strerror)


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
    try:
        head, *intervals = _lines(path_of(run, rank)) or [{"run": depends_on, "about": {}}]
        told, before = dict(head["run"]), dict(head["about"])
        [(one["start"], one["until"]) for one in intervals]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--replay {run}: the log of rank {rank} is damaged: {error}") from None
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


def _line(one: Mapping[str, Any]) -> str:
    return json.dumps(one) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
