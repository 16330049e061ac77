"""Traps of clusters in the environment of a run: variables, network plugin, file systems.

A check is in the list only where its trap is found. Sources: the public documentation of OLCF,
ALCF, CSCS, NERSC, LUMI and JSC.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.launchers import launched
from hpctrain.core.torchrun import TORCHRUN
from hpctrain.hardware import mounts
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.doctor.check import Check

TORCHRUN_CAUSE = (
    "srun gives its one task one core, which all ranks of torchrun share, and each torchrun waits "
    "for the others"
)
TORCHRUN_REMEDY = (
    "start every rank by srun, without torchrun: srun --ntasks-per-node=N --cpus-per-task=C "
    "python -m hpctrain.torch train.py"
)
#: Variables by which MPICH of Cray, MPICH and Aurora's MPICH send from the memory of GPUs.
GPU_AWARE_VARIABLES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU")
MONITOR = "FI_MR_CACHE_MONITOR"
PLUGIN_VARIABLE = "NCCL_NET_PLUGIN"
UENV_VARIABLES = ("UENV_MOUNT_LIST", "UENV_VIEW")
STAGING_REMEDY = (
    "copy it to the memory or disk of each node (sbcast and conda-pack), or use one squashfs file "
    "or a container"
)


@dataclass(frozen=True)
class Installation:
    """The Python of a run, and the file systems of its files."""

    prefix: Path  #: of the environment
    base_prefix: Path  #: of the interpreter, whose standard library it uses
    torch: str | None = None  #: the version of PyTorch, None without it
    root: Path = ROOT

    @property
    def has_nccl(self) -> bool:
        """Whether PyTorch may send by NCCL or RCCL."""
        return self.torch is not None and not self.torch.endswith(("+cpu", "+xpu"))


def this_installation(torch: str | None, root: Path = ROOT) -> Installation:
    """Return the installation of this process."""
    return Installation(Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), torch, root)


def has_slingshot(root: Path = ROOT) -> bool:
    """Return whether this node has adapters of HPE Slingshot."""
    return any((root / "sys/class/cxi").glob("cxi*"))


def check_environment(environ: Mapping[str, str], installation: Installation) -> list[Check]:
    """Return a check for each trap of the environment `environ`."""
    return [
        *_check_torchrun(environ),
        *_check_gpu_aware_mpi(environ, installation),
        *_check_plugin(environ, installation),
        *_check_memory_monitor(environ, installation.root),
        *_check_file_systems(installation),
    ]


def _check_torchrun(environ: Mapping[str, str]) -> Iterator[Check]:
    if environ.get(TORCHRUN) and launched(environ).name == "srun":
        yield Check("torchrun", "bad", f"torchrun under srun: {TORCHRUN_CAUSE}", TORCHRUN_REMEDY)


def _check_gpu_aware_mpi(environ: Mapping[str, str], installation: Installation) -> Iterator[Check]:
    name = gpu_aware_variable(environ)
    if name and installation.has_nccl:
        yield Check(
            "GPU-aware MPI", "note", f"{name}=1: beside NCCL it can deadlock",
            f"export {name}=0 for scripts with the backend nccl",
        )  # fmt: skip


def gpu_aware_variable(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that makes MPI use the memory of GPUs; empty if none does."""
    return next((name for name in GPU_AWARE_VARIABLES if environ.get(name) == "1"), "")


def _check_plugin(environ: Mapping[str, str], installation: Installation) -> Iterator[Check]:
    plugin = environ.get(PLUGIN_VARIABLE)
    if plugin and any(name in environ for name in UENV_VARIABLES):
        yield Check(
            PLUGIN_VARIABLE, "bad",
            f"{PLUGIN_VARIABLE}={plugin} in a uenv, whose plugin has another file name: NCCL does "
            "not find it and does not start",
            f"unset {PLUGIN_VARIABLE}; export NCCL_NET='AWS Libfabric'",
        )  # fmt: skip
    elif has_slingshot(installation.root) and installation.has_nccl and not _has_plugin(environ):
        yield Check(
            "network plugin", "slow",
            "no libnccl-net.so or librccl-net.so in LD_LIBRARY_PATH: on Slingshot NCCL and RCCL "
            "fall back to TCP",
            "module load aws-ofi-nccl or aws-ofi-rccl (the site's name), or build it, and add its "
            "lib to LD_LIBRARY_PATH",
        )  # fmt: skip


def _has_plugin(environ: Mapping[str, str]) -> bool:
    folders = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    named = environ.get(PLUGIN_VARIABLE, "")
    return Path(named).is_absolute() or any(
        next(Path(folder).glob("lib[nr]ccl-net*.so*"), None) for folder in folders
    )


def _check_memory_monitor(environ: Mapping[str, str], root: Path) -> Iterator[Check]:
    monitor = environ.get(MONITOR)
    if not has_slingshot(root) or monitor not in (None, "", "memhooks"):
        return
    observed = f"{MONITOR}={monitor}" if monitor else f"{MONITOR} is not set, perhaps memhooks"
    yield Check(
        "memhooks", "bad" if monitor else "note",
        f"{observed}: libfabric then hooks malloc and free, which can deadlock with NCCL and RCCL",
        f"export {MONITOR}=kdreg2, or userfaultfd where the kernel lacks it",
    )  # fmt: skip


def _check_file_systems(installation: Installation) -> Iterator[Check]:
    mount = mounts.find_mount(installation.prefix, installation.root)
    base_mount = mounts.find_mount(installation.base_prefix, installation.root)
    if mount.is_of_network:
        yield Check(
            "environment", "slow" if mount.kind in mounts.NFS else "note",
            f"{installation.prefix} is on {mount.kind} ({mount.folder}): at the start every rank "
            "reads thousands of files there",
            STAGING_REMEDY,
        )  # fmt: skip
    elif base_mount.is_of_network:
        yield Check(
            "interpreter", "slow",
            f"the environment {installation.prefix} is on the node, but its Python, "
            f"{installation.base_prefix}, on {base_mount.kind} ({base_mount.folder}): every rank "
            "reads the standard library there",
            "copy the Python along: UV_PYTHON_INSTALL_DIR beside the environment before `uv venv`, "
            "or a Python of conda-pack",
        )  # fmt: skip
