"""The arena: places of tensors, and hashes without the gaps."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.gradients import arena as arenas
from hpctrain.gradients.buckets import cut_buckets

SHAPES = {"a": (3, 5), "b": (1,), "c": (17,), "d": (4, 4, 4)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slots_are_aligned_in_order_and_views_write_the_plane(dtype):
    arena = arenas.make_arena(SHAPES, dtype)
    for plane in (arena.param, arena.grad):
        assert plane.ctypes.data % 64 == 0 and not plane.any()
    for slot, shape in zip(arena.slots, SHAPES.values(), strict=True):
        assert slot.offset * arena.param.itemsize % 64 == 0
        view = arena.views(arena.param)[slot.name]
        view[...] = slot.offset + 1
        assert view.shape == shape
        assert (arena.param[slot.offset : slot.stop] == slot.offset + 1).all()
    inside = sum(slot.size for slot in arena.slots)
    assert np.count_nonzero(arena.param) == inside < arena.param.size


def test_the_hash_sees_every_parameter_and_no_gap():
    arena = arenas.make_arena(SHAPES, "float32")
    before = arenas.params_sha256(arena)
    arena.param[arena.slots[1].stop] = 1  # behind "b", which has one element
    assert arenas.params_sha256(arena) == before
    for slot in arena.slots:
        arena.param[slot.stop - 1] += 1
        after = arenas.params_sha256(arena)
        assert after != before
        before = after


@pytest.mark.parametrize("bucket_bytes", [1, 64, 128, 200, 1 << 20])
def test_buckets_cover_the_plane_last_slots_first(bucket_bytes):
    arena = arenas.make_arena(SHAPES, "float32")
    buckets = cut_buckets(arena.slots, arena.grad.size, 4, bucket_bytes)
    assert [b.start for b in buckets] == [b.stop for b in buckets[1:]] + [0]
    assert buckets[0].stop == arena.grad.size
    assert frozenset().union(*(b.names for b in buckets)) == set(SHAPES)
    assert sum(len(b.names) for b in buckets) == len(SHAPES)
    for bucket in buckets[:-1]:
        assert (bucket.stop - bucket.start) * 4 >= bucket_bytes
