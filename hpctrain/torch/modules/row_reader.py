"""Rows of a data set of PyTorch, read by the rank itself or by a worker process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.seeds import hash_indexes

LABELS = "labels"  #: the key of targets in batches that are dicts


class RowReader(Dataset[Any]):
    """Reads the items of a data set, and collates them into a pair (x, y) of trees of tensors.

    An item is a pair (x, y), or a dict with "labels": then x is the whole dict, y its labels.
    Before each item PyTorch's generator is seeded by epoch and index, so that random changes of
    samples do not depend on the ranks. Tensors of a TensorDataset are indexed all at once; so are
    items of a data set with `__getitems__`, unless they draw random numbers.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]):
        """Raise UsageError for a data set without indexes or without items."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"data set: expected one with indexes and a length, seen "
                f"{type(dataset).__name__}: its samples could not be divided among ranks"
            )
        self.dataset, self._collate = dataset, collate
        if not len(self):
            raise UsageError("data set: expected at least 1 sample, seen 0")
        self._reads_at_once = True

    def __len__(self) -> int:
        return len(cast(Any, self.dataset))

    def __getitem__(self, key: tuple[int, np.ndarray]) -> tuple[Any, Any]:
        """Return (x, y) of `key`, an epoch and indexes: for the DataLoader of worker processes."""
        epoch, indexes = key
        return self.rows(indexes, epoch)

    def rows(self, indexes: np.ndarray, epoch: int) -> tuple[Any, Any]:
        """Return (x, y) of the samples at `indexes`, of no sample with leading dimension 0."""
        if not len(indexes):
            return cast(tuple[Any, Any], _take_none(self.rows(np.arange(1), epoch)))
        dataset, own_indexes = find_base(self.dataset, indexes)
        if type(dataset) is TensorDataset and self._collate is default_collate:
            rows = torch.from_numpy(own_indexes)
            batch: Any = tuple(_take(tensor, rows) for tensor in dataset.tensors)
        else:
            seeds = hash_indexes(epoch, indexes)
            batch = self._collate(self._items(dataset, own_indexes.tolist(), seeds))
        if isinstance(batch, Mapping) and LABELS in batch:
            batch = dict(batch), batch[LABELS]
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                "data set: expected items (x, y), or dicts with the key 'labels', seen "
                f"{_describe(batch)} from {type(self.dataset).__name__}"
            )
        return batch[0], batch[1]

    def _items(self, dataset: Any, indexes: list[int], seeds: list[int]) -> list[Any]:
        """Return the items at `indexes`, each read after PyTorch's generator has its seed."""
        generator, read_all = torch.default_generator, getattr(dataset, "__getitems__", None)
        if read_all is not None and self._reads_at_once:
            generator.manual_seed(seeds[0])
            before = generator.get_state()
            items = read_all(indexes)
            if torch.equal(before, generator.get_state()):
                return cast(list[Any], items)
            self._reads_at_once = False  # each sample's random numbers are to be its own
        items = []
        for index, seed in zip(indexes, seeds, strict=True):
            generator.manual_seed(seed)
            items += read_all([index]) if read_all is not None else [dataset[index]]
        return items


def _take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `tensor[rows]`, which takes twice as long; negative rows count from the end."""
    try:
        return tensor.index_select(0, rows)
    except (IndexError, RuntimeError):
        return tensor[rows]


def find_base(dataset: Any, indexes: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return the data set below any Subset, and `indexes` in it."""
    while type(dataset) is Subset:
        indexes = np.asarray(dataset.indices)[indexes]
        dataset = dataset.dataset
    return dataset, indexes


def _take_none(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _take_none(branch) for key, branch in tree.items()}
    return tuple(map(_take_none, tree)) if isinstance(tree, tuple | list) else tree[:0]


def _describe(batch: Any) -> str:
    count = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    return f"a {type(batch).__name__}{count}"
