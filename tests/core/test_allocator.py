"""The allocator reuses what a step frees, unless the user has set it."""

from __future__ import annotations

import platform

import pytest

from hpctrain.core.allocator import _user_has_set

FAULTS = """
import resource, sys
from hpctrain.core.allocator import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [bytearray(24 << 20) for _ in range(4)]  # NumPy asks for huge pages
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    assert keep_freed_memory()
step()
print(step())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_not_faulted_in_again(start):
    """Otherwise steps of 96 MiB fault in some of their 24,576 pages again."""
    keeping, default = (
        int(start("-c", FAULTS, word).finish().stdout) for word in ("keep", "default")
    )
    assert keeping < 100 < default


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=on"}, False),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
    ],
)
def test_the_settings_of_the_user_count(environ, expected):
    assert _user_has_set(environ) is expected
