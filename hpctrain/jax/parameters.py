"""Pytrees of parameters: the names of their leaves, and checks of what a leaf is.

{"layers": [{"weight": w}], "scale": s}        layers.0.weight, scale
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.core.errors import UsageError

ROOT_NAME = "params"  #: the name of a tree that is a single array
LEAVE_OUT = "leave it out"
KEEP_OUTSIDE = (
    "keep what is not trained outside of the tree, as equinox.partition and flax.nnx.split do"
)
DTYPES = ("float32", "float64")  #: of parameters in the arena


def named_leaves(params: Any) -> dict[str, Any]:
    """Return the leaves of `params` by name, in the order of the tree.

    Raises UsageError for a tree without leaves, for leaves that are no arrays of real
    floating-point numbers in this process, and for two leaves with the same name.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(params, "params"):
        name = ".".join(map(_entry_name, path)) or ROOT_NAME
        if fault := find_fault(leaf) or _find_dtype_fault(leaf):
            advice = fault[1] if fault[1] != LEAVE_OUT else KEEP_OUTSIDE
            raise UsageError(
                f"params: expected floating-point arrays, seen {fault[0]} at '{name}'; {advice}"
            )
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


def leaves_with_paths(tree: Any, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Return each leaf of `tree` with its path; raise UsageError for keys that cannot be sorted."""
    try:
        return jax.tree_util.tree_leaves_with_path(tree)
    except ValueError as error:
        raise UsageError(
            f"{name}: expected a pytree whose dicts have keys of a single type, seen one that "
            f"JAX refuses ({error}); rename a key"
        ) from error


def find_fault(leaf: Any, allows_devices: bool = False) -> tuple[str, str] | None:
    """Return (what `leaf` is, what to do) unless it is an array whose values are in this process.

    Scalars of NumPy are arrays; numbers of Python are none. `allows_devices`: of several devices.
    """
    if isinstance(leaf, jax.core.Tracer):
        return "an array traced by JAX", "call it between functions of jax.jit, not within one"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a MaskedArray", "use its method filled"
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    if not isinstance(leaf, jax.Array):
        is_number = isinstance(leaf, int | float | complex)
        return type(leaf).__name__, "write jnp.asarray(x)" if is_number else LEAVE_OUT
    if leaf.is_deleted():
        return (
            "an array that was deleted or donated",
            "pass the result of the function that it was donated to, or a copy made before",
        )
    devices = len(leaf.sharding.device_set)
    if not leaf.is_fully_addressable or (devices > 1 and not allows_devices):
        return (
            f"an array on {devices} devices",
            "a rank computes on one device: start a rank for each, and pass jax.device_get(x)",
        )
    return None


def _find_dtype_fault(leaf: Any) -> tuple[str, str] | None:
    """Return (what `leaf` is, what to do) unless it holds real floating-point numbers."""
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize <= 8:
        return None
    return f"an array of {leaf.dtype}", LEAVE_OUT


def find_dtypes(leaves: Mapping[str, Any]) -> dict[np.dtype, str]:
    """Return the dtypes in which JAX computes with `leaves`, each with the name of its first leaf.

    Without `jax_enable_x64` arrays of float64 count as float32, as everywhere in JAX. Weakly typed
    leaves, such as jnp.asarray(1.0), take the dtype of the others.
    """
    strong_leaves = {name: leaf for name, leaf in leaves.items() if not is_weak(leaf)} or leaves
    dtypes: dict[np.dtype, str] = {}
    for name, leaf in strong_leaves.items():
        native = leaf.dtype.newbyteorder("=")
        dtypes.setdefault(np.dtype(jax.dtypes.canonicalize_dtype(native)), name)
    return dtypes


def common_dtype(dtypes: Mapping[np.dtype, str]) -> Any:
    """Return the name of the only one of `dtypes`; raise UsageError unless it is one of DTYPES."""
    dtype_names = [dtype.name for dtype in dtypes]
    if len(dtype_names) == 1 and dtype_names[0] in DTYPES:
        return dtype_names[0]
    raise UsageError(
        f"params: expected leaves of the same dtype, {' or '.join(DTYPES)}, seen "
        f"{describe_dtypes(dtypes)}; convert them with x.astype, and in the loss what it needs in "
        "another dtype; or give precision='float32': then all are trained and returned in that"
    )


def describe_dtypes(dtypes: Mapping[np.dtype, str]) -> str:
    """Return each dtype with the name of a leaf."""
    return " and ".join(f"{dtype} at '{name}'" for dtype, name in dtypes.items())


def find_devices(leaves: Mapping[str, Any]) -> list[str]:
    """Return the devices, except the arena's, to which the user committed leaves."""
    own_device = jax.local_devices(backend="cpu")[0]
    committed_leaves = (
        leaf for leaf in leaves.values() if isinstance(leaf, jax.Array) and leaf.committed
    )
    return sorted(
        {str(device) for leaf in committed_leaves for device in leaf.devices() - {own_device}}
    )


def is_weak(leaf: Any) -> bool:
    """Return whether operations with `leaf` take the dtype of the other operand."""
    return isinstance(leaf, jax.Array) and bool(leaf.weak_type)


def _entry_name(entry: Any) -> str:
    """Return the key, index or attribute at an entry of a path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'")
