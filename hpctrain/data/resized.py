"""A set of another length: for epochs longer or shorter than the set of samples.

    samples a b c, epoch_samples = 5      a b c a b, then shuffled as any epoch

A timed run needs full batches and no end of an epoch in between, whatever the batch and the number
of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.data.dataset import Samples, Split


@dataclass(frozen=True)
class Resized:
    """`samples`, repeated in order or cut, so that there are `length` of them."""

    samples: Samples
    length: int

    def __len__(self) -> int:
        """Return `length`."""
        return self.length

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.samples.sample_shape

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes` modulo their number."""
        return self.samples.rows(indexes % len(self.samples), epoch)


def resized(split: Split, length: int | None) -> Split:
    """Return `split` with `length` training samples; as it is for None."""
    return split if length is None else split._replace(train=Resized(split.train, length))
