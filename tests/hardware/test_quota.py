"""CPU quotas of control groups, in both versions."""

from __future__ import annotations

import pytest
from machines import write

from hpctrain.hardware import quota

TOP, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
NONE = {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}
# /proc/self/cgroup, files of groups -> cores
GROUPS = {
    "none": ("0::/", {}, None),
    "no limit": ("0::/job", {f"{TOP}/job": {"cpu.max": "max 100000"}}, None),
    "own": ("0::/a/job", {f"{TOP}/a/job": {"cpu.max": "400000 100000"}}, 4.0),
    "above": ("0::/a/job", {f"{TOP}/a": {"cpu.max": "50000 100000"},
                            f"{TOP}/a/job": {"cpu.max": "400000 100000"}}, 0.5),
    "container": ("0::/", {TOP: {"cpu.max": "150000 100000"}}, 1.5),
    "version 1": ("3:memory:/m\n2:cpu,cpuacct:/job\n0::/", {
        V1: NONE, f"{V1}/job": NONE | {"cpu.cfs_quota_us": 200000}}, 2.0),
    "host's path": ("2:cpu:/docker/0a", {V1: NONE | {"cpu.cfs_quota_us": 200000}}, 2.0),
    "of memory": ("2:memory:/job", {f"{V1}/job": NONE | {"cpu.cfs_quota_us": 1000}}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_quota(case, tmp_path):
    reported, groups, cores = GROUPS[case]
    write(tmp_path / "proc/self", {"cgroup": reported})
    for folder, files in groups.items():
        write(tmp_path / folder, files)
    assert quota.quota_cores(tmp_path) == cores


def test_no_groups_at_all(tmp_path):
    assert quota.quota_cores(tmp_path) is None
