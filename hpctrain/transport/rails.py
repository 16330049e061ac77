"""The network adapters of a rank's node, and which of them the rank is near. Before MPI starts.

    GPU 0 -- switch -- mlx5_0:1      rank 0 computes on GPU 0 and is near mlx5_0:1;
    GPU 1 -- switch -- mlx5_1:1      four ranks near the same two ports get them in turn

**Nobody's adapter is chosen unless `HPCTRAIN_NIC=near` asks for it.** UCX takes the ports nearest
to the memory that it sends: of a GPU that was made current before MPI started (openucx/ucx issue
7273), or of the cores that the rank is bound to; `seat` sees to both first. And it splits a long
message over two ports (its FAQ, "multi-rail"). One port named in UCX_NET_DEVICES takes the second
away, which halves what a ring sends from node to node, since of each node one rank at a time does;
and it takes every other network away, TCP among them. Cray's MPI, Intel's and Open MPI's libfabric
layer deal out adapters by themselves, and do not read that variable.

What UCX does badly: where several ports are equally near, all ranks take the first (issue 8401;
mended in 2026, pull request 11547). Sites that know so name a port per local rank in a wrapper.
`HPCTRAIN_NIC=near` in a site's profile does that by what sysfs tells: of the ports that are alike
the nearest for each rank, those equally near in turn; Ethernet stays named beside it, as UCX may
need TCP. Ranks that are fewer than the ports keep all of them, and what the user or the site says
to UCX goes before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.hardware import nics, pci
from hpctrain.hardware.nics import Nic
from hpctrain.launchers import Launched

ASKS, NEAR = "HPCTRAIN_NIC", "near"
UCX_RAILS = 2  # it splits a long message over so many ports, where nothing is set
NAMES = "UCX_NET_DEVICES"
#: By these a user or a site has said to UCX which ports to take.
SAID = (NAMES, "UCX_SINGLE_NET_DEVICE", "UCX_NODE_LOCAL_ID")


@dataclass(frozen=True)
class Rails:
    """The ports on a rank's node as the rank stands to them; names as in "mlx5_0:1"."""

    ports: tuple[str, ...] = ()  #: those alike through which nodes meet
    near: tuple[str, ...] = ()  #: of them, the nearest to the rank's GPU, else to its cores
    named: tuple[str, ...] = ()  #: ports that do RDMA and UCX_NET_DEVICES names, if they are up
    wrong: tuple[str, ...] = ()  #: what it names and is down or not there, with that word
    far: bool = False  #: whether all that it names lie on other NUMA nodes than what is near
    note: str = ""  #: what came of HPCTRAIN_NIC

    @property
    def told(self) -> str:
        """The ports that the rank may take, in a few words; "" for none."""
        return f"{', '.join(self.named)} (named)" if self.named else ", ".join(self.near)


UNKNOWN = Rails()


@dataclass(frozen=True)
class Spot:
    """Where a rank computes: GPUs it sees by their addresses, the number of its own; else cores."""

    gpus: tuple[str, ...] = ()
    ordinal: int = 0
    cores: Collection[int] = ()


def from_table(table: Mapping[str, Any]) -> Rails:
    """Return what `asdict` made a table of, and JSON has carried."""
    told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return Rails(**told)


def take(launched: Launched, spot: Spot, root: Path = pci.ROOT) -> Rails:
    """Return the ports as this rank stands to them; name one for UCX where that is asked for.

    Raises UsageError where HPCTRAIN_NIC asks for something else.
    """
    found = nics.nics(root)
    ports = nics.rails(found)
    value, note = "", ""
    if asked(os.environ):
        value, note = chosen(launched, ports, spot, os.environ, root)
    if value:
        beside = [nic.name for nic in found if nic.active and not nic.rdma]
        os.environ[NAMES] = ",".join([value, *beside])
    return look(found, spot, os.environ.get(NAMES, ""), note, root)


def asked(environ: Mapping[str, str]) -> bool:
    """Return whether each rank is to name the port it is near."""
    said = environ.get(ASKS, "")
    if said not in ("", NEAR):
        raise UsageError(
            f"{ASKS}: expected {NEAR!r}, which lets each rank name the port near it in {NAMES}, or "
            f"nothing, which leaves the choice to MPI; seen {said!r}"
        )
    return said == NEAR


def chosen(
    launched: Launched,
    ports: Sequence[Nic],
    spot: Spot,
    environ: Mapping[str, str],
    root: Path = pci.ROOT,
) -> tuple[str, str]:
    """Return the port that a rank is to name, "" for none, and why, in a few words."""
    rank, ranks = launched.local_rank, launched.local_size
    said = next((name for name in SAID if environ.get(name)), None)
    if said is not None:
        return "", f"{said} is set, and obeyed"
    if len(ports) < 2 or not ports[0].rdma:
        return "", "there is no choice of ports"
    if rank is None or ranks is None or rank >= ranks:
        return "", "the launcher does not tell the local rank"
    each = _near_each(spot, ranks, ports, root)
    of_gpus = {name for gpu in spot.gpus for name in nics.nearest_ports(gpu, ports, root)}
    usable = len(of_gpus if len(spot.gpus) > 1 else ports)
    if ranks < usable:
        return "", f"{ranks} rank{'s' * (ranks > 1)} to {usable} ports: all are left to each"
    return dealt(each, rank), f"one of {', '.join(each[rank])}, the nearest"


def dealt(near: Sequence[Sequence[str]], local_rank: int) -> str:
    """Return the port of a local rank, of those `near` each: they go round among equals."""
    mine = near[local_rank]
    return mine[sum(other == mine for other in near[:local_rank]) % len(mine)]


def look(
    found: tuple[Nic, ...], spot: Spot, value: str, note: str = "", root: Path = pci.ROOT
) -> Rails:
    """Return what of `found` the rank is near, and what UCX_NET_DEVICES' `value` says of it."""
    ports = nics.rails(found)
    near = _near(spot, ports, root)
    named = [nic for word in words(value) for nic in _meant(word, found)]
    up = tuple(nic.name for nic in named if nic.rdma and nic.active)
    at = {nic.name: pci.numa_node(nic.pci, root) for nic in found}
    homes, close = {at[name] for name in up}, {at[name] for name in near}
    far = bool(homes and close) and None not in homes | close and not homes & close
    return Rails(tuple(nic.name for nic in ports), near, up, wrong(value, found, root), far, note)


def wrong(value: str, found: Sequence[Nic], root: Path = pci.ROOT) -> tuple[str, ...]:
    """Return what UCX_NET_DEVICES' `value` names in vain: "mlx5_7:1 is not there"."""
    out = []
    for word in words(value):
        meant = _meant(word, found)
        if not meant and not (root / "sys/class/net" / word).exists():
            out.append(f"{word} is not there")
        # Whether an interface that does TCP is up, the kernel does not always tell.
        elif meant and all(nic.rdma and not nic.active for nic in meant):
            out.append(f"{word} is down")
    return tuple(out)


def words(value: str) -> tuple[str, ...]:
    """Return what UCX_NET_DEVICES names, ranges spelled out; nothing for "all" and for "^..."."""
    if value.startswith("^"):
        return ()
    parts = [part.strip() for part in value.split(",")]
    return tuple(word for part in parts if part not in ("", "all") for word in _spelled(part))


def _spelled(word: str) -> list[str]:
    """Return mlx5_0, mlx5_1, mlx5_2 for mlx5_[0-2], as newer UCX has it."""
    found = re.fullmatch(r"(.*)\[(\d+)-(\d+)\](.*)", word)
    if found is None:
        return [word]
    first, last = int(found[2]), int(found[3])
    return [f"{found[1]}{number}{found[4]}" for number in range(first, last + 1)]


def _meant(word: str, found: Sequence[Nic]) -> list[Nic]:
    """Return the ports that a word means; newer UCX takes an adapter's name for all its ports."""
    return [nic for nic in found if word in (nic.name, nic.name.partition(":")[0])]


def _near_each(spot: Spot, ranks: int, ports: Sequence[Nic], root: Path) -> list[tuple[str, ...]]:
    """Return the ports near each rank of the node; as ours where it cannot be known."""
    if len(spot.gpus) < 2:
        return [_near(spot, ports, root)] * ranks
    of_gpus = [nics.nearest_ports(gpu, ports, root) for gpu in spot.gpus]
    return [of_gpus[rank % len(of_gpus)] for rank in range(ranks)]


def _near(spot: Spot, ports: Sequence[Nic], root: Path) -> tuple[str, ...]:
    if spot.gpus:
        return nics.nearest_ports(spot.gpus[spot.ordinal], ports, root)
    close = pci.nearest_to_cores(spot.cores, [nic.pci for nic in ports], root)
    return tuple(nic.name for nic in ports if nic.pci in close)
