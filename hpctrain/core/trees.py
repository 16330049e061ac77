"""Trees of arrays: an array, or a tuple or dict of trees, nested to any depth.

    {"image": (n, 8, 8), "age": (n, 1)}        (tokens, {"mask": mask})

Samples and targets are trees whose arrays have one leading dimension, the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree of `function(array)` for each array of `tree`."""
    if isinstance(tree, dict):
        return {name: map_arrays(function, branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple([map_arrays(function, branch) for branch in tree])
    return function(tree)


def arrays(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return each array with its path, such as "['image']", in the order of the tree."""
    if not isinstance(tree, dict | tuple):
        return [(path, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [leaf for key, branch in items for leaf in arrays(branch, f"{path}[{key!r}]")]


def shape_from_json(shapes: Any) -> Any:
    """Return the shape of a sample, or the tree of shapes, from lists of JSON; None for None."""
    if shapes is None:
        return None
    if isinstance(shapes, dict):
        return {name: shape_from_json(shape) for name, shape in shapes.items()}
    return tuple(n if isinstance(n, int) else shape_from_json(n) for n in shapes)


def sample_count(tree: Any) -> int:
    """Return the length of the first array."""
    return len(arrays(tree)[0][1])


def sample_shape(tree: Any) -> Any:
    """Return a sample's shape: a tuple of numbers for each array, in the tree's form."""
    return map_arrays(lambda x: tuple(x.shape[1:]), tree)
