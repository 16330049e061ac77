"""What training and evaluation read from: samples with their labels, checked once when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpctrain.errors import UsageError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` (n, ...), real and finite, and their labels `y`, int64 (n,), from 0.

    Raises UsageError when lengths, dtypes or values are not as said.
    """

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        """Check both arrays and make the labels int64."""
        fault = _fault_of_x(self.x) or _fault_of_y(self.y) or _fault_of_both(self.x, self.y)
        if fault:
            raise UsageError(fault)
        object.__setattr__(self, "y", self.y.astype(np.int64))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)

    def rows(self, indexes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) copies of the samples at `indexes`."""
        return self.x[indexes], self.y[indexes]


class Split(NamedTuple):
    """A data set cut in two; labels lie in 0 .. classes - 1."""

    train: Dataset
    test: Dataset | None
    classes: int


def checked(x: np.ndarray, y: np.ndarray, source: str) -> Dataset:
    """Return Dataset(x, y); a fault's message begins with `source`."""
    try:
        return Dataset(x, y)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def split(train: Dataset, test: Dataset | None, source: str, classes: int | None = None) -> Split:
    """Return the Split; `classes` is one more than the largest training label unless given.

    Raises UsageError, which begins with `source`, when samples of the two sets have different
    shapes or a label is beyond the classes.
    """
    classes = int(train.y.max()) + 1 if classes is None else classes
    for name, part in (("training", train), ("test", test)):
        if part is not None and part.y.max() >= classes:
            raise UsageError(
                f"{source}: {name} label {part.y.max()} is out of range; expected labels in "
                f"0 .. {classes - 1} (those trained on): drop these samples or number them anew"
            )
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise UsageError(
            f"{source}: test samples have shape {test.x.shape[1:]}, training samples "
            f"{train.x.shape[1:]}; expected both alike: save them in one shape"
        )
    return Split(train, test, classes)


def _fault_of_x(x: np.ndarray) -> str | None:
    if not isinstance(x, np.ndarray) or x.ndim < 2:
        return f"x is {_kind(x)}; expected an array (samples, ...) of 2 dims or more"
    if x.dtype.kind not in "fiub":
        return f"x has dtype {x.dtype}; expected real numbers: convert it with x.astype('float32')"
    if not np.isfinite(x).all():
        first = np.argwhere(~np.isfinite(x))[0]
        return f"x holds {x[tuple(first)]} in sample {first[0]}; expected finite numbers: clean it"
    return None


def _fault_of_y(y: np.ndarray) -> str | None:
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return f"y is {_kind(y)}; expected an array (samples,) of class labels"
    if y.dtype.kind not in "iu":
        return f"y has dtype {y.dtype}; expected integer class labels: use y.astype('int64')"
    # Seen as int64, as it will be used: labels of uint64 beyond 2**63 show here too.
    if len(y) and y.astype(np.int64).min() < 0:
        bad = int(np.argmax(y.astype(np.int64) < 0))
        return f"y holds label {y[bad]} in sample {bad}; expected labels from 0: number them anew"
    return None


def _fault_of_both(x: np.ndarray, y: np.ndarray) -> str | None:
    if len(x) != len(y):
        return f"x has {len(x)} samples but y has {len(y)} labels; expected as many of each"
    return None if len(x) else "x and y hold 0 samples; expected at least 1"


def _kind(seen: object) -> str:
    return f"of shape {seen.shape}" if isinstance(seen, np.ndarray) else f"a {type(seen).__name__}"
