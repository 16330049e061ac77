"""Reduce-scatter, all-gather, reduce, broadcast, gather, scatter, all-to-all: the closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import THREAD_RANKS, on_ranks

from hpctrain.collectives import Group, broadcast, chunks, reduce
from hpctrain.collectives.linear import all_to_all, gather, scatter
from hpctrain.collectives.ring import all_gather, reduce_scatter

LENGTHS = (0, 1, 7, 64, 100_003)


def vector(rank: int, n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int64) * 7 + rank * 1001


def total(size: int, n: int) -> np.ndarray:
    return sum(vector(rank, n) for rank in range(size))


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("n", LENGTHS)
def test_reduce_scatter_then_all_gather(ranks, n):
    def body(world):
        group, x = Group(world.link), vector(world.rank, n)
        mine = reduce_scatter(group, x, np.add)
        assert np.shares_memory(mine, x) or not mine.size
        np.testing.assert_array_equal(mine, chunks(total(world.size, n), world.size)[world.rank])
        all_gather(group, x)
        np.testing.assert_array_equal(x, total(world.size, n))

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("n", LENGTHS)
def test_to_and_from_every_root(ranks, n):
    def body(world):
        group = Group(world.link)
        for root in range(world.size):
            x = vector(world.rank, n)
            reduce(group, x, np.add, root)
            if world.rank == root:
                np.testing.assert_array_equal(x, total(world.size, n))
            x = vector(world.rank, n)
            broadcast(group, x, root)
            np.testing.assert_array_equal(x, vector(root, n))
            x = vector(world.rank, n)
            mine = scatter(group, x, root)
            expected = chunks(vector(root, n), world.size)[world.rank]
            np.testing.assert_array_equal(mine, expected)
            x = vector(world.rank, n)
            gather(group, x, root)
            if world.rank == root:
                for rank, chunk in enumerate(chunks(x, world.size)):
                    np.testing.assert_array_equal(chunk, chunks(vector(rank, n), world.size)[rank])

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("m", [0, 1, 1000])
def test_all_to_all(ranks, m):
    def body(world):
        size, out = world.size, np.zeros(world.size * m, np.int64)
        all_to_all(Group(world.link), vector(world.rank, size * m), out)
        expected = [vector(rank, size * m)[world.rank * m : (world.rank + 1) * m]
                    for rank in range(size)]  # fmt: skip
        np.testing.assert_array_equal(out, np.concatenate(expected))

    ranks(body)
