"""Every all-reduce against the closed form on integers, and against float64."""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    DTYPES,
    INEXACT,
    LENGTHS,
    OPERATIONS,
    dtype_of,
    expected,
    length,
    vector,
)
from ranks import THREAD_RANKS, on_ranks, run_on

from hpctrain.collectives import (
    ALLREDUCE,
    all_gather_bytes,
    broadcast,
    operation,
)
from hpctrain.collectives.ring import plain_ring
from hpctrain.tuning import select

EVERY = {
    "auto": select.auto,
    "plain-ring": plain_ring,
    **{k: f for k, f in ALLREDUCE.items() if k != "null"},
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("word", LENGTHS)
@on_ranks(*THREAD_RANKS)
def test_exact_on_integers(ranks, name, word, crossed):
    """Every dtype and every operation, to the last bit; all pairs of them in some of the rows."""
    n, size = length(word, ranks.size), ranks.size
    begin = size + [*LENGTHS].index(word) + [*EVERY].index(name)
    kinds = crossed(DTYPES, [*OPERATIONS], begin=begin)
    rows = [(dtype, op, expected(size, n, dtype, op)) for dtype, op in kinds]

    def body(world):
        group = world.main
        for dtype, op, reported in rows:
            if name == "native" and world.transport == "mpi" and dtype in INEXACT and op == "sum":
                continue  # MPI adds no 16-bit floats
            x = vector(world.rank, n, dtype).copy()
            EVERY[name](group, x, operation(op, x.dtype))
            assert x.tobytes() == reported.tobytes(), (dtype, op)

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "native"])
def test_same_bytes_on_all_ranks_and_near_float64(ranks, name):
    """One rounding per addition: error within (P-1) units of the sum of magnitudes."""

    def body(world):
        def values(rank):
            return np.random.default_rng(rank).standard_normal(10_007).astype(np.float32)

        x = values(world.rank)
        EVERY[name](world.main, x, np.add)
        all_bytes = all_gather_bytes(world.link, x.tobytes())
        assert all(item == all_bytes[0] for item in all_bytes)
        all_values = np.array([values(r) for r in range(world.size)], np.float64)
        bound = (world.size - 1) * 2.0**-24 * np.abs(all_values).sum(0) + 1e-30
        assert (np.abs(x - all_values.sum(0)) <= bound).all()

    ranks(body)


@on_ranks(*THREAD_RANKS)
def test_broadcast_and_gather(ranks):
    def body(world):
        for root in range(world.size):
            x = vector(world.rank, 100_003, "float64").copy()
            broadcast(world.main, x, root)
            np.testing.assert_array_equal(x, vector(root, 100_003, "float64"))
        message = all_gather_bytes(world.link, b"x" * world.rank)
        assert message == [b"x" * rank for rank in range(world.size)]

    ranks(body)


def test_a_planted_error_is_seen():
    """A ring that forgets one chunk must fail the comparison that all algorithms pass."""

    def forgetful(group, x, op):
        EVERY["ring"](group, x[: x.size * 3 // 4], op)

    def body(world):
        x = vector(world.rank, 1000, "int64").copy()
        forgetful(world.main, x, np.add)
        return np.array_equal(x, expected(world.size, 1000, "int64", "sum"))

    assert not any(run_on("threads", 4, body))


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "native"])
def test_16_bit_floats_are_summed_in_float32(ranks, name, dtype):
    """Each hop rounds once, by half a unit in the last place at most: the same bytes everywhere.

    So an element is within (P-1) 2^-8 (bfloat16) of its sum of magnitudes, and all elements
    together, whose leading digits differ, within half of that.
    """
    kind = dtype_of(dtype)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]

    def body(world):
        values = [
            np.random.default_rng(rank).standard_normal(4099).astype(kind)
            for rank in range(world.size)
        ]
        x = values[world.rank].copy()
        EVERY[name](world.main, x, operation("sum", kind))
        exact = np.array([item.astype(np.float64) for item in values])
        error = np.abs(x.astype(np.float64) - exact.sum(0))
        bound = (world.size - 1) * unit * np.abs(exact).sum(0)
        assert (error <= bound).all()
        assert error.sum() <= bound.sum() / 2
        all_bytes = all_gather_bytes(world.link, x.tobytes())
        assert all(item == all_bytes[0] for item in all_bytes)

    ranks(body)
