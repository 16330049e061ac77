"""Flags: one word of each rank of a node, in memory that all of them see; the node's fast barrier.

    words   [ round, payload | rank 0 ][ round, payload | rank 1 ] ...   for even rounds
            [ round, payload | rank 0 ][ round, payload | rank 1 ] ...   for odd rounds

In `exchange` each rank writes its word and waits for the same round in all others'. A rank can be
one round ahead, no more: for round k + 2 it needs everybody's word of round k + 1, which comes
after that rank has read all of round k. So two sets of words are enough, and no word is
overwritten before all have read it.

Why this is right on x86 and on Arm:
- A word is 64 bits at a multiple of 64 bytes, and a memoryview writes and reads it in one
  instruction: round and payload come together or not at all.
- Arm may let other loads and stores pass those of the word. What a rank wrote before an exchange
  must be seen by all after it, so the word is written behind a fence and read in front of one.
  The fence is a lock that is released and taken again: a store-release and, after it, a
  load-acquire, which ARMv8 never reorders (its model is RCsc); all that stands before it in the
  program is done before all that stands behind it. (Taken and released would be none: both
  neighbours may move into the critical section.) Without these instructions, on x86, either is a
  locked one, which is a full fence.

Who waits looks a few times, then lets others have the core, at last sleeps (`Link.wait_for`).
A thread that must not hold the interpreter's lock meanwhile does not spin at all: it waits in the
link's barrier, and the words carry only the payload.
"""

from __future__ import annotations

import threading

import numpy as np

from hpctrain.transport.link import Link

WORDS_PER_LINE = 8  # 64 bytes: no two ranks write the same cache line
SPINS = 20  # looks, 50 ns each, before the core is offered to others
ROUND_BITS = 32
MASK = (1 << ROUND_BITS) - 1


def words_needed(ranks: int) -> int:
    """Return how many uint64 the flags of `ranks` ranks take."""
    return 2 * ranks * WORDS_PER_LINE


class Flags:
    """One rank's view of the flags of its node; belongs to one thread, like its link."""

    def __init__(self, link: Link, words: np.ndarray, spins: bool):
        """Use `words` (`words_needed`,) uint64, zeros at first, that all ranks of `link` see.

        `spins`: look for the words, instead of waiting in the link's barrier.
        """
        self._link, self._words, self._spins = link, words.data, spins
        lines = [range(p * link.size, (p + 1) * link.size) for p in (0, 1)]
        self._places = [[line * WORDS_PER_LINE for line in lines[p]] for p in (0, 1)]
        self._round = 0
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def odd(self) -> int:
        """1 if the next round is an odd one, else 0: which of two copies of anything to use."""
        return (self._round + 1) & 1

    def exchange(self, payload: int = 0) -> list[int]:
        """Return every rank's `payload`, 0 .. 2^32 - 1, in rank order; collective.

        What any rank wrote before, anywhere in memory, all see after.
        """
        words, lock = self._words, self._lock
        now = self._round = (self._round + 1) & MASK
        places = self._places[now & 1]
        lock.release()
        lock.acquire()
        words[places[self._link.rank]] = now << ROUND_BITS | payload
        if not self._spins:
            self._link.barrier()
        said = [
            word & MASK if (word := words[at]) >> ROUND_BITS == now else self._awaited(at, now)
            for at in places
        ]
        lock.release()
        lock.acquire()
        return said

    def _awaited(self, at: int, now: int) -> int:
        words = self._words
        for _ in range(SPINS):
            if words[at] >> ROUND_BITS == now:
                return words[at] & MASK
        self._link.wait_for(lambda: words[at] >> ROUND_BITS == now, b"flags of the node")
        return words[at] & MASK
