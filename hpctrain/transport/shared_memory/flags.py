"""Flags: a word per rank of a node, in shared memory; the node's fast barrier.

    words   [ round, payload | rank 0 ][ round, payload | rank 1 ] ...   for even rounds
            [ round, payload | rank 0 ][ round, payload | rank 1 ] ...   for odd rounds

In `exchange` each rank writes its word and waits for the same round in all others'. A rank can be
one round ahead, no more: for round k + 2 it needs the words of all ranks for round k + 1, which a
rank writes after it has read all of round k. So two sets of words are enough, and no word is
overwritten before all have read it.

Why this is right on x86 and on Arm:
- A word is 64 bits at a multiple of 64 bytes, and a memoryview writes and reads it in one
  instruction: round and payload come together or not at all.
- After an exchange all ranks must see what a rank wrote before it, and what a rank read before it
  no other may have changed yet. So no load or store may be reordered with the access to a word, in
  either direction. x86 lets only a load pass an earlier store, which is not among these orders.
  Elsewhere, as on Arm, a word is written after a fence and read before one: a lock that is released
  and acquired again. That is a store-release and, after it, a load-acquire, which ARMv8 keeps in
  this order (its model is RCsc); all that precedes them in the program is done before all that
  follows them. (Acquire and then release is no fence: both neighbours may move into the critical
  section.)

A waiting rank polls a few times, then yields the core, at last sleeps (`Waits.wait_for`); only from
then on is the wait in the watch's record: recording it first would cost half of an exchange.
A thread that must not hold the interpreter's lock meanwhile does not spin at all: it waits in the
link's barrier, which fences too, and the words carry only the payload.

Counters are words without rounds: each is written by one thread and read by any, by the same
instructions and fences. A rank that reads a count sees all that was written before it.
"""

from __future__ import annotations

import platform
import threading

import numpy as np

from hpctrain.transport.link import Link
from hpctrain.transport.pace import WORD_POLLS

WORDS_PER_LINE = 8  # 64 bytes: no two ranks write the same cache line
ROUND_BITS = 32
PAYLOAD_MASK = (1 << ROUND_BITS) - 1
_ROUND, _WORD_MASK = 1 << ROUND_BITS, (1 << 64) - 1
#: Whether this processor may reorder loads and stores, so that flags need fences.
NEEDS_FENCE = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")


def words_needed(ranks: int) -> int:
    """Return the number of uint64 in the flags of `ranks` ranks."""
    return 2 * ranks * WORDS_PER_LINE


class NodeFlags:
    """One rank's view of the flags of its node; belongs to one thread, like its link."""

    def __init__(self, link: Link, words: np.ndarray, spins: bool, uses_fences: bool = NEEDS_FENCE):
        """Use `words` (`words_needed`,) uint64, zeros at first, shared by all ranks of `link`.

        `spins`: poll the words, instead of waiting in the link's barrier.
        """
        self._link, self._words, self._spins = link, words.data, spins
        #: the bytes beside each word, which travel in its cache line: (2, P, 56) uint8, first for
        #: even rounds, then for odd ones
        self.spare_bytes = words.view(np.uint8).reshape(2, link.size, -1)[:, :, words.itemsize :]
        self._wait_for = link.endpoint.waits.wait_for
        lines = [range(parity * link.size, (parity + 1) * link.size) for parity in (0, 1)]
        self._offsets = [[line * WORDS_PER_LINE for line in lines[parity]] for parity in (0, 1)]
        #: for even rounds, then for odd ones: the offsets of our word and of all peers' words
        self._places = [
            (offsets[link.rank], [*offsets[: link.rank], *offsets[link.rank + 1 :]])
            for offsets in self._offsets
        ]
        #: the next round's word without a payload; the round's lowest bit selects one of two copies
        self.next_head = _ROUND
        self._lock = threading.Lock() if uses_fences else None
        if self._lock is not None:
            self._lock.acquire()

    def agree(self, payload: int = 0) -> bool:
        """Return whether all ranks give the same `payload`, 0 .. 2^32 - 1; collective.

        All ranks see after it what any rank wrote before it, anywhere in memory.
        """
        if not self._spins:
            return self._agree_by_barrier(payload)
        words, lock, all_equal = self._words, self._lock, True
        head = self.next_head
        own_offset, peer_offsets = self._places[head >> ROUND_BITS & 1]
        word = head | payload
        if lock is not None:
            lock.release()
            lock.acquire()
        words[own_offset] = word
        # Computed while the peers' words travel, not before our own leaves.
        self.next_head = head + _ROUND & _WORD_MASK
        for offset in peer_offsets:
            if words[offset] != word and self._wait_for_round(offset, word) != payload:
                all_equal = False
        if lock is not None:
            lock.release()
            lock.acquire()
        return all_equal

    def exchange(self, payload: int = 0) -> list[int]:
        """Return every rank's `payload`, in rank order; else as `agree`."""
        offsets = self._offsets[self.next_head >> ROUND_BITS & 1]
        self.agree(payload)
        # No word can have changed yet: for that, this rank would have to be in the next round.
        return [self._words[offset] & PAYLOAD_MASK for offset in offsets]

    def _agree_by_barrier(self, payload: int) -> bool:
        own_offset, peer_offsets = self._places[self.next_head >> ROUND_BITS & 1]
        self.next_head = self.next_head + _ROUND & _WORD_MASK
        self._words[own_offset] = payload
        self._link.barrier()
        return all(self._words[offset] == payload for offset in peer_offsets)

    def _wait_for_round(self, offset: int, own_word: int) -> int:
        """Return the payload at `offset` once its word belongs to the round of `own_word`."""
        words = self._words
        for _ in range(WORD_POLLS):
            if (words[offset] ^ own_word) <= PAYLOAD_MASK:
                break
        else:
            self._wait_for(lambda: (words[offset] ^ own_word) <= PAYLOAD_MASK, b"a collective")
        return words[offset] & PAYLOAD_MASK


class NodeCounters:
    """One thread's view of counters in memory that the ranks of a node share."""

    def __init__(self, words: np.ndarray, uses_fences: bool = NEEDS_FENCE):
        """Use `words` (n * WORDS_PER_LINE,) uint64, zeros at first, as n counters."""
        self._words, self._lock = words.data, threading.Lock() if uses_fences else None
        if self._lock is not None:
            self._lock.acquire()

    def read(self, counter: int) -> int:
        """Return a count."""
        count: int = self._words[counter * WORDS_PER_LINE]
        self._fence()
        return count

    def write(self, counter: int, count: int) -> None:
        """Set a counter that no other thread writes."""
        self._fence()
        self._words[counter * WORDS_PER_LINE] = count

    def _fence(self) -> None:
        """Order what precedes before what follows: a store-release, then a load-acquire."""
        if self._lock is not None:
            self._lock.release()
            self._lock.acquire()
