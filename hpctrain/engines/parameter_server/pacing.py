"""Workers at their own pace: each goes on until all together have done the steps of the run.

A worker reports, is granted a number of steps, and reports again when it begins the last of them,
so that the reply arrives while it computes. A worker whose grant is zero finishes its step and
reports once more. The order of reports decides how many steps each worker takes: it is logged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.engines.parameter_server.coordinator import (
    Coordinator,
    Event,
    Reply,
    Report,
    final_event,
)
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.engines.staleness import Staleness


class PeriodicMethod:
    """Grants each worker `period` steps at a time; see `Method` in engine.py."""

    asynchronous = True
    lockstep = adds = False
    push_every = pull_every = 1
    updates_per_step = 1.0
    delay_compensation = 0.0

    def __init__(self, workers: int, period: int = 1, moving_rate: float = 0.0):
        """End each grant at an exchange, which is due every `period` steps of a worker.

        The servers move by `moving_rate` times the difference to the parameters of a report.
        """
        self.workers, self.period, self.moving_rate = workers, period, moving_rate
        self.clocks = np.zeros(self.workers, np.int64)  #: steps that each worker has done
        self.staleness = Staleness()

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have done their part of `until` steps."""
        if int(self.clocks.sum()) // self.workers != start:
            self.clocks[:] = start  # of another run, or of other workers
        steps_left, stopping_workers, finished = (
            until * self.workers - int(self.clocks.sum()),
            set(),
            0,
        )
        while finished < self.workers:
            worker, report = coordinator.receive_report()
            if worker in stopping_workers:  # the second report: the last step is finished
                finished += 1
                yield Event((worker,), Order())
                continue
            steps = self._grant(worker, report, steps_left, coordinator)
            steps_left -= steps
            if not steps:
                stopping_workers.add(worker)
            pushing_workers = (worker,) if report.push else ()
            use = Use.ELASTIC if pushing_workers else Use.NONE
            reply = Reply(worker, steps, int(self.clocks[worker]), self._step_reached())
            yield Event((worker,), Order(pushing_workers, use, self.moving_rate), (reply,))
        yield final_event(self.workers, self._step_reached())

    def _grant(self, worker: int, report: Report, steps_left: int, coordinator: Coordinator) -> int:
        """Return the number of steps that `worker` may take before it reports again."""
        self.clocks[worker] += report.steps
        clock = int(self.clocks[worker])
        if any(coordinator.flags):
            return 0
        steps = min(self.period - clock % self.period, steps_left)
        if steps:
            self.staleness.record_gap(clock - int(self.clocks.min()))
        return steps

    def _step_reached(self) -> int:
        return int(self.clocks.sum()) // self.workers
