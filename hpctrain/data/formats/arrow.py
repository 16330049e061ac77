"""Columns of Arrow, as Parquet and Hugging Face have them, to arrays of NumPy.

    numbers                         (n,)
    lists of equal lengths          (n, length), lists of lists (n, rows, columns)
    bytes, or {bytes, path}         images, decoded by Pillow: (n, h, w) or (n, h, w, channels)

A null is a missing value, and an error. Text, dates and decimals are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import DataError, UsageError
from hpctrain.core.names import unknown
from hpctrain.data.formats.images import decode_image, stack_values

Key = str | Sequence[str]  #: a column, or columns side by side
_FLOATS = {"halffloat": "f2", "float": "f4", "double": "f8"}
_REMEDIES = {
    "string": "number the texts, as numpy.unique(column, return_inverse=True) does",
    "dictionary": "write the codes of the categories as integers",
    "timestamp": "write seconds as float64",
    "date": "write days as integers",
    "decimal": "cast the column to float64",
}


class Column(NamedTuple):
    """A column of a file: its place for messages, and the shape and dtype of its values."""

    name: str
    place: str
    shape: tuple[int, ...]  #: of a row
    dtype: np.dtype
    convert: Callable[[Any, np.ndarray], np.ndarray]  #: (Arrow's array, rows) -> values


@dataclass(frozen=True)
class Columns:
    """One column of a table, or several columns of numbers side by side."""

    place: str
    columns: Sequence[Column]
    shape: tuple[int, ...]  #: of a row
    dtype: np.dtype
    is_stack: bool

    def read(self, table: Any, rows: np.ndarray) -> np.ndarray:
        """Return the values (m, *shape) of an Arrow table, whose rows are `rows` of the file."""
        arrays = [
            column.convert(table.column(column.name).combine_chunks(), rows)
            for column in self.columns
        ]
        if not self.is_stack:
            return arrays[0]
        casts = [array.astype(self.dtype, copy=False) for array in arrays]
        for cast, array, column in zip(casts, arrays, self.columns, strict=True):
            is_cast = cast.dtype != array.dtype and array.dtype.kind in "iu"
            if is_cast and not np.array_equal(cast.astype(array.dtype), array):
                raise DataError(
                    f"{column.place}: expected integers that {self.dtype} can hold, as other "
                    f"columns of x are, seen up to {array.max()}; write all columns with one dtype"
                )
        return np.stack(casts, axis=1)


def probe_columns(schema: Any, first: Any, key: Key, source: str, extra: str) -> Columns:
    """Return the Columns `key` of a schema; `first` is the table of the first row.

    Raises UsageError for an unknown column, or a type of no numbers.
    """
    names = [key] if isinstance(key, str) else list(key)
    columns = [
        _probe_column(schema.field(name), first.column(name).combine_chunks(), source, extra)
        for name in names
    ]
    place = f"{source}: {', '.join(names)}"
    if isinstance(key, str):
        return Columns(place, columns, columns[0].shape, columns[0].dtype, is_stack=False)
    for column in columns:
        if column.shape:
            raise UsageError(
                f"{column.place}: expected a number per row, since x lists several columns, seen "
                f"lists {column.shape}; name this column alone"
            )
    dtype = np.result_type(*(column.dtype for column in columns))
    return Columns(place, columns, (len(columns),), dtype, is_stack=True)


def must_have(names: Key, choices: Sequence[str], source: str) -> list[str]:
    """Return the list of `names`; raise UsageError for a name that no column of `source` has."""
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise UsageError(f"{source}: expected columns, seen none; name one or more")
    for name in names:
        if name not in choices:
            raise UsageError(unknown(f"column in {source}:", name, choices))
    return names


def _probe_column(field: Any, first: Any, source: str, extra: str) -> Column:
    name, place = field.name, f"{source}: {field.name}"
    leaf = _storage(field.type)
    while _is_list(leaf):
        leaf = _storage(leaf.value_type)
    if _is_image(leaf):
        pixels = _pixels(first, np.zeros(1, np.int64), place, extra)[0]
        return Column(
            name, place, pixels.shape, pixels.dtype, partial(_images, pixels, place, extra)
        )
    dtype = _numpy_dtype(leaf, field.type, place)
    shape = tuple(getattr(field.type, "shape", ())) or _list_shape(first, place)
    return Column(name, place, shape, dtype, partial(_numbers, shape, place))


class CheckedBatches:
    """Record batches, checked at their first use: offsets of damaged files end the process."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches, self._checked = batches, set[int]()

    def __getitem__(self, number: int) -> Any:
        """Return a batch; raise ArrowInvalid for one that is damaged."""
        if number not in self._checked:
            self._batches[number].validate(full=True)
            self._checked.add(number)
        return self._batches[number]


def take_rows(batches: Sequence[Any] | CheckedBatches, ends: np.ndarray, rows: np.ndarray) -> Any:
    """Return the Arrow table of `rows`, increasing, each once, of record batches.

    `ends` (batches,): the row behind each batch. Arrow's own `take` of a table would first join its
    batches, that is copy the table. Adjacent rows stay in place.
    """
    import pyarrow

    numbers, starts = np.unique(np.searchsorted(ends, rows, side="right"), return_index=True)
    pieces = []
    for number, own in zip(numbers.tolist(), np.split(rows, starts[1:]), strict=True):
        batch = batches[number]
        own = own - (ends[number] - batch.num_rows)
        is_adjacent = own[-1] - own[0] < len(own)
        piece = batch.slice(int(own[0]), len(own)) if is_adjacent else batch.take(indexes(own))
        pieces.append(piece)
    return pyarrow.Table.from_batches(pieces)


def indexes(rows: np.ndarray) -> Any:
    """Return `rows`, int64 (n,), as Arrow's array; its own conversion would import pandas."""
    import pyarrow

    buffer = pyarrow.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pyarrow.Array.from_buffers(pyarrow.int64(), len(rows), [None, buffer])


def _storage(type_: Any) -> Any:
    return getattr(type_, "storage_type", type_)


def _is_list(type_: Any) -> bool:
    import pyarrow.types as kinds

    return kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_)


def _is_image(type_: Any) -> bool:
    import pyarrow.types as kinds

    if kinds.is_struct(type_):
        return type_.get_field_index("bytes") >= 0
    return kinds.is_binary(type_) or kinds.is_large_binary(type_)


def _numpy_dtype(leaf: Any, whole: Any, place: str) -> np.dtype:
    import pyarrow.types as kinds

    if not (kinds.is_integer(leaf) or kinds.is_floating(leaf) or kinds.is_boolean(leaf)):
        remedies = [text for name, text in _REMEDIES.items() if name in str(leaf)]
        hint = remedies[0] if remedies else "write the column as numbers"
        raise UsageError(
            f"{place}: expected numbers, lists of numbers or images, seen {whole}; {hint}"
        )
    return _leaf_dtype(leaf)


def _leaf_dtype(leaf: Any) -> np.dtype:
    return np.dtype(_FLOATS.get(str(leaf), str(leaf)))


def _list_shape(first: Any, place: str) -> tuple[int, ...]:
    shape, array = [], _plain(first)
    while _is_list(array.type):
        _must_not_be_null(array, np.zeros(1, np.int64), place)
        shape.append(len(array.flatten()) // max(1, len(array)))
        array = _plain(array.flatten())
    return tuple(shape)


def _plain(array: Any) -> Any:
    """Return an array without its extension type."""
    return getattr(array, "storage", array)


def _must_not_be_null(array: Any, rows: np.ndarray, place: str) -> None:
    """Raise DataError for a null in `array`, which has as many values for each of `rows`."""
    if array.null_count:
        position = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        row = rows[position // max(1, len(array) // len(rows))]
        raise DataError(
            f"{place}: a value is missing (null) in row {row}; expected none: fill it, or remove "
            "the row"
        )


def _numbers(shape: tuple[int, ...], place: str, array: Any, rows: np.ndarray) -> np.ndarray:
    import pyarrow.compute as compute

    array = _plain(array)
    for length in _lengths_of(array, shape):
        _must_not_be_null(array, rows, place)
        lengths = _values(compute.list_value_length(array))
        if (lengths != length).any():
            bad = int(np.argmax(lengths != length))
            row = rows[bad // max(1, len(array) // len(rows))]
            raise DataError(
                f"{place}: expected lists of {length} in each row, seen {lengths[bad]} in row "
                f"{row}; give all rows the same length"
            )
        array = _plain(array.flatten())
    _must_not_be_null(array, rows, place)
    return _values(array).reshape(len(rows), *shape)


def _values(array: Any) -> np.ndarray:
    """Return the numbers of an array without nulls; Arrow's own function imports pandas."""
    dtype, buffer = _leaf_dtype(array.type), array.buffers()[1]
    if dtype.kind == "b" or buffer is None:  # bits
        return array.to_numpy(zero_copy_only=False)
    return np.frombuffer(buffer, dtype)[array.offset : array.offset + len(array)]


def _lengths_of(array: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the length at each level of lists; a tensor in a flat list has its whole size."""
    levels, type_ = 0, array.type
    while _is_list(type_):
        levels, type_ = levels + 1, _storage(type_.value_type)
    return shape if levels == len(shape) else (int(np.prod(shape)),)


def _images(like: np.ndarray, place: str, extra: str, array: Any, rows: np.ndarray) -> np.ndarray:
    places = [f"{place}: row {row}" for row in rows]
    return stack_values(_pixels(array, rows, place, extra), like.shape, like.dtype, places)


def _pixels(array: Any, rows: np.ndarray, place: str, extra: str) -> list[np.ndarray]:
    import pyarrow.compute as compute
    import pyarrow.types as kinds

    array = _plain(array)
    _must_not_be_null(array, rows, place)
    data = compute.struct_field(array, "bytes") if kinds.is_struct(array.type) else array
    if data.null_count:
        raise DataError(
            f"{place}: expected images in the file itself, seen paths of other files; embed them "
            "before you save, as datasets.table.embed_table_storage does"
        )
    pairs = zip(data, rows, strict=True)
    return [decode_image(item.as_py(), f"{place}: row {row}", extra) for item, row in pairs]
