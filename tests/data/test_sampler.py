"""Batches are a function of (seed, epoch, global index); ranks only cut them."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.core.errors import UsageError
from hpctrain.data import Sampler, order, share

SIZES = [(1, 1), (1, 8), (7, 3), (12, 4), (100, 100), (101, 32), (5, 1)]  # samples, batch
GOLDEN = [7, 6, 3, 0, 8, 1, 9, 2, 4, 5]
CHUNK_GOLDEN = [[7, 39, 13, 30, 14, 35, 4, 5, 28, 22], [38, 27, 31, 26, 12, 16, 8, 10, 9, 11]]


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_order_is_a_permutation_of_its_own_for_each_seed_and_epoch(n):
    orders = {(s, e): order(s, e, n) for s in (0, 1, 2**63 - 1) for e in (0, 1, 7)}
    for observed in orders.values():
        assert sorted(observed) == list(range(n))
    if n == 1000:
        assert len({observed.tobytes() for observed in orders.values()}) == len(orders)


def test_order_stays_the_same_for_good():
    # Or a resumed run would see other batches than the run it goes on with.
    assert order(3, 5, 10).tolist() == GOLDEN


def test_the_order_of_chunks_stays_the_same_for_good():
    assert order(3, 5, 7, chunk_rows=2).tolist() == order(3, 5, 7).tolist()  # one window
    orders = order(3, 5, 40, chunk_rows=1), order(3, 5, 40, chunk_rows=2)
    assert [x[:5].tolist() + x[-5:].tolist() for x in orders] == CHUNK_GOLDEN


def test_a_run_goes_on_with_windows_of_its_own_length():
    sampler = Sampler(40, 4, seed=0, chunk_rows=2, window_chunks=5)
    sampler.must_continue(2, 5)
    with pytest.raises(UsageError, match=r"2 samples, 16 together, with .* seen .*, 5 together"):
        sampler.must_continue(2, None)  # of a checkpoint without the number


@pytest.mark.parametrize(("n", "chunk_rows"), [(1, 1), (1, 9), (1000, 3), (1000, 7), (999, 2000)])
def test_an_order_by_chunks_is_a_permutation_of_its_own(n, chunk_rows):
    orders = {(s, e): order(s, e, n, chunk_rows) for s in (0, 2**63 - 1) for e in (0, 7)}
    for observed in orders.values():
        assert sorted(observed) == list(range(n))
    if n > 1:
        assert len({observed.tobytes() for observed in orders.values()}) == len(orders)


def test_order_is_uniform():
    # Each of the 6 orders of 3 samples: 2000 times in 12,000 epochs, standard deviation 41.
    observed = [tuple(order(1, epoch, 3)) for epoch in range(12_000)]
    counts = [observed.count(item) for item in set(observed)]
    assert len(counts) == 6 and max(abs(count - 2000) for count in counts) < 200


@pytest.mark.parametrize(("n", "batch"), SIZES)
def test_an_epoch_has_each_sample_once_and_only_its_last_batch_is_short(n, batch):
    sampler = Sampler(n, batch, seed=4)
    assert sampler.steps_per_epoch == -(-n // batch)
    for epoch in (0, 1):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.batch_indexes(step) for step in steps]
        assert all(len(item) == batch for item in batches[:-1])
        assert np.array_equal(np.concatenate(batches), order(4, epoch, n))
        firsts = [sampler.locate_step(step) for step in steps]
        assert firsts == [(epoch, i * batch) for i in range(len(batches))]


def test_a_batch_does_not_depend_on_the_batches_before():
    target, alone = Sampler(103, 10, seed=0), [Sampler(103, 10, seed=0) for _ in range(40)]
    for step in (39, 0, 11, 10, 12, 11, 30):
        assert np.array_equal(target.batch_indexes(step), alone[step].batch_indexes(step))


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 101])
def test_shares_of_all_ranks_make_up_the_batch(length, size):
    batch = np.arange(length) * 7
    shares = [share(batch, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate([own for _, own in shares]), batch)
    for first, own in shares:
        assert np.array_equal(batch[first : first + len(own)], own)
    lengths = [len(own) for _, own in shares]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("length", [0, 1, 5, 13, 101])
def test_shares_of_whole_blocks(length, size):
    """The cuts between ranks are some of those between blocks, which no number of ranks moves."""
    batch, blocks = np.arange(length) * 7, 12
    cuts = {length * block // blocks for block in range(blocks + 1)}
    shares = [share(batch, rank, size, blocks) for rank in range(size)]
    assert np.array_equal(np.concatenate([own for _, own in shares]), batch)
    assert {first for first, _ in shares} <= cuts


WRONG = [((0, 1, 0), "0 samples"), ((3, 0, 0), "batch is 0"), ((3, 1, -1), "seed is -1"),
         ((3, -2, 0), "batch is -2"), ((3, 1, 2**63), "seed is 9223372036854775808")]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Sampler(*arguments)
