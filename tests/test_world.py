"""The World: what ranks do together, and `allreduce` as a user calls it."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import on_ranks

from hpctrain import allreduce
from hpctrain.errors import HpctrainError, SaveError, UsageError


def refusal(function):
    """Return kind and text of the error that `function()` raises."""
    with pytest.raises(HpctrainError) as error:
        function()
    return type(error.value), str(error.value)


@on_ranks(1, 2, 3, 5, mpi=(1, 4))
def test_gather(ranks):
    texts = [f"{'ä' * rank}|" for rank in range(ranks.size)]
    assert all(seen == texts for seen in ranks(lambda world: world.gather(texts[world.rank])))


@on_ranks(1, 2, 4, mpi=(1, 4))
def test_together_returns_what_each_rank_made(ranks):
    def body(world):
        return world.together(lambda: world.rank) == world.rank

    assert all(ranks(body))


# Who fails, with which error -> the error of those that failed, that of the others
FAULTS = [
    ([1], SaveError, SaveError, UsageError),
    ([0, 2], UsageError, UsageError, UsageError),
]


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize("failing, kind, own, others", FAULTS)
def test_together_tells_all_who_failed(ranks, failing, kind, own, others):
    def body(world):
        def act():
            if world.rank in failing:
                raise kind(f"fault {world.rank}")

        seen, text = refusal(lambda: world.together(act))
        assert seen is (own if world.rank in failing else others)
        assert text == "\n".join(f"rank {r} on {world.hosts[r]}: fault {r}" for r in failing)

    ranks(body)


@on_ranks(1, 3, mpi=(1, 3))
def test_together_says_once_what_all_have_seen(ranks):
    def body(world):
        def act():
            raise UsageError("no such file")

        return refusal(lambda: world.together(act))

    assert all(seen == (UsageError, "no such file") for seen in ranks(body))


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize(
    "said, told",
    [
        ("aaa", None),
        ("aba", "rank 0 has a, but rank 1 has b"),
        ("abc", "rank 0 has a, but rank 1 has b; rank 2 has c"),
    ],
)
def test_must_agree(ranks, said, told):
    def body(world):
        def act():
            world.must_agree(said[world.rank], "it")

        if told is None:
            return act()
        text = f"it must be the same on all ranks; {told}"
        assert refusal(act) == (UsageError, text)

    ranks(body)


REDUCED = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}
PAIRS = [(op, dtype) for op in REDUCED for dtype in ("float32", "float64", "int32", "int64")
         if (op, dtype[:3]) != ("mean", "int")]  # fmt: skip


@on_ranks(1, 2, 3, 4, mpi=(1, 4))
@pytest.mark.parametrize("op, dtype", PAIRS)
def test_allreduce(ranks, op, dtype):
    inputs = np.arange(ranks.size * 10).reshape(ranks.size, 2, 5).astype(dtype) ** 2
    expected = REDUCED[op](inputs, axis=0)

    def body(world):
        x = inputs[world.rank].copy()
        allreduce(x, op=op, algorithm="ring", world=world)
        return np.array_equal(x, expected) and x.dtype == dtype

    assert all(ranks(body))


# x of a rank, further arguments -> what every rank is told
WRONG = {
    "no array": (lambda rank: [1.0], {}, "needs a NumPy array, seen list"),
    "dtype": (lambda rank: np.ones(3, complex), {}, "seen complex128"),
    "strided": (lambda rank: np.ones((4, 4))[:, ::2], {}, "use numpy.ascontiguousarray"),
    "transposed": (lambda rank: np.ones((2, 3)).T, {}, "use numpy.ascontiguousarray"),
    "op": (lambda rank: np.ones(3), {"op": "summ"}, "unknown op 'summ'; did you mean 'sum'?"),
    "mean of integers": (lambda rank: np.ones(3, int), {"op": "mean"}, "use 'sum'"),
    "algorithm": (lambda rank: np.ones(3), {"algorithm": "tre"}, "did you mean 'tree'?"),
    "lengths": (lambda rank: np.ones(3 + (rank == 1)), {}, "rank 1 has 4 float64 sum"),
    "dtypes": (lambda rank: np.ones(3, "f4" if rank else "f8"), {},
               "rank 0 has 3 float64 sum, rank 1 has 3 float32 sum, rank 2 has 3 float32 sum"),
}  # fmt: skip


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize("wrong", WRONG)
def test_allreduce_refuses(ranks, wrong):
    make, options, told = WRONG[wrong]

    def body(world):
        kind, text = refusal(lambda: allreduce(make(world.rank), world=world, **options))
        assert kind is UsageError
        assert told in text

    ranks(body)


@on_ranks(2, mpi=(2,))
def test_the_array_is_left_alone_where_ranks_differ(ranks):
    def body(world):
        x = np.full(3 + world.rank, 7.0)
        refusal(lambda: allreduce(x, world=world))
        return (x == 7).all()

    assert all(ranks(body))
