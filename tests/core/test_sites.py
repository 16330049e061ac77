"""Ranks, nodes and addresses on six sites, from what launchers set: see tests/lib/sites.py."""

from __future__ import annotations

import os
import socket

import pytest
import sites
from sites import SITES

from hpctrain.core.launchers import Launched, launched
from hpctrain.core.torchrun import launched_variables
from hpctrain.torch import ranks
from hpctrain.watch.liveness import channel

SIZE, LOCAL_SIZE = 4, 2


@pytest.fixture
def on_node(monkeypatch):
    """Return what makes this process one of a node: its name, its interfaces, its resolver."""

    def on_node(name: str, node: int) -> None:
        addresses = sites.addresses(name, node)
        host = SITES[name].hosts[node]
        slow = (socket.AF_INET, 0, 0, "", (addresses[SITES[name].slow], 0))
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [slow])
        monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(reversed([*addresses]))])
        monkeypatch.setattr(channel, "_ipv4_of", lambda interface: [addresses[interface]])
        monkeypatch.setattr(channel, "_ipv6_addresses", list)

    return on_node


@pytest.mark.parametrize("name", SITES)
def test_each_rank_knows_its_place(name):
    for rank in range(SIZE):
        environ = sites.rank_environ(name, rank, SIZE, LOCAL_SIZE)
        local_rank = rank % LOCAL_SIZE
        assert launched(environ) == Launched(
            SITES[name].launcher, rank, SIZE, local_rank, LOCAL_SIZE
        )
        variables = launched_variables(environ, "first", 29500)
        expected = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": rank // LOCAL_SIZE}
        assert {key: int(variables[key]) for key in expected} == expected


@pytest.mark.parametrize("has_fast", [True, False])
@pytest.mark.parametrize("name", SITES)
def test_ranks_meet_in_the_fast_network(name, has_fast, on_node, monkeypatch):
    """The host's name leads to a slow network; no suffix of a name is needed.

    The slow network is taken if a node of the job has no other.
    """
    texts: dict[int, list[str]] = {}
    for rank in range(SIZE):  # the texts that each rank sends, until it needs the others'
        on_node(name, rank // LOCAL_SIZE)
        environ = sites.rank_environ(name, rank, SIZE, LOCAL_SIZE)
        monkeypatch.setenv("SLURMD_NODENAME", environ.get("SLURMD_NODENAME", ""))
        node_name = os.environ["SLURMD_NODENAME"]
        fast, every = " ".join(channel.fast_addresses()), " ".join(channel.host_addresses())
        fast *= has_fast or rank < LOCAL_SIZE
        texts[rank] = [socket.gethostname(), node_name, "5", fast, every]
    on_node(name, 1)
    columns = iter(zip(*texts.values(), strict=True))
    rank = ranks._locate(SITES[name].launcher, 3, lambda _: [*next(columns)])
    assert rank == ranks.JobRank(
        Launched(SITES[name].launcher, 3, SIZE, 1, LOCAL_SIZE),
        1,
        sites.addresses(name, 0)[SITES[name].fast[0] if has_fast else SITES[name].slow],
        5,
        has_fast,
    )


@pytest.mark.parametrize("name", SITES)
def test_the_fast_network_is_named_to_gloo_and_nccl(name, on_node, monkeypatch):
    on_node(name, 0)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for variable in variables:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "of the user")
    ranks.set_interfaces()
    fast = SITES[name].fast
    assert [os.environ[variable] for variable in variables] == [fast[0], "of the user"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    ranks.set_interfaces()
    assert os.environ["NCCL_SOCKET_IFNAME"] == ",".join(fast)
