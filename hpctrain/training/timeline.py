"""The traces of every rank on one clock: offsets are measured, files written and merged.

DIR/trace/rank-00000.json    a rank's own spans, by rank 0's clock; with offset and uncertainty
DIR/trace.json               all ranks, for chrome://tracing or ui.perfetto.dev

Both are in the Trace Event Format, an event per line. All ranks share the folder, as they share the
folder of checkpoints. A resumed run replaces the trace of the part before. A failed write is only a
warning: no training fails because of its trace.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np

from hpctrain.core import files, opening
from hpctrain.core.errors import UsageError
from hpctrain.training.run_options import TraceOptions
from hpctrain.transport.link import Link
from hpctrain.watch.trace import Clock, Reading
from hpctrain.world import World

log = logging.getLogger(__name__)
ROUNDS = 10  #: round trips per rank and reading of its clock
_HEAD_BYTES = files.MIB  #: of the first line
LEVELS = 2  #: of the trace of a rank, RUN/trace/FILE, see core/opening.py
FOLDER, MERGED = "trace", "trace.json"
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


class Timeline:
    """The trace of a run in its folder `run`."""

    def __init__(self, world: World, run: Path | None, options: TraceOptions):
        """Raise UsageError if the trace is enabled but the run has no folder."""
        if options.enabled and run is None:
            raise UsageError("a trace is written into the folder of a run: give fit out=DIR")
        self._world, self._run, self._options = world, run, options
        self._active, self._origin_s = False, 0.0
        self._remote_ranks: list[
            int
        ] = []  # ranks on another host than rank 0: they have another clock
        self._readings: tuple[Reading, ...] = ()

    def begin(self) -> None:
        """Begin to record if the trace is enabled; collective."""
        if self._run is None or not self._options.enabled:
            return
        if self._world.rank == 0:
            # The trace of an earlier part may have had more ranks.
            with contextlib.suppress(OSError):
                opening.remove(self._run / MERGED)
                for name in opening.names_in(self._run / FOLDER):
                    if name.startswith("rank-"):
                        opening.remove(self._run / FOLDER / name, LEVELS)
        replies = self._world.gather(f"{kernel()} {perf_counter()!r}")
        kernels, clocks = zip(*(reply.rsplit(" ", 1) for reply in replies), strict=True)
        self._origin_s = float(clocks[0])
        self._remote_ranks = [rank for rank, kernel in enumerate(kernels) if kernel != kernels[0]]
        self._readings = (clock_offset(self._world.link, self._remote_ranks),)
        self._world.trace.start(self._options.traced_steps, self._options.max_spans)
        self._active = True

    def end(self) -> None:
        """Write the files; warn if that fails; collective."""
        if not self._active:
            return
        self._stop()
        self._readings += (clock_offset(self._world.link, self._remote_ranks),)
        faults = self._world.gather(_fault_of(self._write))
        if self._world.rank == 0:
            self._warn(faults, _fault_of(self._merge))

    def end_alone(self) -> None:
        """Write this rank's spans and merge the files present; the other ranks do not take part."""
        if self._active:
            self._stop()
            _fault_of(self._write)
            _fault_of(self._merge)

    def _stop(self) -> None:
        self._world.trace.stop()
        self._active = False

    def _warn(self, faults: list[str], fault: str) -> None:
        hosts = self._world.hosts
        fault_texts = [
            f"rank {rank} on {hosts[rank]}: {text}" for rank, text in enumerate(faults) if text
        ]
        fault_texts += [f"{MERGED}: {fault}"] * bool(fault)
        if fault_texts:
            rest_text = f" (and {len(fault_texts) - 1} more)" * (len(fault_texts) > 1)
            log.warning(
                "the trace in %s could not be written: %s%s", self._run, fault_texts[0], rest_text
            )
        elif dropped := self._world.trace.dropped:
            log.warning(
                "the trace is incomplete: trace.max_spans is %d, and rank 0 had %d more; raise it "
                "or set trace.steps",
                self._options.max_spans,
                dropped,
            )

    def _write(self) -> None:
        world, run = self._world, self._run
        assert run is not None
        last_reading = self._readings[-1]
        about = {
            "rank": world.rank, "host": world.host, "clock_offset_s": last_reading.offset_s,
            "clock_uncertainty_s": max(reading.uncertainty_s for reading in self._readings),
            "dropped_spans": world.trace.dropped,
        }  # fmt: skip
        clock = Clock(self._origin_s, self._readings)
        # An engine may attach any object to a span: it must not end the run.
        encode = partial(json.dumps, default=str)
        events = map(encode, world.trace.events(world.rank, world.host, clock))
        opening.make_folder(run / FOLDER)
        _write(path_of(run, world.rank), about, events, LEVELS)

    def _merge(self) -> None:
        assert self._run is not None
        merge(self._run, self._world.size)


def path_of(run: Path, rank: int) -> Path:
    """Return the path of the trace of `rank`."""
    return run / FOLDER / f"rank-{rank:05d}.json"


def merge(run: Path, size: int) -> None:
    """Merge the existing traces of `size` ranks into one file, line by line; raise OSError."""
    merged_files: list[Path] = []
    # Ranks that fail together merge together: the last one to rename has read all files.
    paths = [path_of(run, rank) for rank in range(size)]
    while (rank_files := [path for path in paths if path.exists()]) != merged_files:
        merged_files = rank_files
        about = {"ranks": [_read_head(path) for path in merged_files]}
        _write(run / MERGED, about, chain.from_iterable(map(_event_lines, merged_files)))


def clock_offset(
    link: Link, remote: Iterable[int], clock: Callable[[], float] = perf_counter
) -> Reading:
    """Return the offset of rank 0's clock from this rank's; collective.

    The `remote` ranks ask rank 0 for the time, one after the other. The answer with the shortest
    round trip counts, among ROUNDS answers: its error is at most half the round trip. All other
    ranks share the clock of rank 0. Source: Cristian, "Probabilistic clock synchronization", 1989.
    """
    remote = list(remote)
    if link.rank == 0:
        request = np.empty(1)
        for rank in (rank for rank in remote for _ in range(ROUNDS)):
            link.irecv(request, rank).wait()
            link.isend(np.array([clock()]), rank).wait()
    if link.rank not in remote:
        return Reading(clock(), 0.0, 0.0)
    return min(
        (_read_remote_clock(link, clock) for _ in range(ROUNDS)),
        key=lambda reading: reading.uncertainty_s,
    )


def _read_remote_clock(link: Link, clock: Callable[[], float]) -> Reading:
    reply = np.empty(1)
    send_s = clock()
    link.sendrecv(np.empty(1), 0, reply, 0)
    receive_s = clock()
    midpoint_s = (send_s + receive_s) / 2
    return Reading(midpoint_s, float(reply[0]) - midpoint_s, (receive_s - send_s) / 2)


def kernel() -> str:
    """Return an identifier of the kernel: all processes on one kernel read the same clock."""
    try:
        return _KERNEL.read_text().strip()
    except OSError:
        return socket.gethostname()


def _fault_of(write: Callable[[], None]) -> str:
    try:
        write()
    except OSError as error:
        return f"{error.filename or ''} {error.strerror}".strip()
    except UsageError as error:  # a rank's file that another program wrote
        return str(error)
    return ""


def _write(path: Path, about: dict[str, Any], events: Iterable[str], levels: int = 1) -> None:
    """Write a trace atomically: a header line, then a line per event."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})
    try:
        with opening.create(temporary, levels) as raw, io.TextIOWrapper(raw) as file:
            file.write(f'{head[:-1]},\n"traceEvents": [')
            for number, event in enumerate(events):
                file.write(f"{',' * bool(number)}\n{event}")
            file.write("\n]}\n")
        opening.rename(temporary, path.name, levels)
    finally:
        with contextlib.suppress(OSError):
            opening.remove(temporary, levels)


def _read_head(path: Path) -> dict[str, Any]:
    with files.open_regular(path, LEVELS) as file:
        line = file.readline(_HEAD_BYTES).rstrip(b",\n") + b"}"
    place = f"{path}, line 1"
    head = files.as_object(files.parsed_json(files.decoded(line, place), place), place)
    return files.as_object(head.get("otherData"), place)


def _event_lines(path: Path) -> Iterator[str]:
    """Yield the events of a trace that `_write` wrote, as text."""
    with files.open_regular(path, LEVELS) as raw, io.TextIOWrapper(raw) as file:
        for line in islice(file, 2, None):
            if line != "]}\n":
                yield line.rstrip(",\n")
