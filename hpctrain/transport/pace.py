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
#: Polls of a word in shared memory, 80 ns each, before a rank yields its core, see WORDS: another
#: process may keep the core for milliseconds.
WORD_POLLS = 60


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

    @classmethod
    def of_naps(cls, nap_s: float, limit_s: float = math.inf) -> Pace:
        """Return the pace of single polls with naps of `nap_s` between them."""
        return cls(limit_s=limit_s, polls=1, min_nap_s=nap_s, max_nap_s=nap_s)

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


#: A rank that waits for a word in shared memory yields its core in a loop, and naps in the end.
WORDS = Pace(spin_s=0.05, polls=32, yields=True, min_nap_s=0.5e-3, max_nap_s=0.5e-3)
SPARE = Pace.of_naps(5e-3)  #: of a spare that sleeps: less than 1 % of a core
THREAD_NAP_S = 2e-5  #: of ranks that are threads, where no condition variable signals
