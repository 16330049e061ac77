"""Workers at their own pace: each goes on as long as all together have steps to do.

A worker reports, is granted a number of steps, and reports again when it has begun the last of
them, so that the answer comes while it computes. A worker that is granted none finishes its step
and reports once more. The order of reports decides the number of steps of each: it is logged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.engines.parameter_server.coordinator import Answer, Desk, Event, Report, over
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.engines.staleness import Staleness


class OwnPace:
    """Grants each worker `period` steps at a time; see `Method` in engine.py."""

    asynchronous = True
    in_step = adds = False
    push_every = pull_every = 1
    updates_per_step = 1.0
    delay_compensation = 0.0

    def __init__(self, workers: int, period: int = 1, moving_rate: float = 0.0):
        """Let workers end where an exchange is due, each `period` steps of their own.

        Of parameters that come with a report the servers take `moving_rate` times the difference.
        """
        self.workers, self.period, self.moving_rate = workers, period, moving_rate
        self.clocks = np.zeros(self.workers, np.int64)  #: steps that each worker has done
        self.staleness = Staleness()

    def events(self, desk: Desk, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have done their part of `until` steps."""
        if int(self.clocks.sum()) // self.workers != start:
            self.clocks[:] = start  # of another run, or of other workers
        left, stopping, finished = until * self.workers - int(self.clocks.sum()), set(), 0
        while finished < self.workers:
            worker, report = desk.hear()
            if worker in stopping:  # its second report: it has finished its last step
                finished += 1
                yield Event((worker,), Order((), Use.NONE, 1.0, (), False))
                continue
            steps = self._let_go(worker, report, left, desk)
            left -= steps
            if not steps:
                stopping.add(worker)
            moves = (worker,) if report.gradient else ()
            use = Use.ELASTIC if moves else Use.NONE
            answer = Answer(worker, steps, int(self.clocks[worker]), self._step_reached())
            yield Event((worker,), Order(moves, use, self.moving_rate, (), False), (answer,))
        yield over(self.workers, self._step_reached())

    def _let_go(self, worker: int, report: Report, left: int, desk: Desk) -> int:
        """Return the number of steps that `worker` may take before it reports again."""
        self.clocks[worker] += report.steps
        clock = int(self.clocks[worker])
        if any(desk.flags):
            return 0
        steps = min(self.period - clock % self.period, left)
        if steps:
            self.staleness.gap(clock - int(self.clocks.min()))
        return steps

    def _step_reached(self) -> int:
        return int(self.clocks.sum()) // self.workers
