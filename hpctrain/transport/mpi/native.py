"""MPI's own collectives, bound to an array: for comparison, and for messages of a few bytes.

transport/mpi/link.py imports this after calls.py has kept mpi4py from starting MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctrain.core.errors import UsageError
from hpctrain.transport.link import NativeCall
from hpctrain.transport.mpi.calls import MpiCalls
from hpctrain.transport.mpi.fault_tolerance import ALL_PEERS
from hpctrain.transport.mpi.requests import cut_pieces
from hpctrain.watch import unrecorded

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
#: are missing, since their sums saturate in Open MPI.
OPS_BY_DTYPE: dict[str, _MpiOps] = {
    "?": _LOGICAL_OPS,
    **dict.fromkeys("ilq", _INTEGER_OPS),
    **dict.fromkeys("fdFD", _FLOAT_OPS),
}


class MpiCollectives:
    """MPI's own collectives on the ranks of a link; see NativeCollectives."""

    def __init__(self, calls: MpiCalls):
        self._comm, self._calls = calls.comm, calls

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that reduces flat `x` by `MPI_Allreduce`; the watch detects its waits.

        Raises UsageError if MPI has no such reduction. mpi4py inspects shape and format of an array
        in every call, but not of its own memory object. An unbound method saves a call in C.
        """
        ops = _supported_ops(x)
        if op not in ops:
            raise UsageError(
                f"MPI has no such reduction of {x.dtype}; take an algorithm of hpctrain"
            )
        if not x.flags.aligned or x.nbytes > self._calls.max_piece_bytes:
            return partial(self._reduce_in_pieces, x, ops[op])
        spec = [MPI.memory.frombuffer(x), x.size, MPI.Datatype.fromcode(x.dtype.char)]
        call = partial(MPI.Comm.Allreduce, self._comm, MPI.IN_PLACE, spec, ops[op])
        if self._calls.family.survives:
            return partial(self._call, call, x.nbytes)
        return unrecorded(call, self._calls, b"MPI_Allreduce", x.nbytes)

    def _call(self, call: Callable[[], Any], nbytes: int) -> None:
        """Make a call, with a note in the record: the watch detects only calls without a frame."""
        entry = self._calls.entry
        entry.enter(b"MPI_Allreduce", ALL_PEERS, nbytes)
        try:
            call()
        except MPI.Exception as error:
            raise self._calls.make_call_error("MPI_Allreduce", ALL_PEERS, nbytes, error) from error
        entry.leave()

    def _reduce_in_pieces(self, x: np.ndarray, native_op: MPI.Op) -> None:
        aligned = x if x.flags.aligned else x.copy()  # mpi4py has no unaligned datatypes
        for piece in cut_pieces(aligned, self._calls.max_piece_bytes):
            call = partial(self._comm.Allreduce, MPI.IN_PLACE, piece, native_op)
            self._call(call, x.nbytes)
        if aligned is not x:
            x[...] = aligned

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call of MPI's own `collective` on flat `x`; see NativeCollectives.bind.

        Raises UsageError for a dtype that MPI does not reduce, and above the limit of Open MPI.
        """
        ops = _supported_ops(x)
        if not isinstance(x, np.ndarray) or x.nbytes > MAX_BYTES or op not in ops:
            raise UsageError(
                f"MPI's own {collective}: expected a dtype and an operation that it has, and at "
                f"most {MAX_BYTES} bytes, seen {x.nbytes} bytes of {x.dtype}"
            )
        comm, in_place, native_op = self._comm, MPI.IN_PLACE, ops[op]
        chunk, datatype = x.size // comm.size, MPI.Datatype.fromcode(x.dtype.char)
        array_spec, chunk_spec = [x, x.size, datatype], [x, chunk, datatype]
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": partial(comm.Allreduce, in_place, array_spec, native_op),
            "allreduce plain": lambda: comm.Allreduce(MPI.IN_PLACE, x, native_op),
            "reduce-scatter": partial(comm.Reduce_scatter_block, in_place, chunk_spec, native_op),
            "all-gather": partial(comm.Allgather, in_place, chunk_spec),
            "broadcast": partial(comm.Bcast, array_spec, 0),
        }
        return NativeCall(calls[collective], x[:chunk] if collective == "reduce-scatter" else x)


def _supported_ops(x: np.ndarray) -> _MpiOps:
    return OPS_BY_DTYPE.get(x.dtype.char, {})
