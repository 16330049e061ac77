"""Checks of a node: BLAS threads, shared memory, left-over files in it, locked memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hpctrain.tools.doctor.check import Check
from hpctrain.transport.placement.check import FEWER_THREADS_REMEDY
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.transport.shared_memory.dev_shm import GIB, MIB, SHM_FOLDER

#: Shared-memory files of MPI libraries and hpctrain; a dead job leaves its files behind.
LEFTOVER_PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "hpctrain-*")
MAX_NAMED_FILES = 4  #: that a remedy lists
MORE_CPU_TIME = "Kubernetes: resources.limits.cpu; docker run --cpus=N"


def check_blas(threads: int, cores: int, quota_cores: float | None = None) -> Check:
    """Return the check of the BLAS threads of a process that may run on `cores` cores.

    `quota_cores` is the CPU time that its control group grants, in cores; None is no limit.
    """
    observed = f"{threads} BLAS thread{'s' * (threads != 1)} on {cores} cores"
    if threads > cores:
        return Check("BLAS", "bad", f"{observed}: threads take turns", FEWER_THREADS_REMEDY)
    if quota_cores is not None and threads > max(1, quota_cores):
        observed += f", and a quota gives the time of {quota_cores:g}: "
        observed += "threads are stopped when it is used up"
        return Check(
            "BLAS", "bad", observed, f"{FEWER_THREADS_REMEDY}, or ask for more: {MORE_CPU_TIME}"
        )
    return Check("BLAS", "ok", observed)


def check_shared_memory(
    folder: Path = SHM_FOLDER, mapped_files: Collection[str] | None = None
) -> list[Check]:
    """Return the checks of a node's shared memory; processes currently use `mapped_files` of it."""
    try:
        free_bytes = dev_shm.free_shm_bytes(folder)
    except OSError as error:
        remedy = "mount a tmpfs there; containers: --shm-size=8g or --ipc=host"
        return [Check("shared memory", "bad", f"{folder}: {error.strerror}", remedy)]
    return [
        check_free_memory(folder, free_bytes),
        _check_leftovers(folder, dev_shm.used_files() if mapped_files is None else mapped_files),
    ]


def check_memlock(limit_bytes: int, has_rdma: bool) -> Check:
    """Return the check of the bytes that a process may lock, -1 for no limit.

    `has_rdma` tells whether network adapters need locked memory.
    """
    if limit_bytes == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "no limit")
    observed = f"limit of {limit_bytes // MIB} MiB"
    if not has_rdma:
        return Check("locked memory", "note", observed)
    return Check(
        "locked memory",
        "slow",
        f"{observed}: InfiniBand must lock the buffers that it sends",
        "ulimit -l unlimited; the site: LimitMEMLOCK=infinity for slurmd",
    )


def check_free_memory(folder: Path, free_bytes: int) -> Check:
    """Return the check of `free` bytes of shared memory in `folder`."""
    observed = dev_shm.format_free_bytes(free_bytes, folder)
    if free_bytes >= dev_shm.AMPLE_BYTES:
        return Check("shared memory", "ok", observed)
    return Check(
        "shared memory",
        "bad" if free_bytes < dev_shm.MIN_BYTES else "slow",
        observed,
        dev_shm.REMEDY,
    )


def _check_leftovers(folder: Path, mapped_files: Collection[str]) -> Check:
    files = [
        file
        for pattern in LEFTOVER_PATTERNS
        for file in folder.glob(pattern)
        if str(file) not in mapped_files
    ]
    facts = {}
    for file in files:
        with suppress(OSError):  # it was removed meanwhile
            facts[file] = file.lstat()
    user_files = [file for file in facts if facts[file].st_uid == os.geteuid()]
    if not user_files:
        return Check("left-overs", "ok", f"none of yours in {folder}")
    total_bytes = sum(facts[file].st_blocks * 512 for file in user_files)
    return Check(
        "left-overs",
        "slow" if total_bytes > GIB else "note",
        f"{len(user_files)} files of yours that no process has open in {folder}, "
        f"{total_bytes / MIB:,.0f} MiB of memory",
        f"when no job of yours runs here: {_remove_command(folder, user_files)}",
    )


def _remove_command(folder: Path, files: Collection[Path]) -> str:
    """Return a command that removes `files`, and only this user's files if they are many."""
    if len(files) <= MAX_NAMED_FILES:
        return f"rm {' '.join(map(str, sorted(files)))}"
    patterns = [p for p in LEFTOVER_PATTERNS if any(file.match(p) for file in files)]
    names = " -o ".join(f"-name '{pattern}'" for pattern in patterns)
    return f"find {folder} -maxdepth 1 -uid {os.geteuid()} \\( {names} \\) -delete"
