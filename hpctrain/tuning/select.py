"""`auto`: selects the algorithm that reduces an array, the same on every rank.

Rank 0 decides once, when the World is made: from a table of `hpctrain tune` that fits this machine
and these ranks, else from the cost model; it broadcasts its decision, so that ranks with other
files, or none, still agree. A call then looks up the choice by the length of the array. If choices
differ between arrays in node memory and others, ranks first agree on where their arrays lie.

`bind` does all lookups for an array once, and returns the call that reduces its current contents:
at few bytes the lookups take longer than the messages. `ht.bind`, the cache of `ht.allreduce` and
the buckets of gradients use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import numpy as np

from hpctrain import collectives
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.all_gathers import (
    ALL_GATHERS,
    AllGather,
    gather_by_allreduce,
    ranks_share_memory,
)
from hpctrain.collectives.direct import MAX_COPIED_BYTES, bind_direct, direct, direct_shared
from hpctrain.collectives.dispatch import Choices
from hpctrain.collectives.native import native
from hpctrain.collectives.nccl import nccl
from hpctrain.collectives.null import null
from hpctrain.collectives.reductions.operations import (
    Operation,
    can_mpi_reduce,
    without_warnings,
)
from hpctrain.collectives.signature import Signature, bind_match
from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.core import names
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, on_device
from hpctrain.transport.device.nccl import load_libraries
from hpctrain.tuning.choose import TuningPlan, make_choices
from hpctrain.tuning.defaults import NodeLayout, default_plan, layout_of
from hpctrain.tuning.gpu_layout import GpuLayout

#: The names of all-reduces for users.
ALGORITHM_NAMES = ("auto", *collectives.ALLREDUCE, "nccl")
#: The cost of one more bucket beside its time on the wire: the hand-off to the communication
#: thread, and back (benchmarks/overhead.py).
HAND_OFF_S = 15e-6


def auto(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place by the algorithm chosen for its length and memory."""
    choose_algorithm(group, x, op)(group, x, op)


def choose_algorithm(group: Group, x: np.ndarray, op: Operation) -> AllReduceFunction:
    """Return the algorithm of `auto` for `x`, the same on all ranks; collective."""
    choice = _choices_for(group, x).lookup(x.nbytes)
    function = choice.default
    if choice.in_node_memory is not function:
        # Ranks with different choices would deadlock, and a user may have mixed arrays.
        is_private = group.memory is None or group.memory.locate(x) is None
        if not elementwise_maximum(group, (int(is_private), 0))[0]:
            function = choice.in_node_memory
    return choice.non_mpi if function is native and not can_mpi_reduce(x, op) else function


def _choices_for(group: Group, x: Array) -> Choices:
    choices = group.choices or _default_choices(group.link.size)
    return choices.gpus if on_device(x) and choices.gpus is not None else choices


def bind(
    group: Group,
    x: np.ndarray,
    op: Operation,
    allreduce: Callable[..., Any],
    signature: Signature | None = None,
) -> Callable[[], Any]:
    """Return a call that reduces the current contents of flat `x`, as `allreduce(group, x, op)`.

    It returns what `allreduce` does: the array with the result, None if that is `x`. With
    `signature`, ranks first compare it. Binding does the local lookups, and is not collective:
    other ranks may call `allreduce` itself. If ranks have to vote on the choice of `auto`, each
    call does so.
    """
    if allreduce is auto:
        choice = _choices_for(group, x).lookup(x.nbytes)
        if choice.default is choice.in_node_memory:
            allreduce = choose_algorithm(group, x, op)
        if (
            (signature is not None and allreduce is native and ranks_share_memory(group))
            and group.link.size == 2
            and x.nbytes <= MAX_COPIED_BYTES
        ):
            # One exchange carries the signature and the copies, and a sum of two arrays has the
            # same bytes in either order; MPI's sums warn of nothing either.
            allreduce, op = direct, without_warnings(op, x)
    if allreduce in (direct, direct_shared):
        return bind_direct(group, x, op, signature, shared=allreduce is direct_shared)
    if allreduce is native and can_mpi_reduce(x, op):
        reduce = group.link.endpoint.native.bind_allreduce(x, op)
    else:
        reduce = partial(allreduce, group, x, op)

    if signature is None:
        return reduce
    match = bind_match(group, signature)

    def match_and_reduce() -> Any:
        match()
        return reduce()

    return match_and_reduce


def resolve_auto(
    allreduce: Callable[..., Any], group: Group, x: np.ndarray, op: Operation
) -> Callable[..., Any]:
    """Return `allreduce`; for `auto` the algorithm that it selects for `x`; collective."""
    return choose_algorithm(group, x, op) if allreduce is auto else allreduce


def algorithm_name(allreduce: Callable[..., Any], group: Group, x: np.ndarray) -> str:
    """Return the name of `allreduce`; `auto` is named after its algorithm for the sum of `x`."""
    function = resolve_auto(allreduce, group, x, np.add)
    return getattr(function, "__name__", "unknown").replace("_", "-")


def find_allreduce(name: str) -> AllReduceFunction:
    """Return the all-reduce called `name`; raise UsageError with the nearest name.

    Also if a library that it needs is not installed.
    """
    if name == "auto":  # the most common; for few bytes every microsecond counts
        return auto
    if name == "nccl":
        load_libraries()
    return names.pick({"auto": auto, **collectives.ALLREDUCE, "nccl": nccl}, name, "algorithm")


def find_all_gather(name: str) -> AllGather:
    """Return the all-gather of algorithm `name`; raise UsageError if it has none."""
    allreduce = find_allreduce(name)
    if allreduce in (null, nccl):  # one sends nothing, the other has no bitwise operations
        raise UsageError(
            "[wire] reduction is 'ordered', whose chunks the algorithm cannot gather: expected "
            f"an algorithm of hpctrain, or native, seen {name}"
        )
    return ALL_GATHERS.get(name) or gather_by_allreduce(allreduce)


def bucket_bytes(group: Group, plane: Array) -> int:
    """Return the bucket length in bytes for a plane of gradients, the same on all ranks."""
    return best_bucket_bytes(_choices_for(group, plane).buckets, plane.nbytes)


def best_bucket_bytes(costs: Sequence[tuple[int, float]], plane_bytes: int) -> int:
    """Return the best bucket length for a plane among `costs`: (bytes, seconds per byte).

    With buckets of b bytes a plane of n takes n/b (c + t(b)) on the wire, c being the hand-off and
    t(b) the all-reduce; and the last bucket's t(b) is exposed, since backward is over when it
    leaves. The sum is least at b = sqrt(n (c + a) / beta) if t(b) = a + beta b, as in any pipeline
    (e.g. Sanders et al., 2009, on segments); here the minimum is over the lengths measured.
    """
    fitting_costs = [cost for cost in costs if cost[0] <= plane_bytes] or costs[:1]
    return min(fitting_costs, key=partial(_plane_seconds, plane_bytes))[0]


def _plane_seconds(plane_bytes: int, bucket: tuple[int, float]) -> float:
    """Return the worst-case seconds of a plane in buckets of (bytes, seconds per byte)."""
    nbytes, seconds_per_byte = bucket
    return math.ceil(plane_bytes / nbytes) * HAND_OFF_S + (plane_bytes + nbytes) * seconds_per_byte


def add_choices(group: Group, mpi: bool, gpus: GpuLayout | None = None) -> Group:
    """Return `group` with the choices of rank 0; `mpi` if its ranks use MPI; collective.

    Also for arrays on `gpus`, if every rank has one. Rank 0 reads the tables; it warns of a table
    that does not fit, and ignores it.
    """
    if group.link.size == 1:
        return replace(group, choices=make_choices(default_plan(layout_of(group, mpi))))
    message = json.dumps(_decide_plans(group, mpi, gpus)).encode() if group.link.rank == 0 else b""
    host_choices, *gpu_choices = (
        make_choices(TuningPlan(**plan))
        for plan in json.loads(broadcast_bytes(group.link, message))
    )
    if gpus is not None:
        length = gpus.stream_segment_bytes
        host_choices = replace(host_choices, gpus=gpu_choices[0], stream_segment_bytes=length)
    return replace(group, choices=host_choices)


def _decide_plans(group: Group, mpi: bool, gpus: GpuLayout | None) -> list[dict[str, Any]]:
    """Return the plans of fitting tables, else of the model: for the host, then for `gpus`."""
    plans = [_measured_plan(group, mpi, None) or default_plan(layout_of(group, mpi))]
    if gpus is not None:
        from hpctrain.tuning import defaults_gpu  # late: only rank 0 of a job with GPUs needs it

        plans.append(_measured_plan(group, mpi, gpus) or defaults_gpu.default_plan(group, gpus))
    return list(map(asdict, plans))


def _measured_plan(group: Group, mpi: bool, gpus: GpuLayout | None) -> TuningPlan | None:
    from hpctrain.tuning import table  # late: only rank 0 reads tables

    tuning_table = table.find_table(group, mpi, gpus)
    return None if tuning_table is None else table.plan_from_table(tuning_table)


@cache
def _default_choices(ranks: int) -> Choices:
    """Return the choices for a group without a World."""
    return make_choices(default_plan(NodeLayout((ranks,))))
