"""The binding map: where every rank sits, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.doctor.check import Check, Verdict
from hpctrain.hardware.pci import core_list
from hpctrain.launchers import TITLES
from hpctrain.transport.rails import ASKS, NEAR, UCX_RAILS
from hpctrain.transport.seats import SHOWN, Seated, by_kind, faults, in_words, named, unbind

COLUMNS = ("rank", "host", "local rank", "cores", "BLAS threads", "GPU", "NIC")
#: Faults of the seats: bad are those which make a run many times slower, or end it.
KINDS: dict[str, Verdict] = {
    "local ranks": "bad",
    "GPUs shared": "bad",
    "cores shared": "bad",
    "BLAS threads": "bad",
    "NICs named": "bad",
    "NICs shared": "slow",
    "NICs far": "slow",
}


def rows(seats: Sequence[Seated]) -> list[tuple[str, ...]]:
    """Return the cells of the map, a row per rank, under `COLUMNS`."""
    seen: dict[str, int] = {}
    found = []
    for rank, seat in enumerate(seats):
        local = seen[seat.host] = seen.get(seat.host, -1) + 1
        nic = seat.rails.told
        cells = (rank, seat.host, local, seat.cores, seat.blas_threads, seat.gpu, nic)
        found.append(tuple(str(cell) or "-" for cell in cells))
    return found


def checks(seats: Sequence[Seated]) -> list[Check]:
    """Return a row for each kind of fault, and one for each that there is not."""
    found = faults(seats)
    out = [_launcher(seats)]
    for wrong in by_kind(found):
        out.append(Check(wrong[0].name, KINDS[wrong[0].name], *in_words(wrong)))
    if not any(one.name in ("cores shared", "BLAS threads") for one in found):
        out.append(_turns(seats))
    if any(seat.gpu for seat in seats) and not any(one.name == "GPUs shared" for one in found):
        out.append(_gpus(seats))
    if not any(one.name.startswith("NICs") for one in found):
        out += _nics(seats)
    return out


def _first(words: Sequence[str]) -> str:
    return "; ".join(words[:SHOWN]) + f"; and {len(words) - SHOWN} more" * (len(words) > SHOWN)


def crowded(seats: Sequence[Seated]) -> bool:
    """Return whether anywhere ranks are more than the cores that they share."""
    return any(len(ranks) > len(core_list(cores)) for ranks, cores, _ in _sharing(seats, "cores"))


def _launcher(seats: Sequence[Seated]) -> Check:
    names = list(dict.fromkeys(TITLES[seat.launcher] for seat in seats))
    hosts = len({seat.host for seat in seats})
    seen = f"{len(seats)} rank{'s' * (len(seats) > 1)} on {hosts} node{'s' * (hosts > 1)}, by "
    seen += " and ".join(names)
    if len(seats) > 1:
        return Check("ranks", "ok", seen)
    return Check("ranks", "note", f"{seen}: start as many as will train",
                 "srun, mpirun or hpctrain launch -n N")  # fmt: skip


def _turns(seats: Sequence[Seated]) -> Check:
    """Return the check of ranks that share cores, though none is idle."""
    found = list(_sharing(seats, "cores"))
    if not found:
        return Check("cores", "ok", "every rank has its own")
    seen = _first([
        f"{named(ranks)} of {host} share {len(core_list(cores))} cores"
        for ranks, cores, host in found
    ])  # fmt: skip
    if crowded(seats):
        return Check("cores", "slow", f"{seen}: they take turns", "start fewer ranks per node")
    remedy = unbind(seats[0].launcher)
    return Check("cores", "note", f"{seen}: ranks are not bound", remedy)


def _gpus(seats: Sequence[Seated]) -> Check:
    """Return the check of ranks that share a GPU, though none is idle."""
    found = [f"{named(ranks)} of {host} share {gpu}" for ranks, gpu, host in _sharing(seats, "gpu")
             if gpu]  # fmt: skip
    if found:
        return Check("GPUs", "note", _first(found), "start as many ranks per node as it has GPUs")
    return Check("GPUs", "ok", "every rank has its own")


def _nics(seats: Sequence[Seated]) -> list[Check]:
    """Return the check of ranks equally near to more ports than UCX uses at once; [] on one node.

    Each of them would take the same.
    """
    if len({seat.host for seat in seats}) < 2 or all(len(s.rails.ports) < 2 for s in seats):
        return []
    found = [
        f"{named(ranks)} of {host} are equally near {len(rails.near)} ports"
        for ranks, rails, host in _sharing(seats, "rails")
        if len(rails.near) > UCX_RAILS and not rails.named
    ]
    if found:
        seen = f"{_first(found)}: UCX may give all of them the same {UCX_RAILS}"
        return [Check("NICs", "note", seen, f"export {ASKS}={NEAR}: ranks share the ports out")]
    return [Check("NICs", "ok", "those near each rank are in the map")]


def _sharing(seats: Sequence[Seated], what: str) -> Iterator[tuple[list[int], Any, str]]:
    """Yield ranks that have the same `what`, what that is, and their node."""
    keys = [(seat.host, getattr(seat, what)) for seat in seats]
    for key in dict.fromkeys(keys):
        ranks = [rank for rank, one in enumerate(keys) if one == key]
        if len(ranks) > 1:
            yield ranks, key[1], key[0]
