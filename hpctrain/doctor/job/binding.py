"""The binding map: host, cores, GPU and NIC of every rank, and the faults of this placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.core.launchers import TITLES
from hpctrain.doctor.check import Check, Verdict
from hpctrain.hardware.pci import core_list
from hpctrain.transport.placement.check import (
    MAX_FAULTS_SHOWN,
    RankBinding,
    description,
    faults,
    grouped_by_kind,
    named,
    unbind,
)
from hpctrain.transport.placement.nearest_nics import NEAR, NIC_VARIABLE, UCX_RAILS

COLUMNS = ("rank", "host", "local rank", "cores", "BLAS threads", "GPU", "NIC")
#: Placement faults: a bad one makes a run many times slower, or ends it.
KINDS: dict[str, Verdict] = {
    "local ranks": "bad",
    "GPUs shared": "bad",
    "cores shared": "bad",
    "BLAS threads": "bad",
    "NICs named": "bad",
    "NICs shared": "slow",
    "NICs far": "slow",
}


def rows(seats: Sequence[RankBinding]) -> list[tuple[str, ...]]:
    """Return the cells of the map, a row per rank, under `COLUMNS`."""
    last_local: dict[str, int] = {}
    cells_of_ranks = []
    for rank, seat in enumerate(seats):
        local = last_local[seat.host] = last_local.get(seat.host, -1) + 1
        nic = seat.nics.label
        cells = (rank, seat.host, local, seat.cores, seat.blas_threads, seat.gpu, nic)
        cells_of_ranks.append(tuple(str(cell) or "-" for cell in cells))
    return cells_of_ranks


def checks(seats: Sequence[RankBinding]) -> list[Check]:
    """Return a check for each kind of fault, and one for each kind that is absent."""
    problems = faults(seats)
    checks_found = [_launcher(seats)]
    for fault_group in grouped_by_kind(problems):
        checks_found.append(
            Check(fault_group[0].name, KINDS[fault_group[0].name], *description(fault_group))
        )
    if not any(fault.name in ("cores shared", "BLAS threads") for fault in problems):
        checks_found.append(_shared_cores(seats))
    gpus_are_shared = any(fault.name == "GPUs shared" for fault in problems)
    if any(seat.gpu for seat in seats) and not gpus_are_shared:
        checks_found.append(_gpus(seats))
    if not any(fault.name.startswith("NICs") for fault in problems):
        checks_found += _nics(seats)
    return checks_found


def _shorten(words: Sequence[str]) -> str:
    return "; ".join(words[:MAX_FAULTS_SHOWN]) + f"; and {len(words) - MAX_FAULTS_SHOWN} more" * (
        len(words) > MAX_FAULTS_SHOWN
    )


def is_oversubscribed(seats: Sequence[RankBinding]) -> bool:
    """Return whether any ranks share fewer cores than they are."""
    return any(len(ranks) > len(core_list(cores)) for ranks, cores, _ in _sharing(seats, "cores"))


def _launcher(seats: Sequence[RankBinding]) -> Check:
    names = list(dict.fromkeys(TITLES[seat.launcher] for seat in seats))
    hosts = len({seat.host for seat in seats})
    observed = f"{len(seats)} rank{'s' * (len(seats) > 1)} on {hosts} node{'s' * (hosts > 1)}, by "
    observed += " and ".join(names)
    if len(seats) > 1:
        return Check("ranks", "ok", observed)
    return Check("ranks", "note", f"{observed}: start as many as will train",
                 "srun, mpirun or hpctrain launch -n N")  # fmt: skip


def _shared_cores(seats: Sequence[RankBinding]) -> Check:
    """Return the check of ranks that share cores, though none is idle."""
    groups = list(_sharing(seats, "cores"))
    if not groups:
        return Check("cores", "ok", "every rank has its own")
    observed = _shorten([
        f"{named(ranks)} of {host} share {len(core_list(cores))} cores"
        for ranks, cores, host in groups
    ])  # fmt: skip
    if is_oversubscribed(seats):
        return Check("cores", "slow", f"{observed}: they take turns", "start fewer ranks per node")
    remedy = unbind(seats[0].launcher)
    return Check("cores", "note", f"{observed}: ranks are not bound", remedy)


def _gpus(seats: Sequence[RankBinding]) -> Check:
    """Return the check of ranks that share a GPU, though none is idle."""
    texts = [f"{named(ranks)} of {host} share {gpu}" for ranks, gpu, host in _sharing(seats, "gpu")
             if gpu]  # fmt: skip
    if texts:
        return Check("GPUs", "note", _shorten(texts), "start as many ranks per node as it has GPUs")
    return Check("GPUs", "ok", "every rank has its own")


def _nics(seats: Sequence[RankBinding]) -> list[Check]:
    """Return the check of ranks equally near to more ports than UCX uses at once; [] on one node.

    UCX would take the same ports for each of these ranks.
    """
    if len({seat.host for seat in seats}) < 2 or all(len(s.nics.ports) < 2 for s in seats):
        return []
    texts = [
        f"{named(ranks)} of {host} are equally near {len(nics.nearest)} ports"
        for ranks, nics, host in _sharing(seats, "nics")
        if len(nics.nearest) > UCX_RAILS and not nics.named
    ]
    if texts:
        observed = f"{_shorten(texts)}: UCX may give all of them the same {UCX_RAILS}"
        return [
            Check(
                "NICs", "note", observed, f"export {NIC_VARIABLE}={NEAR}: ranks share the ports out"
            )
        ]
    return [Check("NICs", "ok", "those near each rank are in the map")]


def _sharing(seats: Sequence[RankBinding], attribute: str) -> Iterator[tuple[list[int], Any, str]]:
    """Yield the ranks of a node with equal `attribute`, its value, and the node."""
    keys = [(seat.host, getattr(seat, attribute)) for seat in seats]
    for key in dict.fromkeys(keys):
        ranks = [rank for rank, seat_key in enumerate(keys) if seat_key == key]
        if len(ranks) > 1:
            yield ranks, key[1], key[0]
