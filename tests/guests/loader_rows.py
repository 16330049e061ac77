"""Loaders of PyTorch whose samples and order are the user's own."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

N, BATCH, EPOCHS = 27, 8, 2
X = torch.from_numpy(np.random.default_rng(0).normal(size=(N, 4)))
LABELS = torch.arange(N) % 3
DATA = TensorDataset(X, LABELS)


def seeded():
    return torch.Generator().manual_seed(7)


class Rotated(Sampler):
    """An order of its own that depends on the epoch."""

    epoch = 0

    def __len__(self):
        return N - 3

    def __iter__(self):
        return iter([(3 * i + self.epoch) % N for i in range(len(self))])

    def set_epoch(self, epoch):
        self.epoch = epoch


class Waning(Sampler):
    """Depends on the epochs drawn before."""

    def __init__(self):
        self._first = 0

    def __len__(self):
        return 12

    def __iter__(self):
        self._first += 5
        return iter(range(self._first, self._first + 12))


def doubled(items):
    x, y = default_collate(items)
    return 2 * x, y


def loader(**options):
    return DataLoader(DATA, **{"batch_size": BATCH, **options})


def batched(sampler, drop_last):
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, BATCH, drop_last))


WEIGHTS = np.linspace(0, 1, N)
#: loaders whose samples and order are the user's own, and used
LOADERS = {
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(20), generator=seeded())),
    "subset, drop_last": lambda: loader(
        sampler=SubsetRandomSampler(range(20), generator=seeded()), drop_last=True
    ),
    "weighted": lambda: loader(sampler=WeightedRandomSampler(WEIGHTS, 40, generator=seeded())),
    "weighted, each once": lambda: loader(
        sampler=WeightedRandomSampler(WEIGHTS, 11, replacement=False, generator=seeded())
    ),
    "random, some": lambda: loader(sampler=RandomSampler(DATA, num_samples=21, generator=seeded())),
    "random, repeated": lambda: loader(
        sampler=RandomSampler(DATA, replacement=True, num_samples=30, generator=seeded())
    ),
    "shuffled by a generator": lambda: loader(shuffle=True, generator=seeded()),
    "two generators": lambda: loader(
        sampler=SubsetRandomSampler(range(5, 20), generator=seeded()), generator=seeded()
    ),
    "a part in order": lambda: loader(sampler=SequentialSampler(range(19))),
    "a list": lambda: loader(sampler=[5, 4, -1, 3, 5, 9, 11, 12, 0, 7, 8]),
    "its own class": lambda: loader(sampler=Rotated()),
    "its own state": lambda: loader(sampler=Waning()),
    "batches of a subset": lambda: batched(
        SubsetRandomSampler(range(4, 24), generator=seeded()), False
    ),
    "batches, drop_last": lambda: batched(RandomSampler(DATA, generator=seeded()), True),
    "replicas": lambda: loader(sampler=DistributedSampler(DATA, 1, 0)),
    "replicas, in order": lambda: loader(sampler=DistributedSampler(DATA, 1, 0, shuffle=False)),
    "replicas, by seed": lambda: loader(sampler=DistributedSampler(DATA, 1, 0, seed=3)),
    "collate_fn": lambda: loader(sampler=range(N), collate_fn=doubled),
    "a subset of the data": lambda: DataLoader(
        Subset(DATA, range(1, 22)), BATCH, sampler=range(0, 21)
    ),
}  # fmt: skip
