"""A rank's seat: its cores and its GPU, taken before MPI starts; afterwards all are told.

    launched -> GPUs in sight -> one of them -> the cores near it -> bound, made current -> MPI

Only then can ranks tell each other their nodes and the names of their GPUs, and only then is it
seen whether two ranks sit on one GPU while another is idle.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.hardware import pci
from hpctrain.launchers import Launched
from hpctrain.transport import first, gpus, verdicts
from hpctrain.transport.bind import Binding, bind
from hpctrain.transport.link import Link
from hpctrain.transport.paths import STAGED, Place, Verdict

logger = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Seat:
    """Where this rank computes: its cores; its GPU, if it has one, and how many it sees."""

    binding: Binding
    gpu: gpus.Gpu | None = None
    seen: int = 0


def take(launched: Launched, device: gpus.Device) -> Seat:
    """Bind this process to its cores and make its GPU current; return both.

    Raises UsageError if `device` is "gpu" and none is to be had; "auto" then takes the CPU.
    """
    seen = gpus.visible(device)
    if not seen:
        return Seat(bind(launched))
    choice = gpus.gpu_for(launched, len(seen), gpus.listed(os.environ))
    gpu = seen[choice.ordinal]
    cores = [pci.near_cores(one.pci) for one in seen]
    binding = bind(launched, near=gpus.near(launched, choice.ordinal, cores))
    gpus.use(choice.ordinal)
    logger.debug("%s: %s; %s", gpu, choice.note, binding.note)
    return Seat(binding, gpu, len(seen))


def told(
    link: Link, gather: first.Gather, hosts: Sequence[str], seat: Seat
) -> tuple[tuple[Place, ...], Verdict]:
    """Return where each rank's arrays lie, and which way they take, the same on all; collective.

    `link` takes that way, once its first messages were seen to arrive. Rank 0 warns of GPUs that
    are doubled. MPI was started. Raises UsageError, on all ranks, if the variable that overrides
    the verdict makes no sense.
    """
    mine = {"seen": seat.seen, "gpu": seat.gpu.uuid if seat.gpu else ""}
    said = [json.loads(one) for one in gather(json.dumps(mine | _known(seat)).encode())]
    for one in said:
        if "refused" in one:
            raise UsageError(one["refused"])
    places = tuple(Place(host, one["gpu"]) for host, one in zip(hosts, said, strict=True))
    for sentence in crowded(places, [one["seen"] for one in said]) if link.rank == 0 else ():
        logger.warning("%s", sentence)
    known = next((Verdict(**one["verdict"]) for one in said if "verdict" in one), STAGED)
    return places, first.taken(link, gather, places, known)


def _known(seat: Seat) -> dict[str, Any]:
    if seat.gpu is None:
        return {}
    try:
        return {"verdict": asdict(verdicts.known(os.environ).verdict)}
    except UsageError as error:
        return {"refused": str(error)}


def crowded(places: Sequence[Place], seen: Sequence[int]) -> list[str]:
    """Return a sentence for each GPU with several ranks although its node has others unused.

    `seen`: how many GPUs each rank sees.
    """
    told = []
    for place in dict.fromkeys(place for place in places if place.gpu):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        used = {other.gpu for other in places if other.node == place.node} - {""}
        idle = max(seen[rank] for rank in ranks) - len(used)
        if len(ranks) > 1 and idle > 0:
            told.append(
                f"ranks {', '.join(map(str, ranks))} share {place.gpu} of {place.node}, and "
                f"{idle} of its GPUs are idle: the launcher does not tell local ranks, or "
                "numbers them wrongly"
            )
    return told
