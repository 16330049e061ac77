"""Samples in files that are mapped to memory, so that only requested rows are read.

Only the header and the labels are read when a run starts: a set may be larger than the memory of
all ranks together. The values of samples are checked when they are read.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from hpctrain.core.errors import DataError, UsageError
from hpctrain.core.files import brief
from hpctrain.core.labels import find_invalid_label
from hpctrain.data.dataset import as_targets, find_fault, find_value_fault
from hpctrain.hardware.memory import available_bytes

BLOCK_BYTES = 1 << 20  #: bytes unpacked at once


class Stream(Protocol):
    """A source of bytes in order, decompressed or not."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""


def map_array(
    file: BinaryIO, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Return the array that begins at byte `offset` of a file; its values are read when accessed.

    Raises UsageError if the file has another length.
    """
    expected_bytes, actual_bytes = offset + count_bytes(dtype, shape), file.seek(0, 2)
    if actual_bytes != expected_bytes:
        raise UsageError(
            f"{path}: expected {expected_bytes} bytes, as its header says "
            f"({dtype}, {_brief_shape(shape)}), seen {actual_bytes}; copy it again"
        )
    return map_range(file, path, dtype, shape, offset)


def map_range(
    file: BinaryIO, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Return the array at byte `offset` of a file that may go on behind it.

    Raises UsageError if the file ends within the array.
    """
    end_bytes, actual_bytes = offset + count_bytes(dtype, shape), file.seek(0, 2)
    if offset < 0 or actual_bytes < end_bytes:
        raise UsageError(
            f"{path}: expected {end_bytes} bytes or more, as its header says, seen {actual_bytes}; "
            "copy it again"
        )
    if not prod(shape):  # an empty range cannot be mapped
        return reshape_array(path, np.empty(0, dtype), shape)
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(memory, "madvise"):
        memory.madvise(mmap.MADV_RANDOM)  # else the system also reads adjacent rows of other ranks
    return reshape_array(path, np.ndarray(prod(shape), dtype, memory, offset), shape)


def take_rows(array: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """Return the rows at `indexes`, integers (m,), of an array, in memory or mapped, as a new one.

    The pages of a mapped file are requested first, so that the system reads them at once, and not
    one after the other when they are touched.
    """
    memory: Any = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if isinstance(memory, mmap.mmap) and array.flags.c_contiguous and array.size and len(indexes):
        offset = array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
        _request_rows(memory, offset, array.nbytes // len(array), np.sort(indexes))
    return array[indexes]


def _request_rows(memory: mmap.mmap, offset: int, row_bytes: int, rows: np.ndarray) -> None:
    """Request the pages of sorted `rows`, unless these scatter over more pages than they fill."""
    begins = (offset + rows * row_bytes) // mmap.PAGESIZE
    ends = (offset + (rows + 1) * row_bytes - 1) // mmap.PAGESIZE + 1
    is_cut = begins[1:] > ends[:-1]
    begins, ends = begins[np.append(True, is_cut)], ends[np.append(is_cut, True)]
    if len(begins) * mmap.PAGESIZE > len(rows) * row_bytes or not hasattr(memory, "madvise"):
        return
    with contextlib.suppress(OSError):  # it is advice
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            memory.madvise(mmap.MADV_WILLNEED, begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)


def unpack_array(
    stream: Stream, path: Path | str, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    """Read the array from decompressing `stream`, up to the end of the array.

    A damaged header can announce any size, so memory is allocated only as bytes arrive. Raises
    UsageError for fewer or more bytes, or for more than the available memory.
    """
    expected_bytes, free_bytes, data = count_bytes(dtype, shape), available_bytes(), bytearray()
    header_text = f"({dtype}, {_brief_shape(shape)})"
    expectation = f"{path}: expected {expected_bytes} bytes, as its header says {header_text}"
    if free_bytes is not None and expected_bytes > free_bytes:
        raise UsageError(f"{expectation}; only {free_bytes} bytes of memory are available")
    while len(data) < expected_bytes and (
        block := stream.read(min(BLOCK_BYTES, expected_bytes - len(data)))
    ):
        data += block
    if len(data) < expected_bytes or stream.read(1):  # a read at the end compares checksums
        seen_text = f"{len(data)} bytes" if len(data) < expected_bytes else "more"
        raise UsageError(f"{expectation}, seen {seen_text}; copy it again")
    return reshape_array(path, np.frombuffer(data, dtype), shape)


def count_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes."""
    return prod(shape) * dtype.itemsize


def reshape_array(path: Path | str, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `numbers` in the shape of a header; raise UsageError for an impossible shape."""
    try:
        return numbers.reshape(shape)
    except (ValueError, OverflowError, MemoryError) as error:
        raise UsageError(
            f"{path}: expected the shape of an array, seen {_brief_shape(shape)}: {error}"
        ) from None


def _brief_shape(shape: tuple[int, ...]) -> str:
    return brief(shape) if len(shape) < 100 else f"{len(shape)} dims"


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """Samples `x` (n, ...) and targets `y` (n, ...), arrays or mapped files.

    With `classes`, targets are labels in 0 .. classes - 1. Raises UsageError, which begins with
    `source`, for other shapes, dtypes or labels; if `finite`, `rows` raises DataError for values
    that are not.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int | None
    source: str
    finite: bool = True

    def __post_init__(self) -> None:
        """Check shapes, dtypes and labels, without reading samples."""
        fault = find_fault(self.x, self.y) or self._find_label_fault()
        if fault:
            raise UsageError(f"{self.source}: {fault}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """A sample's shape."""
        return self.x.shape[1:]

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes`, integer y as int64; reads no others."""
        x, y = take_rows(self.x, indexes), as_targets(take_rows(self.y, indexes))
        if self.finite and (fault := find_value_fault(indexes, x=x, y=y)):
            raise DataError(f"{self.source}: {fault}")
        return x, y

    def _find_label_fault(self) -> str:
        if self.classes is None:
            return ""
        if self.y.dtype.kind == "f":
            return (
                f"y has dtype {self.y.dtype}; expected integer labels, since classes is "
                f"{self.classes}: leave classes out for real targets"
            )
        return find_invalid_label(self.y, self.classes) if isinstance(self.y, np.ndarray) else ""
