"""Data sets and loaders of PyTorch as Samples of the Trainer.

The Trainer chooses the samples of each step, by seed, epoch and index, and each rank reads its own.
Of a DataLoader its data set and `collate_fn` are used, not its batches, order and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays, sample_shape
from hpctrain.torch.modules.seeds import seed_generator

LABELS = "labels"  #: the key of targets in batches that are dicts


class TorchSamples:
    """A data set with indexes and a length; see `hpctrain.data.Samples`.

    An item is a pair (x, y), or a dict with "labels": then x is the whole dict, y its labels.
    Before each item PyTorch's generator is seeded by epoch and index, so that random changes of
    samples do not depend on the ranks.
    """

    #: Not read by a second thread: items draw from the generator of the process.
    reads_ahead = False

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]):
        """Raise UsageError for a data set without indexes or without items."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"data set: expected one with indexes and a length, seen "
                f"{type(dataset).__name__}: its samples could not be divided among ranks"
            )
        self._dataset, self._collate = dataset, collate
        if not len(self):
            raise UsageError("data set: expected at least 1 sample, seen 0")
        self._sample_shape = sample_shape(self.rows(np.arange(1))[0])

    @property
    def sample_shape(self) -> Any:
        """The shape of one sample, or the tree of shapes."""
        return self._sample_shape

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return arrays (x, y) of the samples at `indexes`."""
        if not len(indexes):
            return map_arrays(lambda x: x[:0], self.rows(np.arange(1), epoch))
        items = []
        for index in indexes.tolist():
            seed_generator(epoch, index)
            items.append(self._dataset[index])
        batch = self._collate(items)
        if isinstance(batch, Mapping) and LABELS in batch:
            batch = dict(batch), batch[LABELS]
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                "data set: expected items (x, y), or dicts with the key 'labels', seen "
                f"{type(batch).__name__} from {type(self._dataset).__name__}"
            )
        x, y = map(_as_arrays, batch)
        return x, y


def as_samples(value: DataLoader[Any] | Dataset[Any]) -> TorchSamples:
    """Return the Samples of a data set, or of that of a loader."""
    if isinstance(value, DataLoader):
        collate = value.collate_fn if value.batch_size is not None else default_collate
        return TorchSamples(value.dataset, collate)
    return TorchSamples(value, default_collate)


def _as_arrays(tree: Any) -> Any:
    """Return the tree of tensors as arrays; lists become tuples."""
    if isinstance(tree, Mapping):
        return {key: _as_arrays(branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map(_as_arrays, tree))
    return tree.numpy() if isinstance(tree, torch.Tensor) else np.asarray(tree)
