"""The adapters near ranks, and UCX_NET_DEVICES on request: on simulated nodes."""

from __future__ import annotations

import os

import machines
import pytest

from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import SINGLE_RANK, Launched
from hpctrain.hardware.nics import fabric_ports, read_nics
from hpctrain.transport.placement.nearest_nics import (
    UCX_DEVICES,
    GpuPosition,
    device_names,
    is_near_requested,
    ports_for_rank,
    select_port,
    select_ports,
)


def rank(local_rank, local_size, size=64):
    return Launched("srun", 0, size, local_rank, local_size)


def names(*numbers):
    return tuple(f"mlx5_{number}:1" for number in numbers)


# node -> how many ports are alike, what is near each of its GPUs
NEARBY = {
    "juwels_booster": (4, [names(0), names(1), names(2), names(3)]),
    "leonardo": (4, [names(0, 1)] * 2 + [names(2, 3)] * 2),
    "dgx": (8, [names(0, 1)] * 2 + [names(2, 3)] * 2 + [names(6, 7)] * 2 + [names(8, 9)] * 2),
    "one_adapter": (1, [names(0)]),
}


@pytest.mark.parametrize("node", NEARBY)
def test_what_is_near_a_gpu(node, tmp_path):
    gpus = tuple(getattr(machines, node)(tmp_path))
    ports, nearest = NEARBY[node]
    actual = [
        ports_for_rank(read_nics(tmp_path), GpuPosition(gpus, i), "", root=tmp_path)
        for i in range(len(gpus))
    ]
    assert [r.nearest for r in actual] == nearest
    assert {len(r.ports) for r in actual} == {ports}


ALL = tuple(range(8))
# node, cores of the rank -> what is near them
CORES = {
    "a socket": ("two_sockets", (5, 6), names(1)),
    "both": ("two_sockets", ALL, names(0, 1)),
    "a quarter of a socket without any": ("juwels_booster", (0, 1), names(0, 1)),
    "its own": ("juwels_booster", (43, 44), names(2)),
}


@pytest.mark.parametrize("case", CORES)
def test_what_is_near_cores(case, tmp_path):
    node, cores, nearest = CORES[case]
    getattr(machines, node)(tmp_path)
    assert (
        ports_for_rank(read_nics(tmp_path), GpuPosition(cores=cores), "", root=tmp_path).nearest
        == nearest
    )


def test_a_gpu_whose_place_is_not_known(tmp_path):
    machines.two_sockets(tmp_path)
    assert ports_for_rank(
        read_nics(tmp_path), GpuPosition(("",)), "", root=tmp_path
    ).nearest == names(0, 1)


# node, ranks, whether each sees all GPUs -> the port that each of the first ranks names
DEALT = {
    "four and four": ("juwels_booster", 4, True, names(0, 1, 2, 3)),
    "two cards of two": ("leonardo", 4, True, names(0, 1, 2, 3)),
    "pairs": ("dgx", 8, True, names(0, 1, 2, 3, 6, 7, 8, 9)),
    "shared GPUs": ("leonardo", 8, True, names(0, 1, 2, 3, 0, 1, 2, 3)),
    "narrowed to one": ("dgx", 8, False, names(0, 1, 2, 3, 6, 7, 8, 9)),
}


@pytest.mark.parametrize("case", DEALT)
def test_ports_are_dealt_out(case, tmp_path):
    node, ranks, see_all, expected = DEALT[case]
    gpus = getattr(machines, node)(tmp_path)
    ports = fabric_ports(read_nics(tmp_path))
    spots = [
        GpuPosition(tuple(gpus), r % len(gpus)) if see_all else GpuPosition((gpus[r % len(gpus)],))
        for r in range(ranks)
    ]
    ports_of = [
        select_port(rank(r, ranks), ports, spot, {}, tmp_path) for r, spot in enumerate(spots)
    ]
    assert tuple(name for name, _ in ports_of) == expected


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_cores_name_the_port_of_their_socket(ranks, tmp_path):
    machines.two_sockets(tmp_path)
    ports = fabric_ports(read_nics(tmp_path))
    first = select_port(rank(0, ranks), ports, GpuPosition(cores=(0, 1)), {}, tmp_path)
    last = select_port(rank(ranks - 1, ranks), ports, GpuPosition(cores=(7,)), {}, tmp_path)
    assert (first[0], last[0]) == ("mlx5_0:1", "mlx5_1:1")


# node, launched, GPUs seen, environment -> a word of why nothing is named
REMAINING = {
    "one port": ("one_adapter", rank(0, 2), 1, {}, "no choice"),
    "a rank per node": ("juwels_booster", rank(0, 1), 4, {}, "1 rank to 4 ports"),
    "fewer ranks than ports": ("dgx", rank(2, 4), 8, {}, "4 ranks to 8 ports"),
    "a rank per node, on its cores": ("two_sockets", rank(0, 1), 0, {}, "1 rank to 2 ports"),
    "alone": ("juwels_booster", SINGLE_RANK, 4, {}, "1 rank to 4 ports"),
    "set for UCX": ("juwels_booster", rank(0, 4), 4, {UCX_DEVICES: "mlx5_3:1"},
                    f"{UCX_DEVICES} is set"),
    "UCX's own policy": ("juwels_booster", rank(0, 4), 4, {"UCX_SINGLE_NET_DEVICE": "y"},
                         "UCX_SINGLE_NET_DEVICE is set"),
    "not told": ("juwels_booster", rank(None, None), 4, {}, "sets no local rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", REMAINING)
def test_what_is_left_to_mpi(case, tmp_path):
    node, launched, count, environ, word = REMAINING[case]
    gpus = tuple(getattr(machines, node)(tmp_path))
    spot = GpuPosition(gpus[:count], 0, ALL)
    value, note = select_port(launched, fabric_ports(read_nics(tmp_path)), spot, environ, tmp_path)
    assert value == ""
    assert word in note


def test_a_port_that_is_down_is_nobodys(tmp_path):
    gpus = tuple(machines.juwels_booster(tmp_path, **machines.DOWN))
    adapters = read_nics(tmp_path)
    ports = fabric_ports(adapters)
    named = [
        select_port(rank(r, 4), ports, GpuPosition(gpus, r), {}, tmp_path)[0] for r in range(4)
    ]
    assert named == ["mlx5_0:1", "mlx5_1:1", "mlx5_3:1", "mlx5_3:1"]  # on GPU 2's own socket
    actual = ports_for_rank(adapters, GpuPosition(gpus, 2), "mlx5_2:1", root=tmp_path)
    assert (actual.faults, actual.named, actual.remote) == (("mlx5_2:1 is down",), (), False)


# value of UCX_NET_DEVICES, number of the GPU -> named, what is wrong, whether it is far
NAMED = {
    "not set": ("", 0, (), (), False),
    "all": ("all", 0, (), (), False),
    "all but one": ("^mlx5_0:1", 0, (), (), False),
    "its own": ("mlx5_0:1", 0, names(0), (), False),
    "another's": ("mlx5_1:1", 0, names(1), (), True),
    "its own among others": ("mlx5_1:1, mlx5_0:1", 0, names(1, 0), (), False),
    "without a port": ("mlx5_2", 2, names(2), (), False),
    "a range": ("mlx5_[0-1]:1", 0, names(0, 1), (), False),
    "not there": ("mlx5_7:1", 0, (), ("mlx5_7:1 is not there",), False),
    "one of two": ("mlx5_0:1,mlx5_0:2", 0, names(0), ("mlx5_0:2 is not there",), False),
    "an interface": ("lo", 0, (), (), False),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_is_said_to_ucx(case, tmp_path):
    value, ordinal, named, wrong, far = NAMED[case]
    gpus = tuple(machines.juwels_booster(tmp_path))
    machines.ethernet(tmp_path, "lo", "")
    actual = ports_for_rank(read_nics(tmp_path), GpuPosition(gpus, ordinal), value, root=tmp_path)
    assert (actual.named, actual.faults, actual.remote) == (named, wrong, far)


def test_ranges_are_spelled_out():
    assert device_names("mlx5_[9-11]:1,eth0") == ("mlx5_9:1", "mlx5_10:1", "mlx5_11:1", "eth0")


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setenv(UCX_DEVICES, "")  # restored at the end, whatever `take` writes
    monkeypatch.delenv("HPCTRAIN_NIC", raising=False)


def test_taken_where_it_is_asked_for(tmp_path, monkeypatch, unsaid):
    machines.two_sockets(tmp_path)
    spot = GpuPosition(cores=(4, 5))
    assert select_ports(rank(1, 2), spot, tmp_path).label == "mlx5_1:1"
    assert os.environ[UCX_DEVICES] == ""
    monkeypatch.setenv("HPCTRAIN_NIC", "near")
    result = select_ports(rank(1, 2), spot, tmp_path)
    assert os.environ[UCX_DEVICES] == "mlx5_1:1,eno1"  # TCP is left to UCX
    assert (result.label, result.faults) == ("mlx5_1:1 (named)", ())
    assert "nearest" in result.note
    assert "is set" in select_ports(rank(0, 2), spot, tmp_path).note  # by us: it stays


def test_no_adapter_at_all(tmp_path, monkeypatch, unsaid):
    monkeypatch.setenv("HPCTRAIN_NIC", "near")
    result = select_ports(rank(0, 2), GpuPosition(cores=(0,)), tmp_path)
    assert (result.label, result.ports, "no choice" in result.note) == ("", (), True)


def test_a_word_that_makes_no_sense_is_refused():
    assert is_near_requested({}) is False
    with pytest.raises(UsageError, match=r"HPCTRAIN_NIC: expected 'near'.*seen 'mlx5_0'"):
        is_near_requested({"HPCTRAIN_NIC": "mlx5_0"})
