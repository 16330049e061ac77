"""A call of `fit`, run in segments: a rank loss ends a segment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import checkpoint, data
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.data import unwrap
from hpctrain.data.reading import chunk_rows_of
from hpctrain.data.scaling import scale_of
from hpctrain.training import orders, run_facts
from hpctrain.training.arguments import check_sets
from hpctrain.training.callbacks import Callbacks, check_metrics
from hpctrain.training.centered_loss import centered_loss
from hpctrain.training.exit_status import summary_on_exit
from hpctrain.training.fit import FitSegment
from hpctrain.training.journal import Journal
from hpctrain.training.loggers import run_loggers
from hpctrain.training.loop import Loop
from hpctrain.training.node_reader import open_reader
from hpctrain.training.survival.survival import Survival
from hpctrain.world import watched

log = logging.getLogger(__name__)
LOCK_S = 5.0  #: within which the kernel releases the lock of a killed process


def run_segment(
    segment: FitSegment, survival: Survival, catch_signals: Callable[[], StopRequest]
) -> dict[str, Any]:
    """Train until the end, and return the summary; collective.

    `catch_signals` does so from its first call on. Raises LostRankError at a loss of ranks.
    """
    fit, world = segment.fit, segment.world
    _agree_on_batches(segment)
    has_begun = survival.recoveries.has_begun
    resume = fit.resume or survival.has_claimed
    callbacks = world.on_all_ranks(lambda: _make_callbacks(segment, resume))
    with ExitStack() as stack:
        if segment.run is not None:
            _claim_folder(segment, segment.run, stack, resume)
        survival.has_claimed = True
        journal = Journal(segment, survival.recoveries, survival.times)
        survival.times = None  # else they hold the engine before the loss, and its memory
        loop = Loop(segment, journal, callbacks, survival)
        stack.enter_context(survival.holding(segment.engine, journal, loop.checkpointer))
        _load_state(loop, segment, survival, resume)
        # Before the reader's thread: two threads must not read a user's samples at once.
        stack.enter_context(centered_loss(segment.replica.model, fit.train))
        reader = stack.enter_context(open_reader(segment, loop.step))
        # Before the summary: a second signal while it is written must not end the process.
        stop_request = catch_signals()
        loop.begin()
        if not has_begun:
            orders.announce(world, fit.train, fit.batch)
            for value in (segment.test, segment.replica.loss):
                orders.announce(world, value)
            segment.evaluation.announce(segment.test, fit.metrics)
            _log_start(segment)
        stack.enter_context(summary_on_exit(journal, callbacks.end))
        with np.errstate(over="ignore", invalid="ignore"):  # the loss is checked, each step
            return loop.run(stop_request, reader)


def _agree_on_batches(segment: FitSegment) -> None:
    """Raise UsageError on all ranks if their batches or steps differ; collective."""
    fit, world, sampler = segment.fit, segment.world, segment.sampler
    plan_text = (
        f"{sampler.n} samples in batches of {fit.batch} for {segment.total_steps} steps with seed "
        f"{fit.seed}, {fit.trace}"
    )
    plan_text += f", metrics {metrics}" if (metrics := segment.evaluation.scalars) else ""
    if sampler.order is not None:
        plan_text += f", in the order of {sampler.order!r}"
    if sampler.chunk_rows is not None:
        plan_text += f", shuffled by chunks of {sampler.chunk_rows}"
    reading, chunk_rows = data.reading_of(fit.train), chunk_rows_of(fit.train)
    if chunk_rows is not None or reading != data.ReadOptions():  # a node's reader is collective
        ahead = data.batches_to_read_ahead(fit.train)
        plan_text += f", read by {reading}, chunks of {chunk_rows}, {ahead} batches ahead"
    world.must_agree(plan_text, "the plan of a training")
    orders.draw(world, sampler, 0, 0)


def _make_callbacks(segment: FitSegment, resume: bool) -> Callbacks:
    """Return the callbacks; raise UsageError for arguments that do not fit."""
    fit, replica, sampler, test = segment.fit, segment.replica, segment.sampler, segment.test
    training = orders.samples_to_check(fit.train, sampler)
    check_sets(replica.model, replica.loss, training=training)
    run_loggers.check(fit.loggers, segment.run, is_new=not resume)
    check_metrics(segment.evaluation, fit.callbacks, fit.checkpoints.keep_best, test is not None)
    if fit.micro_batches > 1 and replica.normalizes_batch:
        raise UsageError(
            f"micro_batches is {fit.micro_batches}, but the model normalizes over the batch: "
            "smaller pieces would change the result; set micro_batches = 1"
        )
    replica.micro_batches = fit.micro_batches
    return Callbacks(fit.callbacks, segment.world, replica.model, sampler.steps_per_epoch)


def _claim_folder(segment: FitSegment, run: Path, stack: ExitStack, resume: bool) -> None:
    """Lock the run's folder for this job, and let the watch write into it."""
    world = segment.world
    has_lost_ranks = world.job is not None and world.job.has_lost_ranks

    def claim() -> None:
        if world.rank == 0:
            stack.enter_context(run_folder.claim(run, resume, LOCK_S if has_lost_ranks else 0.0))
            checkpoint.sweep(run)

    world.on_all_ranks(claim)
    stack.enter_context(watched(world, run, segment.fit.options.timeout_s))


def _load_state(loop: Loop, segment: FitSegment, survival: Survival, resume: bool) -> None:
    """Load the state to train from: copies in memory, a checkpoint, or a replay's start."""
    if survival.reader is not None:
        loop.restore(survival.reader)
    elif segment.run is not None and resume:
        loop.resume(segment.run)
    if survival.recoveries.has_begun:
        survival.log_recovery(loop.step)
    elif segment.fit.replay is not None:
        loop.repeat(Path(segment.fit.replay))


def _log_start(segment: FitSegment) -> None:
    """Log the ranks, the engine and the folder of a run; collective."""
    mesh, batch = segment.mesh, segment.fit.batch
    start = run_facts.describe_start(mesh, segment.engine, batch)
    mesh_text = run_facts.describe_mesh(mesh, batch)
    if segment.world.rank == 0:
        fit, steps, run = segment.fit, segment.total_steps, segment.run
        if (scale := scale_of(fit.train)) and fit.origin.recipe is None:  # a recipe's is announced
            samples = unwrap(fit.train)
            x, _ = samples.rows(np.arange(0))
            log.info("[data] scale: %s", scale.describe(x.dtype, len(samples)))
        log.info("%s: %s, %d steps; folder: %s", segment.fit.name, start, steps, run)
        if mesh_text:
            log.info("pipeline: %s", mesh_text)
