"""Collectives between threads through the hub, in place of a library's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from hpctrain.transport.link import NativeCall

T = TypeVar("T")


class CollectivesLink(Protocol):
    """The part of a link that its collectives use."""

    rank: int
    size: int

    def gather_items(self, item: T) -> list[T]: ...


class ThreadCollectives:
    """Collectives on the ranks of a link; see NativeCollectives."""

    def __init__(self, link: CollectivesLink):
        self._link = link

    def allreduce(self, x: np.ndarray, op: Any) -> None:
        """Reduce `x` in place, adding the ranks' arrays in the order of ranks."""
        first_array, *arrays = self._link.gather_items(x.copy())
        x[...] = first_array
        for array in arrays:
            op(x, array, out=x)

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that does `allreduce` to flat `x`."""
        return partial(self.allreduce, x, op)

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call that does `collective` on flat `x`."""
        gather, rank, chunk = self._link.gather_items, self._link.rank, x.size // self._link.size
        own_chunk = slice(rank * chunk, (rank + 1) * chunk)

        def reduce_scatter() -> None:
            x[own_chunk] = op.reduce([array[own_chunk] for array in gather(x.copy())])

        def all_gather() -> None:
            x[:] = np.concatenate(gather(x[own_chunk].copy()))

        def broadcast() -> None:
            x[:] = gather(x.copy())[0]

        calls: dict[str, Callable[[], Any]] = {
            "allreduce": partial(self.allreduce, x, op),
            "allreduce plain": partial(self.allreduce, x, op),
            "reduce-scatter": reduce_scatter,
            "all-gather": all_gather,
            "broadcast": broadcast,
        }
        result = x[own_chunk] if collective == "reduce-scatter" else x
        return NativeCall(calls[collective], result)
