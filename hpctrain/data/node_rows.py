"""Rows of a node's ranks in memory that they share: what is read at once, and where it lies.

    slot   x   [ step 0: worker 0 | worker 1 ][ step 1: worker 0 | worker 1 ] ...
           y   [ step 0: worker 0 | worker 1 ][ step 1: worker 0 | worker 1 ] ...

A *fill* has the rows of some steps of an epoch, in the order of their batches, so a worker's share
is a part of the slot. They are read by window (see `hpctrain.data.sampler`) and index, a piece at a
time, which ends between two chunks of the file unless the set itself keeps the chunks that it
decoded last: each chunk is decoded once per fill, or once per epoch where a window is kept. Beside
the slots a piece, and the chunks kept, is all the memory that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core import trees
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.data.dataset import Samples
from hpctrain.data.reading import chunk_rows_of, unwrap
from hpctrain.data.sampler import Sampler, share

PIECE_BYTES = 1 << 20  #: of rows read by one call, which stay in a core's cache for their copy
SLOTS, CHUNK_SLOTS = 3, 2  #: slots for one step each; for files with chunks they are longer
MAX_ROWS = 1 << 19  #: of a slot, whose indexes need memory, too
ALIGN_BYTES = 64


class Shares(NamedTuple):
    """The shares of a batch that the ranks of a node train: by numbers of workers."""

    workers: tuple[int, ...]  #: of this node, in order
    size: int  #: the number of workers on every node together
    blocks: int  #: of a batch, see `hpctrain.data.sampler.share`

    def positions(self, worker: int, samples: int) -> np.ndarray:
        """Return the positions in a batch of `samples` that `worker` trains."""
        return share(np.arange(samples), worker, self.size, self.blocks)[1]


@dataclass(frozen=True)
class SlotLayout:
    """The places of rows in slots; equal on all ranks of a node."""

    empty: tuple[Any, Any]  #: trees (x, y) of arrays without rows
    shares: Shares
    batch: int
    steps: int  #: of a slot
    slots: int

    @property
    def first_rows(self) -> dict[int, int]:
        """The first row of each worker in a step; the last entry, -1, is the number of rows."""
        # A share of a short batch may have one sample more than its part of a whole batch.
        lengths = [len(self.shares.positions(w, self.batch)) + 1 for w in self.shares.workers]
        ends = np.cumsum([0, *lengths]).tolist()
        return dict(zip((*self.shares.workers, -1), ends, strict=True))

    @property
    def row_bytes(self) -> int:
        """The bytes of a sample with its targets."""
        return sum(_row_bytes(x) for _, x in trees.arrays(self.empty))

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot."""
        rows = self.steps * self.first_rows[-1]
        return sum(_aligned(rows * _row_bytes(x)) for _, x in trees.arrays(self.empty))

    def arrays(self, memory: np.ndarray) -> tuple[Any, Any]:
        """Return the trees (x, y) of a slot, uint8 (slot_bytes,)."""
        offset, rows = 0, self.steps * self.first_rows[-1]

        def view(empty: np.ndarray) -> np.ndarray:
            nonlocal offset
            nbytes = rows * _row_bytes(empty)
            part = memory[offset : offset + nbytes].view(empty.dtype)
            offset += _aligned(nbytes)
            return part.reshape(rows, *empty.shape[1:])

        return trees.map_arrays(view, self.empty)

    def fills(self, sampler: Sampler, first: int, total: int) -> Iterator[range]:
        """Yield the steps of each fill, from step `first` up to `total`."""
        while first < total:
            epoch_end = (first // sampler.steps_per_epoch + 1) * sampler.steps_per_epoch
            yield range(first, end := min(first + self.steps, epoch_end, total))
            first = end


def choose_layout(
    samples: Samples, sampler: Sampler, shares: Shares, max_bytes: int, steps: int
) -> SlotLayout:
    """Return the layout for a training of `steps` steps that needs at most `max_bytes`.

    Slots of files with chunks, or shuffled by chunks, have as many steps as fit, others one. Reads
    the first sample. Raises UsageError if the rows of one step do not fit, or are no arrays.
    """
    rows = samples.rows(np.arange(1))
    if not all(isinstance(x, np.ndarray) and not x.dtype.hasobject for _, x in trees.arrays(rows)):
        raise UsageError(f"{describe(samples)}: expected rows that are arrays of numbers")
    empty = trees.map_arrays(lambda x: x[:0].copy(), rows)
    one = SlotLayout(empty, shares, sampler.batch, 1, 1)
    if one.slot_bytes > max_bytes:
        raise UsageError(
            f"[data] read_ahead_bytes: expected {one.slot_bytes} or more, the bytes of the "
            f"{one.first_rows[-1] - len(shares.workers)} samples of a step on one node, seen "
            f"{max_bytes}"
        )
    if chunk_rows_of(samples) is None and sampler.chunk_rows is None:
        slots = min(SLOTS, max_bytes // one.slot_bytes)
        return SlotLayout(empty, shares, sampler.batch, 1, slots)
    # Since ends are aligned, a longer slot needs at most as much as short ones together.
    fitting = max_bytes // CHUNK_SLOTS // one.slot_bytes
    most = min(steps, sampler.steps_per_epoch, MAX_ROWS // one.first_rows[-1])
    slots = CHUNK_SLOTS if fitting else 1
    return SlotLayout(empty, shares, sampler.batch, max(1, min(fitting, most)), slots)


class FillReader:
    """Reads fills of `samples` into slots, and calls `after_piece`; belongs to one thread."""

    def __init__(
        self,
        samples: Samples,
        sampler: Sampler,
        layout: SlotLayout,
        after_piece: Callable[[], None],
    ):
        self._samples, self._sampler, self._layout = samples, sampler, layout
        self._after_piece = after_piece
        keeps_chunks = getattr(unwrap(samples), "keeps_chunks", False)
        self._chunk_rows = 1 if keeps_chunks else chunk_rows_of(samples) or 1

    def read(self, steps: range, slot: tuple[Any, Any]) -> None:
        """Read the rows of `steps`, which lie in one epoch, into `slot`.

        Raises HpctrainError, which names the data and the sample, where one cannot be read.
        """
        indexes, places = self._locate_rows(steps)
        epoch, _ = self._sampler.locate_step(steps.start)
        order = np.lexsort((indexes, self._sampler.windows(epoch, indexes)))
        sorted_indexes = indexes[order]
        is_new = np.diff(sorted_indexes, prepend=-1) != 0
        unique_indexes, numbers = sorted_indexes[is_new], np.cumsum(is_new) - 1
        piece_rows = max(1, PIECE_BYTES // max(self._layout.row_bytes, 1))
        for part in cut_pieces(unique_indexes, piece_rows, self._chunk_rows):
            rows = self._read_rows(unique_indexes[part], epoch)
            first, end = np.searchsorted(numbers, (part.start, part.stop))
            targets, sources = places[order[first:end]], numbers[first:end] - part.start
            is_whole = len(sources) == part.stop - part.start  # no sample occurs twice
            for (_, stored), (_, read) in zip(trees.arrays(slot), trees.arrays(rows), strict=True):
                stored[targets] = read if is_whole else read[sources]
            self._after_piece()

    def _locate_rows(self, steps: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the indexes of the samples of `steps` on this node, and their rows in a slot."""
        layout, batch = self._layout, self._layout.batch
        epoch_indexes = self._sampler.batch_indexes(steps.start, len(steps))
        whole_steps, rest = divmod(len(epoch_indexes), batch)
        first_rows = layout.first_rows
        parts = []
        for worker in layout.shares.workers:
            for step, count, samples in ((0, whole_steps, batch), (whole_steps, 1, rest)):
                positions = layout.shares.positions(worker, samples)
                first = step * batch
                table = epoch_indexes[first : first + count * samples].reshape(count, samples)
                step_rows = (step + np.arange(count)) * first_rows[-1] + first_rows[worker]
                rows = step_rows[:, None] + np.arange(len(positions))
                parts.append((table[:, positions].ravel(), rows.ravel()))
        indexes, rows = zip(*parts, strict=True)
        return np.concatenate(indexes), np.concatenate(rows)

    def _read_rows(self, indexes: np.ndarray, epoch: int) -> tuple[Any, Any]:
        try:
            rows = self._samples.rows(indexes, epoch)
        except HpctrainError:
            raise
        except Exception as error:
            index = self._find_bad_sample(indexes, epoch)
            raise HpctrainError(
                f"{describe(self._samples)}: sample {index} could not be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        expected, seen = (
            [(path, x.dtype, x.shape[1:]) for path, x in trees.arrays(tree)]
            for tree in (self._layout.empty, rows)
        )
        if expected != seen or any(len(x) != len(indexes) for _, x in trees.arrays(rows)):
            raise UsageError(
                f"{describe(self._samples)}: expected {len(indexes)} rows like those of sample 0 "
                f"in (x, y), {expected}, seen {seen}; [data] reader = 'rank' reads rows of any form"
            )
        return rows

    def _find_bad_sample(self, indexes: np.ndarray, epoch: int) -> int:
        """Return the first of `indexes` whose sample cannot be read, by halves."""
        while len(indexes) > 1:
            half = indexes[: len(indexes) // 2]
            try:
                self._samples.rows(half, epoch)
                indexes = indexes[len(half) :]
            except Exception:
                indexes = half
        return int(indexes[0])


def cut_pieces(indexes: np.ndarray, rows: int, chunk_rows: int) -> Iterator[slice]:
    """Yield parts of `indexes`, grouped by chunk, each of up to `rows`, or a whole chunk."""
    ends = np.append(np.flatnonzero(np.diff(indexes // chunk_rows)) + 1, len(indexes))
    start = 0
    while start < len(indexes):
        last_fitting = np.searchsorted(ends, start + rows, side="right") - 1
        end = int(ends[max(last_fitting, np.searchsorted(ends, start, side="right"))])
        yield slice(start, end)
        start = end


def describe(samples: Samples) -> str:
    """Return the name of a data set in messages: its files, or its class."""
    base = unwrap(samples)
    return str(getattr(base, "source", type(base).__name__))


def _row_bytes(x: np.ndarray) -> int:
    return x.dtype.itemsize * math.prod(x.shape[1:])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
