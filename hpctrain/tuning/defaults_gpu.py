"""Defaults of `auto` for arrays on GPUs without measurements: the cost model with GPU figures.

The figures come from the trial (verdicts.py) if it timed messages of this class of pairs; else from
common machines: some ten microseconds for each wait of the host, PCIe 4 and 100 Gbit/s for bytes
staged through the host. `hpctrain tune --device gpu` replaces all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.collectives import Group
from hpctrain.collectives.node_buffers import GPU_BUFFER_BYTES
from hpctrain.transport.paths import POINTER_PATHS
from hpctrain.tuning.choose import AlgorithmTime, TuningPlan
from hpctrain.tuning.defaults import flat_seconds, plan_from_model
from hpctrain.tuning.gpu_layout import GpuLayout
from hpctrain.tuning.model import cost, fit

#: A byte added: two read and one written, at 2 TB/s.
GAMMA = 1.5e-12
#: By the host: an event is awaited, two copies and a message. By pointer: MPI after a stream.
STAGED_COSTS = {
    "node": cost.Machine(6e-5, 1.2e-10, GAMMA),
    "across": cost.Machine(8e-5, 1.5e-10, GAMMA),
}
POINTER_COSTS = {
    "node": cost.Machine(2e-5, 2e-11, GAMMA),
    "across": cost.Machine(3e-5, 1e-10, GAMMA),
}
#: `direct`: two waits for a stream, two exchanges of flags, one kernel; the rate of a copy out of
#: mapped memory, on one GPU and between two.
SYNCHRONIZATION_S, SAME_GPU_RATE, BETWEEN_GPUS_RATE = 4e-5, 1e12, 5e10
#: Processes that share a GPU take turns: a kernel of each (benchmarks/gpu/allreduce.py, one H100).
TURN_S = 2e-4


@dataclass(frozen=True)
class GpuNetwork:
    """Ranks of each node, wires inside and between them, and the rate of mapped memory."""

    nodes: tuple[int, ...]
    intra_node: cost.Machine
    inter_node: cost.Machine
    shares_one_gpu: bool  #: for all ranks of a node
    mapped_rate: float | None  #: bytes per second out of mapped memory; None if none is mapped


def default_plan(group: Group, gpus: GpuLayout) -> TuningPlan:
    """Return the model's plan for arrays of `group` on `gpus`."""
    return plan_from_model(partial(predict_times, layout_of(group, gpus)))


def layout_of(group: Group, gpus: GpuLayout) -> GpuNetwork:
    """Return the placement of `group`'s ranks and the cost of their paths."""
    nodes = group.nodes or (tuple(range(group.link.size)),)
    one_gpu = all(len({gpus.places[rank] for rank in node}) == 1 for node in nodes)
    name = "same_gpu" if one_gpu else "same_node"
    rate = gpus.verdict.mapped_gb_s.get(name, 0.0) * 1e9
    rate = rate or (SAME_GPU_RATE if one_gpu else BETWEEN_GPUS_RATE)
    return GpuNetwork(
        tuple(map(len, nodes)),
        _message_cost(gpus, name, "node"),
        _message_cost(gpus, "across", "across"),
        one_gpu,
        rate if gpus.is_mapped else None,
    )


def _message_cost(gpus: GpuLayout, name: str, scope: str) -> cost.Machine:
    """Return the message cost of a class of pairs; staging ranks share their GPU's link."""
    is_by_pointer = getattr(gpus.verdict, name) in POINTER_PATHS
    wire = POINTER_COSTS[scope] if is_by_pointer else STAGED_COSTS[scope]
    if times := gpus.verdict.seconds.get(name):
        wire = cost.Machine(*fit.fit_line(times), GAMMA)
    return (
        wire if is_by_pointer else replace(wire, beta=wire.beta * max(map(len, gpus.ranks_by_gpu)))
    )


def predict_times(layout: GpuNetwork, n: int) -> Iterator[AlgorithmTime]:
    """Yield every applicable algorithm with its predicted time for arrays of `n` bytes.

    MPI's own is not among them: it would reduce on the host.
    """
    has_several_nodes = len(layout.nodes) > 1
    for in_memory in (False, True):
        for name in cost.ALLREDUCE:
            seconds = flat_seconds(layout.nodes, layout.intra_node, layout.inter_node, name, n)
            yield AlgorithmTime(name, in_memory, n, seconds)
        if has_several_nodes and max(layout.nodes) > 1:
            yield AlgorithmTime(
                "hierarchical", in_memory, n, _hierarchical_seconds(layout, in_memory, n)
            )
        if not has_several_nodes and layout.mapped_rate:
            seconds = _direct_seconds(layout, layout.nodes[0], layout.mapped_rate, n)
            seconds += 0 if in_memory else _copy_seconds(layout, n)
            yield AlgorithmTime("direct", in_memory, n, seconds)


def _hierarchical_seconds(layout: GpuNetwork, in_memory: bool, n: int) -> float:
    """Inside as in `direct` or a ring; between nodes a ring of the whole vector, on all rails."""
    node_ranks, rate = max(layout.nodes), layout.mapped_rate
    inside_s = layout.intra_node.seconds(cost.ring(n, node_ranks))
    if rate:
        copies_s = 0.0 if in_memory else _copy_seconds(layout, n)
        inside_s = _direct_seconds(layout, node_ranks, rate, n) + copies_s
    return inside_s + layout.inter_node.seconds(cost.ring(n, len(layout.nodes)))


def _direct_seconds(layout: GpuNetwork, ranks: int, rate: float, n: int) -> float:
    """On one GPU P arrays are read and written; else each rank reads and writes 2n (P-1)/P abroad.

    A copy at `mapped_rate` reads each byte and writes it.
    """
    moved_bytes = ranks * n if layout.shares_one_gpu else 2 * n * (ranks - 1) / ranks
    return SYNCHRONIZATION_S + moved_bytes / rate


def _copy_seconds(layout: GpuNetwork, n: int) -> float:
    """To a buffer that neighbours map, and back; each piece of the array waits for all ranks."""
    sharing_ranks = max(layout.nodes) if layout.shares_one_gpu else 1
    piece_s = SYNCHRONIZATION_S + (2 * TURN_S if layout.shares_one_gpu else 0.0)
    return 2 * n * sharing_ranks / SAME_GPU_RATE + -(-n // GPU_BUFFER_BYTES) * piece_s
