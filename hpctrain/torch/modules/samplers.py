"""Samplers of PyTorch as orders of the Trainer: drawn on rank 0, and the same after a resume.

The indexes of an epoch depend on the sampler as it was given, on the Trainer's seed and on the
epoch: PyTorch's, NumPy's and Python's own generators are seeded for the draw. A generator of the
user's own goes on from epoch to epoch, as in a loop over the loader: the epochs before are drawn
again where one is missing, as after a resume.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.seeds import hash_numbers

#: Samplers whose indexes depend on generators and attributes, not on the epochs drawn before.
STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class TorchOrder:
    """The indexes that a sampler yields; see `hpctrain.data.EpochOrder`."""

    def __init__(self, sampler: Any, samples: int, generator: Any = None):
        """Take a sampler of `samples` samples, and the generator of its loader.

        Raises UsageError for a sampler without a length, or of a part of the ranks.
        """
        self._sampler, self._samples = _of_all_ranks(sampler), samples
        self._loader_generator = generator
        own_generator = getattr(sampler, "generator", None)
        self._generators = [g for g in (generator, own_generator) if g is not None]
        self._states = [g.get_state() for g in self._generators]
        self._is_stateless = type(sampler) in STATELESS and not self._generators
        self._next = 0  # the next epoch that the generators are ready for
        try:
            self._length = len(self._sampler)
        except TypeError:
            raise UsageError(
                f"sampler: expected one with a length, the number of indexes of an epoch, seen "
                f"{type(sampler).__name__}; give it a method __len__"
            ) from None

    def __len__(self) -> int:
        """Return the number of indexes in an epoch."""
        return self._length

    def __repr__(self) -> str:
        return f"a {type(self._sampler).__name__} of {self._length} samples"

    def indexes(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indexes of `epoch`, int64 (n,); see EpochOrder."""
        if self._is_stateless:
            self._next = epoch
        elif epoch < self._next:
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            self._next = 0
        indexes = np.empty(0, np.int64)
        while self._next <= epoch:
            indexes = self._draw(seed, self._next)
            self._next += 1
        return indexes

    def _draw(self, seed: int, epoch: int) -> np.ndarray:
        with _seeded(hash_numbers(seed, epoch)):
            if callable(getattr(self._sampler, "set_epoch", None)):
                self._sampler.set_epoch(epoch)
            if self._loader_generator is not None:  # as an iterator of a loader begins
                torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
            try:
                indexes = np.array([operator.index(i) for i in self._sampler], np.int64)
            except Exception as error:
                raise UsageError(
                    f"sampler: expected integer indexes of {self._samples} samples, "
                    f"{type(self._sampler).__name__} raised {type(error).__name__}: {error}"
                ) from error
        return self._check_indexes(indexes)

    def _check_indexes(self, indexes: np.ndarray) -> np.ndarray:
        """Return `indexes` with negative indexes resolved; raise UsageError for invalid indexes."""
        name = type(self._sampler).__name__
        if len(indexes) != self._length:
            raise UsageError(
                f"sampler: expected the {self._length} indexes of an epoch that len({name}) "
                f"promises, seen {len(indexes)}; a sampler must yield as many in each epoch"
            )
        is_outside = (indexes < -self._samples) | (indexes >= self._samples)
        if is_outside.any():
            raise UsageError(
                f"sampler: expected indexes in 0 .. {self._samples - 1}, seen "
                f"{indexes[is_outside][0]} from {name}"
            )
        return np.where(indexes < 0, indexes + self._samples, indexes)


def is_replaceable(sampler: Any, samples: int) -> bool:
    """Return whether the Trainer's order covers the same samples as `sampler`.

    So it is for all samples in order, or shuffled by no generator of the user's own.
    """
    if type(sampler) is SequentialSampler:
        return len(sampler) == samples
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return False
    return len(sampler) == len(sampler.data_source) == samples


def _of_all_ranks(sampler: Any) -> Any:
    """Return a sampler of the samples of all ranks, in the order that each takes its part of.

    Raises UsageError for one of a single rank, of another class than PyTorch's.
    """
    ranks = getattr(sampler, "num_replicas", 1)
    if type(sampler) is DistributedSampler:
        whole = copy.copy(sampler)
        whole.num_replicas, whole.rank = 1, 0
        # What its ranks take together, with the repeated or without the dropped ones at the end.
        whole.num_samples = whole.total_size = sampler.total_size
        return whole
    if ranks is not None and ranks != 1:
        raise UsageError(
            f"sampler: expected one of all samples, since the Trainer divides each batch, seen "
            f"{type(sampler).__name__} of rank {getattr(sampler, 'rank', '?')} of {ranks}; make it "
            "with num_replicas=1 and rank=0"
        )
    return sampler


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed the generators of the process, which continue afterwards as before."""
    states = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        try:
            yield
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])
