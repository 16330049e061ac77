"""Short messages on which all ranks agree: flags, sizes, names, errors.

No barrier anywhere: every rank has all data after ceil(log2 P) exchanges.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from hpctrain.transport.link import Link

LENGTH, SHORT = 8, 120  #: bytes of a length, and of a payload that travels beside it
_ERRORS = "surrogatepass"  # names of files that are not UTF-8 have surrogates


def all_gather_short(link: Link, row: np.ndarray) -> np.ndarray:
    """Return an array (P, n) uint8 of every rank's `row` (n,) uint8; ceil(log2 P) steps.

    On rank r, row i comes from rank r + i, until rows are rotated at the end. After step k a rank
    holds 2^k rows, and sends rank r - 2^k the rows that it lacks. Source: Bruck et al., "Efficient
    algorithms for all-to-all communications", 1997.
    """
    rank, size = link.rank, link.size
    rows = np.empty((size, row.size), np.uint8)
    rows[0] = row
    filled_rows = 1
    while filled_rows < size:
        count = min(filled_rows, size - filled_rows)
        target, source = (rank - filled_rows) % size, (rank + filled_rows) % size
        link.sendrecv(rows[:count], target, rows[filled_rows : filled_rows + count], source)
        filled_rows += count
    return np.roll(rows, rank, axis=0)


def make_head(payload: bytes) -> np.ndarray:
    """Return the length and the first SHORT bytes of `payload`: uint8 (LENGTH + SHORT,)."""
    head = np.zeros(LENGTH + SHORT, np.uint8)
    head[:LENGTH] = np.array([len(payload)], np.int64).view(np.uint8)
    head[LENGTH : LENGTH + len(payload)] = np.frombuffer(payload[:SHORT], np.uint8)
    return head


def all_gather_bytes(link: Link, payload: bytes) -> list[bytes]:
    """Return every rank's `payload`, in rank order; lengths may differ.

    Up to SHORT bytes travel beside their length; if any rank has more, all are sent once more.
    """
    heads = all_gather_short(link, make_head(payload))
    lengths = heads[:, :LENGTH].copy().view(np.int64).ravel()
    rows = heads[:, LENGTH:]
    if (longest := int(lengths.max())) > SHORT:
        padded_row = np.zeros(longest, np.uint8)
        padded_row[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = all_gather_short(link, padded_row)
    return [row[:n].tobytes() for row, n in zip(rows, lengths)]  # noqa: B905


def reduce_to_maximum(link: Link, numbers: np.ndarray) -> None:
    """Replace each of contiguous `numbers` by its largest value on any rank; ceil(log2 P) steps.

    After step k a rank holds the maximum over itself and the 2^k - 1 ranks before. If P is no power
    of two some values count twice, which does not change a maximum. Source: Hensgen, Finkel and
    Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rank, size, distance = link.rank, link.size, 1
    inbox = np.empty_like(numbers)
    while distance < size:
        link.sendrecv(numbers, (rank + distance) % size, inbox, (rank - distance) % size)
        np.maximum(numbers, inbox, out=numbers)
        distance *= 2


def equal_rows(link: Link, rows: np.ndarray) -> np.ndarray:
    """Return whether each row of `rows` (n, m) uint64 is equal on all ranks, (n,) bool.

    A rank's row and its complement both equal their maxima only if no rank has another row. Each
    rank sends ceil(log2 P) messages of 16 n m bytes.
    """
    own = np.stack([rows, ~rows])
    maxima = own.copy()
    reduce_to_maximum(link, maxima)
    return np.all(maxima == own, axis=(0, 2))


def is_equal(link: Link, text: str) -> bool:
    """Return whether all ranks have the same `text`, by a digest with 128 bits.

    Each rank sends ceil(log2 P) messages of 32 bytes.
    """
    digest = blake2b(text.encode(errors=_ERRORS), digest_size=16).digest()
    return bool(equal_rows(link, np.frombuffer(digest, np.uint64).reshape(1, 2))[0])


def is_any(link: Link, flag: bool) -> bool:
    """Return whether any rank has a true `flag`; each sends ceil(log2 P) messages of 8 bytes."""
    vote = np.array([flag], np.int64)
    reduce_to_maximum(link, vote)
    return bool(vote[0])


def gather_distinct(link: Link, text: str) -> list[str]:
    """Return the different texts that ranks give, ordered by the first rank with each.

    The cost is that of `is_equal`, and if texts differ, of `all_gather_bytes` too.
    """
    if is_equal(link, text):
        return [text]
    payloads = all_gather_bytes(link, text.encode(errors=_ERRORS))
    return list(dict.fromkeys(payload.decode(errors=_ERRORS) for payload in payloads))
