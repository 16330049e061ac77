"""MPI's own collectives, bound to an array: for comparison, and for messages of a few bytes.

transport/mpi/link.py imports this after it has kept mpi4py from starting MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hpctrain.core.errors import UsageError
from hpctrain.transport.link import NativeCall
from hpctrain.transport.mpi.requests import cut_pieces
from hpctrain.watch import CallNote, Entry, detect_waits, make_detectable

MAX_BYTES = (1 << 31) - 1  # the limit of Open MPI in one call
_MpiOps = dict[np.ufunc, MPI.Op]
_LOGICAL_OPS: _MpiOps = {np.logical_and: MPI.LAND, np.logical_or: MPI.LOR, np.logical_xor: MPI.LXOR}
#: No minimum of floats: for zeros of both signs and for NaNs the result depends on the library.
_FLOAT_OPS: _MpiOps = {np.add: MPI.SUM, np.multiply: MPI.PROD}
_INTEGER_OPS: _MpiOps = {
    **_FLOAT_OPS,
    np.minimum: MPI.MIN,
    np.maximum: MPI.MAX,
    np.bitwise_and: MPI.BAND,
    np.bitwise_or: MPI.BOR,
    np.bitwise_xor: MPI.BXOR,
}
#: {NumPy's dtype code: {ufunc: MPI's operation with the same result}}. Integers of 8 and 16 bits
#: are missing, since Open MPI's sums of them saturate.
OPS_BY_DTYPE: dict[str, _MpiOps] = {
    "?": _LOGICAL_OPS,
    **dict.fromkeys("ilq", _INTEGER_OPS),
    **dict.fromkeys("fdFD", _FLOAT_OPS),
}


class CollectivesLink(Protocol):
    """The part of a link that its collectives use."""

    entry: Entry
    max_piece_bytes: int


class MpiCollectives:
    """MPI's own collectives on the ranks of a link; see NativeCollectives."""

    def __init__(self, comm: MPI.Comm, link: CollectivesLink):
        self._comm, self.link = comm, link

    @detect_waits(lambda frame: CallNote(frame["self"].link, b"MPI_Allreduce", frame["x"].nbytes))
    def allreduce(self, x: np.ndarray, op: Any) -> None:
        """Reduce `x` in place by `MPI_Allreduce`; the watch records it."""
        if not x.flags.aligned:  # mpi4py has no datatype for unaligned numbers
            aligned_copy = x.copy()
            self.allreduce(aligned_copy, op)
            x[...] = aligned_copy
            return
        native_op, max_piece_bytes = mpi_op(x, op), self.link.max_piece_bytes
        for piece in [x] if x.nbytes <= max_piece_bytes else cut_pieces(x, max_piece_bytes):
            self._comm.Allreduce(MPI.IN_PLACE, piece, native_op)

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that does `allreduce` to flat `x`, also recorded by the watch."""
        # `allreduce` cuts a longer array; other ranks may call it.
        if not (
            x.flags.aligned and x.nbytes <= self.link.max_piece_bytes and can_reduce_natively(x, op)
        ):
            return partial(self.allreduce, x, op)
        call_note = CallNote(self.link, b"MPI_Allreduce", x.nbytes)
        return make_detectable(allreduce_call(self._comm, x, op), call_note)

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call of MPI's own `collective` on `x`, without the watch's record."""
        return bind_collective(self._comm, collective, x, op)


def can_reduce_natively(x: np.ndarray, op: Any) -> bool:
    """Return whether MPI reduces `x` by `op` in one call; never for GPU arrays."""
    return isinstance(x, np.ndarray) and x.nbytes <= MAX_BYTES and op in _supported_ops(x)


def mpi_op(x: np.ndarray, op: Any) -> MPI.Op:
    """Return MPI's operation for `op`; raise UsageError if MPI has none."""
    if op not in _supported_ops(x):
        raise UsageError(f"MPI has no such reduction of {x.dtype}; take an algorithm of hpctrain")
    return _supported_ops(x)[op]


def _supported_ops(x: np.ndarray) -> _MpiOps:
    return OPS_BY_DTYPE.get(x.dtype.char, {})


def allreduce_call(comm: MPI.Comm, x: np.ndarray, op: Any) -> Callable[[], Any]:
    """Return an all-reduce of flat `x`, the fastest call through mpi4py.

    mpi4py inspects shape and format of an array in every call, but not of its own memory object. An
    unbound method saves a call in C.
    """
    spec = [MPI.memory.frombuffer(x), x.size, MPI.Datatype.fromcode(x.dtype.char)]
    return partial(MPI.Comm.Allreduce, comm, MPI.IN_PLACE, spec, mpi_op(x, op))


def bind_collective(comm: MPI.Comm, collective: str, x: np.ndarray, op: Any) -> NativeCall:
    """Return a call of MPI's own `collective` on flat `x`; see NativeCollectives.bind.

    Raises UsageError for a dtype that MPI does not reduce, and above the limit of Open MPI.
    """
    if not can_reduce_natively(x, op):
        raise UsageError(
            f"MPI's own {collective}: expected a dtype and an operation that it has, and at most "
            f"{MAX_BYTES} bytes, seen {x.nbytes} bytes of {x.dtype}"
        )
    chunk, datatype = x.size // comm.size, MPI.Datatype.fromcode(x.dtype.char)
    array_spec, chunk_spec = [x, x.size, datatype], [x, chunk, datatype]
    in_place, native_op = MPI.IN_PLACE, mpi_op(x, op)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": partial(comm.Allreduce, in_place, array_spec, native_op),
        "allreduce plain": lambda: comm.Allreduce(MPI.IN_PLACE, x, native_op),
        "reduce-scatter": partial(comm.Reduce_scatter_block, in_place, chunk_spec, native_op),
        "all-gather": partial(comm.Allgather, in_place, chunk_spec),
        "broadcast": partial(comm.Bcast, array_spec, 0),
    }
    return NativeCall(calls[collective], x[:chunk] if collective == "reduce-scatter" else x)
