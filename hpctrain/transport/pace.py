"""The pace of a wait: polls, a core that is yielded, naps between polls, and a limit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Polls last longer than a first nap: else a rank that was late once would let its peers nap, and
#: they would be late next.
SPIN_S = 250e-6


@dataclass
class Pace:
    """A wait of polls with naps between them: each wake-up takes 20 us from threads that compute.

    A nap is twice as long as the one before, up to 1 ms: at 1 Gbit/s the kernel's buffers hold the
    125 KB that arrive meanwhile. Segments arrive at a regular pace, so the first nap of a wait is a
    quarter of the previous wait.
    """

    spin_s: float = 0.0  #: polls without a nap at first
    limit_s: float = math.inf  #: of a wait, then TimeoutError
    #: polls in a row before a look at the clock: UCX, in MPICH, reads at most 64 KiB from the
    #: kernel at a poll
    polls: int = 4
    yields: bool = False  #: the core is yielded after each poll
    min_nap_s: float = 50e-6
    max_nap_s: float = 1e-3
    _first_nap_s: float = field(init=False, default=0.0)

    def until(self, poll: Callable[[], bool], between: Callable[[], None] | None = None) -> None:
        """Return once `poll()` holds; `between` is called after each row of polls."""
        nap_s, start_s = max(self._first_nap_s, self.min_nap_s), time.perf_counter()
        while True:
            for _ in range(self.polls):
                if poll():
                    return
                if self.yields:
                    os.sched_yield()
            if between is not None:
                between()
            waited_s = time.perf_counter() - start_s
            if waited_s < self.spin_s:
                continue
            if waited_s > self.limit_s:
                raise TimeoutError
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, self.max_nap_s)
            waited_s = time.perf_counter() - start_s
            self._first_nap_s = min(waited_s / 4, self.max_nap_s)
