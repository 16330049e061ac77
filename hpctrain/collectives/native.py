"""The MPI library's own all-reduce: the yardstick of our benchmarks and an oracle of our tests.

Minima and maxima of floats are reduced as integers (extremum.py): of floats Open MPI's own lose a
NaN, and MPICH's the sign of a zero.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.extremum import Extremum
from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation, complex_product
from hpctrain.xp import copy, on_device, to_host


def native(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place; that all ranks end with the same bytes is not promised here.

    An array of a GPU goes there and back through host memory: few MPIs reduce on a GPU, and one
    that was built without CUDA would crash.
    """
    if not on_device(x):
        _on_the_host(group, x, op)
        return
    host = to_host(x)
    _on_the_host(group, host, op)
    copy(x, host)
    group.link.host_bytes += 2 * x.nbytes


def _on_the_host(group: Group, x: np.ndarray, op: Operation) -> None:
    if isinstance(op, Extremum):
        keys = op.encode(x)
        group.link.native_allreduce(keys, op.ufunc)
        op.decode(keys)
        return
    group.link.native_allreduce(x, np.multiply if op is complex_product else op)
