"""Costs of collectives: closed forms of the alpha-beta-gamma model.

A message of m bytes takes alpha + m beta seconds, adding m bytes takes m gamma; P ranks, n bytes,
L = ceil(log2 P). A rank sends one message and receives one at a time, both at once. The exact bytes
sent by each rank, for any length, are in tests/oracles/messages.py. Source, unless another is
named: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.collectives.chunks import SEGMENT_BYTES


@dataclass(frozen=True)
class Cost:
    """Cost of the longest path: messages, bytes moved, bytes added."""

    steps: int
    bytes: float
    added_bytes: float


@dataclass(frozen=True)
class Machine:
    """Seconds per message, per byte moved and per byte added.

    The defaults are of the order of two cores that communicate through shared memory under mpi4py
    (1 us, 10 GB/s, 20 GB/s); only their ratios matter for choosing an algorithm.
    """

    alpha: float = 1e-6
    beta: float = 1e-10
    gamma: float = 5e-11

    def seconds(self, cost: Cost) -> float:
        """Return the predicted time of `cost`."""
        return self.alpha * cost.steps + self.beta * cost.bytes + self.gamma * cost.added_bytes


def ring(n: int, ranks: int) -> Cost:
    """Return 2(P-1) steps, 2n(P-1)/P bytes."""
    share = n * (ranks - 1) / ranks
    return Cost(2 * (ranks - 1), 2 * share, share)


def hierarchical(n: int, ranks: int, nodes: int = 1) -> Cost:
    """Return 2(g-1) steps in the node and 2(N-1) between: as many bytes as a ring in fewer steps.

    N nodes with g = P/N ranks each. Source: Cho et al., "BlueConnect", 2019.
    """
    node_cost, network_cost = ring(n, ranks // nodes), ring(n * nodes // ranks, nodes)
    pairs = zip(vars(node_cost).values(), vars(network_cost).values(), strict=True)
    return Cost(*(a + b for a, b in pairs))


def tree(n: int, ranks: int) -> Cost:
    """Return 2L steps, each with the whole vector."""
    depth = (ranks - 1).bit_length()
    return Cost(2 * depth, 2 * depth * n, depth * n)


def recursive_doubling(n: int, ranks: int) -> Cost:
    """Return L steps with the whole vector, two more where P is no power of two (folding)."""
    log2_core_size = ranks.bit_length() - 1
    has_folded_ranks = ranks != 1 << log2_core_size
    return Cost(
        log2_core_size + 2 * has_folded_ranks,
        (log2_core_size + 2 * has_folded_ranks) * n,
        (log2_core_size + has_folded_ranks) * n,
    )


def halving_doubling(n: int, ranks: int) -> Cost:
    """Return 2 log2 Q steps, 2n(Q-1)/Q bytes, Q the largest power of two; folding adds 3 and 2n."""
    core_size = 1 << (ranks.bit_length() - 1)
    has_folded_ranks, share = ranks != core_size, n * (core_size - 1) / core_size
    steps = 2 * (core_size.bit_length() - 1) + 3 * has_folded_ranks
    return Cost(steps, 2 * share + 2 * n * has_folded_ranks, share + n / 2 * has_folded_ranks)


def double_tree(n: int, ranks: int, segment_bytes: int = SEGMENT_BYTES) -> Cost:
    """Return 4L + 6k steps of n/2k bytes, 2 (L + k) with an addition: at most, k segments a half.

    Up and down, either tree is L deep, and 4k messages pass each rank's wire; up to 2k more is lost
    since a rank is through with one tree before the other. Source: Sanders et al., 2009 (4L + 4k).
    """
    if ranks == 1:
        return Cost(0, 0, 0)
    depth, k = (ranks - 1).bit_length(), max(1, -(-n // (2 * segment_bytes)))
    steps = 4 * depth + 6 * k
    return Cost(steps, steps * n / (2 * k), (depth + k) * n / k)


def reduce_scatter(n: int, ranks: int) -> Cost:
    """Return P-1 steps round the ring, n(P-1)/P bytes, and adds every byte."""
    share = n * (ranks - 1) / ranks
    return Cost(ranks - 1, share, share)


def all_gather(n: int, ranks: int) -> Cost:
    """Return P-1 steps round the ring, n(P-1)/P bytes."""
    return Cost(ranks - 1, n * (ranks - 1) / ranks, 0)


def doubling(n: int, ranks: int) -> Cost:
    """Return log2 P steps, n(P-1)/P bytes; round the ring if P is no power of two."""
    if ranks & (ranks - 1):
        return all_gather(n, ranks)
    return Cost(ranks.bit_length() - 1, n * (ranks - 1) / ranks, 0)


def reduce(n: int, ranks: int) -> Cost:
    """Return L steps up a binomial tree, each with the whole vector, which is added."""
    depth = (ranks - 1).bit_length()
    return Cost(depth, depth * n, depth * n)


def broadcast(n: int, ranks: int) -> Cost:
    """Return L steps down a binomial tree, each with the whole vector."""
    depth = (ranks - 1).bit_length()
    return Cost(depth, depth * n, 0)


def direct(n: int, ranks: int) -> Cost:
    """Return P-1 steps of n/P bytes, by the root in gather and scatter, by all in all-to-all."""
    return Cost(ranks - 1, n * (ranks - 1) / ranks, 0)


def all_gather_short(n: int, ranks: int) -> Cost:
    """Return L steps, n(P-1)/P bytes, where all rows together have n (Bruck et al., 1997)."""
    return Cost((ranks - 1).bit_length(), n * (ranks - 1) / ranks, 0)


ALLREDUCE: dict[str, Callable[[int, int], Cost]] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
}

#: The all-reduces and all others.
COLLECTIVES: dict[str, Callable[[int, int], Cost]] = {
    **ALLREDUCE,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    # to the owner of each chunk, where each rank holds one subtotal; m subtotals cost m times it
    "ordered-reduce-scatter": reduce_scatter,
    "doubling": doubling,
    "reduce": reduce,
    "broadcast": broadcast,
    "gather": direct,
    "scatter": direct,
    "all-to-all": direct,
    "all-gather-short": all_gather_short,
}
