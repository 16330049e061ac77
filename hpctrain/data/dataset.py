"""Data sets of training and evaluation: samples with their targets.

`Dataset` holds samples in memory and checks them once, at its creation; other modules read files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hpctrain.core import trees
from hpctrain.core.errors import UsageError
from hpctrain.core.labels import find_invalid_label

OBJECTS_REMEDY = (
    "give all rows the same length, each missing value a number and each text a number, then "
    "array = numpy.array(rows, dtype='float32'); of pandas: frame.to_numpy(dtype='float32')"
)
SAMPLES_PER_READ = 1024  #: samples read at once in a pass over the whole set


@runtime_checkable
class Samples(Protocol):
    """A data set, in memory or in files; users may write their own classes.

    One with an attribute `order` decides the samples of its epochs itself: see `EpochOrder`.
    """

    @property
    def sample_shape(self) -> Any:
        """A sample's shape; for a tree of arrays the tree of their shapes."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return new arrays (x, y) of the samples at `indexes`, and read no others.

        Both may be trees of arrays (`hpctrain.core.trees`). `epoch` is for sets that change their
        samples at random, differently in each epoch. x and y must depend on the arguments alone.
        Called by one thread, not always the main thread.
        """


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` and targets `y`: arrays (n, ...) of finite real numbers, or trees of such.

    A tree is a dict or tuple, such as {"image": images, "age": ages}. Integer targets, such as
    class labels, become int64; which targets are valid is up to the loss. Images are (n, h, w) or
    (n, h, w, channels). Raises UsageError for other lengths or dtypes and, if `finite`, for NaN and
    infinite values; without it `not_finite` of the run decides about these.
    """

    x: Any
    y: Any
    finite: bool = True

    def __post_init__(self) -> None:
        """Check all arrays and make integer targets int64."""
        fault = find_fault(self.x, self.y)
        if self.finite and not fault:
            fault = find_value_fault(range(len(self)), x=self.x, y=self.y)
        if fault:
            raise UsageError(fault)
        object.__setattr__(self, "y", trees.map_arrays(as_targets, self.y))

    def __len__(self) -> int:
        """Return the number of samples."""
        return trees.sample_count(self.x)

    @property
    def sample_shape(self) -> Any:
        """A sample's shape, or the tree of shapes."""
        return trees.sample_shape(self.x)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return (x, y) copies of the samples at `indexes`."""
        take_rows = itemgetter(indexes)
        return trees.map_arrays(take_rows, self.x), trees.map_arrays(take_rows, self.y)


class DerivedSamples:
    """The part that data sets made from other `samples` share, with the same samples by default."""

    samples: Samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    @property
    def sample_shape(self) -> Any:
        """A sample's shape."""
        return self.samples.sample_shape


class Split(NamedTuple):
    """A training and a test set; `classes` is their number if the data set has class labels."""

    train: Samples
    test: Samples | None
    classes: int | None = None


def in_pieces(samples: Samples, indexes: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Yield (x, y) of the samples at `indexes` in order, SAMPLES_PER_READ at a time."""
    starts = range(0, len(indexes), SAMPLES_PER_READ)
    return (samples.rows(indexes[start : start + SAMPLES_PER_READ]) for start in starts)


def make_dataset(x: Any, y: Any, source: str, finite: bool = True) -> Dataset:
    """Return the Dataset; raise UsageError, which begins with `source`, for invalid arrays."""
    try:
        return Dataset(x, y, finite)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def make_split(
    train: Samples, test: Samples | None, source: str, classes: int | None = None
) -> Split:
    """Return the Split.

    Raises UsageError, which begins with `source`, when samples of the two sets have different
    shapes, or a label of a Dataset is not below `classes`. Other Samples check labels themselves.
    """
    for name, samples in (("training", train), ("test", test)):
        if classes is not None and isinstance(samples, Dataset):
            for _, labels in trees.arrays(samples.y):
                if fault := find_invalid_label(labels, classes):
                    raise UsageError(f"{source}: {name} {fault}")
    if test is not None and test.sample_shape != train.sample_shape:
        raise UsageError(
            f"{source}: test samples have shape {test.sample_shape}, training samples "
            f"{train.sample_shape}; expected the same shape for both"
        )
    return Split(train, test, classes)


def find_fault(x: Any, y: Any) -> str:
    """Return the first fault in the shapes and dtypes of samples and targets; empty if valid."""
    for name, tree in (("x", x), ("y", y)):
        if not trees.arrays(tree):
            return f"{name} holds no array; expected arrays (samples, ...)"
    named_arrays = [(f"{name}{path}", array, min_dims)
                    for name, tree, min_dims in (("x", x, 2), ("y", y, 1))
                    for path, array in trees.arrays(tree)]  # fmt: skip
    for name, array, min_dims in named_arrays:
        if fault := _find_array_fault(array, name, min_dims):
            return fault
    first_name, first_array, _ = named_arrays[0]
    for name, array, _ in named_arrays:
        if len(array) != len(first_array):
            return (
                f"{first_name} has {len(first_array)} samples but {name} has {len(array)}; "
                "expected equal numbers"
            )
    return "" if len(first_array) else "x and y hold 0 samples; expected at least 1"


def find_value_fault(numbers: Sequence[int] | np.ndarray, **parts: Any) -> str:
    """Return the first value that is not finite in trees of samples and targets; else empty.

    `numbers` (n,) count the samples in their data set.
    """
    for name, tree in parts.items():
        for path, array in trees.arrays(tree):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row, *position = np.argwhere(~np.isfinite(array))[0].tolist()
                index_text = ", ".join(map(str, position))
                place_text = (
                    f", column {index_text}" if len(position) == 1 else f", at ({index_text})"
                )
                return (
                    f"{name}{path} holds {array[(row, *position)]} in sample {numbers[row]}"
                    f"{place_text * bool(position)}; expected finite numbers: replace or remove "
                    "it, or set [run] not_finite = 'skip' to go on without the steps that read it"
                )
    return ""


def as_targets(y: np.ndarray) -> np.ndarray:
    """Return targets as losses take them: integers as int64, floats as they are."""
    return y if y.dtype.kind == "f" else y.astype(np.int64)


def _find_array_fault(array: Any, name: str, min_dims: int) -> str:
    if not isinstance(array, np.ndarray) or array.ndim < min_dims:
        seen_text = (
            f"of shape {array.shape}"
            if isinstance(array, np.ndarray)
            else f"a {type(array).__name__}"
        )
        return f"{name} is {seen_text}; expected an array (samples, ...) of {min_dims} dims or more"
    if array.dtype.kind not in "fiub":
        return f"{name} has dtype {array.dtype}; expected real numbers: {_find_remedy(name, array)}"
    return ""


def _find_remedy(name: str, array: np.ndarray) -> str:
    """Return the way to numbers from text, objects, times and complex numbers."""
    if array.dtype.kind in "US" and name.startswith("y"):
        return (
            f"number the classes with classes, {name} = numpy.unique({name}, return_inverse=True)"
        )
    if array.dtype.kind in "US":
        return (
            "give each text a number, as numpy.unique(column, return_inverse=True) does, or a "
            "column of 0 and 1 per text"
        )
    if array.dtype.kind == "O":
        return OBJECTS_REMEDY
    if array.dtype.kind == "c":
        return f"numpy.stack([{name}.real, {name}.imag], axis=-1)"
    return f"{name}.astype('float32'), if that is what the numbers mean"
