"""Reduce-scatter, all-gather, reduce, broadcast, gather, scatter, all-to-all: the closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from cases import DTYPES, LENGTHS, OPERATIONS, expected, length, vector
from ranks import THREAD_RANKS, on_ranks

from hpctrain.collectives import Group, broadcast, chunks, operation, reduce
from hpctrain.collectives.ring import all_gather, reduce_scatter
from hpctrain.collectives.rooted import all_to_all, gather, scatter


def same(x: np.ndarray, y: np.ndarray) -> bool:
    return (x.dtype, x.tobytes()) == (y.dtype, y.tobytes())


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("word", LENGTHS)
def test_reduce_scatter_then_all_gather(ranks, word, crossed):
    n, size = length(word, ranks.size), ranks.size
    kinds = crossed(DTYPES, [*OPERATIONS], begin=size + [*LENGTHS].index(word))
    rows = [(dtype, op, expected(size, n, dtype, op)) for dtype, op in kinds]

    def body(world):
        group = Group(world.link)
        for dtype, op, reported in rows:
            x = vector(world.rank, n, dtype).copy()
            own = reduce_scatter(group, x, operation(op, x.dtype))
            assert np.shares_memory(own, x) or not own.size
            assert same(own, chunks(reported, size)[world.rank]), (dtype, op)
            all_gather(group, x)
            assert same(x, reported), (dtype, op)

    ranks(body)


@on_ranks(2, 3, 4, 5)
@pytest.mark.parametrize("n", [100, 300_007])  # within a segment; several
@pytest.mark.parametrize("cut", [(0,), (1,), (0.4, 0.4, 1), (0, 0.1, 0.9)])
def test_chunks_of_any_length(ranks, n, cut):
    """Empty ones too, beside those that travel in segments: the bounds are n times `cut`."""
    size = ranks.size
    reported = expected(size, n, "float64", "sum")
    inner = [int(n * cut[min(i, len(cut) - 1)]) for i in range(size - 1)]
    offsets = [0, *inner, n]

    def body(world):
        group, x = Group(world.link), vector(world.rank, n, "float64").copy()
        own = reduce_scatter(group, x, np.add, offsets=offsets)
        assert same(own, reported[offsets[world.rank] : offsets[world.rank + 1]])
        all_gather(group, x, offsets)
        assert same(x, reported)

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("word", LENGTHS)
def test_reduce_to_every_root(ranks, word, crossed):
    n, size = length(word, ranks.size), ranks.size
    kinds = crossed(DTYPES, [*OPERATIONS], begin=size + [*LENGTHS].index(word))
    rows = [(dtype, op, expected(size, n, dtype, op)) for dtype, op in kinds]

    def body(world):
        group = Group(world.link)
        for i, (dtype, op, reported) in enumerate(rows):
            for root in range(size) if n <= size + 1 else [i % size]:
                x = vector(world.rank, n, dtype).copy()
                reduce(group, x, operation(op, x.dtype), root)
                assert world.rank != root or same(x, reported), (dtype, op, root)

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("word", LENGTHS)
def test_from_and_to_every_root(ranks, word):
    n, size = length(word, ranks.size), ranks.size

    def body(world):
        group = Group(world.link)
        for root in range(size):
            dtype = DTYPES[root % len(DTYPES)]  # bytes travel: their meaning changes nothing
            x = vector(world.rank, n, dtype).copy()
            broadcast(group, x, root)
            assert same(x, vector(root, n, dtype))
            x = vector(world.rank, n, dtype).copy()
            own = scatter(group, x, root)
            assert same(own, chunks(vector(root, n, dtype), size)[world.rank])
            x = vector(world.rank, n, dtype).copy()
            gather(group, x, root)
            for rank, chunk in enumerate(chunks(x, size)):
                reported = chunks(vector(rank, n, dtype), size)[rank]
                assert world.rank != root or same(chunk, reported)

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("word", LENGTHS)
def test_all_to_all(ranks, word):
    m, size = length(word, ranks.size) // ranks.size, ranks.size  # elements for each rank

    def body(world):
        for dtype in DTYPES:
            x = vector(world.rank, size * m, dtype)
            out = np.zeros_like(x)
            all_to_all(Group(world.link), x, out)
            reported = [
                vector(rank, size * m, dtype).reshape(size, m)[world.rank] for rank in range(size)
            ]
            assert same(out, np.concatenate(reported)), dtype

    ranks(body)
