"""Synchronous SGD with parameter servers: they keep the parameters, workers send them gradients.

    worker i         g_i = dL/dw on its share        push g_i                 pull w
    server j         for its range of w:   g = g_1 + ... + g_N     w <- w - update(g)

The servers make the same update that all-reduce makes, once instead of P times. Sent per step:
n bytes by each worker, n N / k by each of k servers, whose wires are the bottleneck; n being the
bytes of the parameters. Source: Li et al., "Scaling distributed machine learning with the
parameter server", 2014.

With b *backup workers* the servers step on the first N - b gradients of this version of w and drop
the late ones, so that b slow workers delay no step. The sum is scaled up to the whole batch.
Source: Chen et al., "Revisiting distributed synchronous SGD", 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.parameter_server.coordinator import (
    Coordinator,
    Event,
    Reply,
    Report,
    final_event,
)
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.engines.staleness import Staleness
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
        return ParameterServerEngine("ps-sync", world, replica, optimizer, roles, method)


class SyncMethod:
    """Each update takes the first `needed` gradients of one version of the parameters."""

    push_every = pull_every = 1
    asynchronous = adds = False
    delay_compensation = 0.0
    clocks: np.ndarray | None = None
    updates_per_step = 1.0

    def __init__(self, workers: int, needed: int):
        self.workers, self.needed = workers, needed
        self.lockstep = needed == workers
        self.staleness = Staleness()

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events from step `start` on, as workers report."""
        step, pending = start, set(range(self.workers))
        while step < until and not any(coordinator.flags):
            pushed: dict[int, Report] = {}
            while len(pushed) < self.needed:
                failed = coordinator.flags.failed
                worker, report = coordinator.receive_report()
                if report.push and report.step == step:
                    pushed[worker] = report
                else:  # an unused gradient fails no step
                    coordinator.flags = coordinator.flags._replace(failed=failed)
                    yield self._admit(worker, report, step)
            finite = not coordinator.flags.failed
            step += finite
            if step < until and not any(coordinator.flags):
                yield _step(pushed, finite, step, pull=True)
            else:
                yield _step(pushed, finite, step, pull=False)
                pending -= set(pushed)
        failed = coordinator.flags.failed
        while pending:
            worker, report = coordinator.receive_report()
            coordinator.flags = coordinator.flags._replace(failed=failed)
            pending.remove(worker)
            yield self._admit(worker, report, None)
        yield final_event(self.workers, step)

    def _admit(self, worker: int, report: Report, step: int | None) -> Event:
        """Return the event of a report without a gradient of this step: the first, or a late one.

        The worker joins at `step`; with None the interval ends.
        """
        self.staleness.dropped += report.push
        order = Order(
            pushed=(worker,) if report.push else (),
            use=Use.LATE if report.push else Use.NONE,
            pull=(worker,) if step is not None and report.pull else (),
        )
        replies = (Reply(worker, 1, step, step),) if step is not None else ()
        return Event((worker,), order, replies)


def _step(pushed: Mapping[int, Report], finite: bool, step: int, pull: bool) -> Event:
    """Return the event that applies the gradients `pushed`, if all are `finite`: reaches `step`.

    The sum is scaled up for the part of the batch whose gradients are late.
    """
    workers = tuple(sorted(pushed))
    targets = sum(report.targets for report in pushed.values())
    batch_targets = next(iter(pushed.values())).batch_targets
    factor = batch_targets / targets if 0 < targets < batch_targets else 1.0
    replies = tuple(Reply(w, 1, step, step) for w in workers) if pull else ()
    use = Use.UPDATE if finite else Use.DROP
    return Event(workers, Order(workers, use, factor, workers if pull else ()), replies)
