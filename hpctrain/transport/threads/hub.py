"""State shared by the ranks of a LocalLink: mailboxes, gathered items, a barrier, one lock."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class SentMessage:
    """An array sent but perhaps not received; `done` once the receiver has copied it."""

    def __init__(self, x: np.ndarray):
        self.x, self.done = x, False


class Job:
    """The ranks that are threads, by number in the first hub: killed ranks, and kills to come."""

    def __init__(self, kills: dict[int, int] | None = None):
        """`kills`: the number of the call in which a rank is killed."""
        self.failure = threading.Event()  # set if a rank fails
        self.kills = kills or {}
        self.lost: set[int] = set()
        self.calls: dict[int, int] = defaultdict(int)  # of each rank, by all its threads
        self.roots: list[Hub] = []  # of the hubs before and after losses

    @property
    def survives(self) -> bool:
        """Whether ranks may be killed, and the others go on."""
        return bool(self.kills)

    def kill(self, member: int) -> None:
        """End the waits for a rank that is gone, in every hub made so far."""
        self.lost.add(member)
        for root in self.roots:
            root.wake()


class Hub:
    """State shared by the ranks of one link."""

    def __init__(self, members: Sequence[int], timeout_s: float, job: Job, root: Hub | None = None):
        """`members`: the numbers of the ranks in the job; `root`: of the hubs revoked with this."""
        self.members, self.timeout_s, self.job = tuple(members), timeout_s, job
        self._root = root or self
        self._was_revoked = False  # of a root, and of all hubs split from it
        # One lock for all: with a lock per rank, two ranks that exchange messages could deadlock.
        self.lock = threading.Lock()
        # A condition per rank, so that each rank is woken only by its own messages.
        self.wakeups = [threading.Condition(self.lock) for _ in members]
        self.mailboxes: dict[tuple[int, int], deque[SentMessage]] = defaultdict(deque)  # (from, to)
        self.barrier = threading.Barrier(len(members))
        self.items: list[Any] = [None] * len(members)  # one item per rank, readable by all ranks
        self._children: dict[tuple[int, ...], Hub] = {}
        self.agreements: dict[int, Agreement] = defaultdict(Agreement)  # by number
        if root is None:
            job.roots.append(self)

    def child(self, key: tuple[int, ...], ranks: Sequence[int]) -> Hub:
        """Return the hub of `ranks`; its first member creates it."""
        members = [self.members[rank] for rank in ranks]
        with self.lock:
            if key not in self._children:
                self._children[key] = Hub(members, self.timeout_s, self.job, self._root)
            return self._children[key]

    def fail(self) -> None:
        """Wake every waiting rank of this hub and of the hubs split from it."""
        self.job.failure.set()
        self.wake()

    def revoke(self) -> None:
        """End the waits of all ranks of this root, and of the hubs split from it."""
        self._root._was_revoked = True
        self._root.wake()

    @property
    def is_revoked(self) -> bool:
        """Whether the waits on this root were ended, since a rank was lost."""
        return self._root._was_revoked

    def wake(self) -> None:
        """Let the waiting ranks of this hub and of its children look again."""
        with self.lock:
            if self.job.failure.is_set() or self.is_revoked or self.lost_members:
                self.barrier.abort()
            for wakeup in self.wakeups:
                wakeup.notify_all()
            children = list(self._children.values())
        for child in children:
            child.wake()

    @property
    def lost_members(self) -> set[int]:
        """The members that were killed."""
        return self.job.lost.intersection(self.members)


class AgreementResult(NamedTuple):
    """The outcome of an agreement, which a loss or a vote of 0 fails, and the survivors' hub."""

    succeeded: bool
    hub: Hub


class Agreement:
    """An agreement of the ranks of a hub that are left: its result is made once, for all."""

    def __init__(self) -> None:
        self.votes: dict[int, int] = {}
        self.result: AgreementResult | None = None

    def settle(self, hub: Hub) -> bool:
        """Return whether there is a result: all members that are left have voted."""
        survivors = tuple(member for member in hub.members if member not in hub.job.lost)
        if self.result is None and self.votes.keys() >= set(survivors):
            succeeded = survivors == hub.members and all(self.votes.values())
            self.result = AgreementResult(succeeded, Hub(survivors, hub.timeout_s, hub.job))
        return self.result is not None
