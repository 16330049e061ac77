"""Pytrees of parameters: the names of their leaves, and checks of their dtypes.

{"layers": [{"weight": w}], "scale": s}        layers.0.weight, scale
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hpctrain.core.errors import UsageError

ROOT_NAME = "params"  #: the name of a tree that is a single array


def named_leaves(params: Any) -> dict[str, Any]:
    """Return the leaves of `params` by name, in the order of the tree.

    Raises UsageError for a tree without leaves, for leaves that are no arrays of real
    floating-point numbers, and for two leaves with the same name.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = _leaf_name(path)
        _check_leaf(name, leaf)
        if name in leaves:
            raise UsageError(
                f"params: expected leaves with different names, seen two with the name '{name}'; "
                "rename a key of the tree"
            )
        leaves[name] = leaf
    if not leaves:
        raise UsageError(
            f"params: expected a pytree of floating-point arrays, seen a {type(params).__name__} "
            "without leaves"
        )
    return leaves


def _leaf_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of the leaf at `path`."""
    return ".".join(map(_entry_name, path)) or ROOT_NAME


def _entry_name(entry: Any) -> str:
    """Return the key, index or attribute of one entry of a path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'")


def _check_leaf(name: str, leaf: Any) -> None:
    """Raise UsageError unless `leaf` is an array of real floating-point numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return
    kind = type(leaf).__name__ if dtype is None else f"an array of {dtype}"
    raise UsageError(
        f"params: expected floating-point arrays, seen {kind} at '{name}'; keep what is not "
        "trained outside of the tree, as equinox.partition and flax.nnx.split do"
    )
