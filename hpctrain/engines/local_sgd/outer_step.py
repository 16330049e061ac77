"""The use of averaged parameters: an outer optimizer step (DiLoCo), or delayed mixing (DASO).

See `local_sgd.py` for the methods and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain import optim
from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.chunks import slices
from hpctrain.core.xp import copy, namespace
from hpctrain.engines.engine import fitting, piece_of, whole
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import Reducer
from hpctrain.world import World


class Outer:
    """Nesterov's method, with the change of a round as its gradient (DiLoCo).

    Every rank makes the same step from the same mean. Memory: parameters and momentum.
    """

    def __init__(self, arena: Arena, rate: float | None, momentum: float | None):
        """Begin at the arena's parameters; without numbers, those of Douillard et al. (2023)."""
        self._arena, self._centre = arena, arena.param.copy()
        rate, momentum = (0.7 if rate is None else rate), (0.9 if momentum is None else momentum)
        self._optimizer = optim.sgd(rate, momentum, nesterov=momentum > 0)
        self._state = self._optimizer.init(self._centre)

    def begin(self) -> None:
        """Begin at the arena's parameters."""
        self._centre[...] = self._arena.param

    def step(self) -> None:
        """Step from where the round began towards the mean, which is in the arena, and past it."""
        arena = self._arena
        np.subtract(self._centre, arena.param, out=arena.grad)  # its gradient is used up
        self._optimizer.update(arena.grad, self._state, self._centre, arena.slots, whole)
        arena.param[...] = self._centre

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Return rank's 1/P of the outer state, which all ranks hold."""
        return [piece_of(name, x, rank, size) for name, x in self._named().items()]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the whole state; begin at the arena's parameters if there was no outer method."""
        self.begin()
        for name, x in self._named().items() if "outer.param" in arrays else ():
            copy(x, fitting(arrays, name, x.size))

    def _named(self) -> dict[str, np.ndarray]:
        return {"outer.param": self._centre, **{f"outer.{k}": x for k, x in self._state.items()}}


class Delayed:
    """A sum of parameters that is on its way while local steps go on; one at a time."""

    def __init__(
        self,
        world: World,
        planes: Sequence[np.ndarray],
        allreduce: AllReduceFunction,
        delay: int,
    ):
        """Sum copies of `planes` on a thread and link of their own. Memory: once the planes."""
        self._planes, self._delay, self._workers = planes, delay, world.size
        length = sum(x.size for x in planes)
        self._sum = namespace(planes[0]).zeros(length, planes[0].dtype)
        ends = np.cumsum([0, *(x.size for x in planes)]).tolist()
        self._views = slices(self._sum, ends)
        self._group, self._concurrent = Group(world.link_for("average")), world.concurrent
        everything = [Bucket(0, self._sum.size, frozenset({"planes"}))]
        self._reducer = Reducer(
            self._sum, everything, self._group, allreduce, world.concurrent, world.trace
        )
        self._left = self._arrived = False
        self._wire_s = 0.0

    @property
    def bytes_sent(self) -> int:
        return self._group.link.bytes_sent

    def leave(self) -> None:
        """Start the sum of the present parameters."""
        for x, view in zip(self._planes, self._views, strict=True):
            view[...] = x
        self._reducer.ready("planes")
        self._left, self._arrived = True, False
        if not self._concurrent:
            self._wait()  # now, while all ranks are here

    def mix(self) -> float:
        """Mix the sum into the planes, if one was started; return its seconds on the wire."""
        if not self._left:
            return 0.0
        self._wait()
        for x, total in zip(self._planes, self._views, strict=True):
            x *= 2 * self._delay
            x += total
            x /= 2 * self._delay + self._workers
        self._left, before = False, self._wire_s
        self._wire_s = self._reducer.wire_s
        return self._wire_s - before

    def forget(self) -> None:
        """Wait for a sum that is on its way, and discard it."""
        if self._left:
            self._wait()
        self._left = False

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Return rank's 1/P of the sum that is on its way; waits for it."""
        if not self._left:
            return []
        self._wait()
        return [piece_of(f"delayed.{size}", self._sum, rank, size)]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the sum that was on its way, if as many workers made it."""
        name = f"delayed.{self._workers}"
        self._left = self._arrived = name in arrays
        if self._left:
            copy(self._sum, fitting(arrays, name, self._sum.size))

    def close(self) -> None:
        """End the thread and free its link; collective."""
        self._reducer.close()
        self._group.link.free()

    def _wait(self) -> None:
        if not self._arrived:
            self._reducer.wait()
            self._arrived = True
