"""A worker's tasks in a call of fit, read ahead."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from hpctrain import nn
from hpctrain.core.signals import StopRequest
from hpctrain.data import Prefetch, share
from hpctrain.engines import Flags, Task
from hpctrain.gradients.replica import Batch
from hpctrain.training.fit import FitSegment
from hpctrain.training.journal import Journal


class _Place(NamedTuple):
    """The place of a worker's share: epoch, indexes of samples, offset in the batch."""

    epoch: int
    indexes: np.ndarray
    first: int  #: offset in the batch
    samples: int  #: of the whole batch


class _Share(NamedTuple):
    """A worker's share of a step: the samples, and the place of the samples in the batch."""

    step: int
    place: _Place
    batch: Batch


class Tasks(AbstractContextManager["Tasks"]):
    """The tasks of this worker, read ahead; see `hpctrain.engines.Work`. A context manager."""

    def __init__(self, segment: FitSegment, journal: Journal, request: StopRequest):
        self._segment, self._journal, self._request = segment, journal, request
        self._fit, self._world, self._engine = segment.fit, segment.world, segment.engine
        self._sampler, self._targets = segment.sampler, segment.replica.model.targets
        self._shares: Prefetch[_Share] | None = None
        self._stream: Any = None  # the rows of this worker's shares, if the data set streams them
        self.max_drops = self._fit.options.skip_limit

    def __exit__(self, *_: object) -> None:
        """Read no more."""
        if self._shares is not None:
            self._shares.close()
        if self._stream is not None:
            self._stream.close()

    def task(self, step: int) -> Task:
        """Return this worker's share of a step, and the scale: see hpctrain.training.loop."""
        self.at(step)
        if self._shares is None:
            # Data sets with a method `stream` read ahead by themselves, as with worker processes.
            stream = getattr(self._fit.train, "stream", None)
            self._stream = stream and stream(
                self._locate_share(s)[:2] for s in self._steps_from(step)
            )
            steps, timeout_s = self._steps_from(step), self._fit.options.timeout_s
            self._shares = Prefetch(self._read_share, steps, self._segment.prefetch, timeout_s)
        with self._world.trace.span("wait for data", "other") as waiting:
            while (share := self._shares.next()).step < step:
                pass  # a step that the other workers took without this one
        self._engine.times.data_wait_s += waiting.seconds
        place = share.place
        samples = share.batch.n if self._engine.asynchronous else place.samples
        scale = 1.0 / max(samples * self._targets, 1)
        key = nn.Key(self._sampler.seed, step, place.first, samples=place.samples)
        return Task(share.batch, scale, key)

    def record(self, step: int, sums: nn.Sums) -> None:
        """Pass the sums of a step to the journal."""
        self._journal.step(step, sums)

    def flags(self) -> Flags:
        """Return this rank's request to stop, with the number of its signal."""
        return Flags(stop=self._request.number if self._request.requested else 0)

    def at(self, step: int) -> None:
        """Set the step of the watch and of the trace."""
        self._world.trace.step = step
        if self._world.threads.record is not None:
            self._world.threads.record.step = step

    def _steps_from(self, first: int) -> Iterable[int]:
        # A worker that is faster than the others computes more than its part of all steps.
        return (
            count(first) if self._engine.asynchronous else range(first, self._segment.total_steps)
        )

    def _read_share(self, step: int) -> _Share:
        """Return this worker's share of a step; called by the thread that reads ahead."""
        place = self._locate_share(step)
        if self._stream is None:
            rows = self._fit.train.rows(place.indexes, place.epoch)
        else:
            rows = next(self._stream)
        return _Share(step, place, Batch.of(*rows))

    def _locate_share(self, step: int) -> _Place:
        """Return the place of this worker's share of a step."""
        sampler, engine = self._sampler, self._engine
        assert engine.worker is not None  # a server has no tasks
        indexes = sampler.batch_indexes(step)
        first, own_indexes = share(indexes, engine.worker, engine.workers, self._segment.blocks)
        epoch, _ = sampler.locate_step(step)
        return _Place(epoch, own_indexes, first, len(indexes))
