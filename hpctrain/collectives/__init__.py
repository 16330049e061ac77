"""Collective operations, written by hand over point-to-point messages and node memory.

Every all-reduce is a plain function `f(group, x, op)` that reduces the flat, contiguous array
`x` in place; `op` is a NumPy ufunc of two arguments such as `np.add`, or called like one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.collectives.chunks import chunks
from hpctrain.collectives.direct import direct
from hpctrain.collectives.double_tree import double_tree
from hpctrain.collectives.group import Group, group_over_nodes
from hpctrain.collectives.halving_doubling import halving_doubling
from hpctrain.collectives.hierarchical import hierarchical
from hpctrain.collectives.native import native
from hpctrain.collectives.null import null
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.reductions.operations import DTYPES, OPERATIONS, Operation, operation
from hpctrain.collectives.ring import ring
from hpctrain.collectives.small_messages import all_gather_bytes, all_gather_short
from hpctrain.collectives.tree import broadcast, reduce, tree

AllReduceFunction = Callable[[Group, np.ndarray, Operation], None]

#: The algorithms by name.
ALLREDUCE: dict[str, AllReduceFunction] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "direct": direct,
    "hierarchical": hierarchical,
    "native": native,
    "null": null,
}

__all__ = [
    "ALLREDUCE",
    "DTYPES",
    "OPERATIONS",
    "AllReduceFunction",
    "Group",
    "Operation",
    "all_gather_bytes",
    "all_gather_short",
    "broadcast",
    "chunks",
    "operation",
    "group_over_nodes",
    "reduce",
]
