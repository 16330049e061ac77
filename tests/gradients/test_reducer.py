"""Buckets leave in one order while gradients still arrive, and every fault comes out at wait()."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.collectives import Group
from hpctrain.collectives.ring import ring
from hpctrain.errors import HpctrainError
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.buckets import cut
from hpctrain.gradients.reducer import Reducer

SHAPES = dict.fromkeys("abcdef", (100,))


def reducer_of(world, allreduce=ring, concurrent=True):
    arena = arenas.make(SHAPES, "float64")
    buckets = cut(arena.slots, arena.grad.size, 8, 1600)  # two slots each
    return arena, Reducer(arena.grad, buckets, Group(world.link), allreduce, concurrent)


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("order", ["fedcba", "abcdef", "cfadbe"])
@on_ranks(1, 2, 3, 4)
def test_sums_whatever_the_order_in_which_gradients_arrive(ranks, order, concurrent):
    def body(world):
        arena, reducer = reducer_of(world, concurrent=concurrent)
        for step in range(3):
            arena.grad[:] = world.rank + step
            for name in order:
                reducer.ready(name)
            total = reducer.wait()
            assert (total == sum(range(world.size)) + step * world.size).all()
        reducer.close()

    ranks(body)


def test_a_bucket_travels_while_later_gradients_are_still_missing():
    def body(world):
        arrived = threading.Event()

        def allreduce(group, x, op):
            ring(group, x, op)
            arrived.set()

        arena, reducer = reducer_of(world, allreduce)
        arena.grad[:] = 1
        reducer.ready("f")
        reducer.ready("e")
        assert arrived.wait(10), "the full bucket was not sent before wait()"
        assert (arena.views(arena.grad)["f"] == 2).all()
        assert (arena.views(arena.grad)["a"] == 1).all()
        for name in "dcba":
            reducer.ready(name)
        reducer.wait()
        reducer.close()

    run_on("threads", 2, body)


@pytest.mark.parametrize(
    ("fired", "fault"),
    [("fedcb", "never fired for slots: a"), ("", "slots: a, b, c, d, e, f"), ("ff", "twice.*'f'")],
)
def test_a_slot_that_is_not_ready_exactly_once_is_named(fired, fault):
    def body(world):
        _, reducer = reducer_of(world)
        with pytest.raises(HpctrainError, match=fault):
            for name in fired:
                reducer.ready(name)
            reducer.wait()
        reducer.close()

    run_on("threads", 1, body)


def test_an_error_in_the_communication_thread_is_raised_by_wait():
    def broken(group, x, op):
        raise ZeroDivisionError("planted")

    def body(world):
        _, reducer = reducer_of(world, broken)
        for name in "fedcba":
            reducer.ready(name)
        with pytest.raises(ZeroDivisionError, match="planted"):
            reducer.wait()

    run_on("threads", 1, body)


def test_no_step_allocates_after_the_first():
    """The scratch of a group is kept: the memory it hands out is the same each time."""
    group = Group(link=None)
    first = group.scratch.like(np.zeros(100)).ctypes.data
    assert group.scratch.like(np.zeros(10, np.int32)).ctypes.data == first
    assert group.scratch.like(np.zeros(100, np.float32)).ctypes.data == first
