"""Dropout with a mask that depends on the sample, not on the rank that holds it.

Philox is a counter-based generator (Salmon et al., 2011): it computes the n-th number without the
n - 1 before it. Each sample owns a fixed range of counters, and the ranges of consecutive samples
are consecutive, so one call draws the mask of any share.

    counter words    [ sample * blocks + block,  step,  layer,  0 ]      key words  [ seed, STREAM ]

On a GPU a kernel draws the same numbers; see cuda/philox.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, on_device
from hpctrain.nn.cuda.philox import DRAWS_PER_COUNTER, apply_dropout
from hpctrain.nn.layer import Key, PlainLayer

DROPOUT_STREAM = 1 << 63  #: separate from the initial values, whose keys are (seed, index)


def keep_mask(key: Key, rows: int, features: int, rate: float) -> np.ndarray:
    """Return a bool array (rows, features), true for the values that dropout keeps.

    Row i is a function of (key.seed, key.step, key.layer, key.first + i, features, rate) alone.
    """
    blocks = -(-features // DRAWS_PER_COUNTER)
    counter, key_words = (np.array(n, np.uint64) for n in _philox_words(key, features))
    stream = np.random.Philox(key=key_words, counter=counter)
    draws = stream.random_raw(rows * blocks * (DRAWS_PER_COUNTER // 2)).view(np.uint32)
    return draws.reshape(rows, blocks * DRAWS_PER_COUNTER)[:, :features] >= round(rate * 2**32)


def _philox_words(key: Key, features: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the words of the first sample's counter, and the words of the Philox key."""
    counter = (key.first * -(-features // DRAWS_PER_COUNTER), key.step, key.layer, 0)
    return counter, (key.seed, DROPOUT_STREAM)


@dataclass(frozen=True)
class Dropout(PlainLayer):
    """Set each value to 0 with probability `rate`, and multiply the others by 1 / (1 - rate).

    Evaluation changes nothing. Samples may have any shape. Raises UsageError unless 0 <= rate < 1.
    Source: Srivastava et al. (2014).
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UsageError(f"Dropout: rate must be in [0, 1), seen {self.rate}")

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, Array | Key | None]:
        if key is None or self.rate == 0:
            return x, None
        if on_device(x):
            return self._drop_on_device(x, key), key
        mask = keep_mask(key, len(x), math.prod(x.shape[1:]), self.rate)
        factor = mask.reshape(x.shape).astype(x.dtype)
        factor *= 1 / (1 - self.rate)
        return x * factor, factor

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Array | Key | None,
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        if saved is None:
            return dy
        return self._drop_on_device(dy, saved) if isinstance(saved, Key) else dy * saved

    def _drop_on_device(self, x: Array, key: Key) -> Array:
        """Return array `x` of a device after dropout; forward and backward each draw the mask."""
        return apply_dropout(x, self.rate, *_philox_words(key, math.prod(x.shape[1:])))
