"""Data sets and loaders of PyTorch as Samples of the Trainer.

The Trainer chooses the samples of each step, by seed, epoch and index, or in the order of a user's
sampler, and each rank reads its own, in this process or in the worker processes of a loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpctrain.core.trees import sample_shape
from hpctrain.data import EpochOrder
from hpctrain.torch.modules.inputs import as_host_array
from hpctrain.torch.modules.loaders import LoaderOptions, read_options
from hpctrain.torch.modules.row_reader import RowReader


class TorchSamples:
    """A data set with indexes and a length; see `hpctrain.data.Samples` and row_reader.py."""

    #: Not read by a second thread: items draw from the generator of the process.
    reads_ahead = False

    def __init__(self, reader: RowReader, options: LoaderOptions | None = None):
        """`options`: of the loader of a data set."""
        self._reader, self._options = reader, options
        self._sample_shape: Any = None

    @property
    def sample_shape(self) -> Any:
        """The shape of a sample, or the tree of shapes."""
        if self._sample_shape is None:
            self._sample_shape = sample_shape(self.rows(np.arange(1))[0])
        return self._sample_shape

    @property
    def order(self) -> EpochOrder | None:
        """The order of the loader's sampler; None for the Trainer's own."""
        return self._options.order if self._options else None

    @property
    def dropped_batch(self) -> int:
        """The size of batches where a short one is dropped; 0 without `drop_last`."""
        if self._options is None or not self._options.batches.drop_last:
            return 0
        return self._options.batches.batch_size

    @property
    def steps_ahead(self) -> int:
        """The batches that worker processes read ahead."""
        return self._options.steps_ahead if self._options else 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._reader)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return arrays (x, y) of the samples at `indexes`."""
        x, y = self._reader.rows(indexes, epoch)
        return as_arrays(x), as_arrays(y)

    def stream(self, batches: Iterable[tuple[int, np.ndarray]]) -> Iterator[tuple[Any, Any]] | None:
        """Return the rows of `batches`, pairs (epoch, indexes), in order.

        They are read ahead by worker processes, which end when the iterator is closed; None without
        workers.
        """
        if not self.steps_ahead:
            return None
        assert self._options is not None
        rows = self._options.read(self._reader, batches)
        return ((as_arrays(x), as_arrays(y)) for x, y in rows)

    def unused(self, batch: int | None) -> str:
        """Describe the unused arguments of the loader; `batch`: samples per step."""
        return self._options.describe_unused(batch) if self._options else ""


def as_samples(value: DataLoader[Any] | Dataset[Any], finite: bool = True) -> TorchSamples:
    """Return the Samples of a data set, or of a loader with its sampler and options.

    Their values are not checked, whatever `finite` says.
    """
    if isinstance(value, DataLoader):
        reader = RowReader(value.dataset, value.collate_fn)
        return TorchSamples(reader, read_options(value, reader))
    return TorchSamples(RowReader(value, default_collate))


def as_arrays(tree: Any) -> Any:
    """Return the tree of tensors as arrays; lists become tuples."""
    if isinstance(tree, torch.Tensor):
        return as_host_array(tree)
    if isinstance(tree, Mapping):
        return {key: as_arrays(branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map(as_arrays, tree))
    return np.asarray(tree)
