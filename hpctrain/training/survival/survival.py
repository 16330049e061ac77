"""Survival of lost ranks: a call of fit goes on with the surviving ranks, and spares join.

    all ranks      fit ...   LostRankError      survive            whole state?   restore    fit ...
    survivors      step 41   state of step 41   ranks 0, 1, 2      41             41         step 42
    a spare        sleeps    wakes up           rank 3                            41         step 42

Recovery is a resume whose checkpoint lies in the memory of the survivors: the state of the last
step on which all ranks agreed, or the last copies (checkpoint/memory.py). Where neither is whole,
it is the newest checkpoint on disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.memory import MemoryCopies
from hpctrain.checkpoint.memory_reader import HeldState, MemoryReader, live_state, newest_whole
from hpctrain.collectives import all_gather_bytes
from hpctrain.core import errors
from hpctrain.core.errors import AGREED_ERRORS, JobEndedError, LostRankError, RecoveryError
from hpctrain.core.files import FileError
from hpctrain.core.names import counted
from hpctrain.core.run_files import run_folder
from hpctrain.engines import Engine
from hpctrain.training.checkpointer import Checkpointer
from hpctrain.training.counters import RunTimes
from hpctrain.training.journal import Journal
from hpctrain.training.run_options import ElasticOptions
from hpctrain.training.survival.recoveries import Recoveries
from hpctrain.world import World, survive

log = logging.getLogger(__name__)


class Survival:
    """This rank's state and rank losses in a call of fit, over all its segments."""

    def __init__(self, world: World, options: ElasticOptions, run: str | None, unit: int = 1):
        """`run`: the folder of the run; a spare takes the folder of the working ranks.

        `unit`: the ranks that hold a replica together; others than whole replicas are spares.
        """
        self.world, self.options, self.run = world, options, run
        self.recoveries = Recoveries()
        self.reader: MemoryReader | None = None  #: of the state to go on from
        self.times: RunTimes | None = None  #: of the part before
        self.callbacks: list[str] = []  #: the names of all ranks' callbacks in the part before
        self.has_claimed = False  #: whether this call has used its folder
        self._copies = MemoryCopies(options.copies)
        self._live_state: HeldState | None = None
        job = world.job
        self._numbers, self._members = (job.numbers, job.members) if job else ((), ())
        if job is not None:
            job.min_ranks, job.unit = max(job.min_ranks, options.min_ranks), unit

    def train(
        self, build: Callable[[bool], None], part: Callable[[Survival], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the summary that `part` returns, called again after each loss of ranks.

        `build` makes the engine for the ranks that are left, to load a state or not. A spare
        returns the summary of the others, or raises their error.
        """
        is_first = True
        while True:
            try:
                if not is_first:
                    survive(self.world)
                    self._regroup()
                summary = self._run_part(None if is_first else build, part)
                self._end_call({"summary": summary})
                return summary
            except LostRankError:
                if not self.world.survives:
                    raise
                is_first = False
            except _DismissalError as note:
                return note.summary
            except RecoveryError as error:
                self._write_failure(error)
                raise

    def _run_part(
        self, build: Callable[[bool], None] | None, part: Callable[[Survival], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the summary of a part; all ranks raise its errors, or LostRankError."""
        try:
            if self.world.is_spare:
                self._serve_and_sleep()
            if build is not None:
                build(self.reader is not None)
            return part(self)
        except AGREED_ERRORS as error:
            self._end_call({"error": type(error).__name__, "text": str(error)})
            raise

    @contextmanager
    def holding(
        self, engine: Engine, journal: Journal, checkpointer: Checkpointer
    ) -> Iterator[None]:
        """Hold the state of `engine` at the end, or when a rank is lost, if that is whole."""
        try:
            yield
        except LostRankError:
            self._hold_state(engine, journal, checkpointer)
            raise
        self._hold_state(engine, journal, checkpointer)  # a rank may be lost before all have ended

    def _hold_state(self, engine: Engine, journal: Journal, checkpointer: Checkpointer) -> None:
        step, self.times = engine.commit.step, journal.times
        if step is not None:
            about = checkpointer.about(journal.about_here(step))
            self._live_state = live_state(step, engine.commit.pieces(), about)

    def copy(self, step: int, journal: Journal, checkpointer: Checkpointer) -> None:
        """Copy the state after `step` to other ranks; collective."""
        link, hosts = self.world.link, self.world.hosts
        about = checkpointer.about(journal.about_now(step))
        self._copies.write(step, checkpointer.state(), about, link, hosts)
        link.endpoint.survivors.agree()
        self._copies.commit()

    def _serve_and_sleep(self) -> None:
        """Send the others the pieces of the state that this spare holds, then sleep until a note.

        Raises LostRankError once a rank is lost, else what the note asks for.
        """
        assert self.world.job is not None
        if self.reader is not None:
            self.reader.fetch(self.world.job.link)
        note = json.loads(self.world.job.await_note())
        if "summary" in note:
            raise _DismissalError(note["summary"])
        if "error" in note:
            raise getattr(errors, note["error"])(note["text"])
        raise JobEndedError(note["exit_code"])

    def _regroup(self) -> None:
        """Share the record of losses and find the state to go on from; collective, also of spares.

        Raises RecoveryError if all ranks that trained are lost.
        """
        job, own_record_json = self.world.job, ""
        assert job is not None
        if self.has_claimed:
            own_record_json = json.dumps({"run": self.run, "recoveries": asdict(self.recoveries)})
        texts = [text for text in all_gather_bytes(job.link, own_record_json.encode()) if text]
        if not texts and not {*job.numbers} & {*self._members}:
            raise RecoveryError("all ranks that trained are lost; start the job again")
        notes = [json.loads(text) for text in texts]
        self.has_claimed = bool(notes)
        if notes:  # all take the same record: what it leads to must be collective
            records = [Recoveries.from_json(note["recoveries"]) for note in notes]
            self.recoveries = max(records, key=lambda r: (r.has_begun, r.last_step))  # newest
            self.run = notes[0]["run"]
        states = [self._live_state] if self._live_state is not None else []
        self.reader = newest_whole(job.link, states) or self._copies.reader(job.link)

    def _write_failure(self, error: RecoveryError) -> None:
        """Write the summary of a run that cannot go on."""
        job = self.world.job
        if self.run is None or job is None or job.link.rank > 0:
            return
        facts = {"status": "failed", "exit_code": error.exit_code, "reason": str(error)}
        with suppress(OSError, FileError):
            if (run_folder.read_summary(Path(self.run)) or {}).get("status") != "done":
                run_folder.write_summary(Path(self.run), facts)

    def log_recovery(self, step: int) -> None:
        """Record the loss, after which training goes on from `step`, and log it from one rank."""
        job, record = self.world.job, self.recoveries
        assert job is not None
        lost_ranks = sorted({*self._numbers} - {*job.numbers} - {*record.lost_ranks})
        joined_spares = sorted({*job.members} - {*self._members} - {*record.spares})
        hosts = [job.places[number].node for number in lost_ranks]
        record.has_lost_host |= not {*hosts} <= {*job.hosts}
        record.add(step, lost_ranks, hosts, joined_spares)
        if self.world.rank == 0:
            ranks_text = ", ".join(f"{number} ({job.places[number].node})" for number in lost_ranks)
            steps_redone = record.entries[-1].steps_redone if record.entries else 0
            log.warning(
                "lost rank %s; training goes on after step %d with %s%s%s",
                ranks_text,
                step,
                counted(self.world.size, "rank"),
                f", {counted(len(joined_spares), 'spare')} among them" if joined_spares else "",
                f"; {counted(steps_redone, 'step')} will be done again" if steps_redone else "",
            )

    def _end_call(self, note: dict[str, Any]) -> None:
        """End this call on all ranks, whoever is lost afterwards; note it to spares; collective."""
        job = self.world.job
        if job is not None and not job.is_spare:
            self.world.link.endpoint.survivors.agree()
            with suppress(LostRankError):
                job.dismiss_spares(json.dumps(note).encode())


class _DismissalError(Exception):
    """The training of a spare has ended without it."""

    def __init__(self, summary: dict[str, Any]):
        super().__init__()
        self.summary = summary
