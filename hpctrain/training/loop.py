"""The loop over steps, for any engine: train, evaluate, save, and summarize.

Scale is set here and nowhere else: 1 over the targets of a step, all workers together, which are
its samples, or the places in its texts. So collectives only ever sum, and a last batch that is
short or unevenly shared is right as it is. Where workers are asynchronous, the gradient of each
counts by itself: there it is 1 over the worker's own targets.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hpctrain import checkpoint
from hpctrain.core.errors import StoppedError, UnsavedError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest, cause
from hpctrain.core.xp import finish
from hpctrain.engines import replay
from hpctrain.engines.saved_state import SavedState
from hpctrain.training import orders
from hpctrain.training.callbacks import Callbacks, Row
from hpctrain.training.checkpointer import Checkpointer
from hpctrain.training.fit import FitSegment
from hpctrain.training.journal import Journal
from hpctrain.training.node_reader import NodeReader
from hpctrain.training.survival.survival import Survival
from hpctrain.training.suspicions import find_suspicions
from hpctrain.training.tasks import Tasks

log = logging.getLogger(__name__)


class Loop:
    """One call of fit: the state of the loop over steps."""

    def __init__(
        self, segment: FitSegment, journal: Journal, callbacks: Callbacks, survival: Survival
    ):
        self._segment, self._world, self._engine = segment, segment.world, segment.engine
        self._journal, self._callbacks, self._survival = journal, callbacks, survival
        engine, sampler, options = segment.engine, segment.sampler, segment.fit.options
        epoch_steps = self._epoch_steps = sampler.steps_per_epoch
        self._row_steps = options.interval_steps or epoch_steps  # from one row to the next
        self._evaluation_steps = (
            options.evaluate_steps or (options.evaluate_epochs or 1) * epoch_steps
        )
        self._replay_settings = {  # which must be equal in a run and in its replay
            "engine": engine.name,
            "workers": engine.workers,
            "servers": engine.servers,
            "training samples": sampler.n,
            "batch": sampler.batch,
            "seed": sampler.seed,
            "interval_steps": self._row_steps,
        }
        self._replay_log = replay.ReplayLog(
            engine.recorder if segment.mesh.is_first else None,
            segment.run,
            segment.mesh.data.rank,
            self._replay_settings,
        )
        self.step, self._rows = 0, list[Row]()  # rows: of the earlier segments of the run
        self._row, self._first_row = Row(), Row()  # of this step, where there is one; of this part
        self.checkpointer = Checkpointer(segment, journal, callbacks)
        self._callback_states: Row = {}  # at the begin of this part
        self._stop_reason = ""  # the reason to end before the last step

    def begin(self) -> None:
        """Prepare the files of the run for the steps after `step`; collective.

        Raises UsageError on all ranks if one cannot be read or written.
        """
        self._world.on_all_ranks(self._begin_replay_log)
        self._journal.begin(self.step)

    def _begin_replay_log(self) -> None:
        with run_folder.writable(self._segment.run or Path()):
            self._replay_log.truncate(
                self.step, self._journal.intervals, self._survival.recoveries.lost_ranks
            )

    def run(self, request: StopRequest, reader: NodeReader | None) -> dict[str, Any]:
        """Train from `step` to the end, or to the step of a request to stop."""
        arena = self._engine.replica.arena
        callback_names = self._callbacks.share_names(self._survival.callbacks)
        self._survival.callbacks = callback_names
        states, run = self._callback_states, self._segment.run
        self._stop_reason = self._callbacks.begin(self._rows, arena, run, states)
        with Tasks(self._segment, self._journal, request, reader) as tasks:
            self._train(tasks)
        self._replay_log.end()
        is_early = self.step < self._segment.total_steps
        first_row = self._rows[0] if self._rows else self._first_row
        suspicious = find_suspicions(self._segment, first_row, self._row)
        reason = self._stop_reason if is_early else None
        summary = self._journal.finish("done", 0, reason, suspicious)
        self._callbacks.end(summary)
        return summary

    def _train(self, tasks: Tasks) -> None:
        total_steps, sampler = self._segment.total_steps, self._segment.sampler
        self._keep_state()
        if self._survival.reader is not None and self._journal.open_row.has_steps(self.step):
            self._end_interval(0)  # a loss of ranks came before its row
        if self._survival.recoveries.has_lost_host and self.step:
            self._save_checkpoint(must=False)
        while self.step < total_steps and not self._stop_reason:
            tasks.at(self.step)
            step_before, stop = self.step, self._next_stop()
            orders.draw(self._world, sampler, self.step, stop - 1 + self._steps_ahead)
            self.step, flags = self._engine.train(tasks, self.step, stop)
            if flags.failed:
                tasks.raise_read_error()
            if self._journal.intervals is not None:  # else an older part did not count them
                self._journal.intervals += 1
            self._replay_log.write()
            if self.step > step_before:
                self._journal.skips.in_a_row = 0
            if flags.failed:
                self._journal.skips.skip(
                    self.step, flags.failed - 1, self._segment.fit.options.skip_limit
                )
                self.step += 1
            self._keep_state()
            self._end_interval(flags.stop)

    def _end_interval(self, stop_signal: int) -> None:
        """Make the row and the checkpoint that are due; raise StoppedError after a signal."""
        is_stopped = bool(stop_signal) and self.step < self._segment.total_steps
        self._make_row(is_stopped)
        is_last = self.step == self._segment.total_steps or is_stopped or bool(self._stop_reason)
        if is_last:
            self._engine.settle()  # the arena then holds the trained parameters
            finish(self._engine.replica.arena.param)  # no copy into it outlives us
        if is_last or self.checkpointer.is_due(self.step, self._row):
            self._save_checkpoint(must=is_last)
        if is_stopped and not self._stop_reason:
            raise self._stop_error(stop_signal)

    def _save_checkpoint(self, must: bool) -> None:
        self._replay_log.sync()
        if folder := self.checkpointer.save(self.step, self._row, must):
            self._survival.recoveries.has_lost_host = False
            self._callbacks.checkpoint(folder)

    @property
    def _makes_copies(self) -> bool:
        """Whether a rank's part of the state would be lost with it."""
        is_alone = self._world.job is None or self._world.size == 1
        return not (is_alone or self._engine.commit.shares_sums)

    def _keep_state(self) -> None:
        """Note the state, or copy it to other ranks: after a rank loss training resumes here.

        Collective.
        """
        if self._engine.commit.shares_sums:
            self._engine.commit.step = self.step
        if self._makes_copies:
            self._engine.settle()
            self._survival.copy(self.step, self._journal, self.checkpointer)

    def _stop_error(self, signal_number: int) -> StoppedError:
        run = self._segment.run
        reason = run_folder.stop_reason(run) if run else ""
        stop_cause = f"on request ({reason})" if reason else cause(signal_number)
        stop_text = f"stopped at step {self.step} of {self._segment.total_steps} {stop_cause}"
        if run is None:
            return UnsavedError(
                f"{stop_text}; nothing was saved: `fit` was given no folder (out=DIR)"
            )
        return StoppedError(f"{stop_text}; resume me")

    def _make_row(self, is_stopped: bool) -> None:
        """Make a row of metrics and evaluate if due, and call the callbacks with the row."""
        is_last = self.step == self._segment.total_steps
        is_evaluated = is_last or self._multiple_of(self._evaluation_steps)
        is_regular = is_evaluated or self._multiple_of(self._row_steps, self._epoch_steps)
        self._row = {}
        if is_regular or is_stopped:
            # No evaluation for a stop: the time until the job is killed may be short.
            test_metrics = None
            if is_evaluated and self._segment.test is not None:
                with self._world.trace.span("evaluate", "other"):
                    test_metrics = self._segment.evaluation.evaluate(self._segment.test)
            self._row = self._journal.row(self.step, test_metrics, interrupted=not is_regular) or {}
            self._first_row = self._first_row or self._row
            self._stop_reason = self._callbacks.call(self._row) if self._row else ""

    def repeat(self, run: Path) -> None:
        """Let the engine repeat the order of events in `run`; raise UsageError if it cannot."""
        rank, recorder = self._segment.mesh.data.rank, self._engine.recorder
        if recorder is None:
            raise UsageError(
                f"--replay: the engine '{self._engine.name}' is deterministic by itself; "
                "train again without --replay"
            )
        recorded_machine, intervals = self._world.on_all_ranks(
            lambda: replay.read_log(run, rank, self._replay_settings)
        )
        recorder.start_replay(intervals, self._journal.intervals or 0)
        differences = replay.describe_differences(recorded_machine, replay.describe_machine())
        rank_differences = filter(None, self._world.gather(differences))
        if rank == 0 and (text := " | ".join(rank_differences)):
            log.warning("the last bits may differ from those of %s: %s", run, text)

    def restore(self, reader: checkpoint.Reader) -> None:
        """Restore a state from the memory of ranks; every rank goes on, or none; collective."""
        self._request_state(reader)
        self._survival.fetch()
        reader.finish()
        self._go_back(reader.step, reader.about)
        self._world.link.endpoint.survivors.agree()

    def resume(self, run: Path) -> None:
        """Restore the newest good checkpoint, if there is one."""
        loaded = checkpoint.load(run, self._world.link, request=self._request_state)
        if loaded is None:  # a part that was lost before its first checkpoint may have left rows
            self._journal.resume(0, {})
            return
        self._go_back(loaded.step, loaded.about)
        if self._world.rank == 0:
            log.info("resumed at step %d of %d", self.step, self._segment.total_steps)
        self.checkpointer.resume(run, loaded.path)

    def _go_back(self, step: int, about: dict[str, Any]) -> None:
        self.step, self._rows = step, self._journal.resume(step, about)
        self._callback_states = about.get("callbacks", {})

    def _request_state(self, reader: checkpoint.Reader) -> None:
        """Request this rank's part of a checkpoint; raise UsageError on all ranks if it differs."""
        self.checkpointer.must_fit(reader)
        order = [reader.about.get(name) for name in ("chunk_rows", "window_chunks")]
        self._segment.sampler.must_continue(*order)
        if (step := reader.about.get("step", 0)) > self._segment.total_steps:
            raise UsageError(
                f"this run is at step {step}, beyond the last step "
                f"{self._segment.total_steps} of the training; resume it with more epochs or steps"
            )
        ratio = self._engine.updates_per_step / reader.about.get("updates_per_step", 1.0)
        saved = SavedState(reader, ratio)
        self._world.on_all_ranks(lambda: self._engine.load(saved))
        self.checkpointer.load(saved)

    @property
    def _steps_ahead(self) -> int:
        """The steps that this rank may read before the others begin them."""
        own_steps = self._epoch_steps if self._engine.asynchronous else 0
        train = self._segment.fit.train
        return own_steps + self._segment.prefetch + getattr(train, "steps_ahead", 0)

    def _next_stop(self) -> int:
        """Return the next step with a row, an evaluation, an epoch's end or a checkpoint."""
        copy_period = self._survival.options.copy_steps if self._makes_copies else 0
        row_periods = self._row_steps, self._evaluation_steps, self._epoch_steps
        periods = *row_periods, copy_period, *self.checkpointer.periods
        next_due = [(self.step // period + 1) * period for period in periods if period]
        return min(self._segment.total_steps, *next_due)

    def _multiple_of(self, *periods: int) -> bool:
        return any(period and self.step % period == 0 for period in periods)
