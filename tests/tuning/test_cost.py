"""The cost model against the messages of real ranks, and against an ideal machine with clocks."""

from __future__ import annotations

import numpy as np
import pytest
from clocked import alike, clocks
from oracles.messages import MESSAGES, Call
from ranks import THREAD_RANKS, on_ranks

from hpctrain import collectives
from hpctrain.collectives import Group, all_gathers, ordered, rooted
from hpctrain.collectives.chunks import SEGMENT_BYTES
from hpctrain.collectives.ring import all_gather, plain_ring, reduce_scatter
from hpctrain.tuning.model import cost

LENGTHS = ("0", "1", "P-1", "P", "P+1", "100003", "300007")  # the last travels in segments


def length(word: str, size: int) -> int:
    return {"P-1": size - 1, "P": size, "P+1": size + 1}.get(word) if "P" in word else int(word)


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """Return of `x` what can be cut into P equal blocks."""
    return x[: x.size // size * size]


#: One row each: a call on `x`, by op where it reduces, from or to a root where it has one.
CALLS = {
    **{
        name: lambda group, x, op, root, f=collectives.ALLREDUCE[name]: f(group, x, op)
        for name in collectives.ALLREDUCE
        if name not in ("direct", "native", "null")  # no messages, the library's own, and nothing
    },
    "plain-ring": lambda group, x, op, root: plain_ring(group, x, op),
    "reduce-scatter": lambda group, x, op, root: reduce_scatter(group, x, op),
    "all-gather": lambda group, x, op, root: all_gather(group, x),
    "ordered-reduce-scatter": lambda group, x, op, root: ordered.reduce_scatter(
        group, ordered.SumTree(group.link.size, group.link.size), [x], x, op
    ),
    "doubling": lambda group, x, op, root: all_gathers.gather_by_doubling(group, x),
    "broadcasts": lambda group, x, op, root: all_gathers.gather_by_broadcasts(group, x),
    "reduce": lambda group, x, op, root: collectives.reduce(group, x, op, root),
    "broadcast": lambda group, x, op, root: collectives.broadcast(group, x, root),
    "gather": lambda group, x, op, root: rooted.gather(group, x, root),
    "scatter": lambda group, x, op, root: rooted.scatter(group, x, root),
    "all-to-all": lambda group, x, op, root: rooted.all_to_all(group, x, np.empty_like(x)),
    "all-gather-short": lambda group, x, op, root: collectives.all_gather_short(
        group.link, x[: x.size // group.link.size].view(np.uint8)
    ),
}
EQUAL_BLOCKS = ("all-to-all", "all-gather-short")
ROOTED = ("reduce", "broadcast", "gather", "scatter")


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("name", CALLS)
def test_what_each_rank_sends(ranks, name):
    """Bytes and messages of every rank, at every length, are those of the closed form."""
    assert name in MESSAGES, f"add the messages of '{name}' to tests/oracles/messages.py"

    def body(world):
        link = world.link
        for word in LENGTHS:
            x = np.zeros(length(word, link.size))
            x = blocks(x, link.size) if name in EQUAL_BLOCKS else x
            for root in range(link.size if name in ROOTED else 1):
                before = link.endpoint.traffic.bytes_sent, link.endpoint.traffic.messages_sent
                CALLS[name](Group(link), x, np.add, root)
                sent = (
                    link.endpoint.traffic.bytes_sent - before[0],
                    link.endpoint.traffic.messages_sent - before[1],
                )
                reported = MESSAGES[name](Call(x.size, x.itemsize, link.size, link.rank, root))
                assert sent == (sum(reported) * x.itemsize, len(reported)), (word, root)

    ranks(body)


def longest_path(name: str, size: int, n: int, machine: cost.Machine) -> float:
    """Return when the last rank is done with `n` bytes."""
    call = CALLS[name]
    return max(clocks(lambda link, x, add: call(Group(link), x, add, 0), size, n, alike(machine)))


#: Each alone takes the time, so that each is measured alone.
ALONE = {"steps": (1, 0, 0), "bytes": (0, 1, 0), "added_bytes": (0, 0, 1)}


@pytest.mark.parametrize("size", THREAD_RANKS)
@pytest.mark.parametrize("name", cost.COLLECTIVES)
def test_the_longest_path(name, size):
    n = 8 * 2520  # divides by every P here: chunks are equal
    predicted = cost.COLLECTIVES[name](n, size)
    result = cost.Cost(
        *(longest_path(name, size, n, cost.Machine(*item)) for item in ALONE.values())
    )
    if name == "double-tree":
        assert all(getattr(result, item) <= getattr(predicted, item) for item in ALONE)
    else:
        assert result == predicted


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 9])
def test_segments_of_a_double_tree_overlap(size):
    """Otherwise the time of a segment would grow with the depth of the trees."""
    for k in (1, 2, 6):
        n = 2 * k * SEGMENT_BYTES
        result = longest_path("double-tree", size, n, cost.Machine(1, 0, 0))
        assert result <= cost.double_tree(n, size).steps
