"""The loop over steps, whatever the engine: train, look, save, and tell how it ended.

Scale is set here and nowhere else: 1 over the targets of a step, all ranks together, which are
its samples, or the places in its texts. So collectives only ever sum, and a last batch that is
short or unevenly shared is right as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain import checkpoint, nn
from hpctrain.data import Prefetch, Sampler, Samples, in_pieces, share
from hpctrain.engines import Engine, Flags
from hpctrain.errors import HpctrainError, SaveError, Stopped, TrainingError, UsageError
from hpctrain.gradients.replica import Batch, Replica
from hpctrain.journal import Journal
from hpctrain.recipe import CheckpointOptions
from hpctrain.stop import StopRequest
from hpctrain.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What one call of fit does: the samples, and every how many steps what is done."""

    train: Samples
    test: Samples | None
    sampler: Sampler
    targets: int  #: per sample
    interval: int  #: steps per row of metrics
    prefetch: int
    timeout_s: float
    checkpoints: CheckpointOptions


def evaluate(world: World, engine: Engine, samples: Samples) -> nn.Sums:
    """Return the sums of loss and right answers over `samples`; each rank does its share."""
    engine.settle()
    _, own = share(np.arange(len(samples)), world.rank, world.size)
    sums = sums_over(engine.replica, samples, own)
    loss, correct, count = engine.sum(np.array(sums, np.float64))
    return nn.Sums(float(loss), int(correct), int(count))


def sums_over(replica: Replica, samples: Samples, indexes: np.ndarray) -> nn.Sums:
    """Return the sums over the samples at `indexes`, read a few at a time."""
    pieces = (Batch(*rows) for rows in in_pieces(samples, indexes))
    return reduce(nn.add, map(replica.evaluate, pieces), nn.Sums(0.0, 0, 0))


class _Share(NamedTuple):
    """What a rank works on in one step: where it begins in the batch, and the batch's length."""

    first: int
    batch: Batch
    samples: int


class Loop:
    """One call of fit: the state of the loop over steps."""

    def __init__(self, world: World, engine: Engine, plan: Plan, journal: Journal):
        self.world, self.engine, self.plan, self.journal = world, engine, plan, journal
        self.step = 0

    def run(self, request: StopRequest) -> dict[str, Any]:
        """Train from `step` to the end, or to the step at which somebody asked to stop."""
        journal, total = self.journal, self.journal.total_steps
        journal.begin(self.step)
        steps = range(self.step, total)
        with Prefetch(self._read, steps, self.plan.prefetch, self.plan.timeout_s) as shares:
            self._train(shares, request)
        return journal.finish("done", 0)

    def _train(self, shares: Prefetch[_Share], request: StopRequest) -> None:
        journal, total = self.journal, self.journal.total_steps
        while self.step < total:
            flags = self._one_step(shares, Flags(stop=int(request.requested)))
            last = self.step == total or bool(flags.stop)
            if last or self.step % self.plan.interval == 0 or self._ends_epoch():
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
        sampler = self.plan.sampler
        indexes = sampler.batch_indexes(step)
        first, own = share(indexes, self.world.rank, self.world.size)
        epoch, _ = sampler.place(step)
        return _Share(first, Batch(*self.plan.train.rows(own, epoch)), len(indexes))

    def _one_step(self, shares: Prefetch[_Share], flags: Flags) -> Flags:
        """Train one step; raise TrainingError, on all ranks, where a loss is not finite."""
        if self.world.record is not None:
            self.world.record.step = self.step
        first, batch, samples = shares.next()
        key = nn.Key(self.plan.sampler.seed, self.step, first)
        scale = 1.0 / (samples * self.plan.targets)
        sums, flags = self.engine.step(batch, scale, key, flags)
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
        return self.step % self.plan.sampler.steps_per_epoch == 0

    def _evaluated(self, last: bool) -> nn.Sums | None:
        if self.plan.test is None or not (last or self._ends_epoch()):
            return None
        return evaluate(self.world, self.engine, self.plan.test)

    def _checkpoint_due(self) -> bool:
        options = self.plan.checkpoints
        every = (options.every_epochs or 0) * self.plan.sampler.steps_per_epoch
        return any(n and self.step % n == 0 for n in (every, options.every_steps))

    def _save(self, must: bool) -> None:
        """Write a checkpoint; a failure ends the run only if nothing comes after (`must`)."""
        run = self.journal.run
        if run is None:
            return
        self.engine.settle()
        about, keep = self.journal.about_now(self.step), self.plan.checkpoints.keep
        try:
            checkpoint.save(run, self.step, self.engine.state(), about, self.world.link, keep)
        except SaveError as error:
            if must:
                raise
            if self.world.rank == 0:
                log.warning("%s; training goes on", error)


@contextmanager
def told(journal: Journal) -> Iterator[None]:
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
