"""The placement of a rank: cores and GPU, set before MPI_Init and compared by all ranks after it.

    launched -> visible GPUs -> one of them -> the cores near it -> bound, made current
             -> the network adapters near it -> MPI

After MPI_Init the ranks exchange their nodes, cores and GPUs, and check.py finds the faults of the
placement of the whole job.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import Launched
from hpctrain.core.names import format_ranges
from hpctrain.hardware import pci
from hpctrain.transport.device import gpus
from hpctrain.transport.gpu_probe import verify
from hpctrain.transport.link import Link
from hpctrain.transport.paths import (
    STAGED_VERDICT,
    TRIAL_REMEDY,
    RankPlace,
    Verdict,
    pair_classes,
    verdict_from_table,
)
from hpctrain.transport.placement import nearest_nics
from hpctrain.transport.placement.check import (
    RankBinding,
    binding_from_table,
    describe_faults,
    describe_ports,
    find_faults,
    group_by_kind,
)
from hpctrain.transport.placement.core_binding import Binding, bind_process, keep_binding
from hpctrain.transport.placement.nearest_nics import UNKNOWN_PORTS, GpuPosition, NicPorts

logger = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Placement:
    """The cores, GPU and ports of this rank, and the number of the job's GPUs on its node."""

    launched: Launched
    binding: Binding
    gpu: gpus.Gpu | None = None
    gpus: int = 0
    nics: NicPorts = UNKNOWN_PORTS

    def rank_binding(self, host: str) -> RankBinding:
        """Return the record of this placement for the other ranks."""
        return RankBinding(
            host=host,
            launcher=self.launched.name,
            local_rank=self.launched.local_rank,
            cores=format_ranges(self.binding.cores),
            offered=self.binding.offered,
            blas_threads=self.binding.blas_threads,
            gpu=self.gpu.uuid if self.gpu else "",
            gpus=self.gpus,
            nics=self.nics,
        )


class JobPlacement(NamedTuple):
    """The placement of the ranks, equal on each rank."""

    places: tuple[RankPlace, ...]  #: node and GPU of each rank's arrays
    verdict: Verdict  #: the paths of GPU memory between them
    bindings: tuple[RankBinding, ...]


def node_name(gather: verify.Gather, rank: int) -> str:
    """Return the name of this rank's node; collective."""
    host_key = f"{socket.gethostname()}\n{os.environ.get('SLURMD_NODENAME', '')}"
    hosts, slurm_nodes = zip(
        *(text.decode().split("\n") for text in gather(host_key.encode())), strict=True
    )
    return launchers.nodes(hosts, slurm_nodes)[rank]


def place_rank(launched: Launched, device: gpus.Device, binds_cores: bool = True) -> Placement:
    """Bind this process to its cores and make its GPU current; return the placement.

    Raises UsageError if `device` is "gpu" and no GPU is available ("auto" then takes the CPU), or
    if HPCTRAIN_NIC is invalid.
    """
    visible_gpus = gpus.visible_gpus(device)
    if not visible_gpus:
        binding = bind_process(launched) if binds_cores else keep_binding(launched)
        return Placement(
            launched,
            binding,
            nics=nearest_nics.select_ports(launched, GpuPosition(cores=binding.cores)),
        )
    choice = gpus.choose_gpu(launched, len(visible_gpus), gpus.parse_visible_devices(os.environ))
    gpu = visible_gpus[choice.ordinal]
    cores = [pci.near_cores(gpu_seen.pci) for gpu_seen in visible_gpus]
    gpu_cores = gpus.gpu_cores(launched, choice.ordinal, cores)
    binding = bind_process(launched, gpu_cores=gpu_cores) if binds_cores else keep_binding(launched)
    gpus.use_gpu(choice.ordinal)
    gpu_position = GpuPosition(tuple(gpu_seen.pci for gpu_seen in visible_gpus), choice.ordinal)
    nics = nearest_nics.select_ports(launched, gpu_position)
    logger.debug("%s: %s; %s; NIC: %s", gpu, choice.note, binding.note, nics.note or nics.label)
    return Placement(
        launched, binding, gpu, gpus.job_gpu_count(os.environ, len(visible_gpus)), nics
    )


def exchange_placements(
    link: Link, gather: verify.Gather, host: str, placement: Placement
) -> JobPlacement:
    """Return the ranks' placement, and verify the paths of GPU memory; collective.

    `link` uses a path after test messages on it have arrived intact. Rank 0 warns of faults of the
    placement. MPI must be running. Raises UsageError, on all ranks, if the variable that overrides
    the verdict is invalid.
    """
    report = _make_report(host, placement)
    reports: list[dict[str, Any]] = [
        json.loads(text) for text in gather(json.dumps(report).encode())
    ]
    for report in reports:
        if "fault" in report:
            raise UsageError(report["fault"])
    bindings = tuple(binding_from_table(report["binding"]) for report in reports)
    places = tuple(RankPlace(binding.host, binding.gpu) for binding in bindings)
    if link.rank == 0:
        if groups := group_by_kind(find_faults(bindings)):
            logger.warning("%s", "\n".join(": ".join(describe_faults(group)) for group in groups))
        if line := describe_ports(bindings):
            logger.info("%s", line)
    cached_verdict, unproven = next(
        ((verdict_from_table(r["verdict"]), r["unproven"]) for r in reports if "verdict" in r),
        (STAGED_VERDICT, ()),
    )
    verdict = verify.verify_paths(link, gather, places, cached_verdict)
    if link.rank == 0:
        _log_paths([place for place in places if place.gpu], verdict, unproven)
    return JobPlacement(places, verdict, bindings)


def _make_report(host: str, placement: Placement) -> dict[str, Any]:
    """Return the binding of this rank and, if it has a GPU, its cached verdict, for JSON.

    If the variable that overrides the verdict is invalid, the error replaces the verdict.
    """
    report: dict[str, Any] = {"binding": asdict(placement.rank_binding(host))}
    if placement.gpu is None:
        return report
    from hpctrain.transport.gpu_probe import verdicts  # ranks without a GPU do not need it

    try:
        cached_verdict = verdicts.cached_result(os.environ)
    except UsageError as error:
        return report | {"fault": str(error)}
    return report | {"verdict": asdict(cached_verdict.verdict), "unproven": cached_verdict.unproven}


def _log_paths(places: Sequence[RankPlace], verdict: Verdict, unproven: Sequence[str]) -> None:
    """Log the path of memory between the GPUs at `places`, and whether ranks share GPUs."""
    occurring_classes = pair_classes(places)
    if unproven_classes := [
        name.replace("_", " ") for name in occurring_classes if name in unproven
    ]:
        logger.warning(
            "GPU memory goes through the host (%s), since no trial showed that this MPI takes "
            "pointers to it: %s", ", ".join(unproven_classes), TRIAL_REMEDY,
        )  # fmt: skip
    paths = ", ".join(
        f"{name.replace('_', ' ')} {getattr(verdict, name)}" for name in occurring_classes
    )
    if paths:
        logger.info("GPU memory between ranks: %s; %s", paths, verdict.reason)
    if "same_gpu" in occurring_classes:
        counts = Counter(places)
        max_sharers = max(counts.values())
        logger.info(
            "GPUs shared: %d ranks on %d, up to %d each", len(places), len(counts), max_sharers
        )
