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
from hpctrain.jax.parameters import find_fault, is_weak
from hpctrain.world import World, init
from hpctrain.world.calls import calls


def allreduce(tree: Any, op: str = "sum", world: World | None = None) -> Any:
    """Return the pytree of the leaves of `tree` reduced over all ranks; all must call.

    `op`: as of `ht.allreduce`. Leaves that share a dtype travel in one message. An array of JAX
    keeps its dtype, device and weak type; other leaves become arrays of NumPy of their dtype.
    Not within `jax.jit`. Raises UsageError on all ranks for leaves that are no arrays or numbers,
    or that were deleted or donated, and for trees or arguments that differ.
    """
    world = world or init()
    leaves, arrays, structure, fault = _read_tree(tree)
    # Every rank comes here, whatever its tree: one that raised before would leave the others alone.
    call = fault_signature(fault) if fault else make_signature(_describe_call(leaves, arrays, op))
    must_match(world.main, call)
    reduced_leaves: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indexes = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        message = np.concatenate([arrays[i].reshape(-1) for i in indexes])
        calls.allreduce(message, op, world=world, check=False)
        ends = np.cumsum([arrays[i].size for i in indexes])
        for i, part in zip(indexes, np.split(message, ends[:-1]), strict=True):
            reduced_leaves[i] = _as_leaf(leaves[i][1], part.reshape(arrays[i].shape))
    return jax.tree_util.tree_unflatten(structure, reduced_leaves)


def _read_tree(tree: Any) -> tuple[list[Any], list[np.ndarray], Any, str]:
    """Return (leaves with their paths, leaves as arrays, the structure, this rank's fault)."""
    try:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        if fault := "; ".join(fault for path, leaf in leaves if (fault := _find_fault(path, leaf))):
            return [], [], None, f"ht.jax.allreduce: {fault}"
        return leaves, [np.asarray(leaf) for _, leaf in leaves], structure, ""
    except (ValueError, RuntimeError) as error:  # keys that cannot be sorted; a computation failed
        return [], [], None, f"ht.jax.allreduce: {error}"


def _as_leaf(leaf: Any, result: np.ndarray) -> Any:
    """Return `result` as an array such as `leaf`: its kind, device and weak type."""
    if not isinstance(leaf, jax.Array):
        return result
    if is_weak(leaf):
        return leaf.at[...].set(result)  # keeps the weak type, which no constructor takes
    return jax.device_put(result, leaf.sharding) if leaf.committed else jnp.asarray(result)


def _find_fault(path: Any, leaf: Any) -> str:
    """Return the fault of a leaf that is no array or number; empty if there is none."""
    where = f"leaf {jax.tree_util.keystr(path)}" if path else "the tree"
    if isinstance(leaf, bool | int | float | complex):
        return ""
    fault = find_fault(leaf, allows_devices=True)
    if fault is None and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        fault = f"an array of {leaf.dtype}", "leave it out"
    return f"expected arrays or numbers, {where} is {fault[0]}; {fault[1]}" if fault else ""


def _describe_call(leaves: Any, arrays: list[np.ndarray], op: str) -> str:
    """Describe the call, for comparison across ranks."""
    words = [
        f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
        for (path, _), array in zip(leaves, arrays, strict=True)
    ]
    return f"ht.jax.allreduce {op} of {'; '.join(words)}"
