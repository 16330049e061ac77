"""Gather and check the facts of this node; MPI starts in child processes only."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain.cluster.launch import find_mpi
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.doctor import gpus, mpi, network, node
from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.topology import Topology, find_topology, lines
from hpctrain.hardware import gdr, nics, nvidia, pci, quota
from hpctrain.machine import version
from hpctrain.transport.gpu_probe import probe_process, verdicts
from hpctrain.transport.gpu_probe.verdicts import ProbeResult
from hpctrain.transport.placement import core_binding

PACKAGES = ("hpctrain", "numpy", "mpi4py")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@dataclass(frozen=True)
class Hardware:
    """GPUs, adapters and their topology, as found below `root`."""

    cards: nvidia.Cards
    on_bus: int  #: GPUs that the driver knows, hidden ones among them
    nics: tuple[nics.Nic, ...]
    gdr: gdr.Gdr
    topology: Topology
    lines: list[str]
    quota: float | None = None  #: CPU time of so many cores by the control group; None: no limit

    def table(self) -> dict[str, Any]:
        """Return the hardware as --json writes it."""
        return {
            "gpus": [asdict(card) for card in self.cards.cards],
            "nics": [asdict(nic) for nic in self.nics],
            "topology": asdict(self.topology),
            "gdr": asdict(self.gdr),
            "cpu_quota": self.quota,
        }


@dataclass(frozen=True)
class NodeResult:
    """Checks and hardware of a node."""

    host: str
    checks: list[Check]
    hardware: Hardware
    gpu_paths: ProbeResult | None

    def table(self) -> dict[str, Any]:
        """Return the table that --json writes."""
        return {
            "host": self.host,
            "exit_code": exit_code(self.checks),
            "checks": [asdict(check) for check in self.checks],
            **self.hardware.table(),
            "gpu_paths": None if self.gpu_paths is None else asdict(self.gpu_paths),
        }


def examine() -> NodeResult:
    """Check this node; raise UsageError inside a job of several ranks."""
    _refuse(launchers.launched(os.environ))
    node_hardware = hardware(socket.gethostname())
    gpu_paths = _gpu_paths() if node_hardware.cards.cards and cupy() else None
    checks = [_versions(), *_mpi_checks(), _blas(node_hardware.quota)]
    checks += node_checks(node_hardware, gpu_paths)
    checks += network.named_nics(node_hardware.nics, os.environ)
    return NodeResult(socket.gethostname(), checks, node_hardware, gpu_paths)


def node_checks(node_hardware: Hardware, gpu_paths: ProbeResult | None) -> list[Check]:
    """Return the checks of memory, GPUs and network, the same for all processes of a node."""
    rdma = any(nic.rdma for nic in node_hardware.nics)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    checks = [*node.shared_memory(), node.memlock(limit, rdma)]
    checks += gpus.checks(node_hardware.cards, node_hardware.on_bus, cupy(), gpu_paths, os.environ)
    if node_hardware.cards.cards:
        checks.append(gpus.gdr(node_hardware.gdr))
    return checks + network.checks(node_hardware.nics)


def hardware(host: str, root: Path = pci.ROOT) -> Hardware:
    """Return GPUs, adapters and the topology between them."""
    of_driver = [nvidia.nvml(), nvidia.smi()] if root == pci.ROOT else [None, None]
    cards, adapters = nvidia.cards(root, *of_driver), nics.nics(root)
    topology = find_topology(cards, adapters, root)
    on_bus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    text = lines(host, cards, adapters, topology, root)
    quota_cores = quota.cores(root)
    return Hardware(cards, on_bus, adapters, gdr.gdr(adapters, root), topology, text, quota_cores)


def _refuse(launched: launchers.Launched) -> None:
    if launched.size > 1:
        raise UsageError(
            f"doctor looks at one node, from one process; this is rank {launched.rank} of "
            f"{launched.size} that a launcher started: call `hpctrain doctor --job` to look at the "
            "whole job, or `srun -N 1 -n 1 hpctrain doctor`"
        )


def _versions() -> Check:
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return Check("versions", "ok", ", ".join([f"Python {platform.python_version()}", *packages]))


def _mpi_checks() -> list[Check]:
    try:
        library = find_mpi()
    except UsageError as error:
        remedy, *details = str(error).splitlines()
        return [Check("MPI", "bad", " ".join(" ".join(details).split()), remedy)]
    return mpi.checks(library, mpi.start(library), mpi.on_path())


def _blas(quota_cores: float | None) -> Check:
    cores = len(os.sched_getaffinity(0))
    return node.blas(core_binding.user_threads(os.environ) or cores, cores, quota_cores)


def cupy() -> str | None:
    """Return the installed CuPy's name and version, None where there is none."""
    for name in _CUPY:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "version unknown" if find_spec("cupy") else None


def _gpu_paths() -> ProbeResult | None:
    try:
        return verdicts.from_json(probe_process.verdict(repeat=True))
    except (ValueError, KeyError, TypeError, json.JSONDecodeError):
        return None
