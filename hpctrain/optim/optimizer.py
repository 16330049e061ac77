"""The interface of optimizers, and the blocks in which they process flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol

import numpy as np
import pydantic

from hpctrain.core.xp import Array, namespace

#: Processed together: with their state they fit the second-level cache. Shards of an arena begin at
#: multiples of this, so that partial sums do not depend on P.
BLOCK_ELEMENTS = 65_536
MAX_CURVE_POINTS = 17  #: points of the rate curve in one row of metrics

State = dict[str, Array]
Schedule = Callable[[int], float]
GatherRows = Callable[[np.ndarray], np.ndarray]
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0)]
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
    """Returns the initial state for a plane of parameters."""

    def __call__(self, param: Array) -> State: ...


class Update(Protocol):
    """Updates `param` and `state` in place with gradient `grad`."""

    def __call__(
        self,
        grad: Array,
        state: State,
        param: Array,
        slots: Sequence[TensorSlot],
        gather_rows: GatherRows,
    ) -> None: ...


class Optimizer(NamedTuple):
    """A pair of functions on flat arrays, and the rate; an optimizer itself has no state.

    `init(param)` returns the state: planes, arrays of the length and dtype of `param`, and "step",
    int64, the updates done so far. "step" has the shape (1,), or (1 + slots,) with a count
    of each slot of the whole model behind it, in order; a shard knows the counts of its own slots.
    `update(grad, state, param, slots, gather_rows)` writes `state` and `param` in place, never
    `grad`.

    The arrays cover a whole model, ranges of a model, or a shard of either that begins at a
    multiple of BLOCK_ELEMENTS. `slots` always describe the whole model; offsets count from the
    first element of the arrays, so that some are negative or beyond the end of the arrays. They are
    congruent modulo BLOCK_ELEMENTS to the offsets in a whole model.

    `gather_rows(rows)` takes partial sums, float64 (rows, columns), one row per piece, and returns
    the rows of the whole model, in order of slots; with a single shard it returns its argument. It
    is collective: all shards call it equally often.

    `rate` is for the metrics: a number, or a function of the 0-based step. `needs_norms` is true if
    `update` calls `gather_rows`; if it does not, any range of the arrays can be updated separately.
    `skips_absent` is true if `update` leaves slots without a gradient alone, see absent.py.
    """

    init: Init
    update: Update
    rate: float | Schedule | None = None
    needs_norms: bool = True
    skips_absent: bool = False


def initial_state(param: Array, names: Sequence[str] = ()) -> State:
    """Return a state with a step count of 0, and zeros like `param` under each of `names`."""
    state = {name: namespace(param).zeros_like(param) for name in names}
    return {**state, "step": np.zeros(1, np.int64)}


def planes(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a state that have an element per parameter."""
    return {name: x for name, x in state.items() if name != "step"}


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` elements in order, BLOCK_ELEMENTS at a time."""
    return (slice(i, min(i + BLOCK_ELEMENTS, size)) for i in range(0, size, BLOCK_ELEMENTS))


def rate_at(rate: float | Schedule, step: int) -> float:
    """Return the rate of the 0-based `step`."""
    return float(rate(step) if callable(rate) else rate)


def rate_curve(
    rate: float | Schedule | None, first: int, last: int, updates: Callable[[int], int]
) -> list[list[float]] | None:
    """Return [step, rate] of some steps from `first` to `last`; None for a constant rate.

    `updates(step)` is the 0-based update at the end of the 1-based `step`.
    """
    if not callable(rate):
        return None
    steps = np.unique(np.linspace(first, last, MAX_CURVE_POINTS).round().astype(int)).tolist()
    return [[step, float(f"{rate_at(rate, updates(step)):.6g}")] for step in steps]
