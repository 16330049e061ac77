"""Data sets made from others: of another length, or of selected samples; and their targets.

A training set of another length, for epochs longer or shorter than the set of samples:

    samples a b c, epoch_samples = 5      a b c a b, then shuffled like any epoch

A timed run must not contain short batches or the end of an epoch, for any batch and number of
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.core import trees
from hpctrain.core.errors import UsageError
from hpctrain.data.dataset import Dataset, DerivedSamples, Samples, Split
from hpctrain.data.reading import unwrap
from hpctrain.data.sampler import order_of
from hpctrain.data.stored import StoredSamples


@dataclass(frozen=True)
class ResizedSamples(DerivedSamples):
    """`samples`, repeated in order or cut to `length` samples."""

    samples: Samples
    length: int

    def __len__(self) -> int:
        """Return `length`."""
        return self.length

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


@dataclass(frozen=True, eq=False)
class SelectedSamples:
    """The samples at `indexes`, int64 (n,), of `samples`; an index may occur several times."""

    samples: Samples
    indexes: np.ndarray

    def __len__(self) -> int:
        """Return the number of indexes."""
        return len(self.indexes)

    @property
    def sample_shape(self) -> Any:
        """A sample's shape; the first sample is read."""
        return trees.sample_shape(self.rows(np.arange(1))[0])

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return arrays (x, y) of the samples at `indexes` of the selection."""
        return self.samples.rows(self.indexes[indexes], epoch)


SAMPLES_PER_CHECK = 16  #: samples of other sets that are read to see their targets


def has_known_targets(samples: Samples) -> bool:
    """Return whether all targets are in memory or in mapped files."""
    base = unwrap(samples)
    if isinstance(base, StoredSamples):
        return isinstance(base.y, np.ndarray)
    return isinstance(base, Dataset)


def known_targets(samples: Samples) -> Any:
    """Return all targets of samples in memory or in mapped files, else the first few."""
    base = unwrap(samples)
    if isinstance(base, Dataset | StoredSamples) and has_known_targets(base):
        return base.y
    return base.rows(np.arange(min(len(base), SAMPLES_PER_CHECK)))[1]
