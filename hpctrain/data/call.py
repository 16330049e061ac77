"""Data from a user's own function, named `package.module:function` in the recipe."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from hpctrain import config, usercode
from hpctrain.data.dataset import Samples, Split, checked, split
from hpctrain.errors import UsageError


@config.options
class CallOptions:
    """`[data] kind = "package.module:function"`: `target`, called with `arguments` by keyword."""

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: str = "."  #: where modules lie that are not installed

    def load(self, seed: int) -> Split:
        """Return what the function returns: a Split, or (train, test) with a test of None allowed.

        `train` and `test` are Datasets, other Samples or pairs (x, y). Raises UsageError, naming
        what cannot be found or what was returned instead; errors inside the function pass.
        """
        returned = usercode.call(self.target, "[data] kind", self.folder, **self.arguments)
        return _as_split(returned, self.target)


def _as_split(seen: Any, target: str) -> Split:
    if not isinstance(seen, tuple) or len(seen) not in (2, 3):
        raise UsageError(f"{target}: expected (train, test) or a Split, seen {_kind(seen)}")
    train = _as_dataset(seen[0], f"{target} (train)")
    test = None if seen[1] is None else _as_dataset(seen[1], f"{target} (test)")
    return split(train, test, target, *seen[2:])


def _as_dataset(seen: Any, source: str) -> Samples:
    if isinstance(seen, Samples):
        return seen
    if not isinstance(seen, tuple) or len(seen) != 2:
        raise UsageError(f"{source}: expected a Dataset or a pair (x, y), seen {_kind(seen)}")
    return checked(np.asarray(seen[0]), np.asarray(seen[1]), source)


def _kind(seen: Any) -> str:
    return f"a tuple of {len(seen)}" if isinstance(seen, tuple) else f"a {type(seen).__name__}"
