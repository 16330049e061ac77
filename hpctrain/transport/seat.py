"""A rank's seat: its cores and its GPU, taken before MPI starts; afterwards all are told.

    launched -> GPUs in sight -> one of them -> the cores near it -> bound, made current
             -> the network adapters near it -> MPI

Only then can ranks tell each other their nodes, cores and the names of their GPUs, and only then is
it seen what is wrong with them together: seats.py.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain import launchers
from hpctrain.errors import UsageError
from hpctrain.hardware import pci
from hpctrain.launchers import Launched
from hpctrain.transport import first, gpus, rails, verdicts
from hpctrain.transport.bind import Binding, bind
from hpctrain.transport.link import Link
from hpctrain.transport.paths import STAGED, Place, Verdict, classes, from_table
from hpctrain.transport.rails import UNKNOWN, Rails, Spot
from hpctrain.transport.seats import Seated, by_kind, faults, in_words, ports, ranges, seated

logger = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Seat:
    """Where this rank computes: its cores; its GPU, if it has one, of how many of the job's."""

    launched: Launched
    binding: Binding
    gpu: gpus.Gpu | None = None
    gpus: int = 0
    rails: Rails = UNKNOWN

    def told(self, host: str) -> Seated:
        """Return what the other ranks are told."""
        by, binding, gpu = self.launched, self.binding, self.gpu.uuid if self.gpu else ""
        cores, threads = ranges(binding.cores), binding.blas_threads
        offered, of_job = binding.offered, self.gpus
        return Seated(
            host, by.name, by.local_rank, cores, offered, threads, gpu, of_job, self.rails
        )


def node(gather: first.Gather, rank: int) -> str:
    """Return the name of this rank's node; collective."""
    mine = f"{socket.gethostname()}\n{os.environ.get('SLURMD_NODENAME', '')}"
    hosts, slurm = zip(*(one.decode().split("\n") for one in gather(mine.encode())), strict=True)
    return launchers.nodes(hosts, slurm)[rank]


def take(launched: Launched, device: gpus.Device) -> Seat:
    """Bind this process to its cores and make its GPU current; return both.

    Raises UsageError if `device` is "gpu" and none is to be had; "auto" then takes the CPU. And if
    HPCTRAIN_NIC makes no sense.
    """
    seen = gpus.visible(device)
    if not seen:
        binding = bind(launched)
        return Seat(launched, binding, rails=rails.take(launched, Spot(cores=binding.cores)))
    choice = gpus.gpu_for(launched, len(seen), gpus.listed(os.environ))
    gpu = seen[choice.ordinal]
    cores = [pci.near_cores(one.pci) for one in seen]
    binding = bind(launched, near=gpus.near(launched, choice.ordinal, cores))
    gpus.use(choice.ordinal)
    spot = Spot(tuple(one.pci for one in seen), choice.ordinal)
    found = rails.take(launched, spot)
    logger.debug("%s: %s; %s; NIC: %s", gpu, choice.note, binding.note, found.note or found.told)
    return Seat(launched, binding, gpu, gpus.of_job(os.environ, len(seen)), found)


def told(
    link: Link, gather: first.Gather, host: str, seat: Seat
) -> tuple[tuple[Place, ...], Verdict, tuple[Seated, ...]]:
    """Return where each rank's arrays lie, which way they take, and all seats; collective.

    They are the same on all ranks. `link` takes that way, once its first messages were seen to
    arrive. Rank 0 warns of what is wrong with the seats. MPI was started. Raises UsageError, on all
    ranks, if the variable that overrides the verdict makes no sense.
    """
    mine = {"seat": asdict(seat.told(host))}
    said = [json.loads(one) for one in gather(json.dumps(mine | _known(seat)).encode())]
    for one in said:
        if "refused" in one:
            raise UsageError(one["refused"])
    seats = tuple(seated(one["seat"]) for one in said)
    if link.rank == 0:
        if wrong := by_kind(faults(seats)):
            logger.warning("%s", "\n".join(": ".join(in_words(some)) for some in wrong))
        if line := ports(seats):
            logger.info("%s", line)
    places = tuple(Place(one.host, one.gpu) for one in seats)
    known, unproven = next(
        ((from_table(one["verdict"]), one["unproven"]) for one in said if "verdict" in one),
        (STAGED, ()),
    )
    verdict = first.taken(link, gather, places, known)
    if link.rank == 0:
        _say([place for place in places if place.gpu], verdict, unproven)
    return places, verdict, seats


def _say(places: Sequence[Place], verdict: Verdict, unproven: Sequence[str]) -> None:
    """Say which way memory takes between the GPUs at `places`, and that ranks share some."""
    there = classes(places)
    if lacking := [name.replace("_", " ") for name in there if name in unproven]:
        logger.warning(
            "GPU memory goes through the host (%s), since no trial showed that this MPI takes "
            "pointers to it: %s", ", ".join(lacking), verdicts.UNTRIED,
        )  # fmt: skip
    ways = ", ".join(f"{name.replace('_', ' ')} {getattr(verdict, name)}" for name in there)
    if ways:
        logger.info("GPU memory between ranks: %s; %s", ways, verdict.reason)
    if "same_gpu" in there:
        counts = Counter(places)
        most = max(counts.values())
        logger.info("GPUs shared: %d ranks on %d, up to %d each", len(places), len(counts), most)


def _known(seat: Seat) -> dict[str, Any]:
    if seat.gpu is None:
        return {}
    try:
        found = verdicts.known(os.environ)
        return {"verdict": asdict(found.verdict), "unproven": found.unproven}
    except UsageError as error:
        return {"refused": str(error)}
