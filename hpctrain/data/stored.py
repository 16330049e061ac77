"""Samples that stay in their files: mapped to memory, so that only requested rows are read.

Nothing but the header and the labels is read when a run starts: a set may be larger than the memory
of all ranks together. The values of samples are checked when they are read.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.data.dataset import beyond, faults_of
from hpctrain.hardware.memory import available_bytes

BLOCK = 1 << 20  #: bytes unpacked at once


class Stream(Protocol):
    """A source of bytes in order, decompressed or not."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, fewer at the end alone."""


def mapped(
    file: BinaryIO, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Return the array that begins at byte `offset` of a file, mapped: read at its use.

    Raises UsageError if the file has another length.
    """
    expected, actual = offset + nbytes(dtype, shape), file.seek(0, 2)
    if actual != expected:
        raise UsageError(
            f"{path}: expected {expected} bytes, as its header says ({dtype}, {_brief(shape)}), "
            f"seen {actual}; copy it again"
        )
    if not prod(shape):  # there is nothing to map
        return shaped(path, np.empty(0, dtype), shape)
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(memory, "madvise"):
        memory.madvise(mmap.MADV_RANDOM)  # else neighbours of a row, rows of other ranks, are read
    return shaped(path, np.frombuffer(memory, dtype, prod(shape), offset), shape)


def unpacked(
    stream: Stream, path: Path | str, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the array that follows in decompressing `stream`, which is read no further.

    A header can announce any size: memory grows as bytes arrive. Raises UsageError if there are
    fewer or more, or if memory cannot hold them.
    """
    expected, free, data = nbytes(dtype, shape), available_bytes(), bytearray()
    promise = f"{path}: expected {expected} bytes, as its header says ({dtype}, {_brief(shape)})"
    if free is not None and expected > free:
        raise UsageError(f"{promise}; only {free} bytes of memory are available")
    while len(data) < expected and (block := stream.read(min(BLOCK, expected - len(data)))):
        data += block
    if len(data) < expected or stream.read(1):  # at the end checksums are compared
        actual = f"{len(data)} bytes" if len(data) < expected else "more"
        raise UsageError(f"{promise}, seen {actual}; copy it again")
    return shaped(path, np.frombuffer(data, dtype), shape)


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array."""
    return prod(shape) * dtype.itemsize


def shaped(path: Path | str, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `numbers` in the shape of a header; raise UsageError for an impossible one."""
    try:
        return numbers.reshape(shape)
    except (ValueError, OverflowError, MemoryError) as error:
        raise UsageError(
            f"{path}: expected the shape of an array, seen {_brief(shape)}: {error}"
        ) from None


def _brief(shape: tuple[int, ...]) -> str:
    return brief(shape) if len(shape) < 100 else f"{len(shape)} dims"


@dataclass(frozen=True, eq=False)
class Stored:
    """Samples `x` (n, ...) and labels `y` (n,) in 0 .. classes - 1, arrays or mapped files.

    With `divisor` samples are returned as float32, divided by it. Raises UsageError, which begins
    with `source`, if shapes, dtypes or labels differ from that; `rows` does so for values.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    source: str
    divisor: float | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and labels, without reading samples."""
        fault = faults_of(self.x, self.y) or beyond(self.y, self.classes)
        if fault:
            raise UsageError(f"{self.source}: {fault}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.y)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x.shape[1:]

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes`, y int64; reads no others."""
        x, y = self.x[indexes], self.y[indexes].astype(np.int64)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            i = int(np.argwhere(~np.isfinite(x))[0][0])
            raise UsageError(f"{self.source}: sample {indexes[i]} is not of finite numbers")
        return (x if self.divisor is None else x.astype(np.float32) / self.divisor), y
