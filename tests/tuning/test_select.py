"""`auto`: from times to size thresholds, the same on every rank for any file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import dtype_of, expected, vector
from ranks import on_ranks, run_on

from hpctrain.collectives import ALLREDUCE, Group, copy_through, operation
from hpctrain.collectives.signature import make_signature
from hpctrain.core import thresholds
from hpctrain.tuning import choose, defaults, select
from hpctrain.tuning.choose import AlgorithmTime


def rows(in_memory: bool = False, **microseconds: dict[int, float]) -> list[AlgorithmTime]:
    """Return rows of algorithms, `_` standing for `-`: {bytes: us}."""
    return [
        AlgorithmTime(name.replace("_", "-"), in_memory, n, t * 1e-6)
        for name, times in microseconds.items()
        for n, t in times.items()
    ]


# What was measured -> the thresholds.
STAIRS = [
    (rows(ring={8: 5}), ((0, "ring"),)),
    (rows(tree={4: 1, 16: 1}, ring={4: 9, 16: 9}), ((0, "tree"),)),
    (rows(tree={4: 1, 16: 4}, ring={4: 4, 16: 1}), ((0, "tree"), (8, "ring"))),  # lines cross
    (rows(tree={4: 1, 16: 4}, ring={16: 1}), ((0, "tree"), (8, "ring"))),  # hopeless at 4
    (rows(tree={4: 1}, ring={4: 4, 16: 1}), ((0, "tree"), (8, "ring"))),  # left out at 16
    (rows(tree={4: 1, 16: 1.04}, ring={4: 2, 16: 1}), ((0, "tree"),)),  # 4 % is noise
    (rows(tree={4: 1, 16: 1.06}, ring={4: 2, 16: 1}), ((0, "tree"), (14, "ring"))),
    (rows(tree={4: 1, 16: 1, 64: 1}, ring={4: 2, 16: 0.97, 64: 2}), ((0, "tree"),)),
    (rows(null={4: 1}, ring={4: 9}), ((0, "ring"),)),  # null reduces nothing
    (rows(nccl={4: 1}, ring={4: 9}), ((0, "ring"),)),  # not an algorithm of this version
    ([], ((0, "recursive-doubling"),)),
]


@pytest.mark.parametrize(("measured", "steps"), STAIRS)
def test_steps(measured, steps):
    assert choose.make_plan(measured, (), True).default == steps


def test_arrays_in_memory_and_dtypes_of_ours_have_their_own_steps():
    measured = [
        *rows(native={4: 1, 4096: 90}, tree={4: 5, 4096: 9}),
        *rows(True, native={4: 1, 4096: 90}, tree={4: 5, 4096: 9}, ring={4: 50, 4096: 5}),
    ]
    plan = choose.make_plan(measured, (), True)
    result = choose.make_choices(plan)
    reported = ("native native tree", "tree native tree", "tree ring tree")
    named = [[ALLREDUCE[name] for name in row.split()] for row in reported]
    assert [list(choice) for choice in result.choices] == named
    assert result.lookup(result.start_bytes[0] - 1) == tuple(named[0])
    assert result.lookup(result.start_bytes[0]) == tuple(named[1])
    assert result.lookup(1 << 40) == tuple(named[2])


@pytest.mark.parametrize(
    ("nbytes", "ranks", "name"),
    [
        (4, 8, "recursive-doubling"),  # the fewest steps
        (64 << 20, 8, "halving-doubling"),  # the fewest bytes, and fewer steps than a ring
        (64 << 20, 5, "ring"),  # the fewest bytes: folding would add some
        (4 << 20, 1000, "halving-doubling"),  # a ring of so many has too many steps
    ],
)
def test_without_a_table_the_model_chooses(nbytes, ranks, name):
    plan = defaults.default_plan(defaults.NodeLayout((ranks,)))
    assert (
        thresholds.lookup(plan.default, nbytes) == thresholds.lookup(plan.non_mpi, nbytes) == name
    )
    assert (
        thresholds.lookup(
            defaults.default_plan(defaults.NodeLayout((ranks,), uses_mpi=True)).non_mpi, nbytes
        )
        == name
    )


def test_the_library_is_taken_for_short_arrays_only():
    for nodes in ((2,), (4,), (2, 2)):
        plan = defaults.default_plan(defaults.NodeLayout(nodes, uses_mpi=True))
        assert (
            thresholds.lookup(plan.default, 4)
            == "native"
            != thresholds.lookup(plan.default, 64 << 20)
        )


@on_ranks(1, 2, 3, mpi=(1, 3))
def test_auto_and_a_bound_call_reduce(ranks):
    """Of every kind of array, also where the choice is one that the dtype does not allow."""

    def body(world):
        plan = choose.TuningPlan(((0, "native"),), ((0, "ring"),), ((0, "tree"),), (), True)
        group = Group(world.link, memory=world.memory, choices=choose.make_choices(plan))
        for dtype, saved, name in [
            ("float32", False, "native"),
            ("float32", True, "ring" if world.size > 1 else "native"),  # nobody to see it
            ("float16", False, "tree"),
            ("bfloat16", False, "tree"),
        ]:
            x = (
                world.memory.zeros(1003, dtype_of(dtype))
                if saved
                else np.empty(1003, dtype_of(dtype))
            )
            op = operation("sum", x.dtype)
            call = select.bind(group, x, op, select.choose_algorithm(group, x, op))
            for reduce in (call, lambda x=x, op=op: select.auto(group, x, op)):
                x[:] = vector(world.rank, 1003, dtype)
                reduce()
                assert x.tobytes() == expected(world.size, 1003, dtype, "sum").tobytes()
            assert select.choose_algorithm(group, x, op) is ALLREDUCE[name]
            if dtype == "float32":
                assert select.algorithm_name(select.auto, group, x) == name

    ranks(body)


@on_ranks(2, 3)
def test_two_ranks_compare_calls_in_the_exchange_that_adds(ranks):
    """A compared call of few bytes is no longer MPI's, since two operands add up either way."""
    plan = choose.TuningPlan(((0, "native"),), ((0, "native"),), ((0, "ring"),), (), True)

    def body(world):
        group = replace(world.main, choices=choose.make_choices(plan))
        compared = make_signature("a call")
        through_copies = [
            select.bind(group, np.zeros(n), np.add, allreduce, call).__module__
            == copy_through.__name__
            for n, allreduce, call in [
                (1, select.auto, compared),
                (1, select.auto, None),
                (1, ALLREDUCE["native"], compared),
                (1025, select.auto, compared),
            ]
        ]
        assert through_copies == [world.size == 2, False, False, False]

    ranks(body)


@on_ranks(2, 3, mpi=(3,))
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_with_arrays_in_different_memory_take_the_same(ranks, nodes):
    def body(world):
        plan = choose.TuningPlan(((0, "tree"),), ((0, "ring"),), ((0, "tree"),), (), True)
        group = replace(world.main, choices=choose.make_choices(plan))
        # Those of another node see no flags of ours.
        group = replace(group, nodes=group.nodes if nodes == 1 else (*group.nodes, ()))
        mixed = world.memory.zeros(5, np.float32)
        for x, name in ((mixed, "ring"), (mixed if world.rank else np.zeros(5), "tree")):
            assert select.choose_algorithm(group, x, np.add) is ALLREDUCE[name]

    ranks(body)


# bytes of a bucket: seconds per byte -> the bucket of a plane of so many bytes
MIB = 1 << 20
BUCKETS = [
    ({MIB: 1e-9, 4 * MIB: 1e-9, 16 * MIB: 1e-9}, 64 * MIB, MIB),  # flat: the shortest hides best
    ({MIB: 9e-9, 4 * MIB: 1e-9, 16 * MIB: 1e-9}, 64 * MIB, 4 * MIB),  # where it flattens
    ({MIB: 9e-9, 4 * MIB: 4e-9, 16 * MIB: 1e-9}, 64 * MIB, 16 * MIB),  # long ones are cheaper
    ({MIB: 9e-9, 4 * MIB: 4e-9, 16 * MIB: 1e-9}, 4 * MIB, 4 * MIB),  # none longer than the plane
    ({MIB: 1e-14, 4 * MIB: 1e-14}, 64 * MIB, 4 * MIB),  # hand-offs are all that costs
    ({MIB: 1e-9}, 100, MIB),
    ({MIB: 9e-9, 4 * MIB: 1e-9}, 100, MIB),  # all are longer than the plane
]


def of(nbytes: int) -> np.ndarray:
    """Return a plane so long, of one byte."""
    return np.broadcast_to(np.uint8(0), nbytes)


@pytest.mark.parametrize(("costs", "plane", "target"), BUCKETS)
def test_bucket_bytes(costs, plane, target):
    plan = choose.TuningPlan(
        ((0, "ring"),), ((0, "ring"),), ((0, "ring"),), tuple(costs.items()), True
    )
    assert select.bucket_bytes(Group(None, choices=choose.make_choices(plan)), of(plane)) == target


def test_bucket_bytes_of_the_model_grow_with_the_plane():
    def body(world):
        return [select.bucket_bytes(world.main, of(1 << i)) for i in range(10, 34)]

    result = run_on("threads", 3, body)[2]
    assert result == sorted(result) and 64 << 10 <= result[0] < result[-1] <= 64 << 20


# Spreads of the fastest at each size -> what the table is told; `tree` is slower and never counts.
NOISE = [
    ([0.1, 0.02, 0.24, 0.0], None),
    ([0.02, 0.02, 0.02, 0.9], 0.9),
    ([0.02, 0.02, 0.02, 0.02, 0.9], None),  # one size of five: less than a quarter
    ([0.3, 0.3, 0.3, 0.5], 0.5),
    ([None, 0.4], 0.4),
    ([None, None], None),
    ([], None),
]


@pytest.mark.parametrize(("spreads", "reported"), NOISE)
def test_a_table_of_a_busy_machine_is_noisy(spreads, reported):
    fastest = [
        AlgorithmTime("ring", False, 4 << i, 1e-6, spread) for i, spread in enumerate(spreads)
    ]
    rest = [AlgorithmTime("tree", False, row.bytes, 2e-6, 5.0) for row in fastest]
    assert choose.find_noise(rest + fastest) == reported
