"""`auto`: from an array to the algorithm that reduces it, the same on every rank.

Rank 0 decides once, when the World is made: from a table of `hpctrain tune` that fits this machine
and these ranks, else from the cost model; it broadcasts what it decided, so that ranks with other
files, or none, still agree. A call then looks up its pick by the length of the array. Where picks
differ between arrays in node memory and others, ranks first agree on where theirs lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import numpy as np

from hpctrain import collectives, config
from hpctrain.collectives import AllReduceFunction, Group, broadcast
from hpctrain.collectives.choices import Choices
from hpctrain.collectives.direct import direct
from hpctrain.collectives.direct import prepared as direct_prepared
from hpctrain.collectives.gathers import ALL_GATHERS, AllGather, joined_by
from hpctrain.collectives.native import native
from hpctrain.collectives.nccl import nccl
from hpctrain.collectives.null import null
from hpctrain.collectives.operations import Operation, reduced_by_mpi
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.signature import Signature, matched
from hpctrain.errors import UsageError
from hpctrain.transport.nccl import libraries
from hpctrain.tuning import guess_gpus, table
from hpctrain.tuning.choose import Plan, choices
from hpctrain.tuning.gpus import Gpus
from hpctrain.tuning.guess import Layout, guessed, layout_of
from hpctrain.xp import Array, on_device

#: What a user may type for an all-reduce.
NAMES = ("auto", *collectives.ALLREDUCE, "nccl")
#: What one more bucket costs beside its time on the wire: the hand-off to the thread that carries
#: it, and back (benchmarks/overhead.py).
HAND_OFF_S = 15e-6


def auto(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place by the algorithm that was chosen for its length and place."""
    taken(group, x, op)(group, x, op)


def taken(group: Group, x: np.ndarray, op: Operation) -> AllReduceFunction:
    """Return what `auto` takes for `x`; all ranks must call, and all find the same."""
    pick = _choices(group, x).at(x.nbytes)
    function = pick.plain
    if pick.kept is not function and _seen_by_all(group, x):
        function = pick.kept
    return pick.ours if function is native and not reduced_by_mpi(x, op) else function


def _choices(group: Group, x: Array) -> Choices:
    known = group.choices or _guess(group.link.size)
    return known if type(x) is np.ndarray else known.of(on_device(x))


def _seen_by_all(group: Group, x: np.ndarray) -> bool:
    """Return whether `x` lies in node memory on every rank: a user may have mixed arrays.

    Ranks that chose differently would wait for each other for ever. In a node, flags tell in 1 us.
    """
    seen = group.memory is not None and group.memory.place(x) is not None
    if len(group.nodes) == 1 and group.near is not None:
        return all(group.near.flags.exchange(int(seen)))
    vote = np.array([seen], np.int32)
    recursive_doubling(group, vote, np.minimum)
    return bool(vote[0])


def prepared(
    group: Group,
    x: np.ndarray,
    op: Operation,
    allreduce: AllReduceFunction = auto,
    call: Signature | None = None,
    shared: bool = False,
) -> Callable[[], Any]:
    """Return a call that reduces flat `x` by `allreduce`; with `call`, once all ranks make it.

    Nothing is looked up again but what `auto` must ask other ranks, who may call the functions
    themselves. With `shared` it returns the array that holds the sum, which may be a neighbour's
    (`direct_shared`).
    """
    if allreduce is auto:
        pick = _choices(group, x).at(x.nbytes)
        allreduce = taken(group, x, op) if pick.plain is pick.kept else auto
    if allreduce is direct:
        return direct_prepared(group, x, op, call, shared)
    by_mpi = allreduce is native and reduced_by_mpi(x, op)
    work = group.link.bind_native(x, op) if by_mpi else partial(allreduce, group, x, op)
    work = partial(_then, work, x) if shared else work
    return work if call is None else matched(group, call, work)


def bound(
    group: Group, x: np.ndarray, op: Operation, name: str = "auto", shared: bool = False
) -> Callable[[], Any]:
    """Return a `prepared` call for algorithm `name`, chosen once for all: all ranks must call."""
    allreduce = resolved(allreduce_named(name), group, x, op)
    return prepared(group, x, op, allreduce, shared=shared)


def _then(call: Callable[[], Any], x: np.ndarray) -> np.ndarray:
    call()
    return x


def resolved(
    allreduce: Callable[..., Any], group: Group, x: np.ndarray, op: Operation
) -> Callable[..., Any]:
    """Return `allreduce`, or what it takes for `x` if it is `auto`; all ranks must call."""
    return taken(group, x, op) if allreduce is auto else allreduce


def name_of(allreduce: Callable[..., Any], group: Group, x: np.ndarray) -> str:
    """Return the name of what `allreduce` does to the sum of `x`; for `auto`, what it takes."""
    function = resolved(allreduce, group, x, np.add)
    return getattr(function, "__name__", "unknown").replace("_", "-")


def allreduce_named(name: str) -> AllReduceFunction:
    """Return the function that people call `name`; raise UsageError with the nearest name.

    Also where it is one that needs what is not installed here.
    """
    if name == "auto":  # the commonest, and a call of few bytes feels every microsecond
        return auto
    if name == "nccl":
        libraries()
    return config.pick({"auto": auto, **collectives.ALLREDUCE, "nccl": nccl}, name, "algorithm")


def all_gather_named(name: str) -> AllGather:
    """Return how `name` brings finished chunks to all ranks; raise UsageError if it cannot."""
    allreduce = allreduce_named(name)
    if allreduce in (null, nccl):  # one sends nothing, the other knows no bits
        raise UsageError(
            "[wire] reduction is 'ordered', whose chunks the algorithm cannot gather: expected "
            f"one of ours, or native, seen {name}"
        )
    return ALL_GATHERS.get(name) or joined_by(allreduce)


def bucket_bytes(group: Group, plane: Array) -> int:
    """Return how long the buckets of a plane of gradients should be, the same on all ranks."""
    return bucket_of(_choices(group, plane).buckets, plane.nbytes)


def bucket_of(costs: Sequence[tuple[int, float]], plane_bytes: int) -> int:
    """Return the best length for a plane, of those in `costs`: (bytes, seconds per byte).

    With buckets of b bytes a plane of n takes n/b (c + t(b)) on the wire, c being the hand-off and
    t(b) the all-reduce; and the last bucket's t(b) lies bare, since backward is over when it
    leaves. The sum is least at b = sqrt(n (c + a) / beta) where t(b) = a + beta b, as in any
    pipeline (e.g. Sanders et al., 2009, on segments); here it is taken over the lengths measured.
    """
    able = [one for one in costs if one[0] <= plane_bytes] or costs[:1]
    return min(able, key=partial(_bare_seconds, plane_bytes))[0]


def _bare_seconds(plane_bytes: int, bucket: tuple[int, float]) -> float:
    """Return the seconds that buckets of (bytes, seconds per byte) cost at worst."""
    nbytes, per_byte = bucket
    return math.ceil(plane_bytes / nbytes) * HAND_OFF_S + (plane_bytes + nbytes) * per_byte


def with_choices(group: Group, mpi: bool, gpus: Gpus | None = None) -> Group:
    """Return `group` with what rank 0 chooses for it; `mpi` where MPI joins its ranks; collective.

    Also for arrays on `gpus`, if all have some. Rank 0 looks for tables; where there is one that
    does not fit, it says so and goes without.
    """
    if group.link.size == 1:
        return replace(group, choices=choices(guessed(layout_of(group, mpi))))
    said = json.dumps(_decided(group, mpi, gpus)).encode() if group.link.rank == 0 else b""
    host, *others = (choices(Plan(**one)) for one in json.loads(_from_rank_0(group, said)))
    return replace(group, choices=replace(host, gpus=next(iter(others), None)))


def _decided(group: Group, mpi: bool, gpus: Gpus | None) -> list[dict[str, Any]]:
    """Return the plans of tables that fit, else those of the model: the host's, that of `gpus`."""
    plans = [_measured(group, mpi, None) or guessed(layout_of(group, mpi))]
    if gpus is not None:
        plans.append(_measured(group, mpi, gpus) or guess_gpus.guessed(group, gpus))
    return list(map(asdict, plans))


def _measured(group: Group, mpi: bool, gpus: Gpus | None) -> Plan | None:
    found = table.of_group(group, mpi, gpus)
    return None if found is None else table.plan_of(found)


def _from_rank_0(group: Group, said: bytes) -> bytes:
    """Return what rank 0 `said`."""
    length = np.array([len(said)])
    broadcast(group, length)
    text = np.frombuffer(said.ljust(int(length[0])), np.uint8).copy()
    broadcast(group, text)
    return text.tobytes()


@cache
def _guess(ranks: int) -> Choices:
    """Return what is taken in a group that no World made."""
    return choices(guessed(Layout((ranks,))))
