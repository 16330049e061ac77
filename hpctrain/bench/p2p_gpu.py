"""`hpctrain bench p2p --device gpu`: a message between two GPUs, on each path that it may take.

    staged       GPU -> host -> wire -> host -> GPU          always
    cuda-aware   MPI is given pointers to GPU memory         where a trial went well
    gdr          the same, with adapters that read GPUs      where adapters may
    ipc          the receiver copies from memory it maps     on one node, where handles open

Between nodes the rate is also told as a share of what the adapter nearest to each GPU was built
for, as sysfs tells it; the slower of both ends counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from hpctrain import xp
from hpctrain.bench import output
from hpctrain.bench.ends import Ends
from hpctrain.errors import UsageError
from hpctrain.hardware import nics, pci
from hpctrain.transport import gpus
from hpctrain.transport.link import Link, Request
from hpctrain.transport.memory import Memory
from hpctrain.transport.paths import BY_POINTER, Path, path_to
from hpctrain.world import World

COLUMNS = (output.SIZE, output.WHO, *output.TIMES,
           ("GB/s", output.number("algbw", ".3g")),
           ("of NIC", output.number("share_of_nic", ".0%")), output.RIGHT)  # fmt: skip


class Mapped:
    """A link on which a message is a word that it is there: the receiver copies it by itself."""

    def __init__(self, link: Link, memory: Memory, neighbours: Sequence[int]):
        """Send words over `link`; `neighbours` are the ranks that share `memory`, in its order."""
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
        place = self._memory.place(x)
        assert place is not None, "looked at before"
        theirs = place.arrays[self._neighbours.index(source)]
        return _Copy(self._link.irecv(self._word, source), x, theirs)


class _Copy(NamedTuple):
    """A message under way: once its word is here, the memory of `source` is copied into `x`."""

    word: Request
    x: xp.Array
    source: xp.Array

    def wait(self) -> None:
        self.word.wait()
        self.x[...] = self.source
        xp.finish(self.x)


def buffer(world: World, nbytes: int) -> xp.Array:
    """Return zeros (nbytes,), uint8, on this rank's GPU, which neighbours see; collective."""
    if world.memory.gpu is not None:
        return world.memory.gpu.zeros(nbytes, np.uint8)
    return gpus.cupy_module().zeros(nbytes, np.uint8)


def ends(world: World, source: int, to: int, x: xp.Array) -> list[Ends]:
    """Return both ends of a link for each path that `x`, of `buffer`, may take; collective.

    Raises UsageError on all ranks if one of the two has no GPU.
    """
    without = [rank for rank in (source, to) if not world.places[rank].gpu]
    if without:
        raise UsageError(
            f"--device gpu: rank {without[0]} on {world.hosts[without[0]]} has no GPU; look at "
            "`hpctrain doctor` there, or name others with --ranks"
        )
    best = path_to(world.verdict, world.places[source], world.places[to])
    ways: list[Path] = ["staged", *([best] if best in BY_POINTER else [])]
    found = [_end(world, source, to, path) for path in ways]
    return [*found, *_mapped(world, source, to, x)]


def _mapped(world: World, source: int, to: int, x: xp.Array) -> list[Ends]:
    told = world.gather("y" if world.memory.place(x) is not None else "")
    link = world.link_for("p2p ipc")
    if world.hosts[source] != world.hosts[to] or not (told[source] and told[to]):
        return []
    neighbours = [rank for rank, host in enumerate(world.hosts) if host == world.host]
    return [Ends(Mapped(link, world.memory, neighbours), source, to, "ipc")]


def nic_rate(world: World, source: int, to: int, root: File = pci.ROOT) -> float | None:
    """Return the GB/s that the adapters of two ranks were built for; None within a node.

    Collective.
    """
    nearest = nics.near(nics.nics(root), world.gpu.pci if world.gpu else "", root)
    told = world.gather(str(nearest.gbit_s or "") if nearest else "")
    if world.hosts[source] == world.hosts[to] or not told[source] or not told[to]:
        return None
    return min(float(told[source]), float(told[to])) / 8


def _end(world: World, source: int, to: int, path: Path) -> Ends:
    link = world.link_for(f"p2p {path}")
    link.take([path] * world.size)
    return Ends(link, source, to, path)
