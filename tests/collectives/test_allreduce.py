"""Every all-reduce against the closed form on integers, and against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ranks import THREAD_RANKS, on_ranks, run_on

from hpctrain.collectives import (
    ALLREDUCE,
    OPERATIONS,
    Group,
    all_gather_bytes,
    broadcast,
    operation,
)
from hpctrain.collectives.ring import plain_ring
from hpctrain.tuning import cost, select

EVERY = {
    "auto": select.auto,
    "plain-ring": plain_ring,
    **{k: f for k, f in ALLREDUCE.items() if k != "null"},
}
LENGTHS = ("0", "1", "P-1", "P", "P+1", "100003")


def length(word: str, size: int) -> int:
    return {"P-1": size - 1, "P": size, "P+1": size + 1}.get(word) if "P" in word else int(word)


def vector(rank: int, n: int, dtype: str) -> np.ndarray:
    """Integers that differ between ranks and places, small enough to be exact in float32."""
    return ((np.arange(n) * 7 + rank * 13) % 1001 - 500).astype(dtype)


def expected(size: int, n: int, dtype: str, op: np.ufunc) -> np.ndarray:
    return op.reduce([vector(rank, n, dtype) for rank in range(size)])


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("word", LENGTHS)
def test_exact_on_integers(ranks, name, word):
    def body(world):
        n = length(word, world.size)
        group = Group(world.link)
        for dtype in ("int32", "int64", "float32", "float64"):
            x = vector(world.rank, n, dtype)
            EVERY[name](group, x, np.add)
            np.testing.assert_array_equal(x, expected(world.size, n, dtype, np.add))

    ranks(body)


@on_ranks(2, 3, 4, 5)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("op", OPERATIONS)
def test_operations(ranks, name, op):
    def body(world):
        x = vector(world.rank, 1000, "int64")
        EVERY[name](Group(world.link), x, OPERATIONS[op])
        np.testing.assert_array_equal(x, expected(world.size, 1000, "int64", OPERATIONS[op]))

    ranks(body)


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "native"])
def test_same_bytes_on_all_ranks_and_near_float64(ranks, name):
    """One rounding per addition: error within (P-1) units of the sum of magnitudes."""

    def body(world):
        def values(rank):
            return np.random.default_rng(rank).standard_normal(10_007).astype(np.float32)

        x = values(world.rank)
        EVERY[name](Group(world.link), x, np.add)
        all_bytes = all_gather_bytes(world.link, x.tobytes())
        assert all(one == all_bytes[0] for one in all_bytes)
        all_values = np.array([values(r) for r in range(world.size)], np.float64)
        bound = (world.size - 1) * 2.0**-24 * np.abs(all_values).sum(0) + 1e-30
        assert (np.abs(x - all_values.sum(0)) <= bound).all()

    ranks(body)


@on_ranks(2, 3, 4, 5, 8)
@pytest.mark.parametrize("name", sorted(cost.ALLREDUCE))
def test_bytes_and_steps_are_those_of_the_cost_model(ranks, name):
    """The busiest rank moves what the closed form says; all ranks together as the story tells."""
    n = 840 * 4  # divides by every P here: chunks are equal

    def body(world):
        ALLREDUCE[name](Group(world.link), np.zeros(n // 4, np.float32), np.add)
        sent = f"{world.link.bytes_sent} {world.link.messages_sent}"
        check([tuple(map(int, one.split())) for one in world.gather(sent)])

    def check(sent):
        p, predicted = ranks.size, cost.ALLREDUCE[name](n, ranks.size)
        core = 1 << (p.bit_length() - 1)
        total, largest = sum(b for b, _ in sent), max(b for b, _ in sent)
        # What all ranks together send: along each edge of the picture, or each rank alike.
        together = {
            "ring": 2 * (p - 1) * n,
            "tree": 2 * (p - 1) * n,
            "double-tree": 2 * (p - 1) * n,
            "recursive-doubling": core * (p.bit_length() - 1) * n + 2 * (p - core) * n,
            "halving-doubling": 2 * (core - 1) * n + (p - core) * 5 * n // 2,
        }
        assert total == together[name]
        assert largest <= predicted.bytes
        if name == "ring" or (p == core and name.endswith("doubling")):
            assert set(sent) == {(predicted.bytes, predicted.steps)}

    ranks(body)


@on_ranks(*THREAD_RANKS)
def test_broadcast_and_gather(ranks):
    def body(world):
        for root in range(world.size):
            x = vector(world.rank, 100_003, "float64")
            broadcast(Group(world.link), x, root)
            np.testing.assert_array_equal(x, vector(root, 100_003, "float64"))
        said = all_gather_bytes(world.link, b"x" * world.rank)
        assert said == [b"x" * rank for rank in range(world.size)]

    ranks(body)


def test_a_planted_error_is_seen():
    """A ring that forgets one chunk must fail the comparison that all algorithms pass."""

    def forgetful(group, x, op):
        EVERY["ring"](group, x[: x.size * 3 // 4], op)

    def body(world):
        x = vector(world.rank, 1000, "int64")
        forgetful(Group(world.link), x, np.add)
        return np.array_equal(x, expected(world.size, 1000, "int64", np.add))

    assert not any(run_on("threads", 4, body))


@pytest.mark.parametrize(
    ("nbytes", "ranks", "name"),
    [
        (4, 8, "recursive-doubling"),  # the fewest steps
        (64 << 20, 8, "halving-doubling"),  # the fewest bytes, and fewer steps than a ring
        (64 << 20, 5, "ring"),  # the fewest bytes: folding would add some
        (4 << 20, 1000, "halving-doubling"),  # a ring of so many has too many steps
    ],
)
def test_auto_takes_what_the_model_says(nbytes, ranks, name):
    assert select.fastest(nbytes, ranks) == name


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "native"])
def test_16_bit_floats_are_summed_in_float32(ranks, name, dtype):
    """Each hop rounds once, by half a unit in the last place at most: the same bytes everywhere.

    So an element is within (P-1) 2^-8 (bfloat16) of its sum of magnitudes, and all elements
    together, whose leading digits differ, within half of that.
    """
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]

    def body(world):
        values = [
            np.random.default_rng(rank).standard_normal(4099).astype(kind)
            for rank in range(world.size)
        ]
        x = values[world.rank].copy()
        EVERY[name](Group(world.link), x, operation("sum", kind))
        exact = np.array([one.astype(np.float64) for one in values])
        error = np.abs(x.astype(np.float64) - exact.sum(0))
        bound = (world.size - 1) * unit * np.abs(exact).sum(0)
        assert (error <= bound).all()
        assert error.sum() <= bound.sum() / 2
        all_bytes = all_gather_bytes(world.link, x.tobytes())
        assert all(one == all_bytes[0] for one in all_bytes)

    ranks(body)
