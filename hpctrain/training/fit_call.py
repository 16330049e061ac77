"""A call of `fit`, run in segments: a rank loss ends a segment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctrain import checkpoint, engines
from hpctrain.core.errors import RecoveryError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.data import Sampler, Samples, batches_to_read_ahead, order_of
from hpctrain.data.scaling import Scale
from hpctrain.training import orders, run_facts
from hpctrain.training.callbacks import Callbacks, check_metrics
from hpctrain.training.centered_loss import centered_loss
from hpctrain.training.exit_status import summary_on_exit
from hpctrain.training.journal import Journal
from hpctrain.training.loop import Loop
from hpctrain.training.recipe import Recipe
from hpctrain.training.run_options import CheckpointOptions, FitOptions, TraceOptions
from hpctrain.training.survival.survival import Survival
from hpctrain.training.tasks import FitPlan
from hpctrain.world import World, watched

if TYPE_CHECKING:
    from hpctrain.training.trainer import Trainer

log = logging.getLogger(__name__)
LOCK_S = 5.0  #: within which the kernel releases the lock of a killed process


class RunOrigin(NamedTuple):
    """The recipe of a run, kept beside its results, its model's outputs, and its data's scale."""

    recipe: Recipe | None = None
    outputs: int | None = None
    scale: Scale | None = None


@dataclass(frozen=True)
class FitCall:
    """The arguments of a call of fit, see Trainer.fit."""

    train: Samples
    test: Samples | None
    epochs: int | None
    steps: int | None
    batch: int
    micro_batches: int
    resume: bool
    replay: str | Path | None
    options: FitOptions
    checkpoints: CheckpointOptions
    trace: TraceOptions
    origin: RunOrigin

    def run_part(
        self, trainer: Trainer, catch_signals: Callable[[], StopRequest], survival: Survival
    ) -> dict[str, Any]:
        """Train until the end, and return the summary; collective.

        `catch_signals` does so from its first call on. Raises LostRankError at a loss of ranks.
        """
        test = self.test
        if test is not None:
            test = orders.select(trainer.world, test, trainer.seed)
        return replace(self, test=test)._run_part(trainer, catch_signals, survival)

    def _run_part(
        self, trainer: Trainer, catch_signals: Callable[[], StopRequest], survival: Survival
    ) -> dict[str, Any]:
        world = trainer.world
        sampler, total_steps = self._agree_on_batches(trainer)
        callbacks = world.on_all_ranks(lambda: self._make_callbacks(trainer, sampler))
        has_begun = survival.recoveries.has_begun
        resume = self.resume or survival.has_claimed
        with ExitStack() as stack:
            run = _claim_folder(
                world,
                stack,
                survival.run,
                resume,
                self.options.timeout_s,
                LOCK_S if world.job is not None and world.job.has_lost_ranks else 0.0,
            )
            survival.has_claimed = True
            journal = Journal(
                trainer.mesh,
                trainer.engine,
                sampler,
                total_steps,
                run,
                self.origin.recipe,
                trainer.rate,
                self.trace,
                survival.recoveries,
                survival.times,
            )
            survival.times = None  # else they hold the engine before the loss, and its memory
            plan, replica = self._make_plan(trainer, sampler), trainer.replica
            loop = Loop(trainer.world, trainer.engine, replica, plan, journal, callbacks, survival)
            stack.enter_context(survival.holding(loop.engine, loop.journal, loop.checkpointer))
            self._load_state(loop, run if resume else None, survival)
            # Before the summary: a second signal while it is written must not end the process.
            stop_request = catch_signals()
            loop.begin()
            if not has_begun:
                orders.announce(world, self.train, self.batch)
                for value in (self.test, trainer.replica.loss):
                    orders.announce(world, value)
                _log_start(loop.journal)
            stack.enter_context(summary_on_exit(loop.journal, callbacks.end))
            stack.enter_context(centered_loss(trainer.replica.model, self.train))
            with np.errstate(over="ignore", invalid="ignore"):  # the loss is checked, each step
                return loop.run(stop_request)

    def _agree_on_batches(self, trainer: Trainer) -> tuple[Sampler, int]:
        """Return the batches and the number of steps, the same on all ranks; collective."""
        sampler = trainer.world.on_all_ranks(lambda: self._make_sampler(trainer))
        total_steps = self.steps or (self.epochs or 0) * sampler.steps_per_epoch
        plan_text = (
            f"{sampler.n} samples in batches of {self.batch} for {total_steps} steps with seed "
            f"{trainer.seed}, {self.trace}"
        )
        if sampler.order is not None:
            plan_text += f", in the order of {sampler.order!r}"
        trainer.world.must_agree(plan_text, "the plan of a training")
        orders.draw(trainer.world, sampler, 0, 0)
        return sampler, total_steps

    def _load_state(self, loop: Loop, checkpoints: Path | None, survival: Survival) -> None:
        """Load the state to train from: copies in memory, a checkpoint, or a replay's start."""
        if survival.reader is not None:
            loop.restore(survival.reader)
        elif checkpoints is not None:
            loop.resume(checkpoints)
        if survival.recoveries.last_step > 0 and survival.reader is None and loop.step == 0:
            raise RecoveryError(
                "the lost ranks held a part of the state of which no copy is left, and there is no "
                "checkpoint: start the job again; [elastic] copies = 2 keeps one copy more"
            )
        if survival.recoveries.has_begun:
            survival.log_recovery(loop.step)
        elif self.replay is not None:
            loop.repeat(Path(self.replay))

    def _make_sampler(self, trainer: Trainer) -> Sampler:
        """Return the batches of the training set; raise UsageError if they do not fit the ranks."""
        ranks = trainer.mesh.data.size
        samples = len(order_of(self.train) or self.train)
        engines.must_fit(trainer.engine_options, ranks, self.batch, samples)
        return Sampler.of(self.train, self.batch, trainer.seed)

    def _make_callbacks(self, trainer: Trainer, sampler: Sampler) -> Callbacks:
        """Return the callbacks; raise UsageError for arguments that do not fit."""
        trainer.check_sets(training=orders.samples_to_check(self.train, sampler), test=self.test)
        keep_best, has_test_set = self.checkpoints.keep_best, self.test is not None
        check_metrics(trainer.replica.loss, trainer.callbacks, keep_best, has_test_set)
        if self.micro_batches > 1 and trainer.replica.normalizes_batch:
            raise UsageError(
                f"micro_batches is {self.micro_batches}, but the model normalizes over the batch: "
                "smaller pieces would change the result; set micro_batches = 1"
            )
        trainer.replica.micro_batches = self.micro_batches
        model, steps_per_epoch = trainer.replica.model, sampler.steps_per_epoch
        return Callbacks(trainer.callbacks, trainer.world, model, steps_per_epoch)

    def _make_plan(self, trainer: Trainer, sampler: Sampler) -> FitPlan:
        """Return the plan of a training, with all periods in steps."""
        epoch_steps, model, options = sampler.steps_per_epoch, trainer.replica.model, self.options
        prefetch = options.prefetch
        return FitPlan(
            self.train,
            self.test,
            sampler,
            targets=model.targets,
            blocks=trainer.blocks,
            interval=options.interval_steps or epoch_steps,
            evaluate_every=options.evaluate_steps or (options.evaluate_epochs or 1) * epoch_steps,
            prefetch=batches_to_read_ahead(self.train) if prefetch is None else prefetch,
            timeout_s=options.timeout_s,
            checkpoints=self.checkpoints,
            max_skipped=options.skip_limit,
            about={
                "model": {"input_shape": model.input_shape, "outputs": self.origin.outputs},
                **({"scale": self.origin.scale.as_json()} if self.origin.scale else {}),
            },
        )


def _claim_folder(
    world: World, stack: ExitStack, out: str | None, resume: bool, timeout_s: float, wait_s: float
) -> Path | None:
    """Lock the run's folder for this job, and let the watch write into it.

    `wait_s`: for the lock of a rank that was lost.
    """
    if out is None:
        return None
    run = Path(out)

    def claim() -> None:
        if world.rank == 0:
            stack.enter_context(run_folder.claim(run, resume, wait_s))
            checkpoint.sweep(run)

    world.on_all_ranks(claim)
    stack.enter_context(watched(world, run, timeout_s))
    return run


def _log_start(journal: Journal) -> None:
    """Log the ranks, the engine and the folder of a run; collective."""
    mesh, batch = journal.mesh, journal.sampler.batch
    start = run_facts.describe_start(mesh, journal.engine, batch)
    mesh_text = run_facts.describe_mesh(mesh, batch)
    if journal.world.rank == 0:
        steps, run = journal.total_steps, journal.run
        log.info("%s: %s, %d steps; folder: %s", journal.name, start, steps, run)
        if mesh_text:
            log.info("pipeline: %s", mesh_text)
