"""Data sets of training and evaluation: samples with their labels.

`Dataset` holds samples in memory and checks them once, at its creation; other modules read files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from hpctrain.core.errors import UsageError

SAMPLES_PER_READ = 1024  #: samples read at once in a pass over all of them
LABELS_PER_CHECK = 1 << 20  #: labels checked at once; bounds the memory for labels in files


@runtime_checkable
class Samples(Protocol):
    """A data set, in memory or in files; users may write their own classes."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return new arrays (x, y) of the samples at `indexes`, and read no others.

        `epoch` is for sets that change their samples at random, differently in each epoch. x and y
        must depend on the arguments alone. Called by one thread, not always the main thread.
        """


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` (n, ...), real and finite, and their labels `y`, int64 (n,), from 0.

    Raises UsageError for other lengths, dtypes or values.
    """

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        """Check both arrays and make the labels int64."""
        fault = find_fault(self.x, self.y) or _find_value_fault(self.x, self.y)
        if fault:
            raise UsageError(fault)
        object.__setattr__(self, "y", self.y.astype(np.int64))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x.shape[1:]

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) copies of the samples at `indexes`."""
        return self.x[indexes], self.y[indexes]


class Split(NamedTuple):
    """A training and a test set; labels lie in 0 .. classes - 1."""

    train: Samples
    test: Samples | None
    classes: int


def in_pieces(samples: Samples, indexes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (x, y) of the samples at `indexes` in order, SAMPLES_PER_READ at a time."""
    starts = range(0, len(indexes), SAMPLES_PER_READ)
    return (samples.rows(indexes[start : start + SAMPLES_PER_READ]) for start in starts)


def make_dataset(x: np.ndarray, y: np.ndarray, source: str) -> Dataset:
    """Return Dataset(x, y); raise UsageError, which begins with `source`, for invalid arrays."""
    try:
        return Dataset(x, y)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def make_split(
    train: Samples, test: Samples | None, source: str, classes: int | None = None
) -> Split:
    """Return the Split; if `classes` is None, it is one more than the largest training label.

    Raises UsageError, which begins with `source`, when samples of the two sets have different
    shapes, or a label of a Dataset is not below `classes`. Other Samples check labels themselves.
    """
    if classes is None:
        if not isinstance(train, Dataset):
            raise UsageError(f"{source}: expected the number of classes beside your own Samples")
        classes = int(train.y.max()) + 1
    for name, samples in (("training", train), ("test", test)):
        if isinstance(samples, Dataset) and (fault := find_invalid_label(samples.y, classes)):
            raise UsageError(f"{source}: {name} {fault}")
    if test is not None and test.sample_shape != train.sample_shape:
        raise UsageError(
            f"{source}: test samples have shape {test.sample_shape}, training samples "
            f"{train.sample_shape}; expected the same shape for both"
        )
    return Split(train, test, classes)


def find_invalid_label(y: np.ndarray, classes: int) -> str | None:
    """Return a message about the first label outside 0 .. classes - 1; None if all are valid."""
    for start in range(0, len(y), LABELS_PER_CHECK):
        block = y[start : start + LABELS_PER_CHECK].astype(np.int64)
        is_invalid = (block < 0) | (block >= classes)
        if is_invalid.any():
            i = start + int(np.argmax(is_invalid))
            return (
                f"label {y[i]} of sample {i} is out of range; expected labels in "
                f"0 .. {classes - 1}: remove such samples, or renumber the labels"
            )
    return None


def find_fault(x: np.ndarray, y: np.ndarray) -> str | None:
    """Return the first fault in the shapes and dtypes of samples and labels; None if valid."""
    if not isinstance(x, np.ndarray) or x.ndim < 2:
        return f"x is {_describe(x)}; expected an array (samples, ...) of 2 dims or more"
    if x.dtype.kind not in "fiub":
        return f"x has dtype {x.dtype}; expected real numbers: convert it with x.astype('float32')"
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return f"y is {_describe(y)}; expected an array (samples,) of class labels"
    if y.dtype.kind not in "iu":
        return f"y has dtype {y.dtype}; expected integer class labels: use y.astype('int64')"
    if len(x) != len(y):
        return f"x has {len(x)} samples but y has {len(y)} labels; expected equal numbers"
    return None if len(x) else "x and y hold 0 samples; expected at least 1"


def _find_value_fault(x: np.ndarray, y: np.ndarray) -> str | None:
    if not np.isfinite(x).all():
        index = np.argwhere(~np.isfinite(x))[0]
        return f"x holds {x[tuple(index)]} in sample {index[0]}; expected finite numbers"
    # Labels are used as int64, in which uint64 labels from 2**63 on are negative.
    if y.astype(np.int64).min() < 0:
        i = int(np.argmax(y.astype(np.int64) < 0))
        return f"y holds label {y[i]} in sample {i}; expected labels from 0: renumber the labels"
    return None


def _describe(value: object) -> str:
    return (
        f"of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    )
