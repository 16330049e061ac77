"""State shared by the ranks of one LocalLink: message boxes, a desk, a barrier, one lock."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np


class SentMessage:
    """An array on its way; `done` once the receiver has copied it."""

    def __init__(self, x: np.ndarray):
        self.x, self.done = x, False


class Hub:
    """State shared by the ranks of one link."""

    def __init__(self, size: int, timeout_s: float, failed: threading.Event):
        self.size, self.timeout_s = size, timeout_s
        self.failed = failed  # shared by a hub and all hubs split from it
        # One lock for all: a lock per rank would let two ranks that take from each other block.
        self.lock = threading.Lock()
        # But each rank is woken by its own messages only, not by those of all.
        self.wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.mailboxes: dict[tuple[int, int], deque[SentMessage]] = defaultdict(deque)  # (from, to)
        self.barrier = threading.Barrier(size)
        self.items: list[Any] = [None] * size  # one item per rank, readable by all
        self.children: dict[tuple[int, int], Hub] = {}

    def child(self, name: tuple[int, int], size: int) -> Hub:
        """Return the hub of a split, which its first member makes."""
        with self.lock:
            if name not in self.children:
                self.children[name] = Hub(size, self.timeout_s, self.failed)
            return self.children[name]

    def fail(self) -> None:
        """Wake every rank that waits, here and in the links split from this one."""
        with self.lock:
            self.failed.set()
            self.barrier.abort()
            for wakeup in self.wakeups:
                wakeup.notify_all()
            children = list(self.children.values())
        for child in children:
            child.fail()
