"""Checks of network adapters: state, rate, and the adapters that the environment names for UCX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.hardware.nics import Nic, fastest_port
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.doctor.check import Check
from hpctrain.transport.placement import nearest_nics
from hpctrain.transport.placement.check import EXISTING_PORTS_REMEDY


def check_adapters(nics: Sequence[Nic]) -> list[Check]:
    """Return the checks of the adapters."""
    if not nics:
        return [Check("network", "note", "no hardware adapter in /sys/class")]
    fastest_nic = fastest_port(tuple(nics))
    observed = ", ".join(map(describe_nic, nics))
    checks = [Check("network", "ok" if fastest_nic else "note", observed)]
    down_ports = [nic for nic in nics if nic.has_rdma and not nic.active]
    if down_ports:
        names = ", ".join(nic.name for nic in down_ports)
        checks.append(
            Check("links down", "slow", names, "see ibstat and ibdev2netdev, and ask the site")
        )
    slow_ports = _slow_ports(nics)
    if slow_ports:
        names = ", ".join(f"{nic.name} {nic.gbit_s:g} Gbit/s" for nic in slow_ports)
        checks.append(
            Check("slow links", "slow", names, "a cable or a port may be damaged: tell the site")
        )
    return checks


def check_named_nics(
    nics: Sequence[Nic], environ: Mapping[str, str], root: Path = ROOT
) -> list[Check]:
    """Return the check of the adapters that UCX_NET_DEVICES names; [] if it is not set."""
    value = environ.get(nearest_nics.UCX_DEVICES, "")
    if not nearest_nics.device_names(value):
        return []
    faults = nearest_nics.device_faults(value, nics, root)
    if faults:
        return [
            Check(
                "NICs named",
                "bad",
                f"{nearest_nics.UCX_DEVICES}={value}: {', '.join(faults)}",
                EXISTING_PORTS_REMEDY,
            )
        ]
    return [Check("NICs named", "ok", f"{nearest_nics.UCX_DEVICES}={value}")]


def describe_nic(nic: Nic) -> str:
    """Return the name, kind, rate and state of an adapter as text."""
    rate = f"{nic.gbit_s:g} Gbit/s" if nic.gbit_s else "rate unknown"
    return f"{nic.name} {nic.kind} {rate}{'' if nic.active else ' DOWN'}"


def _slow_ports(nics: Sequence[Nic]) -> list[Nic]:
    """Return the active RDMA ports slower than the node's fastest: damaged links run slower."""
    rdma_ports = [nic for nic in nics if nic.has_rdma and nic.active and nic.gbit_s]
    max_gbit_s = max((nic.gbit_s or 0 for nic in rdma_ports), default=0)
    return [nic for nic in rdma_ports if (nic.gbit_s or 0) < max_gbit_s]
