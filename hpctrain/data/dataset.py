"""Data sets of training and evaluation: samples with their labels.

`Dataset` holds them in memory and checks them once when made; other modules read files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from hpctrain.core.errors import UsageError

PIECE = 1024  #: samples read at once in a pass over all of them
LABELS = 1 << 20  #: labels checked at once: they may lie in a file


@runtime_checkable
class Samples(Protocol):
    """A data set, in memory or in files; a user's own class may be one."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return new arrays (x, y) of the samples at `indexes`, and read no others.

        `epoch` is for sets that change their samples at random, anew in each epoch. Both must be a
        function of the arguments alone. Called by one thread, not always the main one.
        """


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` (n, ...), real and finite, and their labels `y`, int64 (n,), from 0.

    Raises UsageError if lengths, dtypes or values differ from that.
    """

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        """Check both arrays and make the labels int64."""
        fault = faults_of(self.x, self.y) or _values_of(self.x, self.y)
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
    """A data set cut in two; labels lie in 0 .. classes - 1."""

    train: Samples
    test: Samples | None
    classes: int


def in_pieces(samples: Samples, indexes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (x, y) of the samples at `indexes` in order, a few at a time."""
    return (samples.rows(indexes[i : i + PIECE]) for i in range(0, len(indexes), PIECE))


def checked(x: np.ndarray, y: np.ndarray, source: str) -> Dataset:
    """Return Dataset(x, y); a fault's message begins with `source`."""
    try:
        return Dataset(x, y)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def split(train: Samples, test: Samples | None, source: str, classes: int | None = None) -> Split:
    """Return the Split; `classes` is one more than the largest training label unless given.

    Raises UsageError, which begins with `source`, when samples of the two sets have different
    shapes, or a label of a Dataset is beyond the classes: other Samples check that when they read.
    """
    if classes is None:
        if not isinstance(train, Dataset):
            raise UsageError(f"{source}: expected the number of classes beside a set of one's own")
        classes = int(train.y.max()) + 1
    for name, part in (("training", train), ("test", test)):
        if isinstance(part, Dataset) and (fault := beyond(part.y, classes)):
            raise UsageError(f"{source}: {name} {fault}")
    if test is not None and test.sample_shape != train.sample_shape:
        raise UsageError(
            f"{source}: test samples have shape {test.sample_shape}, training samples "
            f"{train.sample_shape}; expected both alike: save them in one shape"
        )
    return Split(train, test, classes)


def beyond(y: np.ndarray, classes: int) -> str | None:
    """Return a message about the first label that is not in 0 .. classes - 1; None if all are."""
    for start in range(0, len(y), LABELS):
        block = y[start : start + LABELS].astype(np.int64)
        wrong = (block < 0) | (block >= classes)
        if wrong.any():
            i = start + int(np.argmax(wrong))
            return (
                f"label {y[i]} of sample {i} is out of range; expected labels in "
                f"0 .. {classes - 1}: drop such samples, or number the labels anew"
            )
    return None


def faults_of(x: np.ndarray, y: np.ndarray) -> str | None:
    """Return the first fault in the shapes and dtypes of samples and labels; None if valid."""
    if not isinstance(x, np.ndarray) or x.ndim < 2:
        return f"x is {_kind(x)}; expected an array (samples, ...) of 2 dims or more"
    if x.dtype.kind not in "fiub":
        return f"x has dtype {x.dtype}; expected real numbers: convert it with x.astype('float32')"
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return f"y is {_kind(y)}; expected an array (samples,) of class labels"
    if y.dtype.kind not in "iu":
        return f"y has dtype {y.dtype}; expected integer class labels: use y.astype('int64')"
    if len(x) != len(y):
        return f"x has {len(x)} samples but y has {len(y)} labels; expected as many of each"
    return None if len(x) else "x and y hold 0 samples; expected at least 1"


def _values_of(x: np.ndarray, y: np.ndarray) -> str | None:
    if not np.isfinite(x).all():
        first = np.argwhere(~np.isfinite(x))[0]
        return f"x holds {x[tuple(first)]} in sample {first[0]}; expected finite numbers: clean it"
    # As int64, as in use: labels of uint64 beyond 2**63 are negative, too.
    if y.astype(np.int64).min() < 0:
        bad = int(np.argmax(y.astype(np.int64) < 0))
        return f"y holds label {y[bad]} in sample {bad}; expected labels from 0: number them anew"
    return None


def _kind(value: object) -> str:
    return (
        f"of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    )
