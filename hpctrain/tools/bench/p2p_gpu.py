"""`hpctrain bench p2p --device gpu`: a message between two GPUs, on each available path.

    staged       GPU -> host -> wire -> host -> GPU          always
    cuda-aware   MPI is given pointers to GPU memory         if a trial succeeded
    gdr          the same, with adapters that read GPUs      if adapters may read GPUs
    ipc          the receiver copies from memory it maps     on one node, if IPC handles open

Between nodes the bandwidth is also shown as a share of the nominal rate of the adapter nearest to
each GPU, according to sysfs; the slower one of the two adapters counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.hardware import nics, pci
from hpctrain.tools.bench import base
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link, Request
from hpctrain.transport.paths import POINTER_PATHS, Path, path_between
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.tuning.measure import TimedLink
from hpctrain.world import World

COLUMNS = (
    base.SIZE_COLUMN,
    base.ALGORITHM_COLUMN,
    *base.TIME_COLUMNS,
    ("GB/s", base.number_column("algbw", ".3g")),
    ("of NIC", base.number_column("share_of_nic", ".0%")),
    base.CORRECT_COLUMN,
)


class MappedLink:
    """A link that sends notifications; the receiver then copies from the sender's memory."""

    def __init__(self, link: Link, memory: NodeMemory, neighbours: Sequence[int]):
        """Notify over `link`; `neighbours` are the ranks that share `memory`, in order."""
        self.rank, self._link, self._memory = link.rank, link, memory
        self._neighbours, self._notification = neighbours, np.zeros(1, np.uint8)

    def isend(self, x: xp.Array, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""
        xp.finish(x)
        return self._link.isend(self._notification if xp.on_device(x) else x, dest)

    def irecv(self, x: xp.Array, source: int) -> Request:
        """Start to fill `x` from rank `source`."""
        if not xp.on_device(x):
            return self._link.irecv(x, source)
        shared_array = self._memory.locate(x)
        assert shared_array is not None, "_mapped_pairs checks this"
        remote_array = shared_array.arrays[self._neighbours.index(source)]
        return _Copy(self._link.irecv(self._notification, source), x, remote_array)


class _Copy(NamedTuple):
    """A pending receive: it copies `source` into `x` after the notification."""

    notification: Request
    x: xp.Array
    source: xp.Array

    def wait(self) -> None:
        self.notification.wait()
        self.x[...] = self.source
        xp.finish(self.x)

    def done(self) -> bool:
        return self.notification.done()


def zeros_on_gpu(world: World, nbytes: int) -> xp.Array:
    """Return `nbytes` zeros (uint8) on this rank's GPU, mapped by its neighbours; collective."""
    if world.memory.gpu is not None:
        return world.memory.gpu.zeros(nbytes, np.uint8)
    return gpus.import_cupy().zeros(nbytes, np.uint8)


def pairs_by_path(world: World, source: int, target: int, x: xp.Array) -> list[RankPair]:
    """Return the pair of ranks once per path that is available for `x`; collective.

    Raises UsageError on all ranks if one of the two has no GPU.
    """
    ranks_without_gpu = [rank for rank in (source, target) if not world.places[rank].gpu]
    if ranks_without_gpu:
        raise UsageError(
            f"--device gpu: rank {ranks_without_gpu[0]} on {world.hosts[ranks_without_gpu[0]]} has "
            "no GPU; look at `hpctrain doctor` there, or name others with --ranks"
        )
    best_path = path_between(world.verdict, world.places[source], world.places[target])
    measured_paths: list[Path] = ["staged", *([best_path] if best_path in POINTER_PATHS else [])]
    pairs = [_pair_over_path(world, source, target, path) for path in measured_paths]
    return [*pairs, *_mapped_pairs(world, source, target, x)]


def _mapped_pairs(world: World, source: int, target: int, x: xp.Array) -> list[RankPair]:
    mapped_flags = world.gather("y" if world.memory.locate(x) is not None else "")
    link = world.threads.link_for("p2p ipc")
    if world.hosts[source] != world.hosts[target] or not (
        mapped_flags[source] and mapped_flags[target]
    ):
        return []
    neighbours = [rank for rank, rank_host in enumerate(world.hosts) if rank_host == world.host]
    return [RankPair(MappedLink(link, world.memory, neighbours), source, target, "ipc")]


def nominal_nic_rate(
    world: World, source: int, target: int, sysfs_root: File = pci.ROOT
) -> float | None:
    """Return the nominal GB/s of the slower adapter of two ranks; None within a node.

    Collective.
    """
    nearest_port = nics.nearest_port(
        nics.read_nics(sysfs_root), world.gpu.pci if world.gpu else "", sysfs_root
    )
    nominal_rates = world.gather(str(nearest_port.gbit_s or "") if nearest_port else "")
    if (
        world.hosts[source] == world.hosts[target]
        or not nominal_rates[source]
        or not nominal_rates[target]
    ):
        return None
    return min(float(nominal_rates[source]), float(nominal_rates[target])) / 8


def _pair_over_path(world: World, source: int, target: int, path: Path) -> RankPair:
    link = world.threads.link_for(f"p2p {path}")
    link.endpoint.traffic.set_paths([path] * world.size)
    return RankPair(link, source, target, path)


@dataclass(frozen=True)
class RankPair:
    """A pair of ranks; `peer` is None on all other ranks."""

    link: TimedLink
    source: int
    target: int
    path: str = "host"  #: taken by the messages

    @property
    def peer(self) -> int | None:
        return {self.source: self.target, self.target: self.source}.get(self.link.rank)
