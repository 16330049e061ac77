"""Workers at their own pace: each trains until all together have done the steps of the run.

A worker reports, receives a grant of steps, and reports again when it begins the last granted step,
so that the reply arrives while it computes. After a grant of zero steps a worker finishes its step
and reports once more. The order of reports decides how many steps each worker takes, and is logged.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.engines.parameter_server.coordinator import (
    Coordinator,
    Event,
    Reply,
    Report,
    ServerMethod,
    final_event,
)
from hpctrain.engines.parameter_server.shard import GradientAction, Order


class PeriodicMethod(ServerMethod):
    """Grants each worker `period` steps at a time."""

    def __init__(self, workers: int, period: int = 1, moving_rate: float = 0.0):
        """Grant steps up to the next exchange, which is due every `period` steps of a worker.

        In an exchange the servers move by `moving_rate` times the difference to the worker.
        """
        super().__init__(workers)
        self.period, self.moving_rate = period, moving_rate

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have done their part of `until` steps."""
        if self.run_step() != start:
            self.clocks[:] = start  # the clocks are of another run or of other workers
        steps_left = until * self.workers - int(self.clocks.sum())
        stopping_workers: set[int] = set()
        finished_workers = 0
        while finished_workers < self.workers:
            worker, report = coordinator.receive_report()
            if worker in stopping_workers:  # its last report, after its last step
                finished_workers += 1
                yield Event((worker,), Order())
                continue
            steps = self._grant_steps(worker, report, steps_left, coordinator)
            steps_left -= steps
            if not steps:
                stopping_workers.add(worker)
            pushing_workers = (worker,) if report.has_push else ()
            action = GradientAction.ELASTIC if pushing_workers else GradientAction.NONE
            reply = Reply(worker, steps, int(self.clocks[worker]), self.run_step())
            yield Event((worker,), Order(pushing_workers, action, self.moving_rate), (reply,))
        yield final_event(self.workers, self.run_step())

    def _grant_steps(
        self, worker: int, report: Report, steps_left: int, coordinator: Coordinator
    ) -> int:
        """Return the number of steps that `worker` may take before it reports again."""
        self.clocks[worker] += report.steps
        clock = int(self.clocks[worker])
        if any(coordinator.flags):
            return 0
        steps = min(self.period - clock % self.period, steps_left)
        if steps:
            self.staleness.record_gap(clock - int(self.clocks.min()))
        return steps
