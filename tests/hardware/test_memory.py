"""Available memory of the machine and of control groups of both versions."""

from __future__ import annotations

import pytest
from machines import write

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.gradients.replica import ModelReplica
from hpctrain.hardware.memory import available_bytes

MEMINFO = {"proc": {"meminfo": "MemTotal: 9 kB\nMemAvailable:    6144 kB\n"}}
MIB, TOP, V1 = 1 << 20, "sys/fs/cgroup", "sys/fs/cgroup/memory"
# /proc/self/cgroup, files of groups -> bytes that are left
GROUPS = {
    "none": ("0::/", {}, 6 * MIB),
    "no limit": ("0::/a", {f"{TOP}/a": {"memory.max": "max", "memory.current": "1"}}, 6 * MIB),
    "own": ("0::/a", {f"{TOP}/a": {"memory.max": 3 * MIB, "memory.current": MIB}}, 2 * MIB),
    "files": ("0::/a", {f"{TOP}/a": {"memory.max": 3 * MIB, "memory.current": 2 * MIB,
                                     "memory.stat": f"anon 1\nfile {MIB}\n"}}, 2 * MIB),
    "above": ("0::/a/b", {f"{TOP}/a": {"memory.max": MIB, "memory.current": 2 * MIB}}, 0),
    "version 1": ("3:memory:/a\n0::/", {V1: {"memory.limit_in_bytes": 1 << 62,
                                             "memory.usage_in_bytes": 0},
                                        f"{V1}/a": {"memory.limit_in_bytes": 2 * MIB,
                                                    "memory.usage_in_bytes": MIB,
                                                    "memory.stat": f"total_cache {MIB // 2}"}},
                  MIB + MIB // 2),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_available(case, tmp_path):
    reported, groups, expected = GROUPS[case]
    for folder, files in (MEMINFO | {"proc/self": {"cgroup": reported}} | groups).items():
        write(tmp_path / folder, files)
    assert available_bytes(tmp_path) == expected


def test_a_system_that_does_not_tell(tmp_path):
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("width", [1 << 30, 1 << 62])
def test_a_model_beyond_all_memory_is_refused_before_it_is_made(width):
    model = nn.MlpOptions(widths=[64, width, 10]).build(None, None)
    needed = (64 * width + width + 10 * width + 10) * (8 + 2 * 4)
    with pytest.raises(UsageError, match=f"need {needed:,} bytes, but only .* bytes of memory"):
        ModelReplica(model, 0, "float32")
