"""The variables HOROVOD_... of a job: some are used, the others have no effect here."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.core.printing import say

FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"  #: the bytes of tensors that one all-reduce takes
#: that hpctrain.horovod.torch reads
USED = {
    FUSION_THRESHOLD, "HOROVOD_CYCLE_TIME", "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_TIMELINE",
}  # fmt: skip
#: of Horovod's own build, which users keep in their environment
_OF_BUILD = tuple(
    f"HOROVOD_{name}" for name in ("BUILD_", "CUDA_", "GPU", "MPICXX", "NCCL_", "ROCM_", "WITH")
)


def announce_ignored(environ: Mapping[str, str]) -> None:
    """Name the variables of Horovod in `environ` that have no effect, in one line; for rank 0."""
    names = {name for name in environ if name.startswith("HOROVOD_")} - USED
    if ignored := sorted(name for name in names if not name.startswith(_OF_BUILD)):
        say(f"hpctrain: ignored: {', '.join(ignored)} (docs/horovod.md)", err=True)
