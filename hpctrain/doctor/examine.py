"""Gather the facts of this node, check them, return what was found; starts MPI in children only."""

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

from hpctrain import launchers
from hpctrain.cluster import gpus as trying
from hpctrain.cluster.launch import find_mpi
from hpctrain.doctor import gpus, mpi, network, node
from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.picture import Picture, lines, picture
from hpctrain.errors import UsageError
from hpctrain.hardware import gdr, nics, nvidia, pci, quota
from hpctrain.machine import version
from hpctrain.transport import bind, verdicts
from hpctrain.transport.verdicts import Told

PACKAGES = ("hpctrain", "numpy", "mpi4py")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@dataclass(frozen=True)
class Hardware:
    """What was found below `root`."""

    cards: nvidia.Cards
    on_bus: int  #: GPUs that the driver knows, hidden ones among them
    nics: tuple[nics.Nic, ...]
    gdr: gdr.Gdr
    drawn: Picture
    lines: list[str]
    quota: float | None = None  #: of so many cores a control group gives the time; None: of all

    def table(self) -> dict[str, Any]:
        """Return it as --json holds it."""
        return {
            "gpus": [asdict(card) for card in self.cards.cards],
            "nics": [asdict(nic) for nic in self.nics],
            "topology": asdict(self.drawn),
            "gdr": asdict(self.gdr),
            "cpu_quota": self.quota,
        }


@dataclass(frozen=True)
class Examined:
    """All that a doctor has to say of a node."""

    host: str
    checks: list[Check]
    hardware: Hardware
    told: Told | None

    def table(self) -> dict[str, Any]:
        """Return what --json holds."""
        return {
            "host": self.host,
            "exit_code": exit_code(self.checks),
            "checks": [asdict(check) for check in self.checks],
            **self.hardware.table(),
            "gpu_paths": None if self.told is None else asdict(self.told),
        }


def examine() -> Examined:
    """Look at this node; raise UsageError inside a job of several ranks."""
    _refuse(launchers.launched(os.environ))
    found = hardware(socket.gethostname())
    told = _tried() if found.cards.cards and cupy() else None
    checks = [_versions(), *_of_mpi(), _blas(found.quota), *of_node(found, told)]
    checks += network.named(found.nics, os.environ)
    return Examined(socket.gethostname(), checks, found, told)


def of_node(found: Hardware, told: Told | None) -> list[Check]:
    """Return the checks of memory, GPUs and network, the same for all processes of a node."""
    rdma = any(nic.rdma for nic in found.nics)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    checks = [*node.shared_memory(), node.memlock(limit, rdma)]
    checks += gpus.checks(found.cards, found.on_bus, cupy(), told, os.environ)
    if found.cards.cards:
        checks.append(gpus.gdr(found.gdr))
    return checks + network.checks(found.nics)


def hardware(host: str, root: Path = pci.ROOT) -> Hardware:
    """Return GPUs, adapters and what lies between them."""
    of_driver = [nvidia.nvml(), nvidia.smi()] if root == pci.ROOT else [None, None]
    cards, found = nvidia.cards(root, *of_driver), nics.nics(root)
    drawn = picture(cards, found, root)
    on_bus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    told = lines(host, cards, found, drawn, root)
    given = quota.cores(root)
    return Hardware(cards, on_bus, found, gdr.gdr(found, root), drawn, told, given)


def _refuse(here: launchers.Launched) -> None:
    if here.size > 1:
        raise UsageError(
            f"doctor looks at one node, from one process; this is rank {here.rank} of {here.size} "
            "that a launcher started: call `hpctrain doctor --job` to look at the whole job, or "
            "`srun -N 1 -n 1 hpctrain doctor`"
        )


def _versions() -> Check:
    found = [f"{name} {version(name)}" for name in PACKAGES]
    return Check("versions", "ok", ", ".join([f"Python {platform.python_version()}", *found]))


def _of_mpi() -> list[Check]:
    try:
        found = find_mpi()
    except UsageError as error:
        remedy, *seen = str(error).splitlines()
        return [Check("MPI", "bad", " ".join(" ".join(seen).split()), remedy)]
    return mpi.checks(found, mpi.start(found), mpi.on_path())


def _blas(given: float | None) -> Check:
    cores = len(os.sched_getaffinity(0))
    return node.blas(bind.asked_threads(os.environ) or cores, cores, given)


def cupy() -> str | None:
    """Return the installed CuPy's name and version, None where there is none."""
    for name in _CUPY:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "version unknown" if find_spec("cupy") else None


def _tried() -> Told | None:
    try:
        return verdicts.from_json(trying.verdict(again=True))
    except (ValueError, KeyError, TypeError, json.JSONDecodeError):
        return None
