"""The placement of a rank: cores and GPU, set before MPI_Init; afterwards all ranks compare it.

    launched -> visible GPUs -> one of them -> the cores near it -> bound, made current
             -> the network adapters near it -> MPI

Only then can ranks exchange their nodes, cores and the names of their GPUs, which shows the faults
of the placement as a whole: check.py.
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

from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import Launched
from hpctrain.hardware import pci
from hpctrain.transport.device import gpus
from hpctrain.transport.gpu_probe import verdicts, verify
from hpctrain.transport.link import Link
from hpctrain.transport.paths import STAGED, RankPlace, Verdict, classes, from_table
from hpctrain.transport.placement import nearest_nics
from hpctrain.transport.placement.check import (
    Seated,
    by_kind,
    faults,
    in_words,
    ports,
    ranges,
    seated,
)
from hpctrain.transport.placement.core_binding import Binding, bind
from hpctrain.transport.placement.nearest_nics import UNKNOWN, Rails, Spot

logger = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Seat:
    """The cores of this rank, its GPU if it has one, and the number of GPUs of the job here."""

    launched: Launched
    binding: Binding
    gpu: gpus.Gpu | None = None
    gpus: int = 0
    rails: Rails = UNKNOWN

    def as_seated(self, host: str) -> Seated:
        """Return the record of this placement that the other ranks get."""
        by, binding, gpu = self.launched, self.binding, self.gpu.uuid if self.gpu else ""
        cores, threads = ranges(binding.cores), binding.blas_threads
        offered, of_job = binding.offered, self.gpus
        return Seated(
            host, by.name, by.local_rank, cores, offered, threads, gpu, of_job, self.rails
        )


def node(gather: verify.Gather, rank: int) -> str:
    """Return the name of this rank's node; collective."""
    local = f"{socket.gethostname()}\n{os.environ.get('SLURMD_NODENAME', '')}"
    hosts, slurm = zip(*(text.decode().split("\n") for text in gather(local.encode())), strict=True)
    return launchers.nodes(hosts, slurm)[rank]


def take(launched: Launched, device: gpus.Device) -> Seat:
    """Bind this process to its cores and make its GPU current; return both.

    Raises UsageError if `device` is "gpu" and none is available ("auto" then takes the CPU), and
    if HPCTRAIN_NIC is invalid.
    """
    visible = gpus.visible(device)
    if not visible:
        binding = bind(launched)
        return Seat(launched, binding, rails=nearest_nics.take(launched, Spot(cores=binding.cores)))
    choice = gpus.gpu_for(launched, len(visible), gpus.listed(os.environ))
    gpu = visible[choice.ordinal]
    cores = [pci.near_cores(g.pci) for g in visible]
    binding = bind(launched, gpu_cores=gpus.gpu_cores(launched, choice.ordinal, cores))
    gpus.use(choice.ordinal)
    spot = Spot(tuple(g.pci for g in visible), choice.ordinal)
    nics = nearest_nics.take(launched, spot)
    logger.debug("%s: %s; %s; NIC: %s", gpu, choice.note, binding.note, nics.note or nics.told)
    return Seat(launched, binding, gpu, gpus.of_job(os.environ, len(visible)), nics)


def told(
    link: Link, gather: verify.Gather, host: str, seat: Seat
) -> tuple[tuple[RankPlace, ...], Verdict, tuple[Seated, ...]]:
    """Return the places of all ranks' arrays, the paths between them, and all seats; collective.

    They are the same on all ranks. `link` uses these paths once its first messages have arrived
    intact. Rank 0 warns of faults of the placement. MPI was started. Raises UsageError, on all
    ranks, if the variable that overrides the verdict is invalid.
    """
    local = {"seat": asdict(seat.as_seated(host))}
    reports = [json.loads(text) for text in gather(json.dumps(local | _remembered(seat)).encode())]
    for report in reports:
        if "refused" in report:
            raise UsageError(report["refused"])
    seats = tuple(seated(report["seat"]) for report in reports)
    if link.rank == 0:
        if wrong := by_kind(faults(seats)):
            logger.warning("%s", "\n".join(": ".join(in_words(group)) for group in wrong))
        if line := ports(seats):
            logger.info("%s", line)
    places = tuple(RankPlace(s.host, s.gpu) for s in seats)
    remembered, unproven = next(
        ((from_table(r["verdict"]), r["unproven"]) for r in reports if "verdict" in r),
        (STAGED, ()),
    )
    verdict = verify.verified(link, gather, places, remembered)
    if link.rank == 0:
        _log_paths([place for place in places if place.gpu], verdict, unproven)
    return places, verdict, seats


def _log_paths(places: Sequence[RankPlace], verdict: Verdict, unproven: Sequence[str]) -> None:
    """Log the path of memory between the GPUs at `places`, and whether ranks share GPUs."""
    present = classes(places)
    if lacking := [name.replace("_", " ") for name in present if name in unproven]:
        logger.warning(
            "GPU memory goes through the host (%s), since no trial showed that this MPI takes "
            "pointers to it: %s", ", ".join(lacking), verdicts.UNTRIED,
        )  # fmt: skip
    ways = ", ".join(f"{name.replace('_', ' ')} {getattr(verdict, name)}" for name in present)
    if ways:
        logger.info("GPU memory between ranks: %s; %s", ways, verdict.reason)
    if "same_gpu" in present:
        counts = Counter(places)
        largest = max(counts.values())
        logger.info("GPUs shared: %d ranks on %d, up to %d each", len(places), len(counts), largest)


def _remembered(seat: Seat) -> dict[str, Any]:
    if seat.gpu is None:
        return {}
    try:
        remembered = verdicts.known(os.environ)
        return {"verdict": asdict(remembered.verdict), "unproven": remembered.unproven}
    except UsageError as error:
        return {"refused": str(error)}
