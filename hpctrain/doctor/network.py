"""Network adapters: state, rate, and those that the environment names for UCX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.doctor.check import Check
from hpctrain.hardware.nics import Nic, fastest
from hpctrain.hardware.pci import ROOT
from hpctrain.transport.placement import nearest_nics
from hpctrain.transport.placement.check import EXISTING_PORTS


def checks(nics: Sequence[Nic]) -> list[Check]:
    """Return the checks of the adapters."""
    if not nics:
        return [Check("network", "note", "no adapter of hardware in /sys/class")]
    best_rate = fastest(tuple(nics))
    observed = ", ".join(map(describe, nics))
    rows = [Check("network", "ok" if best_rate else "note", observed)]
    ports_down = [nic for nic in nics if nic.rdma and not nic.active]
    if ports_down:
        names = ", ".join(nic.name for nic in ports_down)
        rows.append(Check("links down", "slow", names, "ask the site: ibstat, ibdev2netdev"))
    slow_ports = _slow_ports(nics)
    if slow_ports:
        names = ", ".join(f"{nic.name} {nic.gbit_s:g} Gbit/s" for nic in slow_ports)
        rows.append(Check("slow links", "slow", names, "a cable or a port: tell the site"))
    return rows


def named_nics(nics: Sequence[Nic], environ: Mapping[str, str], root: Path = ROOT) -> list[Check]:
    """Return the check of the adapters that UCX_NET_DEVICES names; none if it is not set."""
    value = environ.get(nearest_nics.UCX_DEVICES, "")
    if not nearest_nics.device_names(value):
        return []
    device_fault = nearest_nics.device_faults(value, nics, root)
    if device_fault:
        return [
            Check(
                "NICs named",
                "bad",
                f"{nearest_nics.UCX_DEVICES}={value}: {', '.join(device_fault)}",
                EXISTING_PORTS,
            )
        ]
    return [Check("NICs named", "ok", f"{nearest_nics.UCX_DEVICES}={value}")]


def describe(nic: Nic) -> str:
    """Return name, kind, rate and state of an adapter as text."""
    rate = f"{nic.gbit_s:g} Gbit/s" if nic.gbit_s else "rate unknown"
    return f"{nic.name} {nic.kind} {rate}{'' if nic.active else ' DOWN'}"


def _slow_ports(nics: Sequence[Nic]) -> list[Nic]:
    """Return the active RDMA ports slower than the node's fastest: damaged links train down."""
    rdma = [nic for nic in nics if nic.rdma and nic.active and nic.gbit_s]
    best_rate = max((nic.gbit_s or 0 for nic in rdma), default=0)
    return [nic for nic in rdma if (nic.gbit_s or 0) < best_rate]
