"""A training set of another length: for epochs longer or shorter than the set of samples.

    samples a b c, epoch_samples = 5      a b c a b, then shuffled like any epoch

A timed run must not contain short batches or the end of an epoch, for any batch and number of
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.data.dataset import Samples, Split
from hpctrain.data.sampler import order_of


@dataclass(frozen=True)
class ResizedSamples:
    """`samples`, repeated in order or cut to `length` samples."""

    samples: Samples
    length: int

    def __len__(self) -> int:
        """Return `length`."""
        return self.length

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """A sample's shape."""
        return self.samples.sample_shape

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes` modulo their number."""
        return self.samples.rows(indexes % len(self.samples), epoch)


def resize_training_set(split: Split, length: int | None) -> Split:
    """Return `split` with `length` training samples, unchanged if `length` is None.

    Raises UsageError for samples with an order of the user's own, which sets the length.
    """
    if length is None:
        return split
    if (order := order_of(split.train)) is not None:
        raise UsageError(
            f"[run] epoch_samples is {length}, but the sampler of the training set decides which "
            f"{len(order)} samples an epoch has; remove either"
        )
    return split._replace(train=ResizedSamples(split.train, length))
