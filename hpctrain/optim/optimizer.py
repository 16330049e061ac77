"""The interface of optimizers, and the loop over flat arrays in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple, Protocol

import numpy as np
import pydantic

from hpctrain.config import options
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace

BLOCK = 65_536  #: elements handled at once; with their state they fit the second-level cache
CURVE_POINTS = 17  #: of the rate in an interval, at most

State = dict[str, Array]
Schedule = Callable[[int], float]
Total = Callable[[np.ndarray], np.ndarray]
Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]


class TensorSlot(Protocol):
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
    """Makes the state of a plane of parameters."""

    def __call__(self, param: Array) -> State: ...


class Update(Protocol):
    """Updates `param` and `state` in place, by `grad`."""

    def __call__(
        self, grad: Array, state: State, param: Array, slots: Sequence[TensorSlot], total: Total
    ) -> None: ...


class Optimizer(NamedTuple):
    """A pair of functions on flat arrays, and the rate; all that changes is `state` and `param`.

    `init(param)` returns the state: arrays of the length and dtype of `param`, and "step", int64
    of shape (1,), the updates done so far. `update(grad, state, param, slots, total)` writes
    `state` and `param` in place, never `grad`.

    The arrays are a whole model's, or one shard of them that begins at a multiple of BLOCK.
    `slots` are always those of the whole model; offsets count from the first element of the
    arrays, so that in a shard some are negative or beyond its end. `total(rows)` takes partial
    sums, float64 (rows, columns), a row for each part of a block, and returns the rows of all
    shards in order: alone, its argument. Methods that need norms call it, all equally often.

    `rate` is for the metrics: a number, or a function of the 0-based step. `needs_norms`
    says that `total` is called; where it is not, any part of the arrays can be updated alone.
    """

    init: Init
    update: Update
    rate: float | Schedule | None = None
    needs_norms: bool = True


def start(param: Array, names: Sequence[str] = ()) -> State:
    """Return a state with the step count and zeros like `param` under each of `names`."""
    state = {name: namespace(param).zeros_like(param) for name in names}
    return {**state, "step": np.zeros(1, np.int64)}


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` elements in order, BLOCK at a time."""
    return (slice(i, min(i + BLOCK, size)) for i in range(0, size, BLOCK))


def rate_of(rate: float | Schedule, step: int) -> float:
    """Return the rate of the 0-based `step`."""
    return float(rate(step) if callable(rate) else rate)


def rate_curve(
    rate: float | Schedule | None, first: int, last: int, updates: Callable[[int], int]
) -> list[list[float]] | None:
    """Return [step, rate] of some steps from `first` to `last`; None where it does not change.

    `updates(step)` is the 0-based update that ends the 1-based `step`.
    """
    if not callable(rate):
        return None
    steps = np.unique(np.linspace(first, last, CURVE_POINTS).round().astype(int)).tolist()
    return [[step, float(f"{rate_of(rate, updates(step)):.6g}")] for step in steps]


_RANGES: dict[str, Callable[[float], bool]] = {
    "in [0, 1)": lambda x: 0 <= x < 1,
    "above 0": lambda x: x > 0,
    "at least 0": lambda x: x >= 0,
}


def require(optimizer: str, interval: str, **values: float | None) -> None:
    """Raise UsageError for a value outside of `interval`, a key of _RANGES; None is no value."""
    for name, value in values.items():
        if value is not None and not _RANGES[interval](value):
            raise UsageError(f"{optimizer}: {name} must be {interval}, seen {value}")


@options
class CommonOptions:
    """Options of every optimizer: the rate, and the largest norm of all gradients together."""

    rate: Positive
    clip_norm: Positive | None = None
