"""Cores and BLAS, shared memory and the files of dead jobs in it, the limit of locked memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hpctrain.doctor.check import Check
from hpctrain.transport.placement.check import FEWER_THREADS
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.transport.shared_memory.dev_shm import GIB, MIB, SHM

#: Files of MPI libraries and of hpctrain; those of a dead job stay until they are removed.
LEFTOVERS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "hpctrain-*")
MORE_TIME = "Kubernetes: resources.limits.cpu; docker run --cpus=N"


def blas(threads: int, cores: int, quota: float | None = None) -> Check:
    """Return the check of BLAS `threads` in a process that may run on so many `cores`.

    `quota`: cores whose CPU time its control group grants, None for no limit.
    """
    observed = f"{threads} BLAS threads on {cores} cores"
    if threads > cores:
        return Check("BLAS", "bad", f"{observed}: they take turns", FEWER_THREADS)
    if quota is not None and threads > max(1, quota):
        observed += f", and a quota gives the time of {quota:g}: "
        observed += "they are stopped when it is used up"
        return Check("BLAS", "bad", observed, f"{FEWER_THREADS}, or ask for more: {MORE_TIME}")
    return Check("BLAS", "ok", observed)


def shared_memory(folder: Path = SHM, in_use: Collection[str] | None = None) -> list[Check]:
    """Return the checks of the memory that ranks of a node share; `in_use` are files mapped now."""
    try:
        free_bytes = dev_shm.free(folder)
    except OSError as error:
        remedy = "mount a tmpfs there; containers: --shm-size=8g or --ipc=host"
        return [Check("shared memory", "bad", f"{folder}: {error.strerror}", remedy)]
    return [
        free_memory(folder, free_bytes),
        _leftovers(folder, _mapped() if in_use is None else in_use),
    ]


def memlock(limit: int, rdma: bool) -> Check:
    """Return the check of the bytes a process may lock, -1: no limit; `rdma`: NICs need it."""
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "no limit")
    observed = f"limit of {limit // MIB} MiB"
    if not rdma:
        return Check("locked memory", "note", observed)
    return Check(
        "locked memory",
        "slow",
        f"{observed}: InfiniBand must lock what it sends",
        "ulimit -l unlimited; the site: LimitMEMLOCK=infinity for slurmd",
    )


def free_memory(folder: Path, free_bytes: int) -> Check:
    """Return the check of `free_bytes` bytes of shared memory in `folder`."""
    observed = dev_shm.free_text(free_bytes, folder)
    if free_bytes >= dev_shm.AMPLE_BYTES:
        return Check("shared memory", "ok", observed)
    return Check(
        "shared memory", "bad" if free_bytes < dev_shm.MIN_BYTES else "slow", observed, dev_shm.GROW
    )


def _leftovers(folder: Path, in_use: Collection[str]) -> Check:
    files = [f for pattern in LEFTOVERS for f in folder.glob(pattern) if str(f) not in in_use]
    user_files = [file for file in files if _owner(file) == os.geteuid()]
    if not user_files:
        return Check("left-overs", "ok", f"none of yours in {folder}")
    total = sum(_size(file) for file in user_files)
    return Check(
        "left-overs",
        "slow" if total > GIB else "note",
        f"{len(user_files)} files of dead jobs in {folder}, {total / MIB:,.0f} MiB of memory",
        f"when no job of yours runs here: rm {' '.join(_patterns(folder, user_files))}",
    )


def _patterns(folder: Path, files: Collection[Path]) -> list[str]:
    """Return the patterns that match `files`."""
    return [f"{folder}/{pattern}" for pattern in LEFTOVERS if any(f.match(pattern) for f in files)]


def _mapped() -> set[str]:
    """Return the files in /dev/shm that processes map or hold open, as far as we may read them."""
    files = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or of another user
            lines = (process / "maps").read_text().splitlines()
            files |= {line.split(maxsplit=5)[-1] for line in lines if str(SHM) in line}
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):  # closed since
                    files.add(os.readlink(process / "fd" / descriptor))
    return files


def _owner(file: Path) -> int | None:
    try:
        return file.lstat().st_uid
    except OSError:
        return None


def _size(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0
