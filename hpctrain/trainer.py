"""The trainer: the loop over steps, whatever the engine, and what is kept of it.

Scale is set here and nowhere else: 1 over the targets of a step, all ranks together, which are
its samples, or the places in its texts. So collectives only ever sum, and a last batch that is
short or unevenly shared is right as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain import checkpoint, engines, nn, rundir
from hpctrain.data import Prefetch, Sampler, Samples, in_pieces, share, worth_reading_ahead
from hpctrain.engines import Engine, Flags
from hpctrain.errors import HpctrainError, SaveError, Stopped, TrainingError, UsageError
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.journal import Journal
from hpctrain.optim import Optimizer
from hpctrain.recipe import CheckpointOptions, Recipe
from hpctrain.stop import StopRequest
from hpctrain.world import World, init

log = logging.getLogger(__name__)


class Trainer:
    """A model, an optimizer and an engine, ready to be trained; every rank makes its own."""

    def __init__(
        self,
        model: nn.Model,
        optimizer: Optimizer,
        engine: Any = engines.AllReduce(),  # noqa: B008  (frozen)
        seed: int = 0,
        precision: str = "float32",
        world: World | None = None,
    ):
        """Lay the model out and build the engine; collective.

        `engine`: options such as `ht.engines.AllReduce(algorithm="ring")`. `precision`: float32 or
        float64. Raises UsageError on all ranks if the engine does not fit the world, or if ranks
        have different models.
        """
        self.world = world or init()
        self.seed, self.rate = seed, optimizer.rate
        self.replica = ModelReplica(model, seed, np.dtype(precision))
        self.engine: Engine = self.world.together(
            lambda: engine.build(self.world, self.replica, optimizer)
        )

    def fit(
        self,
        train: Samples,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int = 128,
        micro_batches: int = 1,
        evaluate: Samples | None = None,
        prefetch: int | None = None,
        interval_steps: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        checkpoints: CheckpointOptions = CheckpointOptions(),  # noqa: B008  (frozen)
        timeout_s: float = 300.0,
        recipe: Recipe | None = None,
    ) -> dict[str, Any]:
        """Train for `epochs` or `steps` with `batch` samples per step over all ranks; collective.

        Each rank computes its share of a step in `micro_batches` pieces, which need less memory.
        Returns the summary, which also lies in `out`/summary.json if `out` is given, beside
        metrics and checkpoints; `resume` goes on from the newest good checkpoint there. A row of
        metrics is made every `interval_steps` (an epoch) and the `evaluate` set is looked at
        after each epoch. A thread reads `prefetch` batches ahead; if not given, 2, or none
        where the samples lie in memory. `recipe` is what all this was made from, kept beside the
        results.

        Raises UsageError, TrainingError (loss not finite), Stopped (a signal asked to; there is a
        checkpoint) or SaveError, each on all ranks.
        """
        sampler = self.world.together(lambda: self._sampler(train, batch))
        if (epochs is None) == (steps is None):
            raise UsageError("fit needs exactly one of epochs and steps")
        self.replica.micro_batches = self._micro_batches(micro_batches)
        total = steps or (epochs or 0) * sampler.steps_per_epoch
        plan = f"{len(train)} samples in batches of {batch} for {total} steps with seed {self.seed}"
        self.world.must_agree(plan, "the plan of a training")
        with ExitStack() as stack:
            run = self._claim(stack, out, resume, timeout_s)
            journal = Journal(self.world, self.engine, sampler, total, run, recipe, self.rate)
            loop = _Loop(self, train, evaluate, sampler, journal, checkpoints)
            loop.interval = interval_steps or sampler.steps_per_epoch
            loop.prefetch = worth_reading_ahead(train) if prefetch is None else prefetch
            loop.timeout_s = timeout_s
            if resume and run is not None:
                loop.resume(run)
            stack.enter_context(_told(journal))
            request = stack.enter_context(StopRequest())
            with np.errstate(over="ignore", invalid="ignore"):  # the loss is looked at, each step
                return loop.run(request)

    def close(self) -> None:
        """End the engine's threads and free its links; collective."""
        self.engine.close()

    def evaluate(self, samples: Samples) -> nn.Sums:
        """Return the sums of loss and right answers over `samples`; each rank does its share."""
        self.engine.settle()
        _, own = share(np.arange(len(samples)), self.world.rank, self.world.size)
        sums = sums_over(self.replica, samples, own)
        loss, correct, count = self.engine.sum(np.array(sums, np.float64))
        return nn.Sums(float(loss), int(correct), int(count))

    def _sampler(self, train: Samples, batch: int) -> Sampler:
        size = self.world.size
        if min(len(train), batch) < size:
            what = "training samples" if len(train) < batch else "samples per batch"
            raise UsageError(
                f"{min(len(train), batch)} {what} for {size} ranks: every rank needs at least one; "
                "start fewer ranks"
            )
        return Sampler(len(train), batch, self.seed)

    def _micro_batches(self, pieces: int) -> int:
        if pieces > 1 and self.replica.model.buffers:
            raise UsageError(
                f"micro_batches is {pieces}, but the model normalizes over the batch: over pieces "
                "of it the result would be another; set micro_batches = 1"
            )
        return pieces

    def _claim(
        self, stack: ExitStack, out: str | Path | None, resume: bool, timeout_s: float
    ) -> Path | None:
        """Take the run's folder for this job, and let the watch write into it."""
        if out is None:
            return None
        run = Path(out)

        def claim() -> None:
            if self.world.rank == 0:
                stack.enter_context(rundir.claimed(run, resume))

        self.world.together(claim)
        stack.enter_context(self.world.watched(run, timeout_s))
        return run


def sums_over(replica: ModelReplica, samples: Samples, indexes: np.ndarray) -> nn.Sums:
    """Return the sums over the samples at `indexes`, read a few at a time."""
    pieces = (Batch(*rows) for rows in in_pieces(samples, indexes))
    return reduce(nn.add, map(replica.evaluate, pieces), nn.Sums(0.0, 0, 0))


class _Share(NamedTuple):
    """What a rank works on in one step: where it begins in the batch, and the batch's length."""

    first: int
    batch: Batch
    samples: int


class _Loop:
    """One call of fit: the state of the loop over steps."""

    def __init__(
        self,
        trainer: Trainer,
        train: Samples,
        test: Samples | None,
        sampler: Sampler,
        journal: Journal,
        checkpoints: CheckpointOptions,
    ):
        self.trainer, self.world, self.engine = trainer, trainer.world, trainer.engine
        self.train, self.test, self.sampler = train, test, sampler
        self.journal, self.checkpoints = journal, checkpoints
        self.interval, self.prefetch, self.timeout_s = sampler.steps_per_epoch, 0, 300.0
        self.step = 0

    def run(self, request: StopRequest) -> dict[str, Any]:
        """Train from `step` to the end, or to the step at which somebody asked to stop."""
        journal, total = self.journal, self.journal.total_steps
        journal.begin(self.step)
        steps = range(self.step, total)
        with Prefetch(self._read, steps, self.prefetch, self.timeout_s) as shares:
            self._train(shares, request)
        return journal.finish("done", 0)

    def _train(self, shares: Prefetch[_Share], request: StopRequest) -> None:
        journal, total = self.journal, self.journal.total_steps
        while self.step < total:
            flags = self._one_step(shares, Flags(stop=int(request.requested)))
            last = self.step == total or bool(flags.stop)
            if last or self.step % self.interval == 0 or self._ends_epoch():
                journal.row(self.step, self._evaluated(last))
            if last or self._checkpoint_due():
                self._save(must=last)
            if flags.stop and self.step < total:
                raise Stopped(f"stopped at step {self.step} of {total} as asked; resume me")

    def resume(self, run: Path) -> None:
        """Go to the newest good checkpoint, if any was ever written."""
        found = checkpoint.load(run, self.world.link)
        if found is None:
            return
        self.world.together(lambda: self.engine.load(found.arrays))
        self.step = found.step
        self.journal.resume(found.step, found.about)

    def _read(self, step: int) -> _Share:
        """Return this rank's share of a step; called by the thread that reads ahead."""
        indexes = self.sampler.batch_indexes(step)
        first, own = share(indexes, self.world.rank, self.world.size)
        epoch, _ = self.sampler.place(step)
        return _Share(first, Batch(*self.train.rows(own, epoch)), len(indexes))

    def _one_step(self, shares: Prefetch[_Share], flags: Flags) -> Flags:
        """Train one step; raise TrainingError, on all ranks, where a loss is not finite."""
        if self.world.record is not None:
            self.world.record.step = self.step
        first, batch, samples = shares.next()
        key = nn.Key(self.trainer.seed, self.step, first)
        targets = samples * self.trainer.replica.model.targets
        sums, flags = self.engine.step(batch, 1.0 / targets, key, flags)
        if flags.failed:
            raise TrainingError(self._not_finite(flags.failed - 1))
        self.step += 1
        self.journal.step(self.step, sums)
        return flags

    def _not_finite(self, rank: int) -> str:
        where = f"rank {rank} ({self.world.hosts[rank]})"
        return (
            f"the loss is not finite at step {self.step} on {where}; "
            "the parameters are those of the step before. Lower the rate or lengthen the warm-up"
        )

    def _ends_epoch(self) -> bool:
        return self.step % self.sampler.steps_per_epoch == 0

    def _evaluated(self, last: bool) -> nn.Sums | None:
        if self.test is None or not (last or self._ends_epoch()):
            return None
        return self.trainer.evaluate(self.test)

    def _checkpoint_due(self) -> bool:
        every = (self.checkpoints.every_epochs or 0) * self.sampler.steps_per_epoch
        return any(n and self.step % n == 0 for n in (every, self.checkpoints.every_steps))

    def _save(self, must: bool) -> None:
        """Write a checkpoint; a failure ends the run only if nothing comes after (`must`)."""
        run = self.journal.run
        if run is None:
            return
        self.engine.settle()
        about, keep = self.journal.about_now(self.step), self.checkpoints.keep
        try:
            checkpoint.save(run, self.step, self.engine.state(), about, self.world.link, keep)
        except SaveError as error:
            if must:
                raise
            if self.world.rank == 0:
                log.warning("%s; training goes on", error)


@contextmanager
def _told(journal: Journal) -> Iterator[None]:
    """See to it that the summary tells how a run ended, also where it ended badly."""
    try:
        yield
    except Stopped as error:
        journal.finish("stopped", error.exit_code, str(error))
        raise
    except (TrainingError, SaveError) as error:  # raised on all ranks
        journal.finish("failed", error.exit_code, str(error))
        raise
    except UsageError as error:  # out of a user's code, on this rank: the time to refuse is over
        journal.fail_alone(error)
        raise HpctrainError(str(error)) from error
    except BaseException as error:
        journal.fail_alone(error)
        raise
