"""The benchmark of a link: data, ranks, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import fakes
import numpy as np
import pytest
from machines import infiniband
from ranks import on_ranks, run_on

from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.hardware import nics
from hpctrain.tools.bench import p2p, p2p_gpu
from hpctrain.tools.bench.p2p_gpu import RankPair
from hpctrain.transport.device import gpus
from hpctrain.transport.device.gpus import Gpu
from hpctrain.transport.paths import RankPlace, Verdict
from hpctrain.transport.shared_memory.cuda_ipc import shared_gpu_memory


@pytest.fixture
def gpu():
    """Yield the machine of a GPU; a burst fills one buffer from many messages, as osu_bw does."""
    with fakes.installed(races=False) as machine:
        yield machine


REQUESTED = {"ranks": None, "iterations": 2, "warm_up": 0, "json": None, "plot": None}


def asked(sizes="1B,4KiB,70000B", **changes):
    return p2p.parse_options(sizes, **{**REQUESTED, **changes})


@on_ranks(2, 3, mpi=(2, 3))
def test_rows_of_both_ways(ranks):
    for rows in ranks(lambda world: p2p.run(world, asked())):
        assert [row["algorithm"] for row in rows] == ["ping-pong", "one-way"] * 3
        assert [row["bytes"] for row in rows[::2]] == [1, 4096, 70000]
        assert all(row["correct"] and (row["from"], row["to"]) == (0, 1) for row in rows)


def test_other_ranks():
    for rows in run_on("threads", 3, lambda world: p2p.run(world, asked("4B", ranks="2,0"))):
        assert {(row["from"], row["to"], row["correct"]) for row in rows} == {(2, 0, True)}


def test_a_message_that_goes_wrong_is_seen():
    def body(world):
        ends, x = RankPair(world.link, 0, 1), np.zeros(100, np.uint8)

        def damaged():
            p2p._one_way_call(ends, x, 2)()
            x[world.rank * 50] ^= world.rank

        return p2p._delivers_data(world, ends, x, damaged)

    assert run_on("threads", 2, body) == [False, False]


REFUSED = {
    "one": ({"ranks": "1"}, "--ranks: expected two different ranks such as 0,1, seen '1'"),
    "same": ({"ranks": "1,1"}, "seen '1,1'"),
    "none": ({"ranks": "0,7"}, "--ranks: expected ranks below 2, seen 7"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    changes, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        run_on("threads", 2, lambda world: p2p.run(world, asked(**changes)))
    assert message in str(error.value)


def test_alone_there_is_no_link():
    with pytest.raises(UsageError, match="p2p needs two ranks"):
        run_on("threads", 1, lambda world: p2p.run(world, asked()))


# ---- messages that lie on GPUs ----


def on_gpus(world, way="cuda-aware", apart=False):
    """Pretend that every rank has a GPU, and that such is the way between them."""
    nodes = [f"n{rank}" if apart else "n" for rank in range(world.size)]
    node = world.node
    gather = lambda reported: all_gather_bytes(node, reported)  # noqa: E731
    world.memory.gpu = None if apart else shared_gpu_memory(node, gather, ["G"] * world.size)
    return replace(
        world,
        places=tuple(RankPlace(node, f"GPU-{rank}") for rank, node in enumerate(nodes)),
        gpu=Gpu(0, f"GPU-{world.rank}", ""),
        verdict=Verdict(way, way, way if way != "ipc" else "staged", "so it was told"),
    )


@pytest.mark.sample(1)
@on_ranks(2, 3, mpi=(2, 3))
def test_paths_between_gpus(ranks, gpu):
    for rows in ranks(lambda world: p2p.run(on_gpus(world), asked("1B,70000B", device="gpu"))):
        assert [(row["path"], row["algorithm"]) for row in rows[:4]] == [
            ("staged", "ping-pong staged"), ("staged", "one-way staged"),
            ("cuda-aware", "ping-pong cuda-aware"), ("cuda-aware", "one-way cuda-aware"),
        ]  # fmt: skip
        assert {row["path"] for row in rows[4:6]} <= {"ipc", "staged"}
        assert all(row["correct"] and "share_of_nic" not in row for row in rows)


@pytest.mark.sample(1)
@on_ranks(2, 3, mpi=(2, 3))
def test_neighbours_that_map_each_others_memory(ranks):
    with fakes.installed(races=False, ipc_within=True):
        for rows in ranks(lambda world: p2p.run(on_gpus(world, "ipc"), asked(device="gpu"))):
            names = ["ping-pong staged", "one-way staged", "ping-pong ipc", "one-way ipc"]
            assert [row["algorithm"] for row in rows] == names * 3
            assert all(row["correct"] for row in rows)


def test_where_no_trial_went_well_only_the_host_is_left(gpu):
    body = lambda world: p2p.run(on_gpus(world, "ipc"), asked("4KiB", device="gpu"))  # noqa: E731
    for rows in run_on("threads", 2, body):
        assert {row["path"] for row in rows} == {"staged"}


def test_share_of_the_adapter_between_nodes(gpu, monkeypatch, tmp_path, capsys):
    infiniband(tmp_path, "mlx5_0", "pci0000:10/0000:11:00.0", "80 Gb/sec (4X HDR)")
    result = nics.read_nics(tmp_path)
    monkeypatch.setattr(p2p_gpu.nics, "read_nics", lambda root: result)
    saved = tmp_path / "kept.json"
    body = lambda world: p2p.run(  # noqa: E731
        on_gpus(world, "gdr", apart=True), asked("64KiB", device="gpu", json=saved)
    )
    for rows in run_on("threads", 2, body):
        assert [row["share_of_nic"] for row in rows] == [row["algbw"] / 10 for row in rows]
    text = json.loads(saved.read_text())
    assert (text["nic_gb_s"], text["device"], text["paths"]["across"]) == (10.0, "gpu", "gdr")
    assert "of NIC" in capsys.readouterr().out


def test_gpus_without_room(gpu, monkeypatch):
    monkeypatch.setattr(p2p.gpus, "free_gpu_bytes", lambda: 4095)
    with pytest.raises(UsageError, match="--sizes: 4 KiB needs"):
        run_on("threads", 2, lambda w: p2p.run(on_gpus(w), asked("4KiB", device="gpu")))


def test_a_rank_without_a_gpu(gpu):
    def body(world):
        world = on_gpus(world)
        world = replace(world, places=(world.places[0], world.places[1]._replace(gpu="")))
        p2p.run(world, asked("4KiB", device="gpu"))

    with pytest.raises(UsageError, match=r"rank 1 on n has no GPU.*hpctrain doctor"):
        run_on("threads", 2, body)


def test_another_device():
    with pytest.raises(UsageError, match="unknown --device 'tpu'"):
        asked(device="tpu")


@pytest.mark.processes
@pytest.mark.either
def test_the_command_on_a_machine_without_a_gpu(hpctrain):
    if gpus.driver_cuda_version():
        pytest.skip("this machine has a GPU")
    completed = hpctrain("bench", "p2p", "--device", "gpu")
    assert completed.returncode == 2
    assert "CuPy" in completed.stderr or "no NVIDIA driver" in completed.stderr
