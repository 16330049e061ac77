"""Survival of lost ranks: a call of fit goes on with the surviving ranks, and spares join.

    all ranks      fit ...   LostRankError      next World         whole state?   restore    fit ...
    survivors      step 41   state of step 41   ranks 0, 1, 2      41             41         step 42
    a spare        sleeps    wakes up           rank 3                            41         step 42

Recovery is a resume whose checkpoint lies in the memory of the survivors: the state of the last
step on which all ranks agreed, or the last copies (checkpoint/memory.py). Where neither is whole,
it is the newest checkpoint on disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.memory import MemoryCopies
from hpctrain.checkpoint.memory_reader import HeldState, MemoryReader, live_state, newest_whole
from hpctrain.collectives import all_gather_bytes
from hpctrain.core import errors
from hpctrain.core.errors import AGREED_ERRORS, LostRankError, RecoveryError
from hpctrain.core.files import FileError
from hpctrain.core.names import counted
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.last_lines import last_lines
from hpctrain.engines import Engine
from hpctrain.training.checkpointer import Checkpointer
from hpctrain.training.counters import RunTimes
from hpctrain.training.journal import Journal
from hpctrain.training.loggers import run_loggers
from hpctrain.training.loggers.loggers import Logger
from hpctrain.training.run_options import ElasticOptions
from hpctrain.training.survival.recoveries import Recoveries
from hpctrain.world import World
from hpctrain.world.job import Job

log = logging.getLogger(__name__)


class Survival:
    """This rank's state and rank losses in a call of fit, over all its segments.

    An iterable of Worlds: the next one has the ranks that are left after a loss.

        with survival.failure_written(loggers):
            for world in survival:
                with survival.segment():
                    ...
                    break
    """

    def __init__(self, world: World, options: ElasticOptions, run: str | None, unit: int = 1):
        """`run`: the folder of the run; a spare takes the folder of the working ranks.

        `unit`: the ranks that hold a replica together; others than whole replicas are spares.
        """
        self._world, self._membership = world, world.membership
        self.options, self.run = options, run
        self.recoveries = Recoveries()
        self.reader: MemoryReader | None = None  #: of the state to go on from
        self.times: RunTimes | None = None  #: of the part before
        self.callbacks: list[str] = []  #: the names of all ranks' callbacks in the part before
        self.has_claimed = False  #: whether this call has used its folder
        self._copies = MemoryCopies(options.copies)
        self._live_state: HeldState | None = None
        if self._membership is not None:
            self._job_before = self._membership.job
            self._membership.require(options.min_ranks, unit)

    def __iter__(self) -> Iterator[World]:
        worlds = iter(self._membership or [self._world])
        yield next(worlds)
        for world in worlds:
            with suppress(LostRankError):  # then another one follows
                self._regroup()
                yield world

    @property
    def _job(self) -> Job:
        """The ranks that are left, spares too, of a job that survives losses."""
        assert self._membership is not None
        return self._membership.job

    @contextmanager
    def segment(self) -> Iterator[None]:
        """Enclose what the ranks of a World do; a loss of ranks that they survive ends it quietly.

        Spares raise an error that all ranks raise, too.
        """
        try:
            try:
                yield
            except AGREED_ERRORS as error:
                self.end({"error": type(error).__name__, "argument": str(error)})
                raise
        except LostRankError:
            if self._membership is None:
                raise

    @contextmanager
    def failure_written(self, loggers: Sequence[Logger]) -> Iterator[None]:
        """Write the summary of a run that cannot go on, and end its loggers."""
        try:
            yield
        except RecoveryError as error:
            facts = {"status": "failed", "exit_code": error.exit_code, "reason": str(error)}
            facts |= run_loggers.end_open(loggers, facts)
            if self.run is not None and self._membership and self._job.link.rank == 0:
                with suppress(OSError, FileError):
                    if (run_folder.read_summary(Path(self.run)) or {}).get("status") != "done":
                        run_folder.write_summary(Path(self.run), facts)
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
        world = journal.segment.world
        about = checkpointer.about(journal.about_now(step))
        self._copies.write(step, checkpointer.state(), about, world.link, world.hosts)
        world.link.endpoint.survivors.agree()
        self._copies.commit()

    def fetch(self) -> None:
        """Exchange the pieces of the state to go on from; collective, also of spares."""
        if self.reader is not None:
            self.reader.fetch(self._job.link)

    def sleep(self) -> dict[str, Any]:
        """Sleep as a spare until the others have ended; return their summary, or raise their error.

        First send the others the pieces of the state that this spare holds. Raises LostRankError
        once a rank is lost.
        """
        self.fetch()
        note = json.loads(self._job.await_note())
        if "error" in note:
            raise getattr(errors, note["error"])(note["argument"])
        summary: dict[str, Any] = note["summary"]
        return summary

    def _regroup(self) -> None:
        """Share the record of losses and find the state to go on from; collective, also of spares.

        Raises RecoveryError if all ranks that trained are lost.
        """
        job, own_record_json = self._job, ""
        if self.has_claimed:
            own_record_json = json.dumps({"run": self.run, "recoveries": asdict(self.recoveries)})
        texts = [text for text in all_gather_bytes(job.link, own_record_json.encode()) if text]
        if not texts and not {*job.numbers} & {*self._job_before.members}:
            raise RecoveryError("all ranks that trained are lost; start the job again")
        notes = [json.loads(text) for text in texts]
        self.has_claimed = bool(notes)
        if notes:  # all take the same record: what it leads to must be collective
            records = [Recoveries.from_json(note["recoveries"]) for note in notes]
            self.recoveries = max(records, key=lambda r: (r.has_begun, r.last_step))  # newest
            self.run = notes[0]["run"]
        states = [self._live_state] if self._live_state is not None else []
        self.reader = newest_whole(job.link, states) or self._copies.reader(job.link)

    def log_recovery(self, step: int) -> None:
        """Record the loss, after which training goes on from `step`, and log it from one rank.

        Raises RecoveryError if steps are lost for want of a state.
        """
        if self.recoveries.last_step > 0 and self.reader is None and step == 0:
            raise RecoveryError(
                "the lost ranks held a part of the state of which no copy is left, and there is no "
                "checkpoint: start the job again; [elastic] copies = 2 keeps one copy more"
            )
        job, before, record = self._job, self._job_before, self.recoveries
        lost_ranks = sorted({*before.numbers} - {*job.numbers} - {*record.lost_ranks})
        joined_spares = sorted({*job.members} - {*before.members} - {*record.spares})
        hosts = [job.places[number].node for number in lost_ranks]
        record.has_lost_host |= not {*hosts} <= {*job.hosts}
        record.add(step, lost_ranks, hosts, joined_spares)
        if job.number == job.members[0]:
            ranks_text = ", ".join(f"{number} ({job.places[number].node})" for number in lost_ranks)
            steps_redone = record.entries[-1].steps_redone if record.entries else 0
            log.warning(
                "lost rank %s; training goes on after step %d with %s%s%s",
                ranks_text,
                step,
                counted(len(job.members), "rank"),
                f", {counted(len(joined_spares), 'spare')} among them" if joined_spares else "",
                f"; {counted(steps_redone, 'step')} will be done again" if steps_redone else "",
            )

    def end(self, note: dict[str, Any]) -> None:
        """End this call on all ranks, whoever is lost afterwards; note it to spares; collective."""
        if self._membership is not None and not self._job.is_spare:
            self._membership.world.link.endpoint.survivors.agree()
            with suppress(LostRankError):
                self._job.dismiss_spares(json.dumps(note).encode())


def last_words(survival: Survival, world: World) -> str:
    """Return the last message of a run interrupted at once; only rank 0 of `world` has one."""
    if survival.run is None or world.rank > 0:
        return ""
    return "".join(f"{line}\n" for line in last_lines(Path(survival.run)))
