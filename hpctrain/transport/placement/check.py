"""Faults of placement that show only when the bindings of all ranks are compared.

    rank  host  local rank  cores  BLAS  GPU     NIC
    0     n1    0           0-7    8     GPU-5a  mlx5_0:1   both have local rank 0: one GPU
    1     n1    0           0-7    8     GPU-5a  mlx5_0:1   idles
    2     n2    0           0      1             mlx5_0:1   both run on core 0, and others are
    3     n2    1           0      1             mlx5_0:1   idle; both name one port of several

Ranks exchange their bindings once, after MPI_Init; a run pays for one comparison of them.
Adapters are not checked where all ranks are on one node: they need none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hpctrain.core.launchers import TITLES
from hpctrain.hardware.pci import parse_core_list
from hpctrain.transport.placement.nearest_nics import (
    NEAR,
    NIC_VARIABLE,
    UCX_DEVICES,
    UNKNOWN,
    NicPorts,
    from_table,
)

_UNBIND = {
    "srun": "srun --cpus-per-task=N, and export SRUN_CPUS_PER_TASK=N",
    "openmpi": "mpirun --bind-to none",
    "hydra": "mpiexec -bind-to none",
}
FEWER_THREADS = (
    "unset OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS, or set them to the cores of "
    "a rank"
)
OWN_GPU = (
    "srun --gpus-per-node=N --ntasks-per-node=N, where the site binds tasks to GPUs also "
    "--gpu-bind=none: every rank sees all GPUs and takes one by its local rank"
)
LOCAL_RANKS = (
    "start ranks with `srun --mpi=pmix` (MPICH: pmi2), the MPI's own mpiexec or `hpctrain launch`"
)
OWN_NIC = (
    f"unset {UCX_DEVICES}: UCX takes a port near each rank; or export {NIC_VARIABLE}={NEAR} "
    "in its place"
)
EXISTING_PORTS = f"name ports that `hpctrain doctor` shows as up, or unset {UCX_DEVICES}"
MAX_FAULTS_SHOWN = 4  # of the faults of one kind: a job may have hundreds of nodes


@dataclass(frozen=True)
class RankBinding:
    """The cores, GPU and ports of one rank, and its launcher; cores as in "0-3,8"."""

    host: str
    launcher: str  #: a key of launchers.TITLES
    local_rank: int | None  #: as the launcher gave it
    cores: str
    offered: int  #: cores of the node that the rank could be given
    blas_threads: int
    gpu: str = ""  #: its UUID
    gpus: int = 0  #: how many of the node's the job may use
    nics: NicPorts = UNKNOWN


@dataclass(frozen=True)
class PlacementFault:
    """A fault of the placement of `ranks`, which are on one node, and its remedy."""

    name: str
    ranks: tuple[int, ...]
    observed: str
    remedy: str


def faults(bindings: Sequence[RankBinding]) -> list[PlacementFault]:
    """Return the faults of the placement of ranks 0, 1, ...; a cause comes before its effects."""
    result = []
    for ranks in _groups(bindings, range(len(bindings)), "host"):
        result += [
            *_local_ranks(bindings, ranks),
            *_gpus(bindings, ranks),
            *_cores(bindings, ranks),
        ]
        result += _blas(bindings, ranks)
        if len(ranks) < len(bindings):
            result += _nics(bindings, ranks)
    return result


def ports(bindings: Sequence[RankBinding]) -> str:
    """Return the line about network ports near the ranks, of one node of each kind.

    "" where there is no choice: one node, or a port on each.
    """
    nodes = list(_groups(bindings, range(len(bindings)), "host"))
    faults_by_kind = Counter(
        _port_names(bindings, ranks) for ranks in nodes if len(bindings[ranks[0]].nics.ports) > 1
    )
    if len(nodes) < 2 or not faults_by_kind:
        return ""
    texts = [
        f"{n} node{'s' * (n > 1)}: {text}"
        for text, n in faults_by_kind.most_common(MAX_FAULTS_SHOWN)
    ]
    rest = f". And others, {len(faults_by_kind) - MAX_FAULTS_SHOWN} kinds" * (
        len(faults_by_kind) > MAX_FAULTS_SHOWN
    )
    note = bindings[0].nics.note
    suffix = f"; {NIC_VARIABLE}: {note}" * bool(note)
    return f"NICs near local ranks, {'. '.join(texts)}{rest}{suffix}"


def binding_from_table(table: Mapping[str, Any]) -> RankBinding:
    """Return the binding of a table that `asdict` made and JSON has carried."""
    return RankBinding(**{**table, "nics": from_table(table["nics"])})


def description(group: Sequence[PlacementFault]) -> tuple[str, str]:
    """Return a description of some of the faults of one kind, and their remedy."""
    texts = [fault.observed for fault in group]
    rest = f"; and {len(texts) - MAX_FAULTS_SHOWN} more like this" * (len(texts) > MAX_FAULTS_SHOWN)
    return "; ".join(texts[:MAX_FAULTS_SHOWN]) + rest, group[0].remedy


def grouped_by_kind(faults_found: Sequence[PlacementFault]) -> list[list[PlacementFault]]:
    """Return `faults_found` grouped by kind, in the order of the first fault of each."""
    names = dict.fromkeys(fault.name for fault in faults_found)
    return [[fault for fault in faults_found if fault.name == name] for name in names]


def unbind(launcher: str) -> str:
    """Return the advice that gives ranks cores of their own; `launcher`: a key of TITLES."""
    binding_option = _UNBIND.get(launcher, "a launcher that binds no cores")
    return (
        f"{binding_option}, no taskset or numactl before the command; or start with "
        "`hpctrain launch`, which divides the cores among the ranks"
    )


def ranges(numbers: Sequence[int]) -> str:
    """Return "0-3,8" of ascending `numbers`, as the kernel writes lists of cores."""
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def named(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2,4"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _groups(
    bindings: Sequence[RankBinding], ranks: Sequence[int], field: str
) -> Iterator[tuple[int, ...]]:
    """Yield the groups of `ranks` that agree in `field`, in the order of their first rank."""
    for value in dict.fromkeys(getattr(bindings[rank], field) for rank in ranks):
        yield tuple(rank for rank in ranks if getattr(bindings[rank], field) == value)


def _port_names(bindings: Sequence[RankBinding], node: Sequence[int]) -> str:
    """Return the ports of a node by local ranks, as in "0-1 mlx5_0:1; 2-3 mlx5_1:1"."""
    by_ports: dict[str, list[int]] = {}
    for local_rank, rank in enumerate(node):
        by_ports.setdefault(bindings[rank].nics.label, []).append(local_rank)
    return "; ".join(f"{ranges(ranks)} {names}" for names, ranks in by_ports.items())


def _local_ranks(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks of equal local rank: it is that of the daemon which started them."""
    for ranks in _groups(bindings, node, "local_rank"):
        binding = bindings[ranks[0]]
        if len(ranks) > 1 and binding.local_rank is not None:
            source = "SLURM_LOCALID is its daemon's" if binding.launcher == "srun" else "a daemon's"
            yield PlacementFault(
                "local ranks",
                ranks,
                f"{named(ranks)} of {binding.host} all got local rank {binding.local_rank} from "
                f"{TITLES[binding.launcher]} ({source}), so they take the same cores and GPU",
                LOCAL_RANKS,
            )


def _gpus(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks that share a GPU while another GPU of the job on the node is idle."""
    ranks_with_gpu = [rank for rank in node if bindings[rank].gpu]
    used_gpus = {bindings[rank].gpu for rank in ranks_with_gpu}
    idle_gpu_count = max((bindings[rank].gpus for rank in ranks_with_gpu), default=0) - len(
        used_gpus
    )
    for ranks in _groups(bindings, ranks_with_gpu, "gpu"):
        if len(ranks) > 1 and idle_gpu_count > 0:
            binding = bindings[ranks[0]]
            idle_gpus = (
                f"{idle_gpu_count} of its GPUs are"
                if idle_gpu_count > 1
                else "another of its GPUs is"
            )
            text = f"{named(ranks)} share {binding.gpu} of {binding.host}, and {idle_gpus} idle"
            yield PlacementFault("GPUs shared", ranks, text, OWN_GPU)


def _cores(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks that outnumber their cores while other cores of the node are idle."""
    used_cores = {core for rank in node for core in parse_core_list(bindings[rank].cores)}
    idle_core_count = max(bindings[rank].offered for rank in node) - len(used_cores)
    for ranks in _groups(bindings, node, "cores"):
        binding = bindings[ranks[0]]
        count = len(parse_core_list(binding.cores))
        if len(ranks) > count and idle_core_count > 0:
            shared = f"core{'s' * (count > 1)} {binding.cores}"
            idle_cores = f"{idle_core_count} others are" if idle_core_count > 1 else "another is"
            text = f"{named(ranks)} of {binding.host} all run on {shared}, and {idle_cores} idle"
            yield PlacementFault("cores shared", ranks, text, unbind(binding.launcher))


def _blas(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks whose BLAS has more threads than they have cores, unless it has one each.

    More ranks than cores may be intended; one BLAS thread per rank is then the minimum.
    """
    ranks_by_count: dict[tuple[str, str], list[int]] = {}  # by count, and ranks if they share cores
    for ranks in _groups(bindings, node, "cores"):
        threads = [bindings[rank].blas_threads for rank in ranks]
        count = len(parse_core_list(bindings[ranks[0]].cores))
        if sum(threads) > count and max(threads) > 1:
            load = f"{sum(threads)} BLAS threads on {count} core{'s' * (count > 1)}"
            ranks_by_count.setdefault((load, named(ranks) * (len(ranks) > 1)), []).extend(ranks)
    for (load, shared), group in ranks_by_count.items():
        suffix = " each" * (len(group) > 1 and not shared)
        text = f"{named(group)} of {bindings[group[0]].host}: {load}{suffix}, so they take turns"
        yield PlacementFault("BLAS threads", tuple(group), text, FEWER_THREADS)


def _nics(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks whose UCX_NET_DEVICES names missing ports, one shared by all, or far ones."""
    host = bindings[node[0]].host
    faults_by_rank = {
        rank: bindings[rank].nics.faults for rank in node if bindings[rank].nics.faults
    }
    for problems in dict.fromkeys(faults_by_rank.values()):
        ranks = tuple(rank for rank in faults_by_rank if faults_by_rank[rank] == problems)
        text = f"{named(ranks)} of {host}: of what {UCX_DEVICES} names, {' and '.join(problems)}"
        yield PlacementFault("NICs named", ranks, text, EXISTING_PORTS)
    yield from _one_nic(bindings, node)
    ranks_with_remote_nic = tuple(rank for rank in node if bindings[rank].nics.remote)
    if ranks_with_remote_nic:
        nics = bindings[ranks_with_remote_nic[0]].nics
        text = (
            f"{named(ranks_with_remote_nic)} of {host}: {UCX_DEVICES} names a port on another NUMA "
            f"node than the nearest port; rank {ranks_with_remote_nic[0]} has "
            f"{', '.join(nics.named)}, and the nearest is {', '.join(nics.nearest)}"
        )
        yield PlacementFault("NICs far", ranks_with_remote_nic, text, OWN_NIC)


def _one_nic(bindings: Sequence[RankBinding], node: Sequence[int]) -> Iterator[PlacementFault]:
    """Yield the ranks of a node if all name the same port while others are idle."""
    nics = [bindings[rank].nics for rank in node]
    unnamed_ports = set(nics[0].ports) - set(nics[0].named)
    if len(node) > 1 and nics[0].named and unnamed_ports and len({r.named for r in nics}) == 1:
        names = ", ".join(nics[0].named)
        text = f"{named(node)} of {bindings[node[0]].host} all name {names} in {UCX_DEVICES}, and "
        text += (
            f"{', '.join(sorted(unnamed_ports))} {'are' if len(unnamed_ports) > 1 else 'is'} idle"
        )
        yield PlacementFault("NICs shared", tuple(node), text, OWN_NIC)
