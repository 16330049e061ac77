"""MPI's own collectives, bound to an array once: yardsticks, and fast for a few bytes.

Imported by transport/mpi/link.py, which sets first how mpi4py starts MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hpctrain.core.errors import UsageError
from hpctrain.transport.link import NativeCall
from hpctrain.transport.mpi.requests import cuts
from hpctrain.watch import CallNote, Entry, detect_waits, make_detectable

MAX_BYTES = (1 << 31) - 1  # the limit of Open MPI in one call
_Operations = dict[np.ufunc, MPI.Op]
_LOGICAL: _Operations = {np.logical_and: MPI.LAND, np.logical_or: MPI.LOR, np.logical_xor: MPI.LXOR}
#: No minimum of floats: of zeros and NaNs the result depends on the library.
_FLOAT: _Operations = {np.add: MPI.SUM, np.multiply: MPI.PROD}
_INTEGER: _Operations = {
    **_FLOAT,
    np.minimum: MPI.MIN,
    np.maximum: MPI.MAX,
    np.bitwise_and: MPI.BAND,
    np.bitwise_or: MPI.BOR,
    np.bitwise_xor: MPI.BXOR,
}
#: NumPy's code of a dtype -> its ufunc -> MPI's operation with the same result. Open MPI's sums of
#: integers of 8 and 16 bits saturate.
OPERATIONS: dict[str, _Operations] = {
    "?": _LOGICAL,
    **dict.fromkeys("ilq", _INTEGER),
    **dict.fromkeys("fdFD", _FLOAT),
}


class Owner(Protocol):
    """The part of a link that its collectives use."""

    entry: Entry
    cut_bytes: int


class MpiCollectives:
    """MPI's own collectives on the ranks of a link; see NativeCollectives."""

    def __init__(self, comm: MPI.Comm, link: Owner):
        self._comm, self.link = comm, link

    @detect_waits(lambda frame: CallNote(frame["self"].link, b"MPI_Allreduce", frame["x"].nbytes))
    def allreduce(self, x: np.ndarray, op: Any) -> None:
        """Reduce `x` in place by `MPI_Allreduce`; the watch records it."""
        if not x.flags.aligned:  # mpi4py knows no datatype for it, and MPI adds aligned numbers
            aligned = x.copy()
            self.allreduce(aligned, op)
            x[...] = aligned
            return
        op_and_type, cut_bytes = operation(x, op), self.link.cut_bytes
        for piece in [x] if x.nbytes <= cut_bytes else cuts(x, cut_bytes):
            self._comm.Allreduce(MPI.IN_PLACE, piece, op_and_type)

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that does `allreduce` to flat `x`, also recorded by the watch."""
        # A longer array is cut as in `allreduce`, which other ranks may call.
        if not (x.flags.aligned and x.nbytes <= self.link.cut_bytes and is_native(x, op)):
            return partial(self.allreduce, x, op)
        note = CallNote(self.link, b"MPI_Allreduce", x.nbytes)
        return make_detectable(allreduce_call(self._comm, x, op), note)

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call of MPI's own `collective` on `x`, unknown to the watch."""
        return bound(self._comm, collective, x, op)


def is_native(x: np.ndarray, op: Any) -> bool:
    """Return whether MPI reduces `x` by `op` in one call; arrays of GPUs it is never given."""
    return isinstance(x, np.ndarray) and x.nbytes <= MAX_BYTES and op in _operations(x)


def operation(x: np.ndarray, op: Any) -> MPI.Op:
    """Return MPI's `op`; raise UsageError where it has none."""
    if op not in _operations(x):
        raise UsageError(f"MPI reduces no arrays of {x.dtype} so; take an algorithm of ours")
    return _operations(x)[op]


def _operations(x: np.ndarray) -> _Operations:
    return OPERATIONS.get(x.dtype.char, {})


def allreduce_call(comm: MPI.Comm, x: np.ndarray, op: Any) -> Callable[[], Any]:
    """Return an all-reduce of flat `x`: the quickest call that mpi4py knows.

    In every call it asks an array for shape and format, but not memory of its own. A method that
    is not bound to its object yet saves a call in C.
    """
    spec = [MPI.memory.frombuffer(x), x.size, MPI.Datatype.fromcode(x.dtype.char)]
    return partial(MPI.Comm.Allreduce, comm, MPI.IN_PLACE, spec, operation(x, op))


def bound(comm: MPI.Comm, collective: str, x: np.ndarray, op: Any) -> NativeCall:
    """Return a call of MPI's own `collective` on flat `x`; see NativeCollectives.bind.

    Raises UsageError for a dtype that MPI does not reduce, and above the limit of Open MPI.
    """
    if not is_native(x, op):
        raise UsageError(
            f"MPI's own {collective}: expected a dtype and an operation that it has, and at most "
            f"{MAX_BYTES} bytes, seen {x.nbytes} bytes of {x.dtype}"
        )
    chunk, kind = x.size // comm.size, MPI.Datatype.fromcode(x.dtype.char)
    vector, chunks = [x, x.size, kind], [x, chunk, kind]
    in_place, op_and_type = MPI.IN_PLACE, operation(x, op)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": partial(comm.Allreduce, in_place, vector, op_and_type),
        "allreduce plain": lambda: comm.Allreduce(MPI.IN_PLACE, x, op_and_type),
        "reduce-scatter": partial(comm.Reduce_scatter_block, in_place, chunks, op_and_type),
        "all-gather": partial(comm.Allgather, in_place, chunks),
        "broadcast": partial(comm.Bcast, vector, 0),
    }
    return NativeCall(calls[collective], x[:chunk] if collective == "reduce-scatter" else x)
