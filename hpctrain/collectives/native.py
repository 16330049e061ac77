"""The MPI library's own all-reduce: the yardstick of our benchmarks and an oracle of our tests."""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation
from hpctrain.xp import copy, on_device, to_host


def native(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place; that all ranks end with the same bytes is not promised here.

    An array of a GPU goes there and back through host memory: few MPIs reduce on a GPU, and one
    that was built without CUDA would crash.
    """
    if not on_device(x):
        group.link.native_allreduce(x, op)
        return
    host = to_host(x)
    group.link.native_allreduce(host, op)
    copy(x, host)
    group.link.host_bytes += 2 * x.nbytes
