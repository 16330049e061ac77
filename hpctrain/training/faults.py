"""Planted faults: a slow rank, jitter, a fixed time per step; to measure a regime's tolerance.

No result changes: only time passes, and it counts as compute. One second of compute then takes

    f * (1 + jitter * u(seed, rank, step)) seconds        f = slow_factor on slow_rank, 1 elsewhere

with u uniform in [0, 1), a function of its arguments alone: from Philox (Salmon et al., 2011).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from hpctrain import nn
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.gradients.replica import Batch, Replica, WrappedReplica

# Keeps this stream apart from others that use Philox with a key of (seed, small number).
_STREAM = 3
MIN_SLEEP_S = 5e-5  #: the shortest sleep, about: less is put off
T = TypeVar("T")
U = TypeVar("U")


@config.options
class FaultsOptions:
    """`[faults]`: the delays to plant; by default none."""

    slow_rank: Annotated[int, Field(ge=0)] | None = None
    slow_factor: Annotated[float, Field(ge=1)] | None = None
    jitter: Annotated[float, Field(ge=0)] = 0.0  #: 0.5: up to half as long again
    step_ms: Annotated[float, Field(ge=0)] = 0.0  #: sleep per gradient

    @property
    def any(self) -> bool:
        """Whether any delay is planted."""
        return self != FaultsOptions()

    def check(self, ranks: int, workers: int) -> None:
        """Raise UsageError unless the slow rank has a factor and computes.

        The first `workers` of the `ranks` compute.
        """
        if (self.slow_rank is None) != (self.slow_factor is None):
            raise UsageError(
                "[faults] needs both of slow_rank and slow_factor, or neither; "
                f"seen slow_rank {self.slow_rank}, slow_factor {self.slow_factor}"
            )
        if self.slow_rank is not None and self.slow_rank >= ranks:
            raise UsageError(
                f"[faults] slow_rank: expected less than {ranks}, the number of ranks, "
                f"seen {self.slow_rank}"
            )
        if self.slow_rank is not None and self.slow_rank >= workers:
            raise UsageError(
                f"[faults] slow_rank: expected a rank that computes gradients, seen "
                f"{self.slow_rank}, which is a server; the workers are {workers} of the ranks"
            )

    def stretch(self, seed: int, rank: int, step: int) -> float:
        """Return the factor by which the compute time of `rank` is stretched in `step`."""
        factor = self.slow_factor or 1.0 if rank == self.slow_rank else 1.0
        return factor * (1 + self.jitter * uniform(seed, rank, step)) if self.jitter else factor


def uniform(seed: int, rank: int, step: int) -> float:
    """Return a random number in [0, 1) that belongs to a step of a rank."""
    key = np.array([seed, rank], dtype=np.uint64)
    word = np.random.Philox(key=key, counter=(step, 0, 0, _STREAM)).random_raw()
    return float(int(word) >> 11) / 2**53  # as many bits as a float64 holds


class Slowdown:
    """The clock of a rank's compute: sleeps to make it slower by the planted factor."""

    def __init__(
        self,
        options: FaultsOptions,
        rank: int,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._options, self._rank, self._sleep, self._clock = options, rank, sleep, clock
        self._stretch, self._last_reading_s, self._owed_s = 1.0, 0.0, 0.0

    def begin(self, seed: int, step: int) -> None:
        """Begin a gradient: sleep for its fixed part, and read the clock."""
        self._stretch = self._options.stretch(seed, self._rank, step)
        self._owed_s = self._options.step_ms / 1e3 * self._stretch
        self._sleep_owed()

    def catch_up(self) -> None:
        """Sleep until the compute since the last reading has taken its stretched time."""
        self._owed_s += (self._stretch - 1) * (self._clock() - self._last_reading_s)
        self._sleep_owed()

    def not_slowed(self, call: Callable[[U], T]) -> Callable[[U], T]:
        """Return `call` excluded from compute: it first sleeps for the compute before it."""

        def call_after_sleep(argument: U) -> T:
            self.catch_up()
            result = call(argument)
            self._last_reading_s = self._clock()
            return result

        return call_after_sleep

    def _sleep_owed(self) -> None:
        start = self._clock()
        if self._owed_s > MIN_SLEEP_S:
            self._sleep(self._owed_s)
        self._last_reading_s = self._clock()
        self._owed_s -= (
            self._last_reading_s - start
        )  # a sleep is longer than requested: the next is shorter


class SlowedReplica(WrappedReplica):
    """A Replica that returns the gradients of `replica`, after a delay.

    A part of the gradient is ready when the compute before it has taken its time, so that what
    overlaps with backward still does.
    """

    def __init__(self, replica: Replica, slowdown: Slowdown):
        super().__init__(replica)
        self._slowdown = slowdown

    @property
    def loss(self) -> nn.Loss:
        """The loss of `replica`."""
        return self._replica.loss

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, and take longer over it; see Replica."""
        self._slowdown.begin(key.seed, key.step)
        if key.sum_over_ranks is not None:  # a rank waits for the others in it
            key = key._replace(sum_over_ranks=self._slowdown.not_slowed(key.sum_over_ranks))
        if key.on_need is not None:
            key = key._replace(on_need=self._slowdown.not_slowed(key.on_need))
        sums = self._replica.gradient(batch, scale, key, self._slowdown.not_slowed(on_ready))
        self._slowdown.catch_up()
        return sums
