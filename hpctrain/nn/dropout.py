"""Dropout whose mask belongs to the sample, not to the rank that happens to hold it.

Philox is a counter-based generator (Salmon et al., 2011): it gives the n-th number without the
n - 1 before it. Each sample owns a fixed range of counters, and samples that follow each other own
ranges that follow each other, so one call draws the rows of any share.

    counter words    [ sample * blocks + block,  step,  layer,  0 ]      key words  [ seed, STREAM ]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.nn.layer import Key, Parameter, Shape
from hpctrain.xp import Array, like

STREAM = 1 << 63  #: keeps clear of the initial values, whose keys are (seed, index)
DRAWS = 8  #: numbers of 32 bits that one Philox counter gives


def keep_mask(key: Key, rows: int, features: int, rate: float) -> np.ndarray:
    """Return the bool array (rows, features) that is true where a value is kept.

    Row i is a function of (key.seed, key.step, key.layer, key.first + i, features, rate) alone.
    """
    blocks = -(-features // DRAWS)
    counter = np.array([key.first * blocks, key.step, key.layer, 0], dtype=np.uint64)
    stream = np.random.Philox(key=np.array([key.seed, STREAM], dtype=np.uint64), counter=counter)
    draws = stream.random_raw(rows * blocks * (DRAWS // 2)).view(np.uint32)
    return draws.reshape(rows, blocks * DRAWS)[:, :features] >= round(rate * 2**32)


@dataclass(frozen=True)
class Dropout:
    """Set each value to 0 with probability `rate`, the others grow by 1 / (1 - rate).

    Evaluation changes nothing. Samples may have any shape. Raises UsageError unless 0 <= rate < 1.
    Source: Srivastava et al. (2014).
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UsageError(f"Dropout: rate must be in [0, 1), seen {self.rate}")

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {}

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, Array | None]:
        if key is None or self.rate == 0:
            return x, None
        kept = keep_mask(key, len(x), math.prod(x.shape[1:]), self.rate)
        # Drawn on the host even for a GPU, so that both kinds of device drop the same values.
        factor = like(x, kept).reshape(x.shape)
        factor *= 1 / (1 - self.rate)
        return x * factor, factor

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Array | None,
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        return dy if saved is None else dy * saved
