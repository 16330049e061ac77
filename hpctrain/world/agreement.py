"""Agreement of ranks: they fail together, take rank 0's value, and must give equal texts.

Messages and bytes that a rank sends in a call without a fault, with L = ceil(log2 P):

    on_all_ranks    L messages         8 L bytes          a vote
    must_agree      L                  32 L               a digest of 128 bits
    from_first      c of rank's        128 c              a tree; rank 0 has L children, a rank
                    children                              (P - 1)/P on average
    gather          L                  128 (P - 1)        all texts to all ranks

A text of more than 120 bytes costs c or L messages more, with n c or n (P - 1) bytes. Only after a
fault do other texts travel: of the first MAX_NAMED_RANKS ranks that have one to tell, each after a
vote, by a tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.signature import MAX_NAMED_RANKS
from hpctrain.collectives.small_messages import is_any, is_equal
from hpctrain.collectives.tree import broadcast_bytes, broadcast_first
from hpctrain.core.errors import HpctrainError, LostRankError, UsageError
from hpctrain.transport.link import Link
from hpctrain.transport.paths import RankPlace

T = TypeVar("T")


@dataclass(frozen=True, repr=False, eq=False)
class AgreeingRanks:
    """Ranks that agree over `link`; every method is collective over them."""

    link: Link  #: the main thread's; others are made by `World.threads`
    places: tuple[RankPlace, ...]  #: of each rank: its node, and its GPU where it has one

    @property
    def hosts(self) -> tuple[str, ...]:
        """The node of each rank."""
        return tuple(place.node for place in self.places)

    def on_all_ranks(self, function: Callable[[], T]) -> T:
        """Return `function()`; if it raises an HpctrainError on any rank, all ranks raise one.

        Its kind is that of the rank's own error, or UsageError. ceil(log2 P) messages of 8 bytes
        per rank.
        """
        results, fault, kind = _attempt(function)
        if not is_any(self.link, bool(fault)):
            return results[0]
        if is_equal(self.link, fault):
            raise kind(fault)
        faults = broadcast_first(self.link, fault.encode() or None, MAX_NAMED_RANKS)
        lines = [f"rank {r} on {self.hosts[r]}: {text.decode()}" for r, text in faults.items()]
        is_left_out = bool(fault) and self.link.rank not in faults
        if len(faults) == MAX_NAMED_RANKS and is_any(self.link, is_left_out):
            lines.append("and other ranks")
        raise kind("\n".join(lines))

    def from_first(self, function: Callable[[], T]) -> T:
        """Return rank 0's `function()`, JSON data; if it raises an HpctrainError, all ranks raise.

        The other ranks do not call `function`. One message of 128 bytes per child in a binomial
        tree: ceil(log2 P) at rank 0, (P - 1)/P on average; one more to each for longer data.
        """
        is_first = self.link.rank == 0
        results, fault, kind = _attempt(function) if is_first else ([], "", UsageError)
        payload = json.dumps([results, fault]).encode()
        results, fault = json.loads(broadcast_bytes(self.link, payload))
        if not fault:
            return results[0]
        raise kind(f"rank 0 on {self.hosts[0]}: {fault}" if self.link.size > 1 else fault)

    def must_agree(self, text: str, subject: str) -> None:
        """Raise UsageError on every rank, naming those that differ, unless all texts are equal.

        ceil(log2 P) messages of 32 bytes per rank.
        """
        if is_equal(self.link, text):
            return
        first = broadcast_bytes(self.link, text.encode()).decode()
        payload = text.encode() if text != first else None
        others = broadcast_first(self.link, payload, MAX_NAMED_RANKS)
        raise UsageError(
            f"{subject} must be the same on all ranks; rank 0 has {first}, but "
            + "; ".join(f"rank {rank} has {other.decode()}" for rank, other in others.items())
        )

    def gather(self, text: str) -> list[str]:
        """Return every rank's `text`, for results of which every rank needs each.

        ceil(log2 P) messages and 128 (P - 1) bytes per rank; for a longest text of n > 120 bytes as
        many messages, and n (P - 1) bytes, more.
        """
        return [payload.decode() for payload in all_gather_bytes(self.link, text.encode())]


def _attempt(function: Callable[[], T]) -> tuple[list[T], str, type[HpctrainError]]:
    """Call `function`; return its result in a list, or none and its error's text and kind.

    A LostRankError, which the other ranks get too, and bugs are raised.
    """
    try:
        return [function()], "", UsageError
    except LostRankError:
        raise
    except HpctrainError as error:
        return [], str(error) or type(error).__name__, type(error)
