"""Orders of a user's own, such as PyTorch's samplers: rank 0 draws and broadcasts them.

    rank 0    draw epoch 2: 7 3 7 1     broadcast     all ranks cut the same batches from it

An epoch is drawn when its first step begins, or earlier where batches are read ahead, or workers
step apart and a fast one may begin it before the others.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.data import EpochOrder, Sampler, Samples, SelectedSamples, dropped_batch, order_of
from hpctrain.world import World

log = logging.getLogger(__name__)
CHECKED_SAMPLES = 16  #: of a drawn order, checked before training


def draw(world: World, sampler: Sampler, first: int, last: int) -> None:
    """Draw the epochs of steps `first` .. `last` that are not there yet; collective."""
    for epoch in sampler.undrawn_epochs(first, last):
        assert sampler.order is not None
        sampler.set_order(epoch, _draw_epoch(world, sampler.order, sampler.seed, epoch))


def select(world: World, samples: Samples, seed: int) -> Samples:
    """Return the samples that an order selects for evaluation, by default all; collective."""
    order, batch = order_of(samples), dropped_batch(samples)
    world.must_agree(f"{order}, drop_last {batch}", "the sampler of an evaluation")
    if order is None and not batch:
        return samples
    indexes = np.arange(len(samples)) if order is None else _draw_epoch(world, order, seed, 0)
    return SelectedSamples(samples, indexes[: len(indexes) - len(indexes) % max(batch, 1)])


def samples_to_check(samples: Samples, sampler: Sampler) -> Samples:
    """Return a few samples of the first step if there is an order, else all samples."""
    if sampler.order is None:
        return samples
    return SelectedSamples(samples, sampler.batch_indexes(0)[:CHECKED_SAMPLES])


def announce(world: World, value: Any, batch: int | None = None) -> None:
    """Log on rank 0 the unused parts of a user's object; `batch`: of training samples."""
    describe = getattr(value, "unused", None)
    if world.rank == 0 and describe is not None and (unused_text := describe(batch)):
        log.warning("%s", unused_text)


def _draw_epoch(world: World, order: EpochOrder, seed: int, epoch: int) -> np.ndarray:
    """Return the indexes of an epoch, drawn on rank 0; collective."""
    index_bytes = world.on_all_ranks(
        lambda: order.indexes(seed, epoch).tobytes() if world.rank == 0 else b""
    )
    return np.frombuffer(broadcast_bytes(world.link, index_bytes), np.int64).copy()
