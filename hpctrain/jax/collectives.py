"""Collectives on pytrees, for loops of the user's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.user_collectives import calls
from hpctrain.world import World


def allreduce(tree: Any, op: str = "sum", world: World | None = None) -> Any:
    """Return the pytree of the leaves of `tree` reduced over all ranks; all must call.

    `op`: as of `ht.allreduce`. Leaves of one dtype travel in one message, and keep it; arrays of
    JAX stay such, others become arrays of NumPy. Not within `jax.jit`. Raises UsageError for traced
    values, and as `ht.allreduce`, also if ranks have different trees.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise UsageError(
            "ht.jax.allreduce: expected arrays, seen values traced by JAX; call it between "
            "functions of jax.jit, not within one"
        )
    arrays = [np.asarray(leaf) for leaf in leaves]
    reduced: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indexes = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        message = np.concatenate([arrays[i].reshape(-1) for i in indexes])
        calls.allreduce(message, op, world=world)
        ends = np.cumsum([arrays[i].size for i in indexes])
        for i, part in zip(indexes, np.split(message, ends[:-1]), strict=True):
            part = part.reshape(arrays[i].shape)
            reduced[i] = jnp.asarray(part) if isinstance(leaves[i], jax.Array) else part
    return jax.tree_util.tree_unflatten(structure, reduced)
