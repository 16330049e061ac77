"""Synchronous SGD with parameter servers: servers keep the parameters, workers send gradients.

    worker i         g_i = dL/dw on its share        push g_i                 pull w
    server j         for its range of w:   g = g_1 + ... + g_N     w <- w - update(g)

The servers make the same update that all-reduce makes, once instead of P times. Sent per step:
n bytes by each worker, n N / k by each of k servers, whose wires are the bottleneck; n being the
bytes of the parameters. Source: Li et al., "Scaling distributed machine learning with the
parameter server", 2014.

With b *backup workers* the servers update with the first N - b gradients of this version of w and
drop the late ones, so that b slow workers delay no step. The sum is scaled up to the whole batch.
Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.parameter_server.coordinator import (
    Coordinator,
    Event,
    Reply,
    Report,
    ServerMethod,
    final_event,
)
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.engines.parameter_server.shard import GradientAction, Order
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.world import World


@config.options
class PsSync(ServerOptions):
    """`[engine] kind = "ps-sync"`."""

    backup_workers: Annotated[int, Field(ge=0)] = 0

    def must_fit(self, workers: int) -> None:
        """Raise UsageError if all workers are backups."""
        if self.backup_workers >= workers:
            raise UsageError(
                f"[engine] backup_workers is {self.backup_workers} of {workers} workers; at least "
                "one must be needed: take fewer backup workers or start more ranks"
            )

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> ParameterServerEngine:
        """Return this rank's engine; collective."""
        roles = self.roles(world.size)
        workers = len(roles.workers)
        self.must_fit(workers)
        method = SyncMethod(workers, workers - self.backup_workers)
        return ParameterServerEngine(
            "ps-sync", world, replica, optimizer, roles=roles, method=method
        )


class SyncMethod(ServerMethod):
    """Each update uses the first `required_gradients` for a version of the parameters."""

    asynchronous = False

    def __init__(self, workers: int, required_gradients: int):
        super().__init__(workers, has_clocks=False)
        self.required_gradients = required_gradients
        self.is_lockstep = required_gradients == workers

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events from step `start` on, as workers report."""
        step, unfinished_workers = start, set(range(self.workers))
        while step < until and not any(coordinator.flags):
            reports: dict[int, Report] = {}
            while len(reports) < self.required_gradients:
                failed = coordinator.flags.failed
                worker, report = coordinator.receive_report()
                if report.has_push and report.step == step:
                    reports[worker] = report
                else:  # a failure of an unused gradient does not count
                    coordinator.flags = coordinator.flags._replace(failed=failed)
                    yield self._admit_report(worker, report, step)
            is_finite = not coordinator.flags.failed
            step += is_finite
            if step < until and not any(coordinator.flags):
                yield _update_event(reports, is_finite, step, continues=True)
            else:
                yield _update_event(reports, is_finite, step, continues=False)
                unfinished_workers -= set(reports)
        failed = coordinator.flags.failed
        while unfinished_workers:
            worker, report = coordinator.receive_report()
            coordinator.flags = coordinator.flags._replace(failed=failed)
            unfinished_workers.remove(worker)
            yield self._admit_report(worker, report, None)
        yield final_event(self.workers, step)

    def _admit_report(self, worker: int, report: Report, step: int | None) -> Event:
        """Return the event of a report without a gradient for the present step.

        It is the first report of a worker, or its gradient is late. The worker joins at `step`;
        None: the interval ends.
        """
        self.staleness.dropped += report.has_push
        order = Order(
            pushing_workers=(worker,) if report.has_push else (),
            action=GradientAction.LATE if report.has_push else GradientAction.NONE,
            pulling_workers=(worker,) if step is not None and report.wants_pull else (),
        )
        replies = (Reply(worker, 1, step, step),) if step is not None else ()
        return Event((worker,), order, replies)


def _update_event(
    reports: Mapping[int, Report], is_finite: bool, step: int, continues: bool
) -> Event:
    """Return the event that updates with the gradients of `reports`, or drops them, at `step`.

    The sum is scaled up for the part of the batch whose gradients are late. With `continues` the
    workers receive the parameters and go on.
    """
    workers = tuple(sorted(reports))
    targets = sum(report.targets for report in reports.values())
    batch_targets = next(iter(reports.values())).batch_targets
    factor = batch_targets / targets if 0 < targets < batch_targets else 1.0
    action = GradientAction.UPDATE if is_finite else GradientAction.DROP
    pulling_workers = workers if continues else ()
    replies = tuple(Reply(worker, 1, step, step) for worker in pulling_workers)
    return Event(workers, Order(workers, action, factor, pulling_workers), replies)
