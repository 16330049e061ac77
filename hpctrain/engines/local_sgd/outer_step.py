"""The use of averaged parameters: an outer optimizer step (DiLoCo), or delayed mixing (DASO).

See `engine.py` for the methods and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain import optim
from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.chunks import slices
from hpctrain.core.xp import namespace
from hpctrain.engines.engine import Times
from hpctrain.engines.saved_state import SavedState, array_pieces, request_array
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import Reducer
from hpctrain.world import World


class Averaging:
    """At the end of a round all workers continue from the mean."""

    def begin(self) -> None:
        """Begin the first round, with equal parameters on all ranks."""

    def end_step(self, round_steps: int) -> None:
        """End a step of this worker, after which it has made `round_steps` of the round."""

    def end_round(self, average: Callable[[], None]) -> None:
        """End a round; `average()` replaces the workers' planes by their mean."""
        average()

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Return rank's 1/P of the state."""
        return []

    def load(self, saved: SavedState) -> None:
        """Request the whole state."""

    def close(self) -> None:
        """End the threads."""


class OuterOptimizer(Averaging):
    """Nesterov's method, with the change of a round as its gradient (DiLoCo).

    Every rank makes the same step from the same mean. Memory per rank: parameters and momentum.
    """

    def __init__(self, arena: Arena, rate: float | None, momentum: float | None):
        """Begin at the arena's parameters; the defaults come from Douillard et al. (2023)."""
        self._arena, self._centre = arena, arena.param.copy()
        rate, momentum = (0.7 if rate is None else rate), (0.9 if momentum is None else momentum)
        self._optimizer = optim.sgd(rate, momentum, nesterov=momentum > 0)
        self._state = self._optimizer.init(self._centre)

    def begin(self) -> None:
        """Begin at the arena's parameters."""
        self._centre[...] = self._arena.param

    def end_round(self, average: Callable[[], None]) -> None:
        """Step from the start of the round in the direction of the mean."""
        average()
        arena = self._arena
        np.subtract(self._centre, arena.param, out=arena.grad)  # overwrites a used gradient
        arrays = arena.grad, self._state, self._centre
        self._optimizer.update(*arrays, arena.layout, arena.gather_rows)
        arena.param[...] = self._centre

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Return rank's 1/P of the outer state, which all ranks hold."""
        named_arrays = self._named_arrays().items()
        return [
            p for name, x in named_arrays for p in array_pieces(self._arena, name, x, rank, size)
        ]

    def load(self, saved: SavedState) -> None:
        """Request the whole state; without an outer state begin at the arena's parameters."""
        saved.on_arrival(self.begin)
        for name, x in self._named_arrays().items() if "outer.param" in saved.sizes else ():
            request_array(self._arena, name, x, saved.request_deferred)

    def _named_arrays(self) -> dict[str, np.ndarray]:
        return {"outer.param": self._centre, **{f"outer.{k}": x for k, x in self._state.items()}}


class DelayedAverage(Averaging):
    """A sum of parameters that is exchanged during local steps; one at a time."""

    def __init__(
        self,
        world: World,
        arena: Arena,
        planes: Sequence[np.ndarray],
        *,
        allreduce: AllReduceFunction,
        delay: int,
        times: Times,
    ):
        """Sum copies of `planes` of `arena` in a thread with its own link. Memory: these copies."""
        self._arena, self._planes, self._delay = arena, planes, delay
        self._workers = world.size
        self._times, self._trace = times, world.trace
        length = sum(x.size for x in planes)
        self._sum = namespace(arena.param).zeros(length, arena.param.dtype)
        offsets = np.cumsum([0, *(x.size for x in planes)]).tolist()
        self._buffers = slices(self._sum, offsets)
        self.link, self._uses_thread = world.threads.link_for("average"), world.concurrent
        buckets = [Bucket(0, self._sum.size, frozenset({"planes"}))]
        self._reducer = Reducer(
            self._sum, buckets, Group(self.link), allreduce, world.concurrent, trace=world.trace
        )
        self._is_pending = self._is_complete = False
        self._wire_s = 0.0  # of the sums so far

    def begin(self) -> None:
        """Wait for the pending sum, if any, and discard it."""
        if self._is_pending:
            self._wait_for_sum()
        self._is_pending = False

    def end_round(self, average: Callable[[], None]) -> None:
        """Start to sum the current parameters."""
        for x, buffer in zip(self._planes, self._buffers, strict=True):
            buffer[...] = x
        self._reducer.mark_ready("planes")
        self._is_pending, self._is_complete = True, False
        if not self._uses_thread:
            self._wait_for_sum()  # without a thread the sum runs now, while all ranks are here

    def end_step(self, round_steps: int) -> None:
        """Mix the pending sum, if it is due, into the planes."""
        if not self._is_pending or round_steps != self._delay:
            return
        with self._times.wait(self._trace, "wait for an average"):
            self._wait_for_sum()
            for x, plane_sum in zip(self._planes, self._buffers, strict=True):
                x *= 2 * self._delay
                x += plane_sum
                x /= 2 * self._delay + self._workers
        self._is_pending = False

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Wait for the pending sum, if any; return this rank's 1/P of the sum."""
        if not self._is_pending:
            return []
        self._wait_for_sum()
        return array_pieces(self._arena, f"delayed.{size}", self._sum, rank, size)

    def load(self, saved: SavedState) -> None:
        """Request the sum that was pending, if it is over the same number of workers."""
        name = f"delayed.{self._workers}"
        self._is_pending = self._is_complete = name in saved.sizes
        if self._is_pending:
            request_array(self._arena, name, self._sum, saved.request)

    def close(self) -> None:
        """End the thread."""
        self._reducer.close()

    def _wait_for_sum(self) -> None:
        if not self._is_complete:
            self._reducer.wait()
            self._times.wire_s += self._reducer.wire_s - self._wire_s
            self._wire_s = self._reducer.wire_s
            self._is_complete = True
