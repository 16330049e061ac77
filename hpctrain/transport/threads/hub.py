"""State shared by the ranks of a LocalLink: mailboxes, gathered items, a barrier, one lock."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np


class SentMessage:
    """An array sent but perhaps not received; `done` once the receiver has copied it."""

    def __init__(self, x: np.ndarray):
        self.x, self.done = x, False


class Hub:
    """State shared by the ranks of one link."""

    def __init__(self, size: int, timeout_s: float, failure: threading.Event):
        self.size, self.timeout_s = size, timeout_s
        self.failure = failure  # set if a rank fails; shared by a hub and all hubs split from it
        # One lock for all: with a lock per rank, two ranks that exchange messages could deadlock.
        self.lock = threading.Lock()
        # A condition per rank, so that each rank is woken only by its own messages.
        self.wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.mailboxes: dict[tuple[int, int], deque[SentMessage]] = defaultdict(deque)  # (from, to)
        self.barrier = threading.Barrier(size)
        self.items: list[Any] = [None] * size  # one item per rank, readable by all ranks
        self.children: dict[tuple[int, ...], Hub] = {}

    def child(self, key: tuple[int, ...], size: int) -> Hub:
        """Return the hub of some of the ranks; its first member creates it."""
        with self.lock:
            if key not in self.children:
                self.children[key] = Hub(size, self.timeout_s, self.failure)
            return self.children[key]

    def fail(self) -> None:
        """Wake every waiting rank of this hub and of the hubs split from it."""
        with self.lock:
            self.failure.set()
            self.barrier.abort()
            for wakeup in self.wakeups:
                wakeup.notify_all()
            children = list(self.children.values())
        for child in children:
            child.fail()
