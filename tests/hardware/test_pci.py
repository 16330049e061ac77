"""The place of a PCI device in sysfs, on a simulated machine of two sockets."""

from __future__ import annotations

import pytest
from machines import pci_device

from hpctrain.hardware import pci

# socket 0: a switch with two GPUs and a NIC, the NIC behind a second switch; a GPU of its own
# host bridge. Socket 1: a GPU at a root port and a NIC at another.
WAYS = {
    "gpu0": "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0",
    "gpu1": "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0",
    "nic0": "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0",  # noqa: E501
    "gpu2": "pci0000:20/0000:20:01.0/0000:21:00.0",
    "gpu3": "pci0000:80/0000:80:01.0/0000:81:00.0",
    "nic1": "pci0000:80/0000:80:02.0/0000:82:00.0",
}  # fmt: skip
AT = {name: way.rpartition("/")[2] for name, way in WAYS.items()}


@pytest.fixture
def root(tmp_path):
    for way in WAYS.values():
        pci_device(tmp_path, way)
    return tmp_path


@pytest.mark.parametrize(
    "item, other, word",
    [
        ("gpu0", "gpu1", "PIX"),
        ("gpu0", "nic0", "PXB"),
        ("gpu3", "nic1", "PHB"),
        ("gpu0", "gpu2", "NODE"),
        ("gpu0", "gpu3", "SYS"),
    ],
)
def test_relation(root, item, other, word):
    assert pci.relation(AT[item], AT[other], root) == word
    assert pci.relation(AT[other], AT[item], root) == word


def test_what_sysfs_does_not_know(root):
    assert pci.relation(AT["gpu0"], "0000:ff:00.0", root) is None
    assert pci.numa_node("0000:ff:00.0", root) is None
    assert pci.near_cores("0000:ff:00.0", root) == frozenset()
    (root / pci.PCI_FOLDER / AT["gpu3"] / "numa_node").write_text("-1\n")
    assert pci.numa_node(AT["gpu3"], root) is None
    assert pci.relation(AT["gpu0"], AT["gpu3"], root) == "SYS"


def test_numa_and_cores(root):
    assert pci.numa_node(AT["gpu3"], root) == 1
    assert pci.near_cores(AT["gpu3"], root) == {4, 5, 6, 7}


def test_nearest(root):
    nics = [AT["nic0"], AT["nic1"]]
    assert pci.nearest_devices(AT["gpu1"], nics, root) == [AT["nic0"]]
    assert pci.nearest_devices(AT["gpu3"], nics, root) == [AT["nic1"]]
    assert pci.nearest_devices("0000:ff:00.0", nics, root) == []


@pytest.mark.parametrize(
    "text, is_at",
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1B:00.0", "0000:1b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:1B:00", "0000:1b:00.0"),
    ],
)
def test_address(text, is_at):
    assert pci.normalize_address(text) == is_at


def test_core_list():
    assert pci.parse_core_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert pci.parse_core_list("") == ()
