"""The network adapters of a rank's node, and the ports nearest to the rank. Before MPI starts.

    GPU 0 -- switch -- mlx5_0:1      rank 0 computes on GPU 0 and is near mlx5_0:1;
    GPU 1 -- switch -- mlx5_1:1      four ranks near the same two ports get them in turn

**No adapter is chosen unless `HPCTRAIN_NIC=near` requests it.** UCX takes the ports nearest to the
memory that it sends: of a GPU that was made current before MPI started (openucx/ucx issue 7273), or
of the cores that the rank is bound to; `rank_placement` does both first. UCX also splits a long
message over two ports (its FAQ, "multi-rail"). One port named in UCX_NET_DEVICES removes the
second, which halves the bandwidth of a ring from node to node, since one rank of each node sends at
a time; and it removes every other network, TCP among them. Cray's MPI, Intel's MPI and Open
MPI's libfabric layer assign adapters themselves and do not read that variable.

The weakness of UCX: if several ports are equally near, all ranks take the first (issue 8401; fixed
in 2026, pull request 11547). Some sites therefore name a port per local rank in a wrapper.
`HPCTRAIN_NIC=near` in a site's profile does the same from sysfs: each rank names its nearest port,
and ranks with several equally near ports take them in turn. Ethernet stays in the list, since UCX
may need TCP. If a node has fewer ranks than ports, no port is named. UCX's own variables, set by
the user or the site, override the choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import Launched
from hpctrain.hardware import nics, pci
from hpctrain.hardware.nics import Nic

NIC_VARIABLE, NEAR_VALUE = "HPCTRAIN_NIC", "near"
UCX_RAILS = 2  # UCX splits a long message over this number of ports by default
UCX_DEVICES = "UCX_NET_DEVICES"
#: Variables by which a user or a site selects ports for UCX.
UCX_VARIABLES = (UCX_DEVICES, "UCX_SINGLE_NET_DEVICE", "UCX_NODE_LOCAL_ID")


@dataclass(frozen=True)
class NicPorts:
    """The ports of a rank's node in relation to the rank; names as in "mlx5_0:1"."""

    ports: tuple[str, ...] = ()  #: the ports of the fabric between the nodes
    nearest: tuple[
        str, ...
    ] = ()  #: the `ports` nearest to the rank's GPU, or to its cores without one
    named: tuple[str, ...] = ()  #: active RDMA ports named in UCX_NET_DEVICES
    faults: tuple[
        str, ...
    ] = ()  #: faults of names in UCX_NET_DEVICES: ports that are down or missing
    remote: bool = False  #: whether all named ports are on other NUMA nodes than the nearest ports
    note: str = ""  #: the effect of HPCTRAIN_NIC

    @property
    def label(self) -> str:
        """The ports that the rank may use, as text; "" for none."""
        return f"{', '.join(self.named)} (named)" if self.named else ", ".join(self.nearest)


UNKNOWN_PORTS = NicPorts()


@dataclass(frozen=True)
class GpuPosition:
    """The PCI addresses of the visible GPUs and the number of the rank's GPU, or its cores."""

    gpus: tuple[str, ...] = ()
    ordinal: int = 0
    cores: Collection[int] = ()


def ports_from_table(table: Mapping[str, Any]) -> NicPorts:
    """Return the ports from the JSON table of their `asdict`."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return NicPorts(**fields)


def select_ports(launched: Launched, gpu_position: GpuPosition, root: Path = pci.ROOT) -> NicPorts:
    """Return the ports near this rank; set UCX_NET_DEVICES to one if HPCTRAIN_NIC requests it.

    Raises UsageError for any other value of HPCTRAIN_NIC.
    """
    adapters = nics.read_nics(root)
    ports = nics.fabric_ports(adapters)
    value, note = "", ""
    if is_near_requested(os.environ):
        value, note = select_port(launched, ports, gpu_position, os.environ, root)
    if value:
        ethernet_names = [nic.name for nic in adapters if nic.active and not nic.has_rdma]
        os.environ[UCX_DEVICES] = ",".join([value, *ethernet_names])
    return ports_for_rank(adapters, gpu_position, os.environ.get(UCX_DEVICES, ""), note, root)


def is_near_requested(environ: Mapping[str, str]) -> bool:
    """Return whether HPCTRAIN_NIC lets each rank name the port nearest to it."""
    value = environ.get(NIC_VARIABLE, "")
    if value not in ("", NEAR_VALUE):
        raise UsageError(
            f"{NIC_VARIABLE}: expected {NEAR_VALUE!r}, which lets each rank name the port near it "
            f"in {UCX_DEVICES}, or nothing, which leaves the choice to MPI; seen {value!r}"
        )
    return value == NEAR_VALUE


def select_port(
    launched: Launched,
    ports: Sequence[Nic],
    gpu_position: GpuPosition,
    environ: Mapping[str, str],
    root: Path = pci.ROOT,
) -> tuple[str, str]:
    """Return the port that a rank names in UCX_NET_DEVICES, "" for none, and a short reason."""
    rank, ranks = launched.local_rank, launched.local_size
    variable = next((name for name in UCX_VARIABLES if environ.get(name)), None)
    if variable is not None:
        return "", f"{variable} is set, and overrides this"
    if len(ports) < 2 or not ports[0].has_rdma:
        return "", "there is no choice of ports"
    if rank is None or ranks is None or rank >= ranks:
        return "", "the launcher sets no local rank"
    nearest = _nearest_by_rank(gpu_position, ranks, ports, root)
    ports_near_gpus = {
        name for gpu in gpu_position.gpus for name in nics.nearest_ports(gpu, ports, root)
    }
    usable_count = len(ports_near_gpus if len(gpu_position.gpus) > 1 else ports)
    if ranks < usable_count:
        return "", f"{ranks} rank{'s' * (ranks > 1)} to {usable_count} ports: all are left to each"
    return port_in_turn(nearest, rank), f"one of {', '.join(nearest[rank])}, the nearest"


def port_in_turn(nearest: Sequence[Sequence[str]], local_rank: int) -> str:
    """Return the port of a local rank; ranks with the same `nearest` ports get them in turn."""
    own_ports = nearest[local_rank]
    return own_ports[sum(ports == own_ports for ports in nearest[:local_rank]) % len(own_ports)]


def ports_for_rank(
    adapters: tuple[Nic, ...],
    gpu_position: GpuPosition,
    value: str,
    note: str = "",
    root: Path = pci.ROOT,
) -> NicPorts:
    """Return the ports near the rank, and the ports named by UCX_NET_DEVICES' `value`."""
    ports = nics.fabric_ports(adapters)
    nearest = _nearest_ports(gpu_position, ports, root)
    named_ports = [nic for word in device_names(value) for nic in _matching_ports(word, adapters)]
    active_rdma = tuple(nic.name for nic in named_ports if nic.has_rdma and nic.active)
    numa_nodes = {nic.name: pci.numa_node(nic.pci, root) for nic in adapters}
    named_nodes, nearest_nodes = (
        {numa_nodes[name] for name in active_rdma},
        {numa_nodes[name] for name in nearest},
    )
    is_remote = (
        bool(named_nodes and nearest_nodes)
        and None not in named_nodes | nearest_nodes
        and not named_nodes & nearest_nodes
    )
    return NicPorts(
        tuple(nic.name for nic in ports),
        nearest,
        active_rdma,
        device_faults(value, adapters, root),
        is_remote,
        note,
    )


def device_faults(value: str, adapters: Sequence[Nic], root: Path = pci.ROOT) -> tuple[str, ...]:
    """Return the faults of UCX_NET_DEVICES' `value`, such as "mlx5_7:1 is not there"."""
    fault_texts = []
    for word in device_names(value):
        matching_ports = _matching_ports(word, adapters)
        if not matching_ports and not (root / "sys/class/net" / word).exists():
            fault_texts.append(f"{word} is not there")
        # The kernel does not always report the state of a TCP interface.
        elif matching_ports and all(nic.has_rdma and not nic.active for nic in matching_ports):
            fault_texts.append(f"{word} is down")
    return tuple(fault_texts)


def device_names(value: str) -> tuple[str, ...]:
    """Return the names in UCX_NET_DEVICES, ranges expanded; () for "all" and for "^..."."""
    if value.startswith("^"):
        return ()
    parts = [part.strip() for part in value.split(",")]
    return tuple(word for part in parts if part not in ("", "all") for word in _expand_range(part))


def _expand_range(word: str) -> list[str]:
    """Return mlx5_0, mlx5_1, mlx5_2 for mlx5_[0-2], as newer UCX has it."""
    match = re.fullmatch(r"(.*)\[(\d+)-(\d+)\](.*)", word)
    if match is None:
        return [word]
    first, last = int(match[2]), int(match[3])
    return [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)]


def _matching_ports(word: str, adapters: Sequence[Nic]) -> list[Nic]:
    """Return the ports that `word` names; newer UCX takes an adapter's name for all its ports."""
    return [nic for nic in adapters if word in (nic.name, nic.name.partition(":")[0])]


def _nearest_by_rank(
    gpu_position: GpuPosition, ranks: int, ports: Sequence[Nic], root: Path
) -> list[tuple[str, ...]]:
    """Return the ports near each rank of the node; if unknown, this rank's ports for all."""
    if len(gpu_position.gpus) < 2:
        return [_nearest_ports(gpu_position, ports, root)] * ranks
    ports_near_gpus = [nics.nearest_ports(gpu, ports, root) for gpu in gpu_position.gpus]
    return [ports_near_gpus[rank % len(ports_near_gpus)] for rank in range(ranks)]


def _nearest_ports(gpu_position: GpuPosition, ports: Sequence[Nic], root: Path) -> tuple[str, ...]:
    if gpu_position.gpus:
        return nics.nearest_ports(gpu_position.gpus[gpu_position.ordinal], ports, root)
    nearest_nodes = pci.devices_nearest_to_cores(
        gpu_position.cores, [nic.pci for nic in ports], root
    )
    return tuple(nic.name for nic in ports if nic.pci in nearest_nodes)
