"""Samples that stay in their files: mapped to memory, so that only rows asked for are read.

Nothing but the header and the labels is read when a run starts: a set may be larger than the memory
of all ranks together. What the samples hold is checked as they come.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from hpctrain.data.dataset import beyond, faults_of
from hpctrain.errors import UsageError


def mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """Return the array that begins at byte `offset` of a file, read when it is looked at.

    Raises UsageError if the file is not as long as that takes.
    """
    with open(path, "rb") as file:
        expected, seen = offset + prod(shape) * dtype.itemsize, file.seek(0, 2)
        if seen != expected:
            raise UsageError(
                f"{path}: expected {expected} bytes, as its header says ({dtype}, {shape}), "
                f"seen {seen}; copy it again"
            )
        if not prod(shape):  # there is nothing to map
            return np.zeros(shape, dtype)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(memory, "madvise"):
        memory.madvise(mmap.MADV_RANDOM)  # or the neighbours of each row, others' rows, come along
    return np.ndarray(shape, dtype, memory, offset)


@dataclass(frozen=True, eq=False)
class Stored:
    """Samples `x` (n, ...) and labels `y` (n,) in 0 .. classes - 1, arrays or mapped files.

    With `divisor` samples are handed out as float32, divided by it. Raises UsageError, which
    begins with `source`, if shapes, dtypes or labels are not as said; `rows` does for values.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    source: str
    divisor: float | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without reading samples."""
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
