"""The C library's allocator keeps the memory that a step frees, for the next step.

By default glibc returns large blocks to the system when they are freed, and the next step faults
them in again, page by page: 18,000 faults in a gradient of the recipe `mnist`, a quarter of its
time. A process that trains then holds its peak memory until it ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_BLOCK, LARGEST_TOP = 1 << 30, (1 << 31) - 1  #: bytes; larger ones are returned
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Let the allocator of this process reuse freed memory; return whether it will.

    Nothing is changed where the user has set the allocator, or where it is not glibc's.
    """
    if _user_has_set(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, LARGEST_TOP))


def _user_has_set(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets the allocator's thresholds, or another allocator."""
    return (
        any(name in environ for name in _USER_VARIABLES)
        or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
        or "malloc" in environ.get("LD_PRELOAD", "")
    )
