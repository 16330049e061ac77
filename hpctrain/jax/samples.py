"""Samples and targets that are pytrees of arrays, as a loss takes them.

    (x, y) = ([images, None], labels)      rows: (images[i],), (labels[i],)      loss: the tree

Arrays keep their dtypes. Engines cut trees of dicts and tuples; of other pytrees (lists, None,
registered classes) they cut the tuple of leaves, and the model puts the tree together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.core import trees
from hpctrain.core.errors import UsageError
from hpctrain.data import Dataset, Samples
from hpctrain.data.dataset import find_value_fault
from hpctrain.jax.parameters import find_fault, leaves_with_paths
from hpctrain.training.arguments import as_samples

INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)
class PytreeSamples(Dataset):
    """Samples `x` and targets `y` with one leading dimension; for `structure` tuples of leaves."""

    structure: Any = None  #: of the pair (x, y); None: as they are

    def __post_init__(self) -> None:
        """Accept the arrays: `as_jax_samples` has checked them."""


class RefusedSamples:
    """Samples of a rank that raise their error when they are first read, on all ranks together.

    So no rank needs to ask the others before: the Trainer agrees on errors at the start of a call.
    """

    sample_shape = None

    def __init__(self, error: UsageError):
        self._error = error

    def __len__(self) -> int:
        """Raise the error."""
        raise self._error

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Raise the error."""
        raise self._error


def as_jax_samples(samples: Any, name: str) -> Samples:
    """Return `samples`, or read a pair (x, y) of pytrees of arrays; `y` may hold only None.

    Raises UsageError for the argument `name`.
    """
    is_pair = isinstance(samples, tuple | list) and len(samples) == 2
    if isinstance(samples, Samples) or not is_pair:
        return as_samples(samples, name)
    leaves: dict[str, dict[str, np.ndarray]] = {}
    for part, tree in zip("xy", samples, strict=True):
        paths = leaves_with_paths(tree, f"{name}: {part}")
        named = ((f"{part}{jax.tree_util.keystr(path)}", leaf) for path, leaf in paths)
        leaves[part] = {path: as_leaf(leaf, f"{name}: {path}") for path, leaf in named}
    _check_lengths(leaves, name)
    structure = jax.tree_util.tree_structure(tuple(samples))
    x, y = (tuple(leaves[part].values()) for part in "xy")
    if all(map(_is_plain, samples)):
        x, y = jax.tree_util.tree_unflatten(structure, [*x, *y])
        structure = None
    if fault := find_value_fault(range(trees.sample_count(x)), x=x, y=y):
        raise UsageError(f"{name}: {fault}")
    return PytreeSamples(x, y, structure=structure)


def as_leaf(leaf: Any, path: str) -> np.ndarray:
    """Return an array of a batch, on the host; raise UsageError for one that JAX cannot take."""
    if fault := find_fault(leaf, allows_devices=True):
        raise UsageError(f"{path}: expected an array, seen {fault[0]}; {fault[1]}")
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)):
        raise UsageError(f"{path}: expected an array of numbers or bools, seen one of {leaf.dtype}")
    array = np.asarray(leaf)
    is_wide = array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.size > 0
    if is_wide and not jax.config.jax_enable_x64:
        low, high = int(array.min()), int(array.max())
        if low < INT32.min or high > INT32.max:
            raise UsageError(
                f"{path}: expected integers of 32 bits, which JAX makes of {array.dtype} without "
                f"jax_enable_x64, seen {low} to {high}; call jax.config.update('jax_enable_x64', "
                "True) before any array is made"
            )
    return array


def _check_lengths(leaves: dict[str, dict[str, np.ndarray]], name: str) -> None:
    """Raise UsageError unless all arrays have the same number of samples, one or more."""
    if not leaves["x"]:
        raise UsageError(f"{name}: x holds no array; expected arrays (samples, ...)")
    arrays = leaves["x"] | leaves["y"]
    for path, array in arrays.items():
        if array.ndim == 0 or len(array) == 0:
            raise UsageError(
                f"{name}: {path} has shape {array.shape}; expected an array (samples, ...) of at "
                "least 1 sample; let the loss hold what is the same for all samples"
            )
    (first, x), *others = arrays.items()
    for path, array in others:
        if len(array) != len(x):
            raise UsageError(
                f"{name}: {first} has {len(x)} samples but {path} has {len(array)}; expected equal "
                "numbers"
            )


def _is_plain(tree: Any) -> bool:
    """Return whether `tree` is an array, or made of dicts with names and of tuples alone."""
    if type(tree) is dict:
        return all(isinstance(key, str) for key in tree) and all(map(_is_plain, tree.values()))
    if type(tree) is tuple:
        return all(map(_is_plain, tree))
    return isinstance(tree, np.ndarray | np.generic | jax.Array)
