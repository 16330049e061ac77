"""Checks of a node: BLAS threads, shared memory, left-over files in it, locked memory, GPUs.

Of GPUs: their number, their visibility, and the path of messages from their memory.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.hardware.gdr import GdrState
from hpctrain.hardware.nvidia import GpuInfo, NodeGpus
from hpctrain.tools.doctor.check import Check, Verdict
from hpctrain.transport.device.gpus import VISIBLE_DEVICES, parse_visible_devices
from hpctrain.transport.gpu_probe.decision import ProbeResult
from hpctrain.transport.placement.check import FEWER_THREADS_REMEDY
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.transport.shared_memory.dev_shm import GIB, MIB, SHM_FOLDER

#: Shared-memory files of MPI libraries and hpctrain; a dead job leaves its files behind.
LEFTOVER_PATTERNS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "hpctrain-*")
MAX_NAMED_FILES = 4  #: that a remedy lists
MORE_CPU_TIME = "Kubernetes: resources.limits.cpu; docker run --cpus=N"
SHOW_ALL_GPUS = (
    "srun --gpus-per-node=N --ntasks-per-node=N, and --gpu-bind=none if the site binds tasks to "
    "GPUs: then every rank sees all GPUs, and hpctrain selects one by the local rank"
)


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


def check_gpus(
    cards: NodeGpus,
    gpus_on_bus: int,
    cupy_version: str | None,
    gpu_paths: ProbeResult | None,
    environ: Mapping[str, str],
) -> list[Check]:
    """Return the checks of the visible GPUs `cards`; the driver knows `gpus_on_bus` GPUs.

    `cupy_version` is None if CuPy is not installed, `gpu_paths` if no trial ran.
    """
    if cards.fault:
        observed = f"the driver ({cards.driver or 'unknown'}) is loaded, but {cards.fault}"
        return [Check("GPUs", "bad", observed, cards.remedy), _check_cupy(cupy_version)]
    if not cards.gpus and not gpus_on_bus:
        return [Check("GPUs", "note", "none: training runs on the CPU")]
    name_counts = Counter(card.name for card in cards.gpus)
    counts_text = ", ".join(f"{count} x {name}" for name, count in name_counts.items())
    slice_count = sum(len(card.slices) for card in cards.gpus)
    mig_text = f", divided into {slice_count} MIG slices" if slice_count else ""
    checks = [
        Check("GPUs", "ok", f"{counts_text}{mig_text}; driver {cards.driver}"),
        _check_visible_count(cards, gpus_on_bus, environ),
    ]
    checks += filter(None, [_check_visible_list(cards.gpus, environ)])
    checks.append(_check_cupy(cupy_version))
    if gpu_paths is not None:
        checks.append(_check_paths(gpu_paths))
    return checks


def check_gdr(support: GdrState) -> Check:
    """Return the check of GPUDirect RDMA."""
    availability_text = {True: "may be used", False: "no", None: "not known"}[support.available]
    observed = f"{availability_text}: {support.evidence}"
    verdict: Verdict = "ok" if support.available else "note"
    return Check("GPUDirect RDMA", verdict, observed, support.remedy)


def _check_visible_count(cards: NodeGpus, gpus_on_bus: int, environ: Mapping[str, str]) -> Check:
    """Return the check of GPUs that are hidden from this process or from its CUDA library."""
    listed_gpus, count = parse_visible_devices(environ), len(cards.gpus)
    if gpus_on_bus > count:
        observed = f"{count} of {gpus_on_bus} GPUs: a control group hides the neighbours'"
        return Check("GPUs in sight", "slow", f"{observed}, CUDA IPC fails", SHOW_ALL_GPUS)
    if VISIBLE_DEVICES in environ and not listed_gpus:
        return Check(
            "GPUs in sight", "bad", f"none: {VISIBLE_DEVICES} is empty", f"unset {VISIBLE_DEVICES}"
        )
    if listed_gpus and len(listed_gpus) < count and not listed_gpus[0].startswith("MIG-"):
        observed = f"{len(listed_gpus)} of {count}: {VISIBLE_DEVICES}={','.join(listed_gpus)}"
        return Check("GPUs in sight", "note", observed, f"unset {VISIBLE_DEVICES}; {SHOW_ALL_GPUS}")
    return Check(
        "GPUs in sight", "ok", f"all {count}" if not listed_gpus else ",".join(listed_gpus)
    )


def _check_visible_list(cards: Sequence[GpuInfo], environ: Mapping[str, str]) -> Check | None:
    """Return the fault of a CUDA_VISIBLE_DEVICES that names a missing GPU, or one GPU twice.

    CUDA stops reading at such an entry, and shows only the GPUs before it.
    """
    listed_gpus = parse_visible_devices(environ)
    uuids = [_find_uuid(entry, cards) for entry in listed_gpus]
    for entry, name in zip(listed_gpus, uuids, strict=True):
        if name is None:
            return Check("GPUs listed", "bad", f"{VISIBLE_DEVICES} names {entry}: no such GPU",
                         f"unset {VISIBLE_DEVICES}, or name GPUs of `nvidia-smi -L`")  # fmt: skip
    duplicates = [name for name, count in Counter(uuids).items() if count > 1]
    if not duplicates:
        return None
    observed = (
        f"{VISIBLE_DEVICES}={','.join(listed_gpus)} names {', '.join(map(str, duplicates))} twice: "
    )
    observed += "CUDA shows none after it"
    return Check("GPUs listed", "bad", observed, "name each GPU once")


def _find_uuid(entry: str, cards: Sequence[GpuInfo]) -> str | None:
    """Return the UUID for an entry of CUDA_VISIBLE_DEVICES: an index or a prefix of a UUID."""
    if entry.isdigit():
        return cards[int(entry)].uuid if int(entry) < len(cards) else None
    names = [name for card in cards for name in (card.uuid, *card.slices)]
    # The older name of a slice, MIG-GPU-UUID/1/0, contains the UUID of its GPU.
    if entry.startswith("MIG-GPU-"):
        return entry if entry[4:].partition("/")[0] in names else None
    return next((name for name in names if name.startswith(entry)), None)


def _check_cupy(cupy_version: str | None) -> Check:
    if cupy_version is not None:
        return Check("CuPy", "ok", cupy_version)
    remedy = "pip install 'hpctrain[cuda12x]', or cuda13x; or train with --device cpu"
    return Check("CuPy", "bad", "not installed: GPUs cannot be used", remedy)


def _check_paths(gpu_paths: ProbeResult) -> Check:
    verdict = gpu_paths.verdict
    observed = (
        f"same GPU {verdict.same_gpu}, same node {verdict.same_node}, "
        f"across nodes {verdict.across}: {verdict.reason}"
    )
    is_slow = "staged" in (verdict.same_node, verdict.same_gpu) or bool(gpu_paths.remedy)
    return Check("CUDA-aware MPI", "slow" if is_slow else "ok", observed, gpu_paths.remedy)
