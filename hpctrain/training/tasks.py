"""A worker's tasks in a call of fit, read ahead."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from hpctrain import nn
from hpctrain.collectives.signature import MAX_NAMED_RANKS
from hpctrain.collectives.tree import broadcast_first
from hpctrain.core.errors import BadDataError, DataError, HpctrainError, ReadError
from hpctrain.core.signals import StopRequest
from hpctrain.core.trees import map_arrays
from hpctrain.data import Prefetch, share
from hpctrain.engines import Flags, Task
from hpctrain.gradients.replica import Batch
from hpctrain.training.fit import FitSegment
from hpctrain.training.journal import Journal
from hpctrain.training.node_reader import NodeReader
from hpctrain.world import World

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """The place of a worker's share in the batch of a step."""

    positions: np.ndarray  #: of its samples in the batch
    first: int
    samples: int  #: of the whole batch


class _Share(NamedTuple):
    """A worker's share of a step: the samples, and the place of the samples in the batch."""

    step: int
    place: _Place
    batch: Batch


class Tasks(AbstractContextManager["Tasks"]):
    """The tasks of this worker, read ahead; see `hpctrain.engines.Work`. A context manager."""

    def __init__(
        self,
        segment: FitSegment,
        journal: Journal,
        request: StopRequest,
        reader: NodeReader | None = None,
    ):
        """`reader`: of this node; without one this rank reads its own rows."""
        self._segment, self._journal, self._request = segment, journal, request
        self._reader = reader
        self._fit, self._world, self._engine = segment.fit, segment.world, segment.engine
        self._sampler, self._targets = segment.sampler, segment.replica.model.targets
        self._shares: Prefetch[_Share] | None = None
        self._stream: Any = None  # the rows of this worker's shares, if the data set streams them
        self._error: DataError | None = None  # of this rank's own reading
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
        with self._world.trace.span("wait for data", "other") as waiting:
            share = self._next_share(step)
        self._engine.times.data_wait_s += waiting.seconds
        place = share.place
        samples = share.batch.n if self._engine.asynchronous else place.samples
        scale = 1.0 / max(samples * self._targets, 1)
        key = nn.Key(self._sampler.seed, step, place.first, samples=place.samples)
        return Task(share.batch, scale, key)

    def _next_share(self, step: int) -> _Share:
        if self._reader is not None:
            place = self._locate_share(step)
            rows = self._reader.rows(step, len(place.positions))
            return _Share(step, place, Batch.of(*rows))
        if self._shares is None:
            # Data sets with a method `stream` read ahead by themselves, as with worker processes.
            stream = getattr(self._fit.train, "stream", None)
            self._stream = stream and stream(map(self._locate_rows, self._steps_from(step)))
            steps, timeout_s = self._steps_from(step), self._fit.options.timeout_s
            self._shares = Prefetch(self._read_share, steps, self._segment.prefetch, timeout_s)
        try:
            while (share := self._shares.next()).step < step:
                pass  # a step that the other workers took without this one
        except DataError as error:
            if self._stream is not None or not self._engine.keeps_step:
                raise
            self._error = error
            return self._blank_share(step)
        return share

    def _blank_share(self, step: int) -> _Share:
        """Return a share of zeros: all ranks take the step, in which they agree on the failure."""
        place = self._locate_share(step)

        def zeros(x: np.ndarray) -> np.ndarray:
            return np.zeros((len(place.positions), *x.shape[1:]), x.dtype)

        rows = map_arrays(zeros, self._fit.train.rows(np.arange(0)))
        return _Share(step, place, Batch.of(*rows))

    def record(self, step: int, sums: nn.Sums) -> None:
        """Pass the sums of a step to the journal."""
        self._journal.step(step, sums)

    def flags(self) -> Flags:
        """Return this rank's request to stop, with its signal, and whether it could not read."""
        flags = Flags(stop=self._request.number if self._request.requested else 0)
        has_failed = self._reader.has_failed if self._reader else self._error is not None
        return flags.with_failure(self._world.rank) if has_failed else flags

    def raise_read_error(self) -> None:
        """Raise a ReadError on all ranks if a rank could not read its samples; collective."""
        error: BaseException | None = self._error
        if self._reader is not None and self._reader.has_failed:  # else it is of later samples
            error = self._reader.error
        _raise_on_all(self._world, error)

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
        if self._stream is None:
            epoch, indexes = self._locate_rows(step)
            rows = self._fit.train.rows(indexes, epoch)
        else:
            rows = next(self._stream)
        return _Share(step, self._locate_share(step), Batch.of(*rows))

    def _locate_rows(self, step: int) -> tuple[int, np.ndarray]:
        """Return the epoch and the indexes of the samples of this worker's share of a step."""
        epoch, _ = self._sampler.locate_step(step)
        positions = self._locate_share(step).positions
        return epoch, self._sampler.batch_indexes(step)[positions]

    def _locate_share(self, step: int) -> _Place:
        """Return the place of this worker's share of a step."""
        samples, engine = self._sampler.batch_size(step), self._engine
        assert engine.worker is not None  # a server has no tasks
        first, positions = share(
            np.arange(samples), engine.worker, engine.workers, self._segment.blocks
        )
        return _Place(positions, first, samples)


def _raise_on_all(world: World, error: BaseException | None) -> None:
    """Raise a ReadError with the errors of the first ranks that have one; collective."""
    payload = None
    if error is not None:
        is_data, is_known = isinstance(error, DataError), isinstance(error, HpctrainError)
        text = str(error) if is_known else f"{type(error).__name__}: {error}"
        payload = json.dumps([is_data, text]).encode()
        log.debug("samples that could not be read:", exc_info=error)
    payloads = broadcast_first(world.link, payload, MAX_NAMED_RANKS)
    if not payloads:
        return
    are_data, texts = zip(*map(json.loads, payloads.values()), strict=True)
    places = [f"rank {rank} on {world.hosts[rank]}: " * (world.size > 1) for rank in payloads]
    kind = BadDataError if all(are_data) else ReadError
    raise kind("\n".join(map(str.__add__, places, texts))) from error
