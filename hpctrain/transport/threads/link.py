"""The Link between threads of one process: P ranks without MPI, for tests, studies and replay.

A send is a rendezvous, as with large MPI messages: the receiver copies straight out of the
sender's array. So a send without a matching receive blocks, as on a cluster; but a wait longer
than `timeout_s` raises, and a rank that fails ends the other ranks' waits.

A thread may be killed in the middle of a call. The others then get the errors of ULFM: see
transport/mpi/fault_tolerance.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpctrain.core.thresholds import Thresholds
from hpctrain.transport.device import transfers
from hpctrain.transport.link import Endpoint, Traffic
from hpctrain.transport.paths import Path
from hpctrain.transport.threads.hub import Hub, SentMessage
from hpctrain.transport.threads.native import ThreadCollectives
from hpctrain.transport.threads.requests import Receive, Send
from hpctrain.transport.threads.waits import LocalSurvivors, LocalWaits


class StagedTraffic(Traffic):
    """The messages between threads, which have no MPI: GPU arrays are staged on any path."""

    def set_paths(self, paths: Sequence[Path], path_thresholds: Sequence[Thresholds] = ()) -> None:
        """Cut all messages as staged ones, whatever the `paths`."""
        super().set_paths(["staged"] * len(paths))


class LocalLink(transfers.QueuedLink):
    """One thread's view of the ranks; see `hpctrain.transport.link.Link`."""

    def __init__(self, hub: Hub, rank: int):
        self.rank, self.size, self.hub = rank, len(hub.members), hub
        self._waits = waits = LocalWaits(hub, rank)
        self._traffic, self.barrier = StagedTraffic(), waits.barrier
        self.endpoint = Endpoint(
            LocalSurvivors(waits, LocalLink),
            waits,
            self._traffic,
            ThreadCollectives(waits),
            lambda nbytes: waits.gather(np.zeros(nbytes, np.uint8)),  # threads share memory anyway
            partial(_derive_link, self._traffic, hub, rank, range(self.size)),
            waits.free,
        )
        self._pending_receives: dict[int, deque[Receive]] = defaultdict(deque)
        self._splits = 0
        self._groups: Counter[tuple[int, ...]] = Counter()

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        receive, send = self.irecv(inbox, source), self.isend(x, dest)
        receive.wait()
        send.wait()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request; it needs no further `wait`."""
        if self._queues is not None:
            return self._queues.wait_any(requests)
        finished: list[int] = []

        def poll() -> bool:
            finished[:] = [i for i, request in enumerate(requests) if request.is_finished()]
            return bool(finished)

        # The wait polls under the lock.
        self._waits.wait_until(poll, f"wait_any of {len(requests)} requests")
        return finished[0]

    def split(self, color: int, key: int) -> LocalLink:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""
        self._splits += 1
        colors = self._waits.gather((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(colors) if c == color)
        hub = self.hub.child((self._splits, color), [r for _, r in members])
        return _derive_link(
            self._traffic, hub, members.index((key, self.rank)), [r for _, r in members]
        )

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> LocalLink:
        """Return the link of `ranks` of this link, in this order; these alone must call."""
        group = (tag, *ranks)
        self._groups[group] += 1  # the members count alike: they call in the same order
        hub = self.hub.child((self._groups[group], *group), ranks)
        return _derive_link(self._traffic, hub, ranks.index(self.rank), ranks)

    def message(self, x: np.ndarray) -> np.ndarray:
        """Return the bytes of contiguous `x`."""
        return x.reshape(-1).view(np.uint8)

    def post_send(self, message: np.ndarray, dest: int) -> Send:
        """Start to send bytes; nothing is sent once the link was revoked, as in MPI."""
        self._waits.must_be_open("isend", dest)
        sent = SentMessage(message)
        with self.hub.lock:
            self.hub.mailboxes[self.rank, dest].append(sent)
            self.hub.wakeups[dest].notify_all()
        return Send(self._waits, sent, dest)

    def post_receive(self, message: np.ndarray, source: int) -> Receive:
        """Start to receive bytes."""
        self._waits.count_call()
        pending = self._pending_receives[source]
        request = Receive(self._waits, message, source, pending)
        pending.append(request)
        return request


def _derive_link(traffic: Traffic, hub: Hub, rank: int, ranks: Sequence[int]) -> LocalLink:
    """Return a link over `hub` between the `ranks` of a link with this `traffic`."""
    link = LocalLink(hub, rank)
    if traffic.paths:
        link.endpoint.traffic.set_paths([traffic.paths[r] for r in ranks])
    return link
