"""`hpctrain bench p2p --device gpu`: a message between two GPUs, on each available path.

    staged       GPU -> host -> wire -> host -> GPU          always
    cuda-aware   MPI is given pointers to GPU memory         where a trial went well
    gdr          the same, with adapters that read GPUs      where adapters may
    ipc          the receiver copies from memory it maps     on one node, where handles open

Between nodes the rate is also shown as a share of the nominal rate of the adapter nearest to each
GPU, according to sysfs; the slower of both ends counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from hpctrain.bench import output
from hpctrain.bench.rank_pair import RankPair
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.hardware import nics, pci
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link, Request
from hpctrain.transport.paths import BY_POINTER, Path, path_to
from hpctrain.transport.shared_memory.host import Memory
from hpctrain.world import World

COLUMNS = (output.SIZE, output.ALGORITHM, *output.TIMES,
           ("GB/s", output.number("algbw", ".3g")),
           ("of NIC", output.number("share_of_nic", ".0%")), output.CORRECT)  # fmt: skip


class MappedLink:
    """A link whose messages are only a notification: the receiver copies the sender's memory."""

    def __init__(self, link: Link, memory: Memory, neighbours: Sequence[int]):
        """Notify over `link`; `neighbours` are the ranks that share `memory`, in its order."""
        self.rank, self._link, self._memory = link.rank, link, memory
        self._neighbours, self._word = neighbours, np.zeros(1, np.uint8)

    def isend(self, x: xp.Array, to: int) -> Request:
        """Start to send `x` to rank `to`."""
        xp.finish(x)
        return self._link.isend(self._word if xp.on_device(x) else x, to)

    def irecv(self, x: xp.Array, source: int) -> Request:
        """Start to fill `x` from rank `source`."""
        if not xp.on_device(x):
            return self._link.irecv(x, source)
        place = self._memory.locate(x)
        assert place is not None, "looked at before"
        remote_array = place.arrays[self._neighbours.index(source)]
        return _Copy(self._link.irecv(self._word, source), x, remote_array)


class _Copy(NamedTuple):
    """A pending message: after its notification, the memory of `source` is copied into `x`."""

    word: Request
    x: xp.Array
    source: xp.Array

    def wait(self) -> None:
        self.word.wait()
        self.x[...] = self.source
        xp.finish(self.x)


def buffer(world: World, nbytes: int) -> xp.Array:
    """Return zeros (nbytes,), uint8, on this rank's GPU, visible to neighbours; collective."""
    if world.memory.gpu is not None:
        return world.memory.gpu.zeros(nbytes, np.uint8)
    return gpus.cupy_module().zeros(nbytes, np.uint8)


def pairs(world: World, source: int, to: int, x: xp.Array) -> list[RankPair]:
    """Return the pair of ranks for each path available to `x`, of `buffer`; collective.

    Raises UsageError on all ranks if one of the two has no GPU.
    """
    ranks_without_gpu = [rank for rank in (source, to) if not world.places[rank].gpu]
    if ranks_without_gpu:
        raise UsageError(
            f"--device gpu: rank {ranks_without_gpu[0]} on {world.hosts[ranks_without_gpu[0]]} has "
            "no GPU; look at `hpctrain doctor` there, or name others with --ranks"
        )
    best_path = path_to(world.verdict, world.places[source], world.places[to])
    measured_paths: list[Path] = ["staged", *([best_path] if best_path in BY_POINTER else [])]
    result = [_pair_on(world, source, to, path) for path in measured_paths]
    return [*result, *_mapped_pairs(world, source, to, x)]


def _mapped_pairs(world: World, source: int, to: int, x: xp.Array) -> list[RankPair]:
    mapped_on_ranks = world.gather("y" if world.memory.locate(x) is not None else "")
    link = world.link_for("p2p ipc")
    if world.hosts[source] != world.hosts[to] or not (
        mapped_on_ranks[source] and mapped_on_ranks[to]
    ):
        return []
    neighbours = [rank for rank, host in enumerate(world.hosts) if host == world.host]
    return [RankPair(MappedLink(link, world.memory, neighbours), source, to, "ipc")]


def nic_rate(world: World, source: int, to: int, root: File = pci.ROOT) -> float | None:
    """Return the nominal GB/s of the adapters of two ranks; None within a node.

    Collective.
    """
    nearest = nics.nearest_port(nics.nics(root), world.gpu.pci if world.gpu else "", root)
    rates = world.gather(str(nearest.gbit_s or "") if nearest else "")
    if world.hosts[source] == world.hosts[to] or not rates[source] or not rates[to]:
        return None
    return min(float(rates[source]), float(rates[to])) / 8


def _pair_on(world: World, source: int, to: int, path: Path) -> RankPair:
    link = world.link_for(f"p2p {path}")
    link.set_paths([path] * world.size)
    return RankPair(link, source, to, path)
