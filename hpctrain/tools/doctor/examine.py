"""Examine this node: gather its facts and check them; MPI starts only in child processes.

PyTorch is not imported, which takes seconds: its version and the entry points of its backends say
enough.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain.cluster.launch import find_mpi
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.hardware import gdr, nics, nvidia, pci, quota
from hpctrain.tools.doctor import mpi, node, topology, traps
from hpctrain.tools.doctor import script as scripts
from hpctrain.tools.doctor.check import Check, exit_code
from hpctrain.tools.doctor.topology import Topology, find_topology, format_topology
from hpctrain.transport.gpu_probe import probe_process, verdicts
from hpctrain.transport.gpu_probe.decision import ProbeResult
from hpctrain.transport.machine import version
from hpctrain.transport.placement import core_binding

PACKAGES = ("hpctrain", "numpy", "mpi4py")
_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@dataclass(frozen=True)
class Hardware:
    """GPUs, network adapters and their topology."""

    node_gpus: nvidia.NodeGpus
    gpus_on_bus: int  #: GPUs that the driver knows, including hidden ones
    nics: tuple[nics.Nic, ...]
    gdr: gdr.GdrState
    topology: Topology
    topology_lines: list[str]
    quota_cores: float | None = None  #: CPU limit of the control group; None: no limit

    def table(self) -> dict[str, Any]:
        """Return the hardware as --json writes it."""
        return {
            "gpus": [asdict(gpu_info) for gpu_info in self.node_gpus.gpus],
            "nics": [asdict(nic) for nic in self.nics],
            "topology": asdict(self.topology),
            "gdr": asdict(self.gdr),
            "cpu_quota": self.quota_cores,
        }


@dataclass(frozen=True)
class NodeResult:
    """The checks and the hardware of a node."""

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


def examine_node(script: str | None = None) -> NodeResult:
    """Check this node, and the user's `script`; raise UsageError inside a job of several ranks."""
    launched = launchers.launched(os.environ)
    if launched.size > 1:
        raise UsageError(
            f"doctor checks one node, from one process; this is rank {launched.rank} of "
            f"{launched.size} that a launcher started: call `hpctrain doctor --job` to check the "
            "whole job, or `srun -N 1 -n 1 hpctrain doctor`"
        )
    node_hardware = find_hardware(socket.gethostname())
    gpu_paths = _probe_gpu_paths() if node_hardware.node_gpus.gpus and cupy_version() else None
    core_count = len(os.sched_getaffinity(0))
    threads = core_binding.user_blas_threads(os.environ) or core_count
    blas = node.check_blas(threads, core_count, node_hardware.quota_cores)
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    versions = ", ".join([f"Python {platform.python_version()}", *packages])
    checks = [Check("versions", "ok", versions), *_check_mpi(), blas]
    if (torch := torch_version()) is not None:
        has_gpu = bool(node_hardware.node_gpus.gpus)
        # PyTorch loads these names at its import.
        names = [entry.name for entry in metadata.entry_points(group="torch.backends")]
        checks.append(check_torch(torch, names, os.environ, has_gpu))
    checks += check_node(node_hardware, gpu_paths)
    checks += topology.check_named_nics(node_hardware.nics, os.environ)
    checks += check_script(script)
    return NodeResult(socket.gethostname(), checks, node_hardware, gpu_paths)


def check_node(node_hardware: Hardware, gpu_paths: ProbeResult | None) -> list[Check]:
    """Return the checks of memory, GPUs and network, equal for all processes of a node."""
    has_rdma = any(nic.has_rdma for nic in node_hardware.nics)
    memlock_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    checks = [*node.check_shared_memory(), node.check_memlock(memlock_limit, has_rdma)]
    checks += node.check_gpus(
        node_hardware.node_gpus, node_hardware.gpus_on_bus, cupy_version(), gpu_paths, os.environ
    )
    if node_hardware.node_gpus.gpus:
        checks.append(node.check_gdr(node_hardware.gdr))
    checks += topology.check_adapters(node_hardware.nics)
    return checks + traps.check_environment(os.environ, traps.this_installation(torch_version()))


def check_script(script: str | None) -> list[Check]:
    """Return the checks of the user's script; [] if none is named."""
    return scripts.check_script(script, scripts.Machine(os.environ)) if script else []


def find_hardware(host: str, root: Path = pci.ROOT, nvml: Any = None) -> Hardware:
    """Return GPUs, adapters and the topology between them."""
    node_gpus, all_nics = nvidia.read_gpus(root, nvml), nics.read_nics(root)
    topology = find_topology(node_gpus, all_nics, root)
    gpus_on_bus = len(list((root / nvidia.DRIVER_FOLDER / "gpus").glob("*")))
    topology_lines = format_topology(host, node_gpus, all_nics, topology, root)
    quota_cores = quota.quota_cores(root)
    return Hardware(
        node_gpus,
        gpus_on_bus,
        all_nics,
        gdr.gdr_state(all_nics, root),
        topology,
        topology_lines,
        quota_cores,
    )


def _check_mpi() -> list[Check]:
    try:
        library = find_mpi()
    except UsageError as error:
        remedy, *details = str(error).splitlines()
        return [Check("MPI", "bad", " ".join(" ".join(details).split()), remedy)]
    return mpi.check_mpi(library, mpi.start_two_ranks(library), mpi.find_launchers())


def cupy_version() -> str | None:
    """Return the package name and version of the installed CuPy, else None."""
    for name in _CUPY_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "version unknown" if find_spec("cupy") else None


def _probe_gpu_paths() -> ProbeResult | None:
    try:
        return verdicts.result_from_json(probe_process.run_probe(force=True))
    except (ValueError, KeyError, TypeError, json.JSONDecodeError):
        return None


def torch_version() -> str | None:
    """Return the version of PyTorch in this environment, None without it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def check_torch(
    version: str, loaded_names: Sequence[str], environ: Mapping[str, str], has_gpu: bool
) -> Check:
    """Return the check of PyTorch `version`: whether scripts can name the backend hpctrain."""
    build = "for CPUs" if version.endswith("+cpu") else "with CUDA"
    others = "gloo" if version.endswith("+cpu") or not has_gpu else "gloo, nccl"
    for variable, disabling in (("HPCTRAIN_TORCH", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")):
        if environ.get(variable) == disabling:
            text = f"{version}, {build}; {variable}={disabling}: backends {others} alone"
            return Check("PyTorch", "note", text, f"unset {variable}, or import hpctrain.torch")
    if "hpctrain" not in loaded_names:
        text = f"{version}, {build}; no entry point of hpctrain: backends {others} alone"
        return Check("PyTorch", "note", text, "install hpctrain again, or import hpctrain.torch")
    return Check("PyTorch", "ok", f"{version}, {build}; backends hpctrain, {others}")
