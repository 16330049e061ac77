"""Faults of placement that show only when the bindings of all ranks are compared.

    rank  host  told local  cores  BLAS  GPU     NIC
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
from hpctrain.hardware.pci import core_list
from hpctrain.transport.placement.nearest_nics import ASKS, NAMES, NEAR, UNKNOWN, Rails, from_table

_UNBIND = {
    "srun": "srun --cpus-per-task=N, and export SRUN_CPUS_PER_TASK=N",
    "openmpi": "mpirun --bind-to none",
    "hydra": "mpiexec -bind-to none",
}
FEWER = (
    "unset OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS, or set them to the cores of "
    "a rank"
)
OWN_GPU = (
    "srun --gpus-per-node=N --ntasks-per-node=N, where the site binds tasks to GPUs also "
    "--gpu-bind=none: every rank sees all GPUs and takes one by its local rank"
)
TELL = (
    "start ranks with `srun --mpi=pmix` (MPICH: pmi2), the MPI's own mpiexec or `hpctrain launch`"
)
OWN_NIC = f"unset {NAMES}: UCX takes a port near each rank; or export {ASKS}={NEAR} in its place"
THERE_IS = f"name ports that `hpctrain doctor` shows as up, or unset {NAMES}"
SHOWN = 4  # of the faults of one kind: a job may have hundreds of nodes


@dataclass(frozen=True)
class Seated:
    """The cores, GPU and ports of one rank, and its launcher; cores as in "0-3,8"."""

    host: str
    launcher: str  #: a key of launchers.TITLES
    local_rank: int | None  #: as the launcher gave it
    cores: str
    offered: int  #: cores of the node that the rank could be given
    blas_threads: int
    gpu: str = ""  #: its UUID
    gpus: int = 0  #: how many of the node's the job may use
    rails: Rails = UNKNOWN


@dataclass(frozen=True)
class Fault:
    """A fault of the placement of `ranks`, which are on one node, and its remedy."""

    name: str
    ranks: tuple[int, ...]
    seen: str
    remedy: str


def faults(seats: Sequence[Seated]) -> list[Fault]:
    """Return the faults of the placement of ranks 0, 1, ...; a cause comes before its effects."""
    result = []
    for ranks in _groups(seats, range(len(seats)), "host"):
        result += [*_local_ranks(seats, ranks), *_gpus(seats, ranks), *_cores(seats, ranks)]
        result += _blas(seats, ranks)
        if len(ranks) < len(seats):
            result += _nics(seats, ranks)
    return result


def ports(seats: Sequence[Seated]) -> str:
    """Return the line about network ports near the ranks, of one node of each kind.

    "" where there is no choice: one node, or a port on each.
    """
    nodes = list(_groups(seats, range(len(seats)), "host"))
    alike = Counter(
        _port_names(seats, ranks) for ranks in nodes if len(seats[ranks[0]].rails.ports) > 1
    )
    if len(nodes) < 2 or not alike:
        return ""
    of = [f"{n} node{'s' * (n > 1)}: {text}" for text, n in alike.most_common(SHOWN)]
    rest = f". And others, {len(alike) - SHOWN} kinds" * (len(alike) > SHOWN)
    note = seats[0].rails.note
    return f"NICs near local ranks, {'. '.join(of)}{rest}" + f"; {ASKS}: {note}" * bool(note)


def seated(table: Mapping[str, Any]) -> Seated:
    """Return the seat of a table that `asdict` made and JSON has carried."""
    return Seated(**{**table, "rails": from_table(table["rails"])})


def in_words(group: Sequence[Fault]) -> tuple[str, str]:
    """Return a description of some of the faults of one kind, and their remedy."""
    texts = [fault.seen for fault in group]
    rest = f"; and {len(texts) - SHOWN} more like this" * (len(texts) > SHOWN)
    return "; ".join(texts[:SHOWN]) + rest, group[0].remedy


def by_kind(all_faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return `all_faults` grouped by kind, in the order of the first fault of each."""
    names = dict.fromkeys(fault.name for fault in all_faults)
    return [[fault for fault in all_faults if fault.name == name] for name in names]


def unbind(launcher: str) -> str:
    """Return the advice that gives ranks cores of their own; `launcher`: a key of TITLES."""
    own = _UNBIND.get(launcher, "a launcher that binds no cores")
    return (
        f"{own}, no taskset or numactl before the command; or start with `hpctrain launch`, and "
        "ranks share the cores out"
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


def _groups(seats: Sequence[Seated], ranks: Sequence[int], field: str) -> Iterator[tuple[int, ...]]:
    """Yield the groups of `ranks` that agree in `field`, in the order of their first rank."""
    for value in dict.fromkeys(getattr(seats[rank], field) for rank in ranks):
        yield tuple(rank for rank in ranks if getattr(seats[rank], field) == value)


def _port_names(seats: Sequence[Seated], node: Sequence[int]) -> str:
    """Return the ports of a node by local ranks, as in "0-1 mlx5_0:1; 2-3 mlx5_1:1"."""
    by_ports: dict[str, list[int]] = {}
    for local_rank, rank in enumerate(node):
        by_ports.setdefault(seats[rank].rails.told, []).append(local_rank)
    return "; ".join(f"{ranges(ranks)} {names}" for names, ranks in by_ports.items())


def _local_ranks(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks of equal local rank: it is that of the daemon which started them."""
    for ranks in _groups(seats, node, "local_rank"):
        seat = seats[ranks[0]]
        if len(ranks) > 1 and seat.local_rank is not None:
            whose = "SLURM_LOCALID is its daemon's" if seat.launcher == "srun" else "a daemon's"
            yield Fault(
                "local ranks",
                ranks,
                f"{named(ranks)} of {seat.host} were all told local rank {seat.local_rank} by "
                f"{TITLES[seat.launcher]} ({whose}), so they take the same cores and GPU",
                TELL,
            )


def _gpus(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks that share a GPU while another GPU of the job on the node is idle."""
    with_gpu = [rank for rank in node if seats[rank].gpu]
    used = {seats[rank].gpu for rank in with_gpu}
    idle = max((seats[rank].gpus for rank in with_gpu), default=0) - len(used)
    for ranks in _groups(seats, with_gpu, "gpu"):
        if len(ranks) > 1 and idle > 0:
            seat = seats[ranks[0]]
            idle_gpus = f"{idle} of its GPUs are" if idle > 1 else "another of its GPUs is"
            text = f"{named(ranks)} share {seat.gpu} of {seat.host}, and {idle_gpus} idle"
            yield Fault("GPUs shared", ranks, text, OWN_GPU)


def _cores(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks that outnumber their cores while other cores of the node are idle."""
    used = {core for rank in node for core in core_list(seats[rank].cores)}
    idle = max(seats[rank].offered for rank in node) - len(used)
    for ranks in _groups(seats, node, "cores"):
        seat = seats[ranks[0]]
        count = len(core_list(seat.cores))
        if len(ranks) > count and idle > 0:
            shared = f"core{'s' * (count > 1)} {seat.cores}"
            idle_cores = f"{idle} others are" if idle > 1 else "another is"
            text = f"{named(ranks)} of {seat.host} all run on {shared}, and {idle_cores} idle"
            yield Fault("cores shared", ranks, text, unbind(seat.launcher))


def _blas(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks whose BLAS has more threads than they have cores, unless it has one each.

    More ranks than cores may be intended; one BLAS thread per rank is then the minimum.
    """
    wrong: dict[tuple[str, str], list[int]] = {}  # by count, and ranks if they share cores
    for ranks in _groups(seats, node, "cores"):
        threads = [seats[rank].blas_threads for rank in ranks]
        count = len(core_list(seats[ranks[0]].cores))
        if sum(threads) > count and max(threads) > 1:
            all_of = f"{sum(threads)} BLAS threads on {count} core{'s' * (count > 1)}"
            wrong.setdefault((all_of, named(ranks) * (len(ranks) > 1)), []).extend(ranks)
    for (all_of, shared), group in wrong.items():
        suffix = " each" * (len(group) > 1 and not shared)
        text = f"{named(group)} of {seats[group[0]].host}: {all_of}{suffix}, so they take turns"
        yield Fault("BLAS threads", tuple(group), text, FEWER)


def _nics(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks whose UCX_NET_DEVICES names missing ports, one shared by all, or far ones."""
    host = seats[node[0]].host
    wrong = {rank: seats[rank].rails.wrong for rank in node if seats[rank].rails.wrong}
    for problems in dict.fromkeys(wrong.values()):
        ranks = tuple(rank for rank in wrong if wrong[rank] == problems)
        text = f"{named(ranks)} of {host}: of what {NAMES} names, {' and '.join(problems)}"
        yield Fault("NICs named", ranks, text, THERE_IS)
    yield from _one_nic(seats, node)
    far = tuple(rank for rank in node if seats[rank].rails.far)
    if far:
        rails = seats[far[0]].rails
        text = (
            f"{named(far)} of {host}: {NAMES} names a port on another NUMA node than the one near "
            f"the rank's GPU or cores; rank {far[0]} has {', '.join(rails.named)}, and near is "
            f"{', '.join(rails.near)}"
        )
        yield Fault("NICs far", far, text, OWN_NIC)


def _one_nic(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks of a node if all name the same port while others are idle."""
    rails = [seats[rank].rails for rank in node]
    idle = set(rails[0].ports) - set(rails[0].named)
    if len(node) > 1 and rails[0].named and idle and len({r.named for r in rails}) == 1:
        names = ", ".join(rails[0].named)
        text = f"{named(node)} of {seats[node[0]].host} all name {names} in {NAMES}, and "
        text += f"{', '.join(sorted(idle))} {'are' if len(idle) > 1 else 'is'} idle"
        yield Fault("NICs shared", tuple(node), text, OWN_NIC)
