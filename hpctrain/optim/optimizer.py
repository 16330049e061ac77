"""What an optimizer is, and the walk over a flat array in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.xp import Array, namespace

BLOCK = 65_536  #: elements handled at once; with their state they fit the second-level cache

State = dict[str, Array]
Schedule = Callable[[int], float]
Total = Callable[[np.ndarray], np.ndarray]


class Slot(Protocol):
    """One tensor's place in the flat arrays."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Init(Protocol):
    def __call__(self, param: Array) -> State: ...


class Update(Protocol):
    def __call__(
        self, grad: Array, state: State, param: Array, slots: Sequence[Slot], total: Total
    ) -> None: ...


class Optimizer(NamedTuple):
    """A pair of functions on flat arrays; all that changes lives in `state` and `param`.

    `init(param)` returns the state: arrays of the length and dtype of `param`, and "step", int64
    of shape (1,), the updates done so far. `update(grad, state, param, slots, total)` writes
    `state` and `param` in place, never `grad`. `slots` says where each tensor lies; `total` adds
    partial sums (float64) over the ranks that share the arrays, for methods that need norms.
    """

    init: Init
    update: Update


def start(param: Array, names: Sequence[str] = ()) -> State:
    """Return a state with the step count and zeros like `param` under each of `names`."""
    state = {name: namespace(param).zeros_like(param) for name in names}
    return {**state, "step": np.zeros(1, np.int64)}


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` elements in order, BLOCK at a time."""
    return (slice(i, min(i + BLOCK, size)) for i in range(0, size, BLOCK))


def rate_of(rate: float | Schedule, step: int) -> float:
    """Return the rate of the 0-based `step`."""
    return rate(step) if callable(rate) else rate
