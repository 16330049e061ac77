"""Collective matching: all ranks compare a digest of their call before any of its data moves.

    rank 0   allreduce sum auto of float32 (3,)   8a1c..   |  all alike: go on
    rank 1   allreduce sum auto of float32 (3,)   8a1c..   |
    rank 2   allreduce sum auto of float64 (3,)   07e3..   |  else texts follow: one error, on all

A rank that cannot make the call at all, because an argument is wrong there, takes part too: its
text describes the fault, its digest matches no call, and so all ranks raise and none waits.

Inside a node the digest is the payload of one exchange of flags; `direct` combines it with its own
(`direct.py`). Between nodes the leaders, or without shared memory all ranks, take the maximum of
(digest, complement): 16 bytes, ceil(log2 nodes) messages. It equals the input of each rank only if
all inputs are equal.

In a node's first exchange a payload may also depend on the place of an array. So if it differs, a
second exchange, of digests alone, distinguishes different calls from different places.

Source: Falzone, Chan, Lusk and Gropp, "Collective error detection for MPI collective operations",
2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.node_buffers import CACHED_LENGTHS, NodeBuffers
from hpctrain.collectives.small_messages import all_gather_bytes, maximum
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.flags import PAYLOAD_MASK

T = TypeVar("T")
RANKS_NAMED = 8
_FAULT, _CALL = b"!", b" "  # prefixes of exchanged texts


class Signature(NamedTuple):
    """A collective call as one rank makes it."""

    text: str  #: the call in words, or the fault
    digest: int  #: 64 bits
    is_fault: bool = False  #: whether this rank cannot make the call

    @property
    def payload(self) -> int:
        """The digest as the flags of a node carry it."""
        return self.digest & PAYLOAD_MASK


def signature(text: str) -> Signature:
    """Return the signature of the call described by `text`."""
    return Signature(text, _digest(text))


def fault_signature(text: str) -> Signature:
    """Return the signature of a call that this rank cannot make, for the reason in `text`."""
    return Signature(text, _digest("fault: " + text), is_fault=True)


@lru_cache(CACHED_LENGTHS)
def of_length(nbytes: int, on_gpu: bool = False) -> Signature:
    """Return the signature of a call by its array's length and kind alone."""
    return signature(f"an array of {nbytes} bytes" + on_gpu * " of a GPU")


def must_match(group: Group, call: Signature) -> None:
    """Raise UsageError on all ranks, naming those that differ, unless all make the same `call`."""
    buffers = group.node_buffers
    if len(group.nodes) == 1 and buffers is not None:
        if not buffers.flags.agree(call.payload) or call.is_fault:
            must_match_in_node(buffers, call)
    elif not _matches(group, buffers, call.digest) or call.is_fault:
        _explain(group.link, call)


def matched(group: Group, call: Signature, work: Callable[[], T]) -> Callable[[], T]:
    """Return a call of `work` after `must_match`, with all lookups done now.

    The first match in `group` is collective.
    """
    buffers = group.node_buffers
    if len(group.nodes) != 1 or buffers is None:
        return partial(_match_first, group, call, work)
    agree, payload = buffers.flags.agree, call.payload

    def checked() -> T:
        if not agree(payload):
            must_match_in_node(buffers, call)
        return work()

    return checked


def _match_first(group: Group, call: Signature, work: Callable[[], T]) -> T:
    must_match(group, call)
    return work()


def must_match_in_node(buffers: NodeBuffers, call: Signature) -> None:
    """Raise as `must_match`, after an exchange of flags that may differ by place alone."""
    if not buffers.flags.agree(call.payload) or call.is_fault:
        _explain(buffers.link, call)


def _matches(group: Group, buffers: NodeBuffers | None, digest: int) -> bool:
    """Return whether all ranks have the same `digest`: in each node, then among the leaders."""
    if group.node is None or group.across is None or len(group.nodes) < 2:
        return _equal(group.link, None, digest)
    numbers = _with_complement(digest)
    if not _equal(group.node, buffers, digest):
        numbers[:] = np.iinfo(np.uint64).max  # matches no digest with its complement
    if group.node.rank == 0:
        maximum(group.across, numbers)
    all_match = np.array_equal(numbers, _with_complement(digest))
    return _equal(group.node, buffers, int(all_match)) and all_match


def _equal(link: Link, buffers: NodeBuffers | None, number: int) -> bool:
    """Return whether all ranks of `link` have the same `number`."""
    if buffers is not None:
        return buffers.flags.agree(number & PAYLOAD_MASK)
    numbers = _with_complement(number)
    maximum(link, numbers)
    return np.array_equal(numbers, _with_complement(number))


def _with_complement(number: int) -> np.ndarray:
    words = np.array([number, number], np.uint64)
    np.invert(words[1:], out=words[1:])
    return words


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(_encoded(text), digest_size=8).digest(), "little")


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a user's string may be invalid Unicode


def _explain(link: Link, call: Signature) -> None:
    """Exchange texts; raise UsageError on all ranks of `link`."""
    mark = _FAULT if call.is_fault else _CALL
    rows = all_gather_bytes(link, mark + _encoded(call.text))
    texts = [row[1:].decode() for row in rows]
    faults = [rank for rank, row in enumerate(rows) if row[:1] == _FAULT]
    if len(faults) == link.size and len(set(texts)) == 1:
        raise UsageError(texts[0])
    if faults:
        raise UsageError("; ".join(f"rank {rank}: {texts[rank]}" for rank in faults[:RANKS_NAMED]))
    first, *rest = dict.fromkeys(texts)
    differing = [f"{_ranks_with(text, texts)} {text}" for text in rest[:RANKS_NAMED]]
    raise UsageError(
        "shape, dtype and call must be the same on all ranks; "
        f"{_ranks_with(first, texts)} {first}, but {', '.join(differing)}"
    )


def _ranks_with(text: str, texts: Sequence[str]) -> str:
    """Return "rank 1 has", or "ranks 1, 2, 5 have", for the ranks with `text`."""
    ranks = [str(rank) for rank, other in enumerate(texts) if other == text]
    named = ", ".join(ranks[:RANKS_NAMED]) + ", ..." * (len(ranks) > RANKS_NAMED)
    return f"rank {named} has" if len(ranks) == 1 else f"ranks {named} have"
