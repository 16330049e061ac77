"""Arrays in files, read by rows: parts of an array in several files, and checks of their values.

A `Part` describes an array of a file. A `FileArray` joins the parts in the order of their files,
and opens a file when its rows are first needed:

    part-0.h5: rows 0 .. 99      part-1.h5: rows 100 .. 149      indexes 120 3 3 101
    rows by file, increasing, each once         part-0: 3        part-1: 1 20
"""

from __future__ import annotations

import base64
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import DataError, UsageError
from hpctrain.core.files import brief
from hpctrain.data.dataset import SAMPLES_PER_READ
from hpctrain.data.formats.libraries import faults_of
from hpctrain.data.stored import count_bytes
from hpctrain.hardware.memory import available_bytes

OPEN_FILES = 64  #: for an array; a set may have more shards than a process may have descriptors
_PACKED = ("scale_factor", "add_offset")
_MISSING = ("_FillValue", "missing_value")

#: rows (m,) of a file, increasing, each once -> their values, a new array (m, ...)
ReadRows = Callable[[np.ndarray], np.ndarray]


class Part(NamedTuple):
    """An array of a file; `open_rows` opens the file and returns the function of its rows."""

    place: str  #: the file, and the array in it, for messages
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_rows: int | None  #: rows that the file stores, and decodes, together
    open_rows: Callable[[], ReadRows]
    note: str = ""  #: about the storage, for `data info`
    classes: int | None = None  #: of labels, where the file says so
    in_any_order: bool = False  #: `open_rows` takes rows in any order, several times, too
    decodes_rows: bool = False  #: a row of a chunk is read and decoded without the others


class FileArray:
    """An array (n, ...) whose rows lie in `parts`; the `selected` rows, or all.

    Raises UsageError if the parts differ in dtype or in the shape of a row. Threads may share it.
    """

    def __init__(self, parts: Sequence[Part], selected: np.ndarray | None = None) -> None:
        """`selected`: indexes of rows, int64 (n,), None for all."""
        self.parts, self.selected = parts, selected
        first = parts[0]
        for part in parts:
            if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
                raise UsageError(
                    f"{part.place}: expected rows of {first.dtype} {first.shape[1:]}, as in "
                    f"{first.place}, seen {part.dtype} {part.shape[1:]}; a set has one kind"
                )
        self._ends = np.cumsum([part.shape[0] for part in parts])
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], ReadRows] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts: another process opens the files itself."""
        return FileArray, (self.parts, self.selected)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        n = int(self._ends[-1]) if self.selected is None else len(self.selected)
        return (n, *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def chunk_rows(self) -> int | None:
        """The rows that lie in one chunk of a file; a selection has its share."""
        rows = max((part.chunk_rows or 0 for part in self.parts), default=0)
        return max(1, rows * len(self) // max(1, int(self._ends[-1]))) if rows else None

    def __getitem__(self, indexes: Any) -> np.ndarray:
        """Return the rows at `indexes`, integers (m,), a slice or a number, as a new array."""
        if isinstance(indexes, slice):
            indexes = np.arange(*indexes.indices(len(self)))
        elif np.ndim(indexes) == 0:
            return self[np.array([range(len(self))[indexes]])][0]
        if self.selected is not None:
            indexes = self.selected[indexes]
        numbers = np.searchsorted(self._ends, indexes, side="right")
        used = np.unique(numbers).tolist()
        if len(used) == 1:
            return self._read(used[0], indexes - self._start(used[0]))
        values = np.empty((len(indexes), *self.shape[1:]), self.dtype)
        for number in used:
            is_own = numbers == number
            values[is_own] = self._read(number, indexes[is_own] - self._start(number))
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all rows, in memory, for numpy.asarray; raise ValueError where copy=False."""
        if copy is False:
            raise ValueError("rows of files are read into a new array: expected copy=None or True")
        return np.asarray(self.load(), dtype)

    def select(self, indexes: np.ndarray) -> FileArray:
        """Return the array of the rows at `indexes`."""
        rows = indexes if self.selected is None else self.selected[indexes]
        return FileArray(self.parts, rows)

    def load(self) -> np.ndarray:
        """Return all rows, in memory; raise UsageError if there is too little."""
        nbytes, free_bytes = count_bytes(self.dtype, self.shape), available_bytes()
        if free_bytes is not None and nbytes > free_bytes:
            raise UsageError(
                f"{self.parts[0].place}: expected values that fit into memory, seen {nbytes} bytes "
                f"of shape {self.shape}; only {free_bytes} bytes are available"
            )
        starts = range(0, len(self), SAMPLES_PER_READ)
        pieces = [self[start : start + SAMPLES_PER_READ] for start in starts]
        return np.concatenate([self._none, *pieces])

    def locate(self, index: int) -> str:
        """Return the place of a row, for a message."""
        row = int(index if self.selected is None else self.selected[index])
        number = int(np.searchsorted(self._ends, row, side="right"))
        return f"row {row - self._start(number)} of {self.parts[number].place}"

    @property
    def _none(self) -> np.ndarray:
        return np.empty((0, *self.shape[1:]), self.dtype)

    def _start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def _read(self, number: int, indexes: np.ndarray) -> np.ndarray:
        """Return new rows at `indexes`, integers (m,), of a part."""
        if self.parts[number].in_any_order:
            return self._read_rows(number, indexes)
        rows, inverse = np.unique(indexes, return_inverse=True)
        values = self._read_rows(number, rows)
        is_new = values.flags.writeable  # not so in memory of Arrow
        return values if is_new and np.array_equal(rows, indexes) else values[inverse]

    def _read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        key = (os.getpid(), number)  # a file that a parent process opened is opened again
        with self._lock:
            if key not in self._open:
                while len(self._open) >= OPEN_FILES:
                    self._open.popitem(last=False)
                self._open[key] = self.parts[number].open_rows()
            self._open.move_to_end(key)
            return self._open[key](rows)


@dataclass(frozen=True)
class Places:
    """The places of samples in their files, as messages name samples by their number."""

    array: FileArray
    indexes: np.ndarray

    def __getitem__(self, i: int) -> str:
        index = int(self.indexes[i])
        return f"{index}, {self.array.locate(index)}"


def guarded(read: ReadRows, place: str, expectation: str) -> ReadRows:
    """Return `read`, whose errors of a library become DataErrors that name the rows."""

    def read_guarded(rows: np.ndarray) -> np.ndarray:
        rows_text = f", rows {rows[0]} .. {rows[-1]}" if len(rows) else ""
        with faults_of(place + rows_text, expectation, error_class=DataError):
            return read(rows)

    return read_guarded


def refuse_missing(read: ReadRows, attributes: Mapping[str, Any], place: str) -> ReadRows:
    """Return `read`, which raises DataError for a value by which `attributes` mark missing ones."""
    values = _missing_values(attributes, place)
    if not values:
        return read

    def read_checked(rows: np.ndarray) -> np.ndarray:
        array = read(rows)
        for value in values:
            is_missing = np.isnan(array) if value != value else array == value
            if is_missing.any():
                row, *position = np.argwhere(is_missing)[0].tolist()
                at_text = f" at {tuple(position)}" * bool(position)
                raise DataError(
                    f"{place}: row {rows[row]} holds {value}{at_text}, which marks a missing value "
                    "(_FillValue, missing_value, or fill_value of xarray's Zarr); replace it, or "
                    "remove the row"
                )
        return array

    return read_checked


def must_be_unpacked(attributes: Mapping[str, Any], place: str) -> None:
    """Raise UsageError for values that attributes of netCDF say to be scaled or mark by texts."""
    for name in _PACKED:
        if name in attributes:
            raise UsageError(
                f"{place}: expected values as they are, seen packed ones (attribute {name}); write "
                "them unpacked"
            )
    _missing_values(attributes, place)


def _missing_values(attributes: Mapping[str, Any], place: str) -> list[Any]:
    """Return the values by which `attributes` mark missing ones; raise UsageError for a text.

    netCDF and xarray write them; in Zarr of format 3 a float is a little-endian float64 in base64.
    """
    values: list[Any] = []
    for name in _MISSING:
        markers = attributes.get(name, [])
        try:
            if isinstance(markers, str):
                markers = np.frombuffer(base64.b64decode(markers, validate=True), "<f8")
            if np.ravel(markers).dtype.kind not in "fiub":
                raise ValueError
        except ValueError:
            raise UsageError(
                f"{place}: expected a number as the mark of missing values, seen {name} = "
                f"{brief(attributes[name])}; write a number, or remove the attribute"
            ) from None
        values.extend(np.ravel(markers))
    return values


def must_be_numbers(dtype: np.dtype, shape: tuple[int, ...], place: str) -> None:
    """Raise UsageError for a dtype of no real numbers, or an array without rows."""
    if dtype.kind not in "fiub" or dtype.itemsize > 8 or dtype.names:
        remedy = "number the texts, as numpy.unique(column, return_inverse=True) does"
        hint = remedy if dtype.kind in "OSUT" else "write it as float32 or as integers"
        raise UsageError(f"{place}: expected real numbers, seen dtype {dtype}; {hint}")
    if not shape or not shape[0]:
        raise UsageError(f"{place}: expected an array of rows, seen shape {shape}")
    if any(not 0 <= dim < 1 << 48 for dim in shape):
        raise UsageError(f"{place}: expected the shape of an array, seen {shape}; copy it again")
