"""The seats of all ranks side by side: what is wrong with them, and no rank can see alone.

    rank  host  told local  cores  BLAS  GPU     NIC
    0     n1    0           0-7    8     GPU-5a  mlx5_0:1   both were told local rank 0: one GPU
    1     n1    0           0-7    8     GPU-5a  mlx5_0:1   idles
    2     n2    0           0      1             mlx5_0:1   both run on core 0, and others are
    3     n2    1           0      1             mlx5_0:1   idle; both name one port of several

Ranks tell each other where they sit once, when MPI has started; all this costs a run is one look.
Of adapters nothing is said where all ranks are on one node: they need none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hpctrain.hardware.pci import core_list
from hpctrain.launchers import TITLES
from hpctrain.transport.rails import ASKS, NAMES, NEAR, UNKNOWN, Rails, from_table

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
    """Where one rank sits, and what its launcher said of it; cores as in "0-3,8"."""

    host: str
    launcher: str  #: a key of launchers.TITLES
    local_rank: int | None  #: as the launcher told it
    cores: str
    offered: int  #: cores of the node that the rank could be given
    blas_threads: int
    gpu: str = ""  #: its UUID
    gpus: int = 0  #: how many of the node's the job may use
    rails: Rails = UNKNOWN


@dataclass(frozen=True)
class Fault:
    """What is wrong with the seats of `ranks`, which are on one node, and what helps."""

    name: str
    ranks: tuple[int, ...]
    seen: str
    remedy: str


def faults(seats: Sequence[Seated]) -> list[Fault]:
    """Return what is wrong with the seats of ranks 0, 1, ...; what causes others comes first."""
    found = []
    for ranks in _together(seats, range(len(seats)), "host"):
        found += [*_local_ranks(seats, ranks), *_gpus(seats, ranks), *_cores(seats, ranks)]
        found += _blas(seats, ranks)
        if len(ranks) < len(seats):
            found += _nics(seats, ranks)
    return found


def ports(seats: Sequence[Seated]) -> str:
    """Return the line about network ports near the ranks, of one node of each kind.

    "" where there is no choice: one node, or a port on each.
    """
    nodes = list(_together(seats, range(len(seats)), "host"))
    alike = Counter(_told(seats, ranks) for ranks in nodes if len(seats[ranks[0]].rails.ports) > 1)
    if len(nodes) < 2 or not alike:
        return ""
    of = [f"{n} node{'s' * (n > 1)}: {told}" for told, n in alike.most_common(SHOWN)]
    more = f". And others, {len(alike) - SHOWN} kinds" * (len(alike) > SHOWN)
    note = seats[0].rails.note
    return f"NICs near local ranks, {'. '.join(of)}{more}" + f"; {ASKS}: {note}" * bool(note)


def seated(table: Mapping[str, Any]) -> Seated:
    """Return what `asdict` made a table of, and JSON has carried."""
    return Seated(**{**table, "rails": from_table(table["rails"])})


def in_words(found: Sequence[Fault]) -> tuple[str, str]:
    """Return what was seen of faults of one kind, some of them, and what helps."""
    seen = [one.seen for one in found]
    more = f"; and {len(seen) - SHOWN} more like this" * (len(seen) > SHOWN)
    return "; ".join(seen[:SHOWN]) + more, found[0].remedy


def by_kind(found: Sequence[Fault]) -> list[list[Fault]]:
    """Return `found`, those of one kind together, in the order of the first of each."""
    names = dict.fromkeys(one.name for one in found)
    return [[one for one in found if one.name == name] for name in names]


def unbind(launcher: str) -> str:
    """Return how ranks get cores of their own; `launcher`: a key of launchers.TITLES."""
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


def _together(
    seats: Sequence[Seated], ranks: Sequence[int], what: str
) -> Iterator[tuple[int, ...]]:
    """Yield those of `ranks` that have the same `what`, in the order of their first."""
    for value in dict.fromkeys(getattr(seats[rank], what) for rank in ranks):
        yield tuple(rank for rank in ranks if getattr(seats[rank], what) == value)


def _told(seats: Sequence[Seated], node: Sequence[int]) -> str:
    """Return "0-1 mlx5_0:1; 2-3 mlx5_1:1", by local ranks."""
    told: dict[str, list[int]] = {}
    for local_rank, rank in enumerate(node):
        told.setdefault(seats[rank].rails.told, []).append(local_rank)
    return "; ".join(f"{ranges(ranks)} {names}" for names, ranks in told.items())


def _local_ranks(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield those that were told one local rank: it is that of a daemon which started them."""
    for ranks in _together(seats, node, "local_rank"):
        told = seats[ranks[0]]
        if len(ranks) > 1 and told.local_rank is not None:
            whose = "SLURM_LOCALID is its daemon's" if told.launcher == "srun" else "a daemon's"
            yield Fault(
                "local ranks",
                ranks,
                f"{named(ranks)} of {told.host} were all told local rank {told.local_rank} by "
                f"{TITLES[told.launcher]} ({whose}), so they take the same cores and GPU",
                TELL,
            )


def _gpus(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield those that share a GPU although others that the job has on the node are idle."""
    with_gpu = [rank for rank in node if seats[rank].gpu]
    used = {seats[rank].gpu for rank in with_gpu}
    idle = max((seats[rank].gpus for rank in with_gpu), default=0) - len(used)
    for ranks in _together(seats, with_gpu, "gpu"):
        if len(ranks) > 1 and idle > 0:
            one = seats[ranks[0]]
            others = f"{idle} of its GPUs are" if idle > 1 else "another of its GPUs is"
            seen = f"{named(ranks)} share {one.gpu} of {one.host}, and {others} idle"
            yield Fault("GPUs shared", ranks, seen, OWN_GPU)


def _cores(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield those that are more than their cores although others of the node are idle."""
    used = {core for rank in node for core in core_list(seats[rank].cores)}
    idle = max(seats[rank].offered for rank in node) - len(used)
    for ranks in _together(seats, node, "cores"):
        one = seats[ranks[0]]
        count = len(core_list(one.cores))
        if len(ranks) > count and idle > 0:
            what = f"core{'s' * (count > 1)} {one.cores}"
            others = f"{idle} others are" if idle > 1 else "another is"
            seen = f"{named(ranks)} of {one.host} all run on {what}, and {others} idle"
            yield Fault("cores shared", ranks, seen, unbind(one.launcher))


def _blas(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield those whose BLAS has more threads than they have cores, where it is not their number.

    More ranks than cores may be meant; then one thread each is all there can be.
    """
    wrong: dict[tuple[str, str], list[int]] = {}  # by what, and whose: ranks on their own are alike
    for ranks in _together(seats, node, "cores"):
        threads = [seats[rank].blas_threads for rank in ranks]
        count = len(core_list(seats[ranks[0]].cores))
        if sum(threads) > count and max(threads) > 1:
            all_of = f"{sum(threads)} BLAS threads on {count} core{'s' * (count > 1)}"
            wrong.setdefault((all_of, named(ranks) * (len(ranks) > 1)), []).extend(ranks)
    for (all_of, shared), found in wrong.items():
        each = " each" * (len(found) > 1 and not shared)
        seen = f"{named(found)} of {seats[found[0]].host}: {all_of}{each}, so they take turns"
        yield Fault("BLAS threads", tuple(found), seen, FEWER)


def _nics(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield those whose UCX_NET_DEVICES names what is not there, what all share, what is far."""
    host = seats[node[0]].host
    wrong = {rank: seats[rank].rails.wrong for rank in node if seats[rank].rails.wrong}
    for what in dict.fromkeys(wrong.values()):
        ranks = tuple(rank for rank in wrong if wrong[rank] == what)
        seen = f"{named(ranks)} of {host}: of what {NAMES} names, {' and '.join(what)}"
        yield Fault("NICs named", ranks, seen, THERE_IS)
    yield from _one_nic(seats, node)
    far = tuple(rank for rank in node if seats[rank].rails.far)
    if far:
        one = seats[far[0]].rails
        seen = (
            f"{named(far)} of {host}: {NAMES} names a port on another NUMA node than the one near "
            f"the rank's GPU or cores; rank {far[0]} has {', '.join(one.named)}, and near is "
            f"{', '.join(one.near)}"
        )
        yield Fault("NICs far", far, seen, OWN_NIC)


def _one_nic(seats: Sequence[Seated], node: Sequence[int]) -> Iterator[Fault]:
    """Yield the ranks of a node if all name the same port although others are idle."""
    told = [seats[rank].rails for rank in node]
    idle = set(told[0].ports) - set(told[0].named)
    if len(node) > 1 and told[0].named and idle and len({rails.named for rails in told}) == 1:
        which = ", ".join(told[0].named)
        seen = f"{named(node)} of {seats[node[0]].host} all name {which} in {NAMES}, and "
        seen += f"{', '.join(sorted(idle))} {'are' if len(idle) > 1 else 'is'} idle"
        yield Fault("NICs shared", tuple(node), seen, OWN_NIC)
