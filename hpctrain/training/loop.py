"""The loop over steps, for any engine: train, evaluate, save, and summarize.

Scale is set here and nowhere else: 1 over the targets of a step, all workers together, which are
its samples, or the places in its texts. So collectives only ever sum, and a last batch that is
short or unevenly shared is right as it is. Where workers are asynchronous, the gradient of each
counts by itself: there it is 1 over the worker's own targets.
"""

from __future__ import annotations

import logging
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import checkpoint, nn
from hpctrain.core.errors import StoppedError, UnsavedError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest, cause
from hpctrain.core.xp import finish
from hpctrain.data import Samples, in_pieces, share
from hpctrain.engines import Engine, replay
from hpctrain.engines.saved_state import SavedState
from hpctrain.gradients.blocks import add_in_order
from hpctrain.gradients.replica import Batch, Replica
from hpctrain.training import orders
from hpctrain.training.callbacks import Callbacks, Row
from hpctrain.training.checkpointer import Checkpointer
from hpctrain.training.journal import Journal
from hpctrain.training.survival.survival import Survival
from hpctrain.training.suspicions import find_suspicions
from hpctrain.training.tasks import FitPlan, Tasks
from hpctrain.world import World

log = logging.getLogger(__name__)


def evaluate(engine: Engine, samples: Samples, blocks: int) -> nn.Sums:
    """Return the sums of the loss and the metrics over `samples`; each worker does its share.

    They are added block by block: the number of workers only decides the owner of each block.
    """
    engine.settle()
    loss = engine.replica.loss
    block_sums = np.zeros((blocks, 2 * len(loss.terms)))
    if engine.worker is not None:
        _, own_blocks = share(np.arange(blocks), engine.worker, engine.workers)
        for block in own_blocks:
            _, indexes = share(np.arange(len(samples)), block, blocks)
            block_sums[block] = nn.losses.pack(
                sums_over(engine.replica, samples, indexes), loss.terms
            )
    return add_in_order(engine.sum(block_sums.ravel()).reshape(block_sums.shape), loss)


def sums_over(replica: Replica, samples: Samples, indexes: np.ndarray) -> nn.Sums:
    """Return the sums over the samples at `indexes`, read a few at a time."""
    batches = (Batch.of(*rows) for rows in in_pieces(samples, indexes))
    return reduce(nn.add, map(replica.evaluate, batches), {})


class Loop:
    """One call of fit: the state of the loop over steps."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        replica: Replica,
        plan: FitPlan,
        journal: Journal,
        callbacks: Callbacks,
        survival: Survival,
    ):
        """Train `replica`, on which `engine` was built."""
        self._survival, self.replica, self.callbacks = survival, replica, callbacks
        self.world, self.engine, self.plan, self.journal = world, engine, plan, journal
        self._replay_settings = {  # which must be equal in a run and in its replay
            "engine": engine.name,
            "workers": engine.workers,
            "servers": engine.servers,
            "training samples": plan.sampler.n,
            "batch": plan.sampler.batch,
            "seed": plan.sampler.seed,
            "interval_steps": plan.interval,
        }
        self.replay_log = replay.ReplayLog(
            engine.recorder if journal.mesh.is_first else None,
            journal.run,
            journal.mesh.data.rank,
            self._replay_settings,
        )
        self.step, self.rows = 0, list[Row]()  # rows: of the earlier segments of the run
        self.row, self.first_row = Row(), Row()  # of this step, where there is one; of this part
        about = {**plan.about, "callbacks": callbacks.saved}  # which changes with each row
        self.checkpointer = Checkpointer(world, engine, replica, journal, plan.checkpoints, about)
        self._callback_states: Row = {}  # at the begin of this part
        self.stop_reason = ""  # the reason to end before the last step

    def begin(self) -> None:
        """Prepare the files of the run for the steps after `step`; collective.

        Raises UsageError on all ranks if one cannot be read or written.
        """
        self.world.on_all_ranks(self._begin_replay_log)
        self.journal.begin(self.step)

    def _begin_replay_log(self) -> None:
        with run_folder.writable(self.journal.run or Path()):
            self.replay_log.truncate(
                self.step, self.journal.intervals, self.journal.recoveries.lost_ranks
            )

    def run(self, request: StopRequest) -> dict[str, Any]:
        """Train from `step` to the end, or to the step of a request to stop."""
        arena = self.engine.replica.arena
        callback_names = self.callbacks.share_names(self._survival.callbacks)
        self._survival.callbacks = callback_names
        states, run = self._callback_states, self.journal.run
        self.stop_reason = self.callbacks.begin(self.rows, arena, run, states)
        with Tasks(self.world, self.engine, self.plan, self.journal, request) as tasks:
            self._train(tasks)
        self.replay_log.end()
        is_early = self.step < self.journal.total_steps
        first_row = self.rows[0] if self.rows else self.first_row
        self.journal.suspicious = find_suspicions(
            self.journal.mesh, self.engine, self.replica, self.plan.test, first_row, self.row
        )
        summary = self.journal.finish("done", 0, self.stop_reason if is_early else None)
        self.callbacks.end(summary)
        return summary

    def _train(self, tasks: Tasks) -> None:
        total_steps = self.journal.total_steps
        self._keep_state()
        if self._survival.reader is not None and self.journal.open_row.has_steps(self.step):
            self._end_interval(0)  # a loss of ranks came before its row
        if self.journal.recoveries.has_lost_host and self.step:
            self._save_checkpoint(must=False)
        while self.step < total_steps and not self.stop_reason:
            tasks.at(self.step)
            step_before, stop = self.step, self._next_stop()
            orders.draw(self.world, self.plan.sampler, self.step, stop - 1 + self._steps_ahead)
            self.step, flags = self.engine.train(tasks, self.step, stop)
            if self.journal.intervals is not None:  # else an older part did not count them
                self.journal.intervals += 1
            self.replay_log.write()
            if self.step > step_before:
                self.journal.skips.in_a_row = 0
            if flags.failed:
                self.journal.skips.skip(self.step, flags.failed - 1, self.plan.max_skipped)
                self.step += 1
            self._keep_state()
            self._end_interval(flags.stop)

    def _end_interval(self, stop_signal: int) -> None:
        """Make the row and the checkpoint that are due; raise StoppedError after a signal."""
        is_stopped = bool(stop_signal) and self.step < self.journal.total_steps
        self._make_row(is_stopped)
        is_last = self.step == self.journal.total_steps or is_stopped or bool(self.stop_reason)
        if is_last:
            self.engine.settle()  # the arena then holds the trained parameters
            finish(self.engine.replica.arena.param)  # no copy into it outlives us
        if is_last or self.checkpointer.is_due(self.step, self.row):
            self._save_checkpoint(must=is_last)
        if is_stopped and not self.stop_reason:
            raise self._stop_error(stop_signal)

    def _save_checkpoint(self, must: bool) -> None:
        self.replay_log.sync()
        if folder := self.checkpointer.save(self.step, self.row, must):
            self.journal.recoveries.has_lost_host = False
            self.callbacks.checkpoint(folder)

    @property
    def _makes_copies(self) -> bool:
        """Whether a rank's part of the state would be lost with it."""
        return self.world.survives and not self.engine.shares_sums and self.world.size > 1

    def _keep_state(self) -> None:
        """Note the state, or copy it to other ranks: after a rank loss training resumes here.

        Collective.
        """
        if self.engine.shares_sums:
            self.engine.committed_step = self.step
        if self._makes_copies:
            self.engine.settle()
            self._survival.copy(self.step, self.journal, self.checkpointer)

    def _stop_error(self, signal_number: int) -> StoppedError:
        run = self.journal.run
        reason = run_folder.stop_reason(run) if run else ""
        stop_cause = f"on request ({reason})" if reason else cause(signal_number)
        stop_text = f"stopped at step {self.step} of {self.journal.total_steps} {stop_cause}"
        if run is None:
            return UnsavedError(
                f"{stop_text}; nothing was saved: `fit` was given no folder (out=DIR)"
            )
        return StoppedError(f"{stop_text}; resume me")

    def _make_row(self, is_stopped: bool) -> None:
        """Make a row of metrics and evaluate if due, and call the callbacks with the row."""
        is_last = self.step == self.journal.total_steps
        is_evaluated = is_last or self._multiple_of(self.plan.evaluate_every)
        is_regular = is_evaluated or self._multiple_of(self.plan.interval, self._epoch_steps)
        self.row = {}
        if is_regular or is_stopped:
            # No evaluation for a stop: the time until the job is killed may be short.
            test_sums = None
            if is_evaluated and self.plan.test is not None:
                with self.world.trace.span("evaluate", "other"):
                    test_sums = evaluate(self.engine, self.plan.test, self.plan.blocks)
            self.row = self.journal.row(self.step, test_sums, interrupted=not is_regular) or {}
            self.first_row = self.first_row or self.row
            self.stop_reason = self.callbacks.call(self.row) if self.row else ""

    def repeat(self, run: Path) -> None:
        """Let the engine repeat the order of events in `run`; raise UsageError if it cannot."""
        rank, recorder = self.journal.mesh.data.rank, self.engine.recorder
        if recorder is None:
            raise UsageError(
                f"--replay: the engine '{self.engine.name}' is deterministic by itself; "
                "train again without --replay"
            )
        recorded_machine, intervals = self.world.on_all_ranks(
            lambda: replay.read_log(run, rank, self._replay_settings)
        )
        recorder.start_replay(intervals, self.journal.intervals or 0)
        differences = replay.describe_differences(recorded_machine, replay.describe_machine())
        rank_differences = filter(None, self.world.gather(differences))
        if rank == 0 and (text := " | ".join(rank_differences)):
            log.warning("the last bits may differ from those of %s: %s", run, text)

    def restore(self, reader: checkpoint.Reader) -> None:
        """Restore a state from the memory of ranks; every rank goes on, or none; collective."""
        self._request_state(reader)
        assert self.world.job is not None
        reader.fetch(self.world.job.link)  # spares, too, send what they hold
        reader.finish()
        self._go_back(reader.step, reader.about)
        self.world.link.agree()

    def resume(self, run: Path) -> None:
        """Restore the newest good checkpoint, if there is one."""
        loaded = checkpoint.load(run, self.world.link, request=self._request_state)
        if loaded is None:  # a part that was lost before its first checkpoint may have left rows
            self.journal.resume(0, {})
            return
        self._go_back(loaded.step, loaded.about)
        if self.world.rank == 0:
            log.info("resumed at step %d of %d", self.step, self.journal.total_steps)
        self.checkpointer.resume(run, loaded.path)

    def _go_back(self, step: int, about: dict[str, Any]) -> None:
        self.step, self.rows = step, self.journal.resume(step, about)
        self._callback_states = about.get("callbacks", {})

    def _request_state(self, reader: checkpoint.Reader) -> None:
        """Request this rank's part of a checkpoint; raise UsageError on all ranks if it differs."""
        self.checkpointer.must_fit(reader)
        if (step := reader.about.get("step", 0)) > self.journal.total_steps:
            raise UsageError(
                f"this run is at step {step}, beyond the last step "
                f"{self.journal.total_steps} of the training; resume it with more epochs or steps"
            )
        ratio = self.engine.updates_per_step / reader.about.get("updates_per_step", 1.0)
        saved = SavedState(reader, ratio)
        self.world.on_all_ranks(lambda: self.engine.load(saved))
        self.checkpointer.load(saved)

    @property
    def _epoch_steps(self) -> int:
        return self.plan.sampler.steps_per_epoch

    @property
    def _steps_ahead(self) -> int:
        """The steps that this rank may read before the others begin them."""
        own_steps = self._epoch_steps if self.engine.asynchronous else 0
        return own_steps + self.plan.prefetch + getattr(self.plan.train, "steps_ahead", 0)

    def _next_stop(self) -> int:
        """Return the next step with a row, an evaluation, an epoch's end or a checkpoint."""
        plan = self.plan
        copy_period = self._survival.options.copy_steps if self._makes_copies else 0
        checkpoint_periods = self.checkpointer.periods
        periods = (
            plan.interval,
            plan.evaluate_every,
            self._epoch_steps,
            copy_period,
            *checkpoint_periods,
        )
        next_due = [(self.step // period + 1) * period for period in periods if period]
        return min(self.journal.total_steps, *next_due)

    def _multiple_of(self, *periods: int) -> bool:
        return any(period and self.step % period == 0 for period in periods)
