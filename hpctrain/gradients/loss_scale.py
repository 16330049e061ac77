"""The factor of the loss in fp16, where small gradients would become 0 without it.

A power of two, halved where a gradient overflows, which is then computed again; doubled after
GROWTH_INTERVAL gradients without overflow. Source: Micikevicius et al., "Mixed precision training",
2018; the automatic choice: Kuchaiev et al., "OpenSeq2Seq", 2018.
"""

from __future__ import annotations

import numpy as np

GROWTH_INTERVAL = 1000  #: gradients without overflow after which the factor is doubled
MAX_FACTOR, MIN_FACTOR = 2.0**24, 2.0**-14


class LossScale:
    """The factor of a worker's loss."""

    def __init__(self) -> None:
        self.factor, self._finite_count = 2.0**15, 0

    @property
    def state(self) -> np.ndarray:
        """The factor, and the gradients since its last change, float64 (2,)."""
        return np.array([self.factor, self._finite_count])

    def restore(self, state: np.ndarray) -> None:
        """Restore a saved `state`; a mean over workers is rounded down to a power of two."""
        self.factor = 2.0 ** np.floor(np.log2(state[0]))
        self._finite_count = int(state[1])

    def halve(self) -> bool:
        """Halve the factor after an overflow; return False if it cannot be smaller."""
        if self.factor <= MIN_FACTOR:
            return False
        self.factor, self._finite_count = self.factor / 2, 0
        return True

    def count_gradient(self) -> None:
        """Count a gradient without overflow."""
        self._finite_count += 1
        if self._finite_count == GROWTH_INTERVAL:
            self.factor, self._finite_count = min(2 * self.factor, MAX_FACTOR), 0
