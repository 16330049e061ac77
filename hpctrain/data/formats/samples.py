"""Samples whose arrays lie in files of any format, and their division into sets."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from hpctrain.core.errors import DataError, UsageError
from hpctrain.core.labels import find_invalid_label
from hpctrain.data.dataset import as_targets, find_fault, find_value_fault
from hpctrain.data.formats import blocks
from hpctrain.data.formats.arrays import FileArray, Places
from hpctrain.data.sampler import WINDOW_CHUNKS
from hpctrain.data.stored import StoredSamples

# Makes this stream another than other Philox streams with a key of (seed, number).
_INITIAL_COUNTER = (0, 0, 0, 3)


@dataclass(frozen=True, eq=False)
class FileSamples(StoredSamples):
    """Samples `x`, a FileArray, with targets `y`, a FileArray or, where they are short, an array.

    As StoredSamples; messages name the file and the row.
    """

    x: FileArray  # type: ignore[assignment]
    y: Any
    keeps_chunks: ClassVar = True  #: the one decoded last: the next call may go on within it

    def __post_init__(self) -> None:
        """Check shapes, dtypes and, where targets are in memory, labels."""
        if fault := find_fault(_stand_in(self.x), _stand_in(self.y)) or self._find_label_fault():
            raise UsageError(f"{self.source}: {fault}")

    @property
    def chunk_rows(self) -> int | None:
        """The samples that the file stores, and decodes, together; None if it reads single rows."""
        return self.x.chunk_rows

    @property
    def window_chunks(self) -> int:
        """The chunks that may be shuffled together so that each is decoded once per epoch."""
        decoded = [part.chunk_rows or 0 for part in self.x.parts if not part.decodes_rows]
        chunk_bytes = max(decoded, default=0) * self.x.dtype.itemsize * prod(self.x.shape[1:])
        # Beside them a chunk of the next window is kept.
        kept_chunks = blocks.CACHE_BYTES // chunk_bytes - 1 if chunk_bytes else WINDOW_CHUNKS
        return max(1, min(WINDOW_CHUNKS, kept_chunks))

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes`, integer y as int64; reads no others."""
        x, y = self.x[indexes], as_targets(self.y[indexes])
        places: Any = Places(self.x, indexes)
        if self.finite and (fault := find_value_fault(places, x=x, y=y)):
            raise DataError(fault)
        places = Places(self.y, indexes)
        if self.classes is not None and (fault := find_invalid_label(y, self.classes, places)):
            raise DataError(fault)
        return x, y

    def divide(self, test_share: float, seed: int) -> tuple[FileSamples, FileSamples]:
        """Return the training and the test samples, each in the order of their files."""
        train, test = divide_rows(len(self), test_share, seed)
        return self._select(train), self._select(test)

    def _select(self, rows: np.ndarray) -> FileSamples:
        y = self.y[rows] if isinstance(self.y, np.ndarray) else self.y.select(rows)
        return FileSamples(self.x.select(rows), y, self.classes, self.source, self.finite)


def divide_rows(n: int, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a training and of a test set: a function of (n, share, seed) alone.

    Both are increasing, int64; the test set has the share of `n` rows, rounded, and at least one.
    Raises UsageError if a set would be empty.
    """
    test_count = max(1, round(n * test_share))
    if test_count >= n:
        raise UsageError(f"[data] test_share: {test_share} of {n} samples leaves none to train on")
    key = np.array([seed, n], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=_INITIAL_COUNTER).random_raw(n)
    rows = np.argsort(words, kind="stable")
    return np.sort(rows[test_count:]), np.sort(rows[:test_count])


def read_samples(
    x: FileArray, y: FileArray, classes: int | None, source: str, finite: bool
) -> FileSamples:
    """Return the samples; single numbers as targets are read into memory, other targets by rows."""
    fault = find_fault(_stand_in(x), _stand_in(y))
    if fault:
        hint = "; numbers of a table are columns side by side: x = ['NAME']" * (x.ndim == 1)
        raise UsageError(f"{source}: {fault}{hint}")
    targets: Any = y.load() if prod(y.shape[1:]) == 1 else y
    return FileSamples(x, targets, classes, source, finite)


def _stand_in(array: Any) -> np.ndarray:
    """Return an array of the same shape and dtype, which takes no memory."""
    return np.broadcast_to(np.empty((), array.dtype), array.shape)
