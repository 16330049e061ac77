"""Batches of samples: a function of (seed, epoch, global index) alone.

Batches do not depend on the number of ranks, which only determines the shares of each batch. So a
job may be resumed with another number of ranks. The last batch of an epoch is short when `batch`
does not divide the number of samples, and a share is empty when a batch has fewer samples than
ranks.

    epoch 0, n = 10, batch = 4    step 0: 7 2 9 0    step 1: 4 1 8 3    step 2: 6 5
    step 1 on 3 ranks             rank 0: 4          rank 1: 1          rank 2: 8 3

With `shuffle = "chunks"` the chunks of the file are permuted, cut into windows, and the samples of
each window are permuted: so a chunk is used up within a few steps, and read once.

    chunks of 2 samples           0 1 | 2 3 | 4 5 | 6 7 | 8 9
    permuted, windows of 2        6 7 | 0 1       8 9 | 4 5       2 3
    samples of each permuted      1 6 7 0         4 9 5 8         3 2
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.data.augment import AugmentedSamples
from hpctrain.data.dataset import Samples
from hpctrain.data.reading import ReadSamples, shuffled_rows_of, unwrap

# Makes these streams others than other Philox streams with a key of (seed, small number).
_INITIAL_COUNTER, _CHUNK_COUNTER = (0, 0, 0, 1), (0, 0, 0, 4)
WINDOW_CHUNKS = 16  #: chunks whose samples are permuted together, unless they are large


def order(
    seed: int,
    epoch: int,
    n: int,
    chunk_rows: int | None = None,
    window_chunks: int = WINDOW_CHUNKS,
) -> np.ndarray:
    """Return the order of `n` samples in `epoch`: a permutation, int64 (n,).

    Sorts the raw Philox stream keyed by (seed, epoch) (Salmon et al., 2011): NumPy guarantees these
    bits, while `Generator.permutation` may change with its version. With `chunk_rows` chunk c
    begins at sample c * chunk_rows. A second stream with the same key sorts the chunks, every
    `window_chunks` in a row are a window, and samples are sorted by window, then by their word.
    """
    words = _draw_words(seed, epoch, _INITIAL_COUNTER, n)
    if chunk_rows is None:
        return np.argsort(words, kind="stable")
    windows = _windows(seed, epoch, -(-n // chunk_rows), window_chunks)
    return np.lexsort((words, np.repeat(windows, chunk_rows)[:n]))


@lru_cache(maxsize=2)  # each fill of an epoch asks, and a file may have a million chunks
def _windows(seed: int, epoch: int, chunks: int, window_chunks: int) -> np.ndarray:
    """Return the window of each chunk, int32 (chunks,)."""
    windows = np.empty(chunks, np.int32)
    chunk_order = np.argsort(_draw_words(seed, epoch, _CHUNK_COUNTER, chunks), kind="stable")
    windows[chunk_order] = np.arange(chunks) // window_chunks
    return windows


def _draw_words(seed: int, epoch: int, counter: tuple[int, ...], n: int) -> np.ndarray:
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(n)


def share(
    indexes: np.ndarray, rank: int, size: int, blocks: int | None = None
) -> tuple[int, np.ndarray]:
    """Return (first, indexes of the share): the contiguous part of a batch for `rank` of `size`.

    `first` is the position of the share in the batch. Shares differ by one sample at most. With
    `blocks` the batch is first divided into that many blocks, which differ by one sample at most,
    and each share is made of whole blocks.
    """
    parts = blocks or size
    first, end = (len(indexes) * (r * parts // size) // parts for r in (rank, rank + 1))
    return first, indexes[first:end]


class EpochOrder(Protocol):
    """An order of the user's own: which samples an epoch has, some perhaps several times."""

    def __len__(self) -> int:
        """Return the number of indexes in an epoch."""

    def indexes(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indexes of `epoch`, int64 (n,); called on one rank, which sends them."""


def order_of(samples: Samples) -> EpochOrder | None:
    """Return the order that the user has given to `samples`; None for `order` above."""
    return getattr(_without_augmentation(samples), "order", None)


def dropped_batch(samples: Samples) -> int:
    """Return the size of batches that `samples` are cut to, by evaluations; 0: all are used."""
    return getattr(_without_augmentation(samples), "dropped_batch", 0)


def _without_augmentation(samples: Samples) -> Samples:
    while isinstance(samples, AugmentedSamples | ReadSamples):
        samples = samples.samples
    return samples


class Sampler:
    """The batches of `n` samples in steps counted from 0 over all epochs; `batch` is global.

    With an order of the user's own the indexes of an epoch must be set before its steps are read;
    see hpctrain/training/orders.py.
    """

    def __init__(
        self,
        n: int,
        batch: int,
        seed: int,
        order: EpochOrder | None = None,
        drop_last: bool = False,
        *,
        chunk_rows: int | None = None,
        window_chunks: int = WINDOW_CHUNKS,
    ) -> None:
        """Raise UsageError for fewer than 1 sample or batch, or a seed outside 0 .. 2**63 - 1.

        `drop_last`: an epoch ends before a short batch. `chunk_rows`, `window_chunks`: see `order`.
        """
        n = n if order is None else len(order)
        _require(n >= 1, f"{n} samples; a data set needs at least 1")
        _require(batch >= 1, f"batch is {batch}; it must be at least 1")
        _require(0 <= seed < 2**63, f"seed is {seed}; it must lie in 0 .. 2**63 - 1")
        self._samples = n
        if drop_last:
            _require(n >= batch, f"drop_last leaves none of {n} samples: batch is {batch}")
            n -= n % batch
        self.n, self.batch, self.seed, self.order = n, batch, seed, order
        self.chunk_rows, self.window_chunks = chunk_rows, window_chunks
        self.steps_per_epoch = -(-n // batch)
        self._orders: dict[int, np.ndarray] = {}  # by epoch

    @classmethod
    def of(cls, samples: Samples, batch: int, seed: int) -> Sampler:
        """Return the Sampler of a training set."""
        chunk_rows = shuffled_rows_of(samples)
        own_order, drop_last = order_of(samples), dropped_batch(samples) > 0
        window_chunks = getattr(unwrap(samples), "window_chunks", WINDOW_CHUNKS)
        return cls(
            len(samples), batch, seed, own_order, drop_last,
            chunk_rows=chunk_rows, window_chunks=window_chunks,
        )  # fmt: skip

    def facts(self) -> dict[str, int | None]:
        """Return the facts of a checkpoint on which the orders of a resumed run depend."""
        return {
            "batch": self.batch,
            "chunk_rows": self.chunk_rows,
            "window_chunks": self.window_chunks,
            "seed": self.seed,
        }

    def must_continue(self, chunk_rows: int | None, window_chunks: int | None) -> None:
        """Raise UsageError unless a run with these parameters of `order` had the same orders."""
        before, now = (
            "'samples'" if rows is None else f"'chunks' of {rows} samples, {chunks} together"
            for rows, chunks in (
                (chunk_rows, window_chunks or WINDOW_CHUNKS),
                (self.chunk_rows, self.window_chunks),
            )
        )
        if before != now:
            raise UsageError(
                f"[data] shuffle: expected {before}, with which this run began, seen {now}; leave "
                "it as it was, or begin another run"
            )

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return (epoch, position in the order of the epoch) of the first sample of `step`."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch, step_in_epoch * self.batch

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the first `step` steps, with the short batches."""
        epoch, index = self.locate_step(step)
        return epoch * self.n + index

    def batch_size(self, step: int) -> int:
        """Return the number of samples of `step`."""
        return min(self.batch, self.n - self.locate_step(step)[1])

    def batch_indexes(self, step: int, steps: int = 1) -> np.ndarray:
        """Return the global indexes of the samples of `step`, int64.

        With `steps`: the samples of so many steps in a row, within the epoch.
        """
        epoch, first = self.locate_step(step)
        if self.order is None and epoch not in self._orders:
            # Sorting a large set takes longer than a step; the epoch before may be read on.
            self._orders = {e: x for e, x in self._orders.items() if e == epoch - 1}
            self.set_order(
                epoch, order(self.seed, epoch, self._samples, self.chunk_rows, self.window_chunks)
            )
        if epoch not in self._orders:  # of a worker that is an epoch or more apart from the others
            epoch = min(self._orders, key=lambda drawn: abs(drawn - epoch))
        return self._orders[epoch][first : first + steps * self.batch]

    def windows(self, epoch: int, indexes: np.ndarray) -> np.ndarray:
        """Return the windows of the samples at `indexes` of a set, int32; 0 without chunks."""
        if self.chunk_rows is None:
            return np.zeros(len(indexes), np.int32)
        chunks = -(-self._samples // self.chunk_rows)
        windows = _windows(self.seed, epoch, chunks, self.window_chunks)
        return windows[indexes // self.chunk_rows]

    def undrawn_epochs(self, first: int, last: int) -> list[int]:
        """Return the epochs of steps `first` .. `last` to be set; forget all before `first`."""
        if self.order is None:
            return []
        start, stop = (self.locate_step(step)[0] for step in (first, last))
        self._orders = {e: x for e, x in self._orders.items() if e >= start}
        return [epoch for epoch in range(start, stop + 1) if epoch not in self._orders]

    def set_order(self, epoch: int, indexes: np.ndarray) -> None:
        """Take `indexes`, int64, as the order of `epoch`."""
        self._orders[epoch] = indexes[: self.n]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
