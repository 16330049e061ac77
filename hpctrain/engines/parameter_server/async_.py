"""Asynchronous SGD with parameter servers: workers wait only for a bound on staleness, if any.

    worker i         g = dL/dw on a batch of its own       push g         pull w         again
    server j         on each push, for its range:          w <- w - update(g)

Source: Dean et al., "Large scale distributed deep networks" (Downpour SGD), 2012. With
`push_every` a worker adds up several gradients before it pushes their sum. With `pull_every` it
updates its own copy of w by plain SGD steps between pulls.

The *staleness* tau of a gradient is the number of updates between the pull of the w at which it
was computed and its push. Methods against the harm of staleness:

- `staleness = s`: a worker more than s clocks ahead of the slowest waits; a clock is a step of a
  worker. Stale synchronous parallel; Ho et al., 2013. With 0 all workers take each step together.
- `rate_rule = "inverse-staleness"`: g counts as g / max(tau, 1). With P workers tau is about P - 1,
  so that a learning rate tuned on one device suits P workers. `softsync = n`: the mean of
  c = floor(P / n) gradients makes one update. Source: Zhang, Gupta, Lian and Liu, 2016.
- `delay_compensation = lambda`: g + lambda g g (w - w_then), where w_then is the w that the worker
  has pulled; the servers keep a copy for each worker. DC-ASGD; Zheng et al., 2017.

Sent per step of a worker: n bytes to the servers, n bytes back; n is the size of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

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
from hpctrain.engines.parameter_server.sync import SyncMethod
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.world import World

PositiveInt = Annotated[int, Field(ge=1)]


@config.options
class PsAsync(ServerOptions):
    """`[engine] kind = "ps-async"`."""

    staleness: Annotated[int, Field(ge=0)] | None = None  #: None: no bound
    rate_rule: Literal["none", "inverse-staleness"] = "inverse-staleness"
    softsync: PositiveInt | None = None  #: None: an update for each gradient
    delay_compensation: Annotated[float, Field(ge=0)] = 0.0
    push_every: PositiveInt = 1
    pull_every: PositiveInt = 1

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> ParameterServerEngine:
        """Return this rank's engine; collective."""
        roles = self.roles(world.size)
        workers = len(roles.workers)
        self.must_fit(workers)
        method: ServerMethod = AsyncMethod(workers, self)
        if self.staleness == 0:
            method = SyncMethod(workers, workers)
        return ParameterServerEngine(
            "ps-async", world, replica, optimizer, roles=roles, method=method
        )

    def gradients_per_update(self, workers: int) -> int:
        """Return the number of gradients that are averaged for one update."""
        return workers // self.softsync if self.softsync else 1

    def updates_per_step(self, workers: int) -> float:
        """Return the number of updates while `workers` do a step each."""
        if self.staleness == 0:
            return 1.0
        return workers / (self.push_every * self.gradients_per_update(workers))

    def must_fit(self, workers: int) -> None:
        """Raise UsageError for keys that contradict each other or need more workers."""
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
        changed_keys = [key for key in keys if getattr(self, key) != getattr(PsAsync, key)]
        if self.staleness == 0 and changed_keys:
            raise UsageError(
                f"[engine] staleness = 0 lets all workers take each step together, where "
                f"{', '.join(changed_keys)} mean nothing; remove them or raise staleness"
            )


class AsyncMethod(ServerMethod):
    """Applies gradients in the order of arrival; a worker too far ahead waits."""

    def __init__(self, workers: int, options: PsAsync):
        super().__init__(workers)
        self.options = options
        self.push_every, self.pull_every = options.push_every, options.pull_every
        self.gradients_per_update = options.gradients_per_update(workers)
        self.shard_options = {
            "delay_compensation": options.delay_compensation,
            "accumulates": self.gradients_per_update > 1,
        }
        self.updates_per_step = options.updates_per_step(workers)
        self._version = 0  # the number of updates
        self._added_gradients = 0  # the number of gradients since the last update
        self._pulled_versions = [0] * workers  # the version that each worker has pulled

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have reached step `until`."""
        self._pulled_versions = [self._version] * self.workers  # an interval begins with a pull
        extra_steps = int(self.clocks.sum()) - start * self.workers
        if not 0 <= extra_steps < max(self.workers, self.push_every):
            self.clocks[:], extra_steps = start, 0  # clocks of another run or of other workers
        steps_left = (until - start) * self.workers - extra_steps
        idle_workers: dict[int, Report] = {}
        while len(idle_workers) < self.workers:
            worker, report = coordinator.receive_report()
            idle_workers[worker] = report
            gradient_staleness = self._version - self._pulled_versions[worker]
            pushing_workers, action, factor = self._count_report(worker, report, gradient_staleness)
            granted_workers = self._grant_workers(idle_workers, steps_left, coordinator)
            steps_left -= len(granted_workers) * self.push_every
            pulling_workers = tuple(w for w in granted_workers if idle_workers.pop(w).wants_pull)
            for w in pulling_workers:
                self._pulled_versions[w] = self._version
            run_step = self.run_step()
            replies = tuple(Reply(w, 1, int(self.clocks[w]), run_step) for w in granted_workers)
            adds_gradient = action in (GradientAction.ADD, GradientAction.UPDATE)
            staleness = gradient_staleness if adds_gradient else None
            order = Order(pushing_workers, action, factor, pulling_workers)
            yield Event((worker,), order, replies, staleness)
        if self._added_gradients:  # at the end of an interval fewer gradients make the last update
            self._added_gradients, self._version = 0, self._version + 1
            yield Event((), Order(action=GradientAction.UPDATE))
        yield final_event(self.workers, min(until, self.run_step()))

    def _count_report(
        self, worker: int, report: Report, gradient_staleness: int
    ) -> tuple[tuple[int, ...], GradientAction, float]:
        """Count a report; return (pushing workers, action for the gradient, its factor)."""
        if report.flags.failed:
            return (worker,), GradientAction.DROP, 1.0
        self.clocks[worker] += report.steps  # also for gradients that the worker dropped
        if not report.has_push:
            return (), GradientAction.NONE, 1.0
        self.staleness.record_gradient(gradient_staleness)
        self._added_gradients += 1
        factor = 1.0 / self.gradients_per_update
        if self.options.rate_rule == "inverse-staleness":
            factor = 1.0 / (max(gradient_staleness, 1) * self.gradients_per_update)
        if self._added_gradients < self.gradients_per_update:
            return (worker,), GradientAction.ADD, factor
        self._added_gradients, self._version = 0, self._version + 1
        return (worker,), GradientAction.UPDATE, factor

    def _grant_workers(
        self, idle_workers: dict[int, Report], steps_left: int, coordinator: Coordinator
    ) -> list[int]:
        """Return the idle workers that may continue, the slowest first."""
        if any(coordinator.flags):
            return []
        slowest, max_gap = int(self.clocks.min()), self.options.staleness
        gaps = sorted((int(self.clocks[w]) - slowest, w) for w in idle_workers)
        eligible_workers = [(gap, w) for gap, w in gaps if max_gap is None or gap <= max_gap]
        max_workers = max(0, -(-steps_left // self.push_every))
        granted_workers = eligible_workers[:max_workers]
        for gap, _ in granted_workers:
            self.staleness.record_gap(gap)
        return [w for _, w in granted_workers]
