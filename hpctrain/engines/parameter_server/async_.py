"""Asynchronous SGD with parameter servers: workers wait only to keep a bound on staleness.

    worker i         g = dL/dw on a batch of its own       push g         pull w         again
    server j         on each push, for its range:          w <- w - update(g)

Source: Dean et al., "Large scale distributed deep networks" (Downpour SGD), 2012. With
`push_every` and `pull_every` a worker adds up several gradients before it pushes them, and walks
on with its own copy of w, by plain SGD steps, between pulls.

The *staleness* tau of a gradient is the number of updates between the pull of the w that it was
taken at and its push. Methods that limit its harm:

- `staleness = s`: a worker more than s clocks ahead of the slowest waits; a clock is a step of a
  worker. Stale synchronous parallel; Ho et al., 2013. With 0 all workers take each step together.
- `rate_rule = "inverse-staleness"`: g counts as g / max(tau, 1). With P workers tau is about P - 1,
  so that a rate found for one device is about right for P. `softsync = n`: c = floor(P / n)
  gradients make one update, as their mean. Source: Zhang, Gupta, Lian and Liu, 2016.
- `delay_compensation = lambda`: g + lambda g g (w - w_then), w_then being the w that the worker
  had pulled, of which the servers keep a copy for each worker. DC-ASGD; Zheng et al., 2017.

Sent per step of a worker: n bytes up, n bytes down, n being the bytes of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

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
from hpctrain.engines.parameter_server.engine import Method, ParameterServerEngine
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.engines.parameter_server.sync import SyncMethod
from hpctrain.engines.staleness import Staleness
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.world import World

Positive = Annotated[int, Field(ge=1)]


@config.options
class PsAsync(ServerOptions):
    """`[engine] kind = "ps-async"`."""

    staleness: Annotated[int, Field(ge=0)] | None = None  #: None: no bound
    rate_rule: Literal["none", "inverse-staleness"] = "inverse-staleness"
    softsync: Positive | None = None  #: None: an update for each gradient
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    push_every: Positive = 1
    pull_every: Positive = 1

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> ParameterServerEngine:
        """Return this rank's engine; collective."""
        roles = self.roles(world.size)
        workers = len(roles.workers)
        self.must_fit(workers)
        method: Method = AsyncMethod(workers, self)
        if self.staleness == 0:
            method = SyncMethod(workers, workers)
        return ParameterServerEngine("ps-async", world, replica, optimizer, roles, method)

    def gradients_per_update(self, workers: int) -> int:
        """Return c: an update applies the mean of c gradients."""
        return workers // self.softsync if self.softsync else 1

    def updates_per_step(self, workers: int) -> float:
        """Return the number of updates while `workers` do a step each."""
        if self.staleness == 0:
            return 1.0
        return workers / (self.push_every * self.gradients_per_update(workers))

    def must_fit(self, workers: int) -> None:
        """Raise UsageError for keys that contradict each other, or that need more workers."""
        if self.pull_every % self.push_every:
            raise UsageError(
                f"[engine] pull_every: expected a multiple of push_every, which is "
                f"{self.push_every}, seen {self.pull_every}"
            )
        if self.softsync and self.softsync > workers:
            raise UsageError(
                f"[engine] softsync: expected at most the {workers} workers, seen {self.softsync}"
            )
        keys = ("softsync", "delay_compensation", "push_every", "pull_every")
        changed = [key for key in keys if getattr(self, key) != getattr(PsAsync, key)]
        if self.staleness == 0 and changed:
            raise UsageError(
                f"[engine] staleness = 0 lets all workers take each step together, where "
                f"{', '.join(changed)} mean nothing; remove them or raise staleness"
            )


class AsyncMethod:
    """Applies gradients in the order of arrival; a worker too far ahead waits."""

    asynchronous = True
    lockstep = False

    def __init__(self, workers: int, options: PsAsync):
        self.workers, self.options = workers, options
        self.push_every, self.pull_every = options.push_every, options.pull_every
        self.delay_compensation = options.delay_compensation
        self.gradients_per_update = options.gradients_per_update(workers)
        self.adds = self.gradients_per_update > 1
        self.updates_per_step = options.updates_per_step(workers)
        self.clocks = np.zeros(workers, np.int64)  #: steps that each worker has done
        self.staleness = Staleness()
        self._version = self._added = 0  # updates, and gradients added since the last one
        self._pulled = [0] * workers  # the version that each worker pulled last

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have done their part of `until` steps."""
        self._pulled = [self._version] * self.workers  # an interval begins with a pull
        extra_steps = int(self.clocks.sum()) - start * self.workers
        if not 0 <= extra_steps < max(self.workers, self.push_every):
            self.clocks[:], extra_steps = start, 0  # of another run, or of other workers
        steps_left = (until - start) * self.workers - extra_steps
        idle: dict[int, Report] = {}
        while len(idle) < self.workers:
            worker, report = coordinator.receive_report()
            idle[worker] = report
            staleness_of_gradient = self._version - self._pulled[worker]
            pushed_workers, use, factor = self._count(worker, report, staleness_of_gradient)
            granted_workers = self._grant(idle, steps_left, coordinator)
            steps_left -= len(granted_workers) * self.push_every
            pull = tuple(w for w in granted_workers if idle.pop(w).pull)
            for w in pull:
                self._pulled[w] = self._version
            reached = self._step_reached()
            replies = tuple(Reply(w, 1, int(self.clocks[w]), reached) for w in granted_workers)
            staleness = staleness_of_gradient if use in (Use.ADD, Use.UPDATE) else None
            yield Event((worker,), Order(pushed_workers, use, factor, pull), replies, staleness)
        if self._added:  # fewer gradients than an update waits for: the last of the interval
            self._added, self._version = 0, self._version + 1
            yield Event((), Order(use=Use.UPDATE))
        yield final_event(self.workers, min(until, self._step_reached()))

    def _count(
        self, worker: int, report: Report, staleness_of_gradient: int
    ) -> tuple[tuple[int, ...], Use, float]:
        """Count a report; return (pushing workers, use of the gradient, its factor)."""
        if report.flags.failed:
            return (worker,), Use.DROP, 1.0
        self.clocks[worker] += report.steps  # also for gradients that the worker dropped
        if not report.push:
            return (), Use.NONE, 1.0
        self.staleness.count(staleness_of_gradient)
        self._added += 1
        rule = max(staleness_of_gradient, 1) if self.options.rate_rule == "inverse-staleness" else 1
        factor = 1.0 / (rule * self.gradients_per_update)
        if self._added < self.gradients_per_update:
            return (worker,), Use.ADD, factor
        self._added, self._version = 0, self._version + 1
        return (worker,), Use.UPDATE, factor

    def _grant(
        self, idle: dict[int, Report], steps_left: int, coordinator: Coordinator
    ) -> list[int]:
        """Return the idle workers that may go on, the slowest first."""
        if any(coordinator.flags):
            return []
        slowest, bound = int(self.clocks.min()), self.options.staleness
        gaps = sorted((int(self.clocks[w]) - slowest, w) for w in idle)
        eligible_workers = [(gap, w) for gap, w in gaps if bound is None or gap <= bound]
        chosen = eligible_workers[: max(0, -(-steps_left // self.push_every))]
        for gap, _ in chosen:
            self.staleness.record_gap(gap)
        return [w for _, w in chosen]

    def _step_reached(self) -> int:
        return int(self.clocks.sum()) // self.workers
