"""Data from a user's own function, named `package.module:function` in the recipe."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from hpctrain.core import config, frameworks
from hpctrain.core.config import usercode
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays
from hpctrain.data.dataset import Samples, Split, make_dataset, make_split


@config.options
class FunctionData:
    """`[data] kind = "package.module:function"`: `target`, called with `arguments` by keyword."""

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: str = "."  #: where modules that are not installed are looked up

    def load(self, seed: int, finite: bool = True) -> Split:
        """Call the function, which returns a Split or (train, test); test may be None.

        `train` and `test` are Datasets, other Samples, or pairs (x, y) of arrays or of dicts and
        tuples of arrays. Raises UsageError for a missing function or an invalid return value.
        Errors inside the function are not caught.
        """
        target = self.target
        value = usercode.call(target, "[data] kind", self.folder, **self.arguments)
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            raise UsageError(
                f"{target}: expected (train, test) or a Split, seen {_describe_value(value)}"
            )
        train = _as_dataset(value[0], f"{target} (train)", finite)
        has_test = value[1] is not None
        test = _as_dataset(value[1], f"{target} (test)", finite) if has_test else None
        return make_split(train, test, target, *value[2:])


def _as_dataset(value: Any, source: str, finite: bool) -> Samples:
    if isinstance(value, Samples):
        return value
    if (samples := frameworks.as_samples(value, finite)) is not None:
        return samples
    if not isinstance(value, tuple) or len(value) != 2:
        raise UsageError(
            f"{source}: expected a Dataset or a pair (x, y), seen {_describe_value(value)}"
        )
    x, y = map_arrays(np.asarray, value)
    return make_dataset(x, y, source, finite)


def _describe_value(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
