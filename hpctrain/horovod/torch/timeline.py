"""The timeline of operations, as JSON for chrome://tracing or ui.perfetto.dev, by the first rank.

An operation has a row: NEGOTIATE_ALLREDUCE from its submission on this rank until all ranks have
submitted it, then ALLREDUCE while it runs. Rows are written as operations end, so that a job that
was killed leaves a file that can be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from io import TextIOWrapper
from threading import Lock
from time import perf_counter

from hpctrain.core import opening
from hpctrain.core.printing import say
from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.named.entries import Entry
from hpctrain.horovod.torch.named.execution import Execution

VARIABLE, DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"


class Timeline:
    """A file of spans."""

    def __init__(self, path: str):
        """Begin the file `path`; raise OSError if it cannot be written."""
        self._start_s, self._rows = perf_counter(), dict[str, int]()
        self._file = TextIOWrapper(opening.create(path, opening.NAMED))
        self._file.write("[")
        self._separator, self._lock = "\n", Lock()  # each process set has a thread

    def add(self, entries: Iterable[Entry], start_s: float, stop_s: float) -> None:
        """Add operations that ran together between two readings of `perf_counter`.

        If the file cannot be written, the timeline ends, with a line.
        """
        try:
            with self._lock:
                self._add(entries, start_s, stop_s)
        except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
            if Execution.timeline is self:
                Execution.timeline = None
                say(f"hpctrain.horovod: the timeline ends: {error}", err=True)

    def _add(self, entries: Iterable[Entry], start_s: float, stop_s: float) -> None:
        for entry in entries:
            kind, name = entry.request.kind.upper(), entry.request.name
            if name not in self._rows:
                self._rows[name] = len(self._rows)
                self._write(ph="M", name="process_name", pid=self._rows[name], args={"name": name})
            spans = (f"NEGOTIATE_{kind}", entry.start_s, start_s), (kind, start_s, stop_s)
            for title, begin_s, end_s in spans:
                us = 1e6 * (begin_s - self._start_s), 1e6 * (end_s - begin_s)
                self._write(ph="X", name=title, pid=self._rows[name], tid=0, ts=us[0], dur=us[1])
        self._file.flush()

    def _write(self, **event: object) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def close(self) -> None:
        """End the file."""
        with self._lock, self._file:
            self._file.write("\n]\n")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the operations from now on to `file_path`, on rank 0.

    `mark_cycles` has no use: there are no cycles. Raises ValueError if a timeline is written.
    """
    if job.rank() == 0:
        if Execution.timeline is not None:
            raise ValueError("start_timeline: a timeline is written; call hvd.stop_timeline first")
        Execution.timeline = Timeline(file_path)


def stop_timeline() -> None:
    """End the file of `start_timeline`."""
    timeline, Execution.timeline = Execution.timeline, None
    if timeline is not None:
        timeline.close()


def start_by_variable(environ: Mapping[str, str] = os.environ) -> None:
    """Start the timeline whose file a variable names."""
    path = environ.get(VARIABLE, "")
    if path not in ("", DYNAMIC):
        start_timeline(path)
