"""`hpctrain bench p2p --device gpu`: a message between two GPUs, on each path that it may take.

    staged       GPU -> host -> wire -> host -> GPU          always
    cuda-aware   MPI is given pointers to GPU memory         where a trial went well
    gdr          the same, with adapters that read GPUs      where adapters may

Between nodes the rate is also told as a share of what the adapter nearest to each GPU was built
for, as sysfs tells it; the slower of both ends counts.
"""

from __future__ import annotations

from pathlib import Path as File

from hpctrain.bench import output
from hpctrain.bench.ends import Ends
from hpctrain.errors import UsageError
from hpctrain.hardware import nics, pci
from hpctrain.transport.paths import BY_POINTER, Path, path_to
from hpctrain.world import World

COLUMNS = (output.SIZE, output.WHO, *output.TIMES,
           ("GB/s", output.number("algbw", ".3g")),
           ("of NIC", output.number("share_of_nic", ".0%")), output.RIGHT)  # fmt: skip


def ends(world: World, source: int, to: int) -> list[Ends]:
    """Return both ends of a link for each path between two ranks' GPUs; collective.

    Raises UsageError on all ranks if one of them has none.
    """
    without = [rank for rank in (source, to) if not world.places[rank].gpu]
    if without:
        raise UsageError(
            f"--device gpu: rank {without[0]} on {world.hosts[without[0]]} has no GPU; look at "
            "`hpctrain doctor` there, or name others with --ranks"
        )
    best = path_to(world.verdict, world.places[source], world.places[to])
    ways: list[Path] = ["staged", *([best] if best in BY_POINTER else [])]
    return [_end(world, source, to, path) for path in ways]


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
