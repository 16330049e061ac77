"""Collectives between threads through the hub, in place of a library's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.transport.link import NativeCall
from hpctrain.transport.threads.waits import LocalWaits


class ThreadCollectives:
    """Collectives on the ranks of a link; see NativeCollectives."""

    def __init__(self, waits: LocalWaits):
        self._waits = waits

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that reduces flat `x`, adding the ranks' arrays in the order of ranks."""

        def allreduce() -> None:
            first_array, *arrays = self._waits.gather(x.copy())
            x[...] = first_array
            for array in arrays:
                op(x, array, out=x)

        return allreduce

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call that does `collective` on flat `x`."""
        waits, rank = self._waits, self._waits.rank
        gather, chunk = waits.gather, x.size // len(waits.hub.members)
        own_chunk = slice(rank * chunk, (rank + 1) * chunk)

        def reduce_scatter() -> None:
            x[own_chunk] = op.reduce([array[own_chunk] for array in gather(x.copy())])

        def all_gather() -> None:
            x[:] = np.concatenate(gather(x[own_chunk].copy()))

        def broadcast() -> None:
            x[:] = gather(x.copy())[0]

        calls: dict[str, Callable[[], Any]] = {
            "allreduce": self.bind_allreduce(x, op),
            "allreduce plain": self.bind_allreduce(x, op),
            "reduce-scatter": reduce_scatter,
            "all-gather": all_gather,
            "broadcast": broadcast,
        }
        result = x[own_chunk] if collective == "reduce-scatter" else x
        return NativeCall(calls[collective], result)
