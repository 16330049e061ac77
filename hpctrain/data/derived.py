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
from hpctrain.data.dataset import Dataset, DerivedSamples, Samples, Split, in_pieces
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


def checks_as_read(samples: Samples) -> bool:
    """Return whether values are checked when they are read, since they lie in files."""
    return isinstance(unwrap(samples), StoredSamples)


def known_targets(samples: Samples) -> Any:
    """Return all targets of samples in memory or in mapped files, else the first few."""
    base: Any = unwrap(samples)
    if has_known_targets(base):
        return base.y
    return base.rows(np.arange(min(len(base), SAMPLES_PER_CHECK)))[1]


def count_labels(samples: Samples, classes: int, rank: int = 0, size: int = 1) -> np.ndarray:
    """Return the number of labels of each class, int64 (classes,), over all samples of a data set.

    Each label counts once, whatever the length of an epoch. With `size` the samples are cut into as
    many parts, and part `rank` is counted alone. Labels that are not in memory are read. Raises
    UsageError for targets that are not integers in 0 .. classes - 1.
    """
    base, targets = unwrap(samples), known_targets(samples)
    if isinstance(targets, dict | tuple):
        raise UsageError(f"labels: expected one array, seen a {type(targets).__name__}")
    first, end = (len(base) * n // size for n in (rank, rank + 1))
    parts = [targets[first:end]] if len(targets) == len(base) else (
        y for _, y in in_pieces(base, np.arange(first, end)))  # fmt: skip
    counts = np.zeros(classes, np.int64)
    for y in parts:
        if y.size and (y.dtype.kind not in "iu" or not 0 <= y.min() <= y.max() < classes):
            raise UsageError(
                f"labels: expected integers in 0 .. {classes - 1}, seen {y.dtype} from {y.min()} "
                f"to {y.max()}"
            )
        counts += np.bincount(y.reshape(-1).astype(np.int64), minlength=classes)
    return counts
