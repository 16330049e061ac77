"""MPI's own collectives, bound to an array once: yardsticks, and fast for a few bytes.

Imported by transport/mpi.py, which sets first how mpi4py starts MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctrain.errors import UsageError
from hpctrain.transport.link import NativeCall

LONGEST_BYTES = (1 << 31) - 1  # what Open MPI takes in one call
OPERATIONS: dict[np.ufunc, MPI.Op] = {
    np.add: MPI.SUM,
    np.minimum: MPI.MIN,
    np.maximum: MPI.MAX,
    np.bitwise_or: MPI.BOR,
}


def able(x: np.ndarray, op: Any) -> bool:
    """Return whether MPI reduces `x` by `op` in one call; arrays of GPUs it is never given."""
    return op in OPERATIONS and x.nbytes <= LONGEST_BYTES and isinstance(x, np.ndarray)


def operation(x: np.ndarray, op: Any) -> MPI.Op:
    """Return MPI's `op`; raise UsageError where it has none."""
    if op not in OPERATIONS:
        raise UsageError(f"MPI reduces no arrays of {x.dtype}; take an algorithm of ours")
    return OPERATIONS[op]


def at_once(comm: MPI.Comm, x: np.ndarray, op: Any) -> Callable[[], Any]:
    """Return an all-reduce of flat `x`: the quickest call that mpi4py knows.

    In every call it asks an array for shape and format, but not memory of its own. A method that
    is not bound to its object yet saves a call in C.
    """
    spec = [MPI.memory.frombuffer(x), x.size, MPI.Datatype.fromcode(x.dtype.char)]
    return partial(MPI.Comm.Allreduce, comm, MPI.IN_PLACE, spec, OPERATIONS[op])


def bound(comm: MPI.Comm, operation: str, x: np.ndarray, op: Any) -> NativeCall:
    """Return a call of MPI's own `operation` on flat `x`; see Link.native_call.

    Raises UsageError for a dtype that MPI does not reduce, and above what Open MPI takes at once.
    """
    if not able(x, op):
        raise UsageError(
            f"MPI's own {operation}: expected int or float of 32 or 64 bits and at most "
            f"{LONGEST_BYTES} bytes, seen {x.nbytes} bytes of {x.dtype}"
        )
    chunk, kind = x.size // comm.size, MPI.Datatype.fromcode(x.dtype.char)
    whole, chunks = [x, x.size, kind], [x, chunk, kind]
    here, by = MPI.IN_PLACE, OPERATIONS[op]
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": partial(comm.Allreduce, here, whole, by),
        "allreduce plain": lambda: comm.Allreduce(MPI.IN_PLACE, x, by),
        "reduce-scatter": partial(comm.Reduce_scatter_block, here, chunks, by),
        "all-gather": partial(comm.Allgather, here, chunks),
        "broadcast": partial(comm.Bcast, whole, 0),
    }
    return NativeCall(calls[operation], x[:chunk] if operation == "reduce-scatter" else x)
