"""Faults of placement, found by comparing the ranks' bindings.

    rank  host  local rank  cores  BLAS  GPU     NIC
    0     n1    0           0-7    8     GPU-5a  mlx5_0:1   both have local rank 0: one GPU
    1     n1    0           0-7    8     GPU-5a  mlx5_0:1   idles
    2     n2    0           0      1             mlx5_0:1   both run on core 0, and others are
    3     n2    1           0      1             mlx5_0:1   idle; both name one port of several

Ranks exchange and compare their bindings once, after MPI_Init. Network adapters are not checked if
all ranks are on one node, which needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.core.launchers import TITLES
from hpctrain.core.names import format_ranges, format_ranks
from hpctrain.hardware.pci import parse_core_list
from hpctrain.transport.placement.nearest_nics import (
    NEAR_VALUE,
    NIC_VARIABLE,
    UCX_DEVICES,
    UNKNOWN_PORTS,
    NicPorts,
    ports_from_table,
)

_UNBIND_OPTIONS = {
    "srun": "srun --cpus-per-task=N, and export SRUN_CPUS_PER_TASK=N",
    "openmpi": "mpirun --bind-to none",
    "hydra": "mpiexec -bind-to none",
}
FEWER_THREADS_REMEDY = (
    "unset OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS, or set them to the cores of "
    "a rank"
)
OWN_GPU_REMEDY = (
    "srun --gpus-per-node=N --ntasks-per-node=N, where the site binds tasks to GPUs also "
    "--gpu-bind=none: every rank sees all GPUs and takes one by its local rank"
)
LOCAL_RANKS_REMEDY = (
    "start ranks with `srun --mpi=pmix` (MPICH: pmi2), the MPI's own mpiexec or `hpctrain launch`"
)
OWN_NIC_REMEDY = (
    f"unset {UCX_DEVICES}: UCX takes a port near each rank; or export {NIC_VARIABLE}={NEAR_VALUE} "
    "in its place"
)
EXISTING_PORTS_REMEDY = f"name ports that `hpctrain doctor` shows as up, or unset {UCX_DEVICES}"
MAX_FAULTS_SHOWN = 4  # per kind of fault: a job may have hundreds of nodes


@dataclass(frozen=True)
class RankBinding:
    """A rank's cores, GPU, ports and launcher; cores as in "0-3,8"."""

    host: str
    launcher: str  #: a key of launchers.TITLES
    local_rank: int | None  #: as set by the launcher
    cores: str
    offered: int  #: number of cores of the node available to the job
    blas_threads: int
    gpu: str = ""  #: its UUID
    gpus: int = 0  #: number of the node's GPUs in the job
    nics: NicPorts = UNKNOWN_PORTS


@dataclass(frozen=True)
class PlacementFault:
    """A fault in the placement of a node's `ranks`, and its remedy."""

    name: str
    ranks: tuple[int, ...]
    observed: str
    remedy: str


def find_faults(bindings: Sequence[RankBinding]) -> list[PlacementFault]:
    """Return the faults of the placement of ranks 0, 1, ...; a cause comes before its effects."""
    faults = []
    for ranks in _group_ranks(bindings, range(len(bindings)), "host"):
        faults += [
            *_local_rank_faults(bindings, ranks),
            *_gpu_faults(bindings, ranks),
            *_core_faults(bindings, ranks),
        ]
        faults += _blas_faults(bindings, ranks)
        if len(ranks) < len(bindings):
            faults += _nic_faults(bindings, ranks)
    return faults


def describe_ports(bindings: Sequence[RankBinding]) -> str:
    """Return a line about the network ports near the ranks, one node of each kind.

    "" without a choice of ports: on a single node, or if each node has one port.
    """
    nodes = list(_group_ranks(bindings, range(len(bindings)), "host"))
    port_texts = Counter(
        _describe_node_ports(bindings, ranks)
        for ranks in nodes
        if len(bindings[ranks[0]].nics.ports) > 1
    )
    if len(nodes) < 2 or not port_texts:
        return ""
    node_texts = [
        f"{n} node{'s' * (n > 1)}: {text}" for text, n in port_texts.most_common(MAX_FAULTS_SHOWN)
    ]
    rest_text = f". And others, {len(port_texts) - MAX_FAULTS_SHOWN} kinds" * (
        len(port_texts) > MAX_FAULTS_SHOWN
    )
    note = bindings[0].nics.note
    suffix = f"; {NIC_VARIABLE}: {note}" * bool(note)
    return f"NICs near local ranks, {'. '.join(node_texts)}{rest_text}{suffix}"


def binding_from_table(table: Mapping[str, Any]) -> RankBinding:
    """Return the binding from the JSON table of its `asdict`."""
    return RankBinding(**{**table, "nics": ports_from_table(table["nics"])})


def describe_faults(group: Sequence[PlacementFault]) -> tuple[str, str]:
    """Describe the first faults of a kind; return the description and the remedy."""
    texts = [fault.observed for fault in group]
    rest_text = f"; and {len(texts) - MAX_FAULTS_SHOWN} more like this" * (
        len(texts) > MAX_FAULTS_SHOWN
    )
    return "; ".join(texts[:MAX_FAULTS_SHOWN]) + rest_text, group[0].remedy


def group_by_kind(faults: Sequence[PlacementFault]) -> list[list[PlacementFault]]:
    """Return `faults` grouped by kind, in the order of first appearance."""
    fault_names = dict.fromkeys(fault.name for fault in faults)
    return [[fault for fault in faults if fault.name == name] for name in fault_names]


def unbind_advice(launcher: str) -> str:
    """Return the advice for giving each rank its own cores; `launcher`: a key of TITLES."""
    binding_option = _UNBIND_OPTIONS.get(launcher, "a launcher that binds no cores")
    return (
        f"{binding_option}, no taskset or numactl before the command; or start with "
        "`hpctrain launch`, which divides the cores among the ranks"
    )


def _group_ranks(
    bindings: Sequence[RankBinding], ranks: Sequence[int], field: str
) -> Iterator[tuple[int, ...]]:
    """Yield the groups of `ranks` that agree in `field`, in the order of their first rank."""
    for value in dict.fromkeys(getattr(bindings[rank], field) for rank in ranks):
        yield tuple(rank for rank in ranks if getattr(bindings[rank], field) == value)


def _describe_node_ports(bindings: Sequence[RankBinding], node: Sequence[int]) -> str:
    """Return the ports of a node by local ranks, as in "0-1 mlx5_0:1; 2-3 mlx5_1:1"."""
    by_ports: dict[str, list[int]] = {}
    for local_rank, rank in enumerate(node):
        by_ports.setdefault(bindings[rank].nics.label, []).append(local_rank)
    return "; ".join(f"{format_ranges(ranks)} {names}" for names, ranks in by_ports.items())


def _local_rank_faults(
    bindings: Sequence[RankBinding], node: Sequence[int]
) -> Iterator[PlacementFault]:
    """Yield ranks with the same local rank: each was started by its own daemon."""
    for ranks in _group_ranks(bindings, node, "local_rank"):
        binding = bindings[ranks[0]]
        if len(ranks) > 1 and binding.local_rank is not None:
            source = "SLURM_LOCALID is its daemon's" if binding.launcher == "srun" else "a daemon's"
            yield PlacementFault(
                "local ranks",
                ranks,
                f"{format_ranks(ranks)} of {binding.host} all got local rank {binding.local_rank} "
                f"from {TITLES[binding.launcher]} ({source}), so they take the same cores and GPU",
                LOCAL_RANKS_REMEDY,
            )


def _gpu_faults(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield ranks that share a GPU while another GPU of the job on the node is idle."""
    ranks_with_gpu = [rank for rank in node if bindings[rank].gpu]
    used_gpus = {bindings[rank].gpu for rank in ranks_with_gpu}
    idle_gpu_count = max((bindings[rank].gpus for rank in ranks_with_gpu), default=0) - len(
        used_gpus
    )
    for ranks in _group_ranks(bindings, ranks_with_gpu, "gpu"):
        if len(ranks) > 1 and idle_gpu_count > 0:
            binding = bindings[ranks[0]]
            idle_gpus = (
                f"{idle_gpu_count} of its GPUs are"
                if idle_gpu_count > 1
                else "another of its GPUs is"
            )
            text = (
                f"{format_ranks(ranks)} share {binding.gpu} of {binding.host}, and {idle_gpus} idle"
            )
            yield PlacementFault("GPUs shared", ranks, text, OWN_GPU_REMEDY)


def _core_faults(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield ranks that outnumber their cores while other cores of the node are idle."""
    used_cores = {core for rank in node for core in parse_core_list(bindings[rank].cores)}
    idle_core_count = max(bindings[rank].offered for rank in node) - len(used_cores)
    for ranks in _group_ranks(bindings, node, "cores"):
        binding = bindings[ranks[0]]
        count = len(parse_core_list(binding.cores))
        if len(ranks) > count and idle_core_count > 0:
            cores_text = f"core{'s' * (count > 1)} {binding.cores}"
            idle_cores_text = (
                f"{idle_core_count} others are" if idle_core_count > 1 else "another is"
            )
            ranks_text = f"{format_ranks(ranks)} of {binding.host}"
            text = f"{ranks_text} all run on {cores_text}, and {idle_cores_text} idle"
            yield PlacementFault("cores shared", ranks, text, unbind_advice(binding.launcher))


def _blas_faults(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield ranks with more BLAS threads than cores, unless each rank has one BLAS thread.

    More ranks than cores may be intended; one BLAS thread per rank is then the minimum.
    """
    ranks_by_load: dict[
        tuple[str, str], list[int]
    ] = {}  # by load, and by the ranks if they share cores
    for ranks in _group_ranks(bindings, node, "cores"):
        threads = [bindings[rank].blas_threads for rank in ranks]
        count = len(parse_core_list(bindings[ranks[0]].cores))
        if sum(threads) > count and max(threads) > 1:
            load = f"{sum(threads)} BLAS threads on {count} core{'s' * (count > 1)}"
            ranks_by_load.setdefault((load, format_ranks(ranks) * (len(ranks) > 1)), []).extend(
                ranks
            )
    for (load, sharing_ranks), group in ranks_by_load.items():
        suffix = " each" * (len(group) > 1 and not sharing_ranks)
        ranks_text = f"{format_ranks(group)} of {bindings[group[0]].host}"
        text = f"{ranks_text}: {load}{suffix}, so they take turns"
        yield PlacementFault("BLAS threads", tuple(group), text, FEWER_THREADS_REMEDY)


def _nic_faults(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield ranks whose UCX_NET_DEVICES names missing ports, one port for all, or far ports."""
    host = bindings[node[0]].host
    faults_by_rank = {
        rank: bindings[rank].nics.faults for rank in node if bindings[rank].nics.faults
    }
    for faults in dict.fromkeys(faults_by_rank.values()):
        ranks = tuple(rank for rank in faults_by_rank if faults_by_rank[rank] == faults)
        text = (
            f"{format_ranks(ranks)} of {host}: of the ports in {UCX_DEVICES}, "
            f"{' and '.join(faults)}"
        )
        yield PlacementFault("NICs named", ranks, text, EXISTING_PORTS_REMEDY)
    yield from _shared_nic_faults(bindings, node)
    ranks_with_remote_nic = tuple(rank for rank in node if bindings[rank].nics.remote)
    if ranks_with_remote_nic:
        nics = bindings[ranks_with_remote_nic[0]].nics
        text = (
            f"{format_ranks(ranks_with_remote_nic)} of {host}: {UCX_DEVICES} names a port on "
            f"another NUMA node than the nearest port; rank {ranks_with_remote_nic[0]} has "
            f"{', '.join(nics.named)}, and the nearest is {', '.join(nics.nearest)}"
        )
        yield PlacementFault("NICs far", ranks_with_remote_nic, text, OWN_NIC_REMEDY)


def _shared_nic_faults(
    bindings: Sequence[RankBinding], node: Sequence[int]
) -> Iterator[PlacementFault]:
    """Yield the ranks of a node if all name the same port while other ports are idle."""
    nics = [bindings[rank].nics for rank in node]
    unnamed_ports = set(nics[0].ports) - set(nics[0].named)
    if len(node) > 1 and nics[0].named and unnamed_ports and len({nic.named for nic in nics}) == 1:
        port_names = ", ".join(nics[0].named)
        text = f"{format_ranks(node)} of {bindings[node[0]].host} all name {port_names} in "
        text += f"{UCX_DEVICES}, and "
        text += (
            f"{', '.join(sorted(unnamed_ports))} {'are' if len(unnamed_ports) > 1 else 'is'} idle"
        )
        yield PlacementFault("NICs shared", tuple(node), text, OWN_NIC_REMEDY)
