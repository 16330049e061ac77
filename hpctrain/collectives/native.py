"""The MPI library's all-reduce, the reference of our benchmarks and an oracle of our tests.

Minima and maxima of floats are reduced as integers (extremum.py): Open MPI's reductions lose NaNs,
MPICH's lose the signs of zeros. Integers of 8 and 16 bits are reduced in 32 bits: Open MPI's sums
of long arrays saturate instead of wrapping around (its issue 8045).
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.extremum import Extremum
from hpctrain.collectives.reductions.operations import Operation, multiply_complex
from hpctrain.core.xp import copy, on_device, to_host


def native(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place; the bytes may differ between ranks.

    An array on a GPU is staged through host memory: few MPIs reduce on a GPU, and one built
    without CUDA would crash.
    """
    if not on_device(x):
        _reduce_on_host(group, x, op)
        return
    host = to_host(x)
    _reduce_on_host(group, host, op)
    copy(x, host)
    group.link.endpoint.traffic.host_bytes += 2 * x.nbytes


def _reduce_on_host(group: Group, x: np.ndarray, op: Operation) -> None:
    if isinstance(op, Extremum):
        keys = op.encode(x)
        _reduce_on_host(group, keys, op.ufunc)
        op.decode(keys)
    elif x.dtype.kind in "iu" and x.itemsize <= 2:
        widened = x.astype(np.int32)
        group.link.endpoint.native.bind_allreduce(widened, op)()
        x[...] = widened
    else:
        native_op = np.multiply if op is multiply_complex else op
        group.link.endpoint.native.bind_allreduce(x, native_op)()
