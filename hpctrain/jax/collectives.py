"""Collectives on pytrees, for loops of the user's own.

ranks compare a digest of op, paths, dtypes and shapes; then, for each dtype:
leaves  a (3, 2)  b (4,)  c ()   -->   message of 11 elements   -->   a  b  c, reduced
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.collectives.signature import fault_signature, make_signature, must_match
from hpctrain.user_collectives import calls
from hpctrain.world import World, init


def allreduce(tree: Any, op: str = "sum", world: World | None = None) -> Any:
    """Return the pytree of the leaves of `tree` reduced over all ranks; all must call.

    `op`: as of `ht.allreduce`. Leaves of one dtype travel in one message, and keep it; arrays of
    JAX stay such, others become arrays of NumPy. Not within `jax.jit`. Raises UsageError on all
    ranks for leaves that are no arrays or numbers, and for trees or arguments that differ.
    """
    world = world or init()
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    fault = "; ".join(fault for path, leaf in leaves if (fault := _find_fault(path, leaf)))
    if fault:
        must_match(world.main, fault_signature(fault))
    arrays = [np.asarray(leaf) for _, leaf in leaves]
    must_match(world.main, make_signature(_describe(leaves, arrays, op)))
    reduced: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indexes = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        message = np.concatenate([arrays[i].reshape(-1) for i in indexes])
        calls.allreduce(message, op, world=world, check=False)
        ends = np.cumsum([arrays[i].size for i in indexes])
        for i, part in zip(indexes, np.split(message, ends[:-1]), strict=True):
            part = part.reshape(arrays[i].shape)
            reduced[i] = jnp.asarray(part) if isinstance(leaves[i][1], jax.Array) else part
    return jax.tree_util.tree_unflatten(structure, reduced)


def _find_fault(path: Any, leaf: Any) -> str:
    """Return the fault of a leaf that is no array or number; empty if there is none."""
    where = f"leaf {jax.tree_util.keystr(path)}" if path else "the tree"
    if isinstance(leaf, jax.core.Tracer):
        return (
            f"ht.jax.allreduce: expected arrays, {where} is traced by JAX; call it between "
            "functions of jax.jit, not within one"
        )
    is_array = isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex)
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    if is_array or (isinstance(leaf, jax.Array) and not is_key):
        return ""
    kind = f"an array of {leaf.dtype}" if is_key else type(leaf).__name__
    return f"ht.jax.allreduce: expected arrays or numbers, {where} is {kind}; leave it out"


def _describe(leaves: Any, arrays: list[np.ndarray], op: str) -> str:
    """Return the call in words, for comparison with that of other ranks."""
    words = [
        f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
        for (path, _), array in zip(leaves, arrays, strict=True)
    ]
    return f"ht.jax.allreduce {op} of {'; '.join(words)}"
