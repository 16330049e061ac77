"""The state in a checkpoint, as engines request it: any regime resumes from any other.

Where workers trained apart, a checkpoint has no common optimizer state but "worker.0.optimizer.m",
"worker.1.optimizer.m", ...: a request for "optimizer.m" then gets the mean. A regime with more
updates per step has a higher count at the same step: counts are converted.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from hpctrain.checkpoint import Reader
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy, namespace, to_host

UPDATE_COUNT = "optimizer.step"  #: names of update counters end so
_WORKER_ARRAY = re.compile(r"worker\.([0-9]{1,9})\.(.+)")


class SavedState:
    """The arrays of a checkpoint and the means over its workers; all arrive after `Engine.load`."""

    def __init__(self, reader: Reader, update_ratio: float = 1.0):
        """`update_ratio`: updates per step of this regime over the saved regime's."""
        self._reader, self._ratio = reader, update_ratio
        #: registers a call to make once everything that any rank requested has arrived
        self.on_arrival = reader.on_arrival
        self._means: dict[str, list[str]] = {}  # name: the arrays of all workers
        own_arrays = sorted(
            (int(m[1]), m[2], m[0]) for m in map(_WORKER_ARRAY.fullmatch, reader.sizes) if m
        )
        for _, common, name in own_arrays:
            if common not in reader.sizes:
                self._means.setdefault(common, []).append(name)
        self.sizes = reader.sizes | {
            name: reader.sizes[arrays[0]] for name, arrays in self._means.items()
        }
        #: the number of workers with an optimizer state of their own
        self.workers = sum(common == UPDATE_COUNT for _, common, _ in own_arrays)

    def own_name(self, name: str, worker: int, workers: int) -> str:
        """Return the name of a worker's own array, of the common one where it has none.

        Of another number of `workers` than was saved, none has.
        """
        own_name = f"worker.{worker}.{name}"
        return own_name if own_name in self.sizes and self.workers == workers else name

    def request(self, name: str, out: Any, offset: int = 0, size: int | None = None) -> None:
        """Request the elements of `name` from `offset` on that fill flat `out`.

        Raises UsageError unless the whole array has `size` elements, by default `out.size`.
        """
        expected, actual = out.size if size is None else size, self.sizes.get(name, "none")
        if actual != expected:
            raise UsageError(
                f"the checkpoint does not fit the recipe: expected {expected} numbers of '{name}', "
                f"seen {actual}; resume with the model and the optimizer of the checkpoint"
            )
        sources = self._means.get(name, [name])
        for turn, source in enumerate(sources):
            self._reader.request(source, out, offset, turn)
        if len(sources) > 1:
            self.on_arrival(partial(divide, out, len(sources)))
        ratio = self._ratio
        if name.endswith(UPDATE_COUNT) and ratio != 1:
            self.on_arrival(lambda: copy(out, np.rint(to_host(out) * ratio)))

    def request_sum(self, name: str, out: Any, offset: int, size: int) -> None:
        """Request elements, from `offset` on, of the sum over the parts of `name`, `size` long."""
        for turn in range(self.sizes[name] // size):
            self._reader.request(name, out, turn * size + offset, turn)

    def request_deferred(
        self, name: str, out: Any, offset: int = 0, size: int | None = None
    ) -> None:
        """Request an array that not every checkpoint has: `out` changes after all has arrived.

        If this checkpoint is damaged and an older one lacks the array, `out` keeps its values.
        """
        arrived = namespace(out).empty_like(out)
        self.request(name, arrived, offset, size)
        self.on_arrival(partial(copy, out, arrived))


def divide(x: Any, n: int) -> None:
    """Divide `x` by `n` in place, integers rounded down."""
    if np.issubdtype(x.dtype, np.integer):
        x //= n
    else:
        x /= n
