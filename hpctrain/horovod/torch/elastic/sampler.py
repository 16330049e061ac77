"""Indices of a data set, shared out to the ranks anew after a loss, without those processed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from hpctrain.horovod.torch import job


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Indices of this rank, as of a DistributedSampler, that remembers how many were processed.

    Give it to a `TorchState`, call `record_batch` after each step, and `set_epoch` at the end of
    each epoch: after a loss the ranks that are left share what remains of the epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        """Share out `dataset`, of constant length; `seed` is the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0  #: samples of the epoch that all ranks have processed
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, in an order of its own if indices are shuffled."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed `batch_size` samples more; `batch_idx` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the epoch of `state_dict`, after its processed samples."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the samples that are not processed to the present ranks."""
        self.rank, self.num_replicas = job.rank(), job.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices; some repeat, so that each rank has as many."""
        remaining = self.remaining_indices
        positions = range(self.rank, self.num_samples * self.num_replicas, self.num_replicas)
        return (remaining[position % len(remaining)] for position in positions)

    def __len__(self) -> int:
        """Return the number of this rank's indices."""
        return self.num_samples
