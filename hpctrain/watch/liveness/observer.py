"""The thread that observes the ranks of its node, and the host before its own in the ring.

Only for jobs that survive lost ranks: a stopped rank is killed, so that MPI reports it as it
reports any lost rank, and the ranks of a dead host are reported by `on_lost`.

    every rank                  heartbeats of the node's ranks, every tenth of a limit
    the lowest that is alive    kills a stopped one
    the first of each host      sends and receives the datagrams of the ring
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from hpctrain.watch.liveness.channel import Channel
from hpctrain.watch.liveness.host_ring import HostRing
from hpctrain.watch.liveness.processes import kill
from hpctrain.watch.liveness.stopped_ranks import LIMIT_S, StepTimes, StoppedRanks

log = logging.getLogger(__name__)
LOOKS_PER_LIMIT = 10
_FIRST_HEARTBEAT_S = 30.0  #: without any datagram of the host before, a warning is logged


class LivenessObserver:
    """A daemon thread that detects stopped ranks of the node and, with a ring, dead hosts."""

    def __init__(
        self,
        heartbeats: Callable[[], Mapping[int, float]],
        stopped_ranks: StoppedRanks,
        step: Callable[[], int],
        on_lost_rank: Callable[[int, str], None],
        ring: HostRing | None = None,
        channel: Channel | None = None,
        least_limit_s: float = LIMIT_S,
    ) -> None:
        """`heartbeats()` of the node's ranks; `step()`: the training step that is under way.

        `on_lost_rank(rank, reason)` is called in this thread where SIGKILL does not end a rank.
        """
        self._heartbeats, self._stopped_ranks, self._step = heartbeats, stopped_ranks, step
        self._on_lost_rank, self._ring, self._channel = on_lost_rank, ring, channel
        self._least_limit_s, self._interval_s = least_limit_s, least_limit_s / LOOKS_PER_LIMIT
        self._step_times, self._awake_s = StepTimes(), 0.0
        self._warns = ring is not None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-liveness", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """End the thread and close its sockets; wait for it `limit_s` at most."""
        self._stop_event.set()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        previous_s = time.monotonic()
        while not self._stop_event.wait(self._interval_s):
            elapsed_s, previous_s = time.monotonic() - previous_s, time.monotonic()
            self._look(elapsed_s)
        if self._channel is not None:
            self._channel.close()

    def _look(self, elapsed_s: float) -> None:
        # Only time that this process was awake counts: a job that its scheduler has stopped for an
        # hour must not kill its ranks in the order in which they wake.
        self._awake_s += min(elapsed_s, 2 * self._interval_s)
        self._step_times.observe(self._step(), self._awake_s)
        limit_s = self._step_times.limit_s(self._least_limit_s)
        if elapsed_s > self._least_limit_s / 2:
            self._stopped_ranks.restart()
            if self._ring is not None:
                self._ring.restart(self._awake_s)
        heartbeats = self._heartbeats()
        for stopped in self._stopped_ranks.observe(heartbeats, self._awake_s, limit_s):
            if stopped.outlives_kill:
                self._on_lost_rank(stopped.rank, str(stopped))
            elif kill(stopped.process):
                log.warning("%s: it was killed and counts as lost", stopped)
        if self._ring is not None:
            self._ring.advance(self._awake_s, limit_s)
            self._warn_if_never_heard(self._ring)

    def _warn_if_never_heard(self, ring: HostRing) -> None:
        if self._warns and self._awake_s > _FIRST_HEARTBEAT_S:
            self._warns = False
            if not ring.was_heard:
                log.warning(
                    "no heartbeat of the neighbouring host has arrived within %.0f s, so its death "
                    "would not be detected: is UDP between the hosts filtered?",
                    _FIRST_HEARTBEAT_S,
                )
