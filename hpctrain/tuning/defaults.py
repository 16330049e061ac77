"""Defaults of `auto` without measurements: the cost model with figures of common machines.

Wrong by a factor on other machines; only ratios matter for the choice. Our algorithms pay Python's
overhead per message, the MPI library's own does not: below some 30 KiB it is faster in a node.
`hpctrain tune` replaces all of this by measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hpctrain.collectives import Group
from hpctrain.collectives.direct import MAX_COPIED_BYTES
from hpctrain.collectives.node_buffers import LONG_BUFFER_BYTES, SHORT_BUFFER_BYTES
from hpctrain.core.thresholds import lookup
from hpctrain.transport import machine
from hpctrain.tuning.choose import AlgorithmTime, TuningPlan, make_plan
from hpctrain.tuning.model import cost

#: Lengths at which the model is evaluated, in bytes.
SIZES = [1 << i for i in range(2, 31)]
BUCKET_SIZES = [1 << i for i in range(16, 27)]

#: Ours, under Python: in a node through shared memory, between nodes some 10 Gbit/s.
INTRA_NODE = cost.Machine(alpha=5e-6, beta=1e-10, gamma=5e-11)
INTER_NODE = cost.Machine(alpha=1e-5, beta=1e-9, gamma=5e-11)
#: Between nodes, algorithms that await a message before the next send use only this share of the
#: bandwidth; rings and double trees send a stream of segments (benchmarks/netlab.py).
STREAMING_ALGORITHMS, BANDWIDTH_SHARE = ("ring", "double-tree"), 0.65
#: The library's own: less per message, more per byte, which it moves in smaller pieces. Within a
#: node Open MPI has a special all-reduce for few bytes, MPICH sends messages.
INTRA_NODE_NATIVE = cost.Machine(alpha=1e-6, beta=2e-10, gamma=5e-11)
NATIVE_ALPHAS = {"Open MPI": 0.7e-6, "MPICH": 2.5e-6}
INTER_NODE_NATIVE = cost.Machine(alpha=6e-6, beta=2e-9, gamma=5e-11)
#: `direct`: Python's time around flags, to read a rank's flag and add its array; a byte read or
#: written.
FLAGS_S, SECONDS_PER_RANK, SECONDS_PER_BYTE = 0.9e-6, 0.3e-6, 1.5e-11


@dataclass(frozen=True)
class NodeLayout:
    """Ranks of each node; whether they use MPI; whether node neighbours share memory.

    Without known nodes, all ranks are assumed to be on one.
    """

    nodes: tuple[int, ...]
    uses_mpi: bool = False
    shares_memory: bool = False
    mpi_name: str = ""  #: the library, if known

    @property
    def ranks(self) -> int:
        return sum(self.nodes)


def layout_of(group: Group, uses_mpi: bool) -> NodeLayout:
    """Return the placement of `group`'s ranks; `uses_mpi` if they use MPI."""
    nodes = tuple(map(len, group.nodes)) or (group.link.size,)
    shares_memory = group.memory is not None and group.memory.kind is not None
    return NodeLayout(
        nodes, uses_mpi, shares_memory, machine.mpi().rsplit(maxsplit=1)[0] if uses_mpi else ""
    )


@cache
def default_plan(layout: NodeLayout) -> TuningPlan:
    """Return the model's plan for `layout`, the same on every rank."""
    return plan_from_model(partial(predict_times, layout))


def plan_from_model(predict: Callable[[int], Iterable[AlgorithmTime]]) -> TuningPlan:
    """Return the plan with the fastest predicted algorithm at each length."""
    rows = [row for n in SIZES for row in predict(n)]
    first_plan = make_plan(rows, (), measured=False)
    seconds = {(row.algorithm, row.bytes): row.seconds for row in rows if row.in_memory}
    buckets = tuple((n, seconds[lookup(first_plan.in_node_memory, n), n] / n) for n in BUCKET_SIZES)
    return replace(first_plan, buckets=buckets)


def predict_times(layout: NodeLayout, n: int) -> Iterator[AlgorithmTime]:
    """Yield every applicable algorithm with its predicted time for arrays of `n` bytes."""
    for in_memory in (False, True):
        for name in cost.ALLREDUCE:
            share = 1 if name in STREAMING_ALGORITHMS else BANDWIDTH_SHARE
            seconds = flat_seconds(layout.nodes, INTRA_NODE, INTER_NODE, name, n, share=share)
            yield AlgorithmTime(name, in_memory, n, seconds)
        if len(layout.nodes) > 1 and max(layout.nodes) > 1:
            yield AlgorithmTime(
                "hierarchical", in_memory, n, _hierarchical_seconds(layout, in_memory, n)
            )
        if layout.uses_mpi:
            yield AlgorithmTime("native", in_memory, n, _native_seconds(layout, n))
        if layout.shares_memory and len(layout.nodes) == 1:
            seconds = _direct_seconds(layout.ranks, n, in_memory=in_memory)
            yield AlgorithmTime("direct", in_memory, n, seconds)


def flat_seconds(
    nodes: Sequence[int],
    intra_node: cost.Machine,
    inter_node: cost.Machine,
    name: str,
    n: int,
    *,
    share: float = 1,
) -> float:
    """Return the seconds of a flat algorithm; ranks of a node share its wire to other nodes.

    `nodes`: the ranks of each node. `share`: the part of the bandwidth between nodes that is used.
    """
    algorithm_cost = cost.ALLREDUCE[name](n, sum(nodes))
    if len(nodes) == 1:
        return intra_node.seconds(algorithm_cost)
    sharing_ranks = 1 if name == "ring" else max(nodes)
    beta = inter_node.beta * sharing_ranks / share
    return replace(inter_node, beta=beta).seconds(algorithm_cost)


def _hierarchical_seconds(layout: NodeLayout, in_memory: bool, n: int) -> float:
    """Inside as in `direct` or a ring; between nodes a ring of the whole vector, on all rails."""
    node_ranks = max(layout.nodes)
    uses_memory = in_memory and layout.shares_memory
    ring_s = INTRA_NODE.seconds(cost.ring(n, node_ranks))
    inside_s = _direct_seconds(node_ranks, n, in_memory=True) if uses_memory else ring_s
    return inside_s + INTER_NODE.seconds(cost.ring(n, len(layout.nodes)))


def _native_seconds(layout: NodeLayout, n: int) -> float:
    """Libraries use recursive doubling or Rabenseifner's halving-doubling."""
    if len(layout.nodes) == 1:
        alpha = NATIVE_ALPHAS.get(layout.mpi_name, INTRA_NODE_NATIVE.alpha)
        native = replace(INTRA_NODE_NATIVE, alpha=alpha)
    else:
        native = replace(INTER_NODE_NATIVE, beta=INTER_NODE_NATIVE.beta * max(layout.nodes[1:]))
    formulas = (cost.recursive_doubling, cost.halving_doubling)
    return min(native.seconds(formula(n, layout.ranks)) for formula in formulas)


def _direct_seconds(ranks: int, n: int, *, in_memory: bool) -> float:
    """In memory each byte of P arrays is read and written once; through buffers twice as often.

    A node's ranks share the memory bandwidth: times P either way.
    """
    exchange_s = FLAGS_S + SECONDS_PER_RANK * ranks
    if in_memory and n > MAX_COPIED_BYTES:
        return exchange_s + 2 * ranks * n * SECONDS_PER_BYTE
    if n <= SHORT_BUFFER_BYTES:
        return exchange_s + (ranks + 2) * n * SECONDS_PER_BYTE
    return exchange_s * -(-n // LONG_BUFFER_BYTES) + 4 * ranks * n * SECONDS_PER_BYTE
