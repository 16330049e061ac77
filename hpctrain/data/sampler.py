"""The samples of each batch: a function of (seed, epoch, global index) alone.

Batches do not depend on the number of ranks, which only determines the shares of each batch. So a
job may be resumed with another number of ranks. The last batch of an epoch is short when `batch`
does not divide the number of samples, and a share is empty when a batch has fewer samples than
ranks.

    epoch 0, n = 10, batch = 4    step 0: 7 2 9 0    step 1: 4 1 8 3    step 2: 6 5
    step 1 on 3 ranks             rank 0: 4          rank 1: 1          rank 2: 8 3
"""

from __future__ import annotations

import numpy as np

from hpctrain.core.errors import UsageError

# Makes this stream another than other Philox streams with a key of (seed, small number).
_INITIAL_COUNTER = (0, 0, 0, 1)


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of `n` samples in `epoch`: a permutation, int64 (n,).

    Sorts the raw Philox stream keyed by (seed, epoch) (Salmon et al., 2011): NumPy guarantees these
    bits, while `Generator.permutation` may change with its version.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=_INITIAL_COUNTER).random_raw(n)
    return np.argsort(words, kind="stable")


def share(
    indexes: np.ndarray, rank: int, size: int, blocks: int | None = None
) -> tuple[int, np.ndarray]:
    """Return (first, indexes of the share): the contiguous part of a batch for `rank` of `size`.

    `first` is the position of the share in the batch. Shares differ by one sample at most. With
    `blocks` the batch is first divided into that many blocks, which differ by one sample at most,
    and each share is made of whole blocks.
    """
    parts = blocks or size
    first, end = (len(indexes) * (r * parts // size) // parts for r in (rank, rank + 1))
    return first, indexes[first:end]


class Sampler:
    """The batches of `n` samples in steps counted from 0 over all epochs; `batch` is global."""

    def __init__(self, n: int, batch: int, seed: int) -> None:
        """Raise UsageError for fewer than 1 sample or batch, or a seed outside 0 .. 2**63 - 1."""
        _require(n >= 1, f"{n} samples; a data set needs at least 1")
        _require(batch >= 1, f"batch is {batch}; it must be at least 1")
        _require(0 <= seed < 2**63, f"seed is {seed}; it must lie in 0 .. 2**63 - 1")
        self.n, self.batch, self.seed = n, batch, seed
        self.steps_per_epoch = -(-n // batch)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return (epoch, position in the order of the epoch) of the first sample of `step`."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, step_in_epoch * self.batch

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the first `step` steps, with the short batches."""
        epoch, index = self.locate_step(step)
        return epoch * self.n + index

    def batch_indexes(self, step: int) -> np.ndarray:
        """Return the global indexes of the samples of `step`, int64."""
        epoch, first = self.locate_step(step)
        if epoch != self._epoch:  # sorting a large set takes longer than a step
            self._epoch, self._order = epoch, order(self.seed, epoch, self.n)
        return self._order[first : first + self.batch]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
