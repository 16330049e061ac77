"""Collective matching: all ranks compare a digest of their call before any of its data moves.

    rank 0   allreduce sum auto of float32 (3,)   8a1c..   |  all alike: go on
    rank 1   allreduce sum auto of float32 (3,)   8a1c..   |
    rank 2   allreduce sum auto of float64 (3,)   07e3..   |  else texts follow: one error, on all

A rank with an invalid argument takes part, too: its text describes the fault and its digest matches
no call, so all ranks raise and none waits.

Inside a node the digest is the payload of one exchange of flags; `direct` combines it with its own
(`direct.py`). Between nodes the leaders, or without shared memory all ranks, take the maximum of
(digest, complement): 16 bytes, ceil(log2 nodes) messages. The maximum equals the input of each rank
only if all inputs are equal.

In a node's first exchange a payload may also depend on the location of an array. So if payloads
differ, a second exchange, of digests alone, distinguishes different calls from different locations.

Source: Falzone, Chan, Lusk and Gropp, "Collective error detection for MPI collective operations",
2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.node_buffers import MAX_CACHED_LENGTHS, NodeBuffers
from hpctrain.collectives.small_messages import all_gather_bytes, equal_rows, reduce_to_maximum
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.flags import PAYLOAD_MASK

MAX_NAMED_RANKS = 8
_ALL_BITS = (1 << 64) - 1
_FAULT_PREFIX, _CALL_PREFIX = b"!", b" "  # prefixes of exchanged texts


class Signature(NamedTuple):
    """A collective call as one rank makes it."""

    text: str  #: the call in words, or the fault
    digest: int  #: 64 bits
    is_fault: bool = False  #: whether this rank cannot make the call
    hint: str = ""  #: appended to the error of a mismatch

    @property
    def payload(self) -> int:
        """The bits of the digest that fit the flags of a node."""
        return self.digest & PAYLOAD_MASK


def make_signature(text: str, hint: str = "") -> Signature:
    """Return the signature of the call described by `text`; `hint` ends the error of a mismatch."""
    return Signature(text, _compute_digest(text), hint=hint)


def fault_signature(text: str) -> Signature:
    """Return the signature of a call that this rank cannot make, for the reason in `text`."""
    return Signature(text, _compute_digest("fault: " + text), is_fault=True)


@lru_cache(MAX_CACHED_LENGTHS)
def length_signature(nbytes: int, on_gpu: bool = False) -> Signature:
    """Return the signature of a call by its array's length and kind alone."""
    return make_signature(f"an array of {nbytes} bytes" + on_gpu * " of a GPU")


def must_match(group: Group, call: Signature) -> None:
    """Raise UsageError on all ranks, naming those that differ, unless all make the same `call`."""
    bind_match(group, call)()


def bind_match(group: Group, call: Signature) -> Callable[[], None]:
    """Return a call of `must_match` with all lookups done now; the first one is collective."""
    buffers, payload, nodes = group.node_buffers, call.payload, len(group.nodes)

    def match() -> None:
        if nodes == 1 and buffers is not None:
            if not buffers.flags.agree(payload) or call.is_fault:
                must_match_in_node(buffers, call)
        elif not _digests_match(group, buffers, call.digest) or call.is_fault:
            _raise_mismatch(group.link, call)

    return match


def must_match_in_node(buffers: NodeBuffers, call: Signature) -> None:
    """Raise as `must_match`, after payloads differed, perhaps only by the location of arrays."""
    if not buffers.flags.agree(call.payload) or call.is_fault:
        _raise_mismatch(buffers.link, call)


def _digests_match(group: Group, buffers: NodeBuffers | None, digest: int) -> bool:
    """Return whether all ranks have the same `digest`: in each node, then among the leaders."""
    if group.node is None or group.across is None or len(group.nodes) < 2:
        return _is_equal(group.link, None, digest)
    numbers = _append_complement(digest)
    if not _is_equal(group.node, buffers, digest):
        numbers[:] = _ALL_BITS  # matches no digest with its complement
    if group.node.rank == 0:
        reduce_to_maximum(group.across, numbers)
    all_match = np.array_equal(numbers, _append_complement(digest))
    return _is_equal(group.node, buffers, int(all_match)) and all_match


def _is_equal(link: Link, buffers: NodeBuffers | None, number: int) -> bool:
    """Return whether all ranks of `link` have the same `number`."""
    if buffers is not None:
        return buffers.flags.agree(number & PAYLOAD_MASK)
    return bool(equal_rows(link, np.array([[number]], np.uint64))[0])


def _append_complement(number: int) -> np.ndarray:
    return np.array([number, number ^ _ALL_BITS], np.uint64)


def _compute_digest(text: str) -> int:
    return int.from_bytes(blake2b(_encode(text), digest_size=8).digest(), "little")


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a user's string may be invalid Unicode


def _raise_mismatch(link: Link, call: Signature) -> None:
    """Exchange texts; raise UsageError on all ranks of `link`."""
    prefix = _FAULT_PREFIX if call.is_fault else _CALL_PREFIX
    prefixed_texts = all_gather_bytes(link, prefix + _encode(call.text))
    texts = [row[1:].decode() for row in prefixed_texts]
    faulty_ranks = [rank for rank, row in enumerate(prefixed_texts) if row[:1] == _FAULT_PREFIX]
    if len(faulty_ranks) == link.size and len(set(texts)) == 1:
        raise UsageError(texts[0])
    if faulty_ranks:
        raise UsageError(
            "; ".join(f"rank {rank}: {texts[rank]}" for rank in faulty_ranks[:MAX_NAMED_RANKS])
        )
    first_text, *other_texts = dict.fromkeys(texts)
    differences = [
        f"{_name_ranks_with(text, texts)} {text}" for text in other_texts[:MAX_NAMED_RANKS]
    ]
    raise UsageError(
        "shape, dtype and call must be the same on all ranks; "
        f"{_name_ranks_with(first_text, texts)} {first_text}, "
        f"but {', '.join(differences)}{call.hint}"
    )


def _name_ranks_with(text: str, texts: Sequence[str]) -> str:
    """Return "rank 1 has", or "ranks 1, 2, 5 have", for the ranks with `text`."""
    ranks = [str(rank) for rank, rank_text in enumerate(texts) if rank_text == text]
    rank_list = ", ".join(ranks[:MAX_NAMED_RANKS]) + ", ..." * (len(ranks) > MAX_NAMED_RANKS)
    return f"rank {rank_list} has" if len(ranks) == 1 else f"ranks {rank_list} have"
