"""Defaults of `auto` without measurements: the cost model with figures of common machines.

Wrong by a factor on other machines; only ratios matter for the choice. Our algorithms pay Python's
overhead per message, the MPI library's own does not: below some 30 KiB it is faster in a node.
`hpctrain tune` replaces all of this by measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from hpctrain import machine
from hpctrain.collectives import Group
from hpctrain.collectives.direct import COPIED_BYTES
from hpctrain.collectives.node_buffers import LONG_BYTES, SHORT_BYTES
from hpctrain.core.thresholds import lookup
from hpctrain.cost_model import cost
from hpctrain.tuning.choose import AlgorithmTime, TuningPlan, plan

#: Lengths at which the model is evaluated, in bytes.
SIZES = [1 << i for i in range(2, 31)]
BUCKETS = [1 << i for i in range(16, 27)]

#: Ours, under Python: in a node through shared memory, between nodes some 10 Gbit/s.
NODE = cost.Machine(alpha=5e-6, beta=1e-10, gamma=5e-11)
ACROSS = cost.Machine(alpha=1e-5, beta=1e-9, gamma=5e-11)
#: Between nodes, algorithms that await a message before the next send use only this share of the
#: bandwidth; rings and double trees send a stream of segments (benchmarks/netlab.py).
STREAMS, BANDWIDTH_SHARE = ("ring", "double-tree"), 0.65
#: The library's own: less per message, more per byte, which it moves in smaller pieces. Within a
#: node Open MPI has a special all-reduce for few bytes, MPICH sends messages.
NODE_NATIVE = cost.Machine(alpha=1e-6, beta=2e-10, gamma=5e-11)
NODE_ALPHAS = {"Open MPI": 0.7e-6, "MPICH": 2.5e-6}
ACROSS_NATIVE = cost.Machine(alpha=6e-6, beta=2e-9, gamma=5e-11)
#: `direct`: Python's time around flags, to read a rank's flag and add its array; a byte read or
#: written.
DIRECT_S, PER_RANK_S, SECONDS_PER_BYTE = 0.9e-6, 0.3e-6, 1.5e-11


@dataclass(frozen=True)
class NodeLayout:
    """Ranks of each node; whether they use MPI; whether node neighbours share memory.

    Without known nodes, all ranks are assumed to be on one.
    """

    nodes: tuple[int, ...]
    mpi: bool = False
    memory: bool = False
    mpi_name: str = ""  #: the library, if known

    @property
    def ranks(self) -> int:
        return sum(self.nodes)


def layout_of(group: Group, mpi: bool) -> NodeLayout:
    """Return the placement of `group`'s ranks; `mpi` if they use MPI."""
    nodes = tuple(map(len, group.nodes)) or (group.link.size,)
    memory = group.memory is not None and group.memory.kind is not None
    return NodeLayout(nodes, mpi, memory, machine.mpi().rsplit(maxsplit=1)[0] if mpi else "")


@cache
def default_plan(layout: NodeLayout) -> TuningPlan:
    """Return the model's plan for `layout`, the same on every rank."""
    return plan_from(partial(predicted, layout))


def plan_from(predict: Callable[[int], Iterable[AlgorithmTime]]) -> TuningPlan:
    """Return the plan with the fastest predicted algorithm at each length."""
    rows = [row for n in SIZES for row in predict(n)]
    first = plan(rows, (), measured=False)
    seconds = {(row.algorithm, row.bytes): row.seconds for row in rows if row.in_memory}
    buckets = tuple((n, seconds[lookup(first.in_node_memory, n), n] / n) for n in BUCKETS)
    return replace(first, buckets=buckets)


def predicted(layout: NodeLayout, n: int) -> Iterator[AlgorithmTime]:
    """Yield the predicted time of each applicable algorithm for arrays of `n` bytes."""
    for in_memory in (False, True):
        for name in cost.ALLREDUCE:
            if name != "hierarchical":
                yield AlgorithmTime(name, in_memory, n, _flat(layout, name, n))
        if len(layout.nodes) > 1 and max(layout.nodes) > 1:
            yield AlgorithmTime("hierarchical", in_memory, n, _hierarchical(layout, in_memory, n))
        if layout.mpi:
            yield AlgorithmTime("native", in_memory, n, _native(layout, n))
        if layout.memory and len(layout.nodes) == 1:
            seconds = _direct(layout.ranks, n, in_memory=in_memory)
            yield AlgorithmTime("direct", in_memory, n, seconds)


def _flat(layout: NodeLayout, name: str, n: int) -> float:
    """Ranks of a node share its wire to other nodes; in a ring only one of them uses it."""
    if len(layout.nodes) == 1:
        return NODE.seconds(cost.ALLREDUCE[name](n, layout.ranks))
    sharing = 1 if name == "ring" else max(layout.nodes)
    beta = ACROSS.beta * sharing / (1 if name in STREAMS else BANDWIDTH_SHARE)
    return replace(ACROSS, beta=beta).seconds(cost.ALLREDUCE[name](n, layout.ranks))


def _hierarchical(layout: NodeLayout, in_memory: bool, n: int) -> float:
    """Inside as in `direct` or a ring; between nodes a ring of the whole vector, on all rails."""
    node_ranks = max(layout.nodes)
    shares = in_memory and layout.memory
    ring = NODE.seconds(cost.ring(n, node_ranks))
    inside = _direct(node_ranks, n, in_memory=True) if shares else ring
    return inside + ACROSS.seconds(cost.ring(n, len(layout.nodes)))


def _native(layout: NodeLayout, n: int) -> float:
    """Libraries use recursive doubling or Rabenseifner's halving-doubling."""
    if len(layout.nodes) == 1:
        alpha = NODE_ALPHAS.get(layout.mpi_name, NODE_NATIVE.alpha)
        native = replace(NODE_NATIVE, alpha=alpha)
    else:
        native = replace(ACROSS_NATIVE, beta=ACROSS_NATIVE.beta * max(layout.nodes[1:]))
    formulas = (cost.recursive_doubling, cost.halving_doubling)
    return min(native.seconds(formula(n, layout.ranks)) for formula in formulas)


def _direct(ranks: int, n: int, *, in_memory: bool) -> float:
    """In memory each byte of P arrays is read and written once; through buffers twice as often.

    A node's ranks share the memory bandwidth: times P either way.
    """
    exchange_s = DIRECT_S + PER_RANK_S * ranks
    if in_memory and n > COPIED_BYTES:
        return exchange_s + 2 * ranks * n * SECONDS_PER_BYTE
    if n <= SHORT_BYTES:
        return exchange_s + (ranks + 2) * n * SECONDS_PER_BYTE
    return exchange_s * -(-n // LONG_BYTES) + 4 * ranks * n * SECONDS_PER_BYTE
