"""The reducer: buckets are sent in one order during backward; faults are raised in wait()."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct_shared
from hpctrain.collectives.ring import ring
from hpctrain.core.errors import HpctrainError
from hpctrain.engines.synchronous.overlap import first_needed
from hpctrain.gradients import arena as arenas
from hpctrain.gradients import reducer as reducing
from hpctrain.gradients.buckets import cut_buckets
from hpctrain.gradients.reducer import Reducer, first_ready

SHAPES = dict.fromkeys("abcdef", (100,))


def reducer_of(world, allreduce=ring, concurrent=True, priority=False):
    arena = arenas.make_arena(SHAPES, "float64")
    buckets = cut_buckets(arena.slots, arena.grad.size, 8, 1600)  # two slots each
    group = Group(world.link)
    return arena, Reducer(
        arena.grad, buckets, group, allreduce, concurrent,
        send_order=first_needed if priority else first_ready,
    )  # fmt: skip


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("order", ["fedcba", "abcdef", "cfadbe"])
@on_ranks(1, 2, 3, 4)
def test_sums_whatever_the_order_in_which_gradients_arrive(ranks, order, concurrent):
    def body(world):
        arena, reducer = reducer_of(world, concurrent=concurrent)
        for step in range(3):
            arena.grad[:] = world.rank + step
            for name in order:
                reducer.mark_ready(name)
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
        reducer.mark_ready("f")
        reducer.mark_ready("e")
        assert arrived.wait(10), "the full bucket was not sent before wait()"
        assert (arena.views(arena.grad)["f"] == 2).all()
        assert (arena.views(arena.grad)["a"] == 1).all()
        for name in "dcba":
            reducer.mark_ready(name)
        reducer.wait()
        reducer.close()

    run_on("threads", 2, body)


@pytest.mark.parametrize(("late", "order"), [((), [0, 2, 1]), ((1,), [0, 1, 2])])
def test_with_priority_the_last_bucket_that_is_ready_everywhere_goes_first(late, order):
    """While bucket 0 travels the others get ready; bucket 2, on ranks that are late, after 1."""

    def body(world):
        sent: list[int] = []
        first, extra, second = (threading.Semaphore(0) for _ in range(3))

        def allreduce(group, x, op):
            ring(group, x, op)
            sent.append(int(x[0]) // 2)
            if len(sent) == 1:
                first.release()
                extra.acquire(timeout=10)
            elif len(sent) == 2:
                second.release()

        arena, reducer = reducer_of(world, allreduce, priority=True)
        for step in range(2):
            sent.clear()
            for number, name in enumerate("fedcba"):
                arena.views(arena.grad)[name][:] = number // 2
                if name == "d":
                    first.acquire(timeout=10)
                if name == "b" and world.rank in late:
                    extra.release()
                    second.acquire(timeout=10)
                reducer.mark_ready(name)
            if world.rank not in late:
                extra.release()
                second.acquire(timeout=10)
            total = arena.views(reducer.wait())
            assert [int(total[name][0]) for name in "fedcba"] == [0, 0, 2, 2, 4, 4]
            assert sent == order, step
        reducer.close()

    run_on("threads", 2, body)


@pytest.mark.parametrize("concurrent", [True, False])
def test_who_needs_a_bucket_is_given_those_that_are_in_before_it(concurrent):
    def body(world):
        arena, reducer = reducer_of(world, concurrent=concurrent)
        arena.grad[:] = 1
        for name in "fedcba":
            reducer.mark_ready(name)
        reducer.finish_backward()
        due, chosen = {0, 1, 2}, []
        while 2 in due:
            chosen.append(reducer.wait_for_any(due, 2))
            due.discard(chosen[-1])
        assert chosen[-1] == 2
        assert sorted([*chosen, *due]) == [0, 1, 2]
        assert all((reducer.wait_for(number) == world.size).all() for number in range(3))
        assert reducer.wait_for_any({0, 1}, 0) == 0, "the one that is needed"
        assert reducer.wait_for_any({0, 1}, 2) == 1, "else the one that is needed next"
        reducer.close()

    run_on("threads", 2, body)


@pytest.mark.parametrize("slots", ["abcdef", "a"])
@on_ranks(2, 3, mpi=(2, 3))
def test_the_sum_may_lie_in_the_plane_of_the_first_rank(ranks, slots):
    """Long buckets are summed there, and short ones in each plane: `wait` returns what has all."""

    def body(world):
        lengths = {name: 2000 if name in slots else 100 for name in "abcdef"}
        arena = arenas.make_arena({name: (n,) for name, n in lengths.items()}, "float64")
        arena = replace(arena, grad=world.memory.zeros(arena.grad.size, arena.grad.dtype))
        buckets = cut_buckets(arena.slots, arena.grad.size, 8, 1)
        group = world.threads.group_for("wire")
        reducer = Reducer(arena.grad, buckets, group, direct_shared, world.concurrent)
        for step in range(3):
            arena.grad[:] = world.rank + step
            for name in "fedcba":
                reducer.mark_ready(name)
            total = reducer.wait()
            assert (total == sum(range(world.size)) + step * world.size).all()
            if slots == "abcdef":
                assert (total is arena.grad) == (world.rank == 0)
            reducer.release()
        reducer.close()

    ranks(body)


@pytest.mark.parametrize(
    ("fired", "fault"),
    [("fedcb", "never fired for slots: a"), ("", "slots: a, b, c, d, e, f"), ("ff", "twice.*'f'")],
)
def test_a_slot_that_is_not_ready_exactly_once_is_named(fired, fault):
    def body(world):
        _, reducer = reducer_of(world)
        with pytest.raises(HpctrainError, match=fault):
            for name in fired:
                reducer.mark_ready(name)
            reducer.wait()
        reducer.close()

    run_on("threads", 1, body)


def test_an_error_in_the_communication_thread_is_raised_by_wait():
    def broken(group, x, op):
        raise ZeroDivisionError("planted")

    def body(world):
        _, reducer = reducer_of(world, broken)
        for name in "fedcba":
            reducer.mark_ready(name)
        with pytest.raises(ZeroDivisionError, match="planted"):
            reducer.wait()

    run_on("threads", 1, body)


def test_the_end_of_the_communication_thread_is_an_error(monkeypatch):
    monkeypatch.setattr(reducing, "_run_thread", lambda *_: None)

    def body(world):
        _, reducer = reducer_of(world, ring)
        for name in "fedcba":
            reducer.mark_ready(name)
        with pytest.raises(HpctrainError, match="communication thread has ended"):
            reducer.wait()

    run_on("threads", 1, body)


def test_no_step_allocates_after_the_first():
    """The scratch of a group is kept: the memory it hands out is the same each time."""
    group = Group(link=None)
    first = group.scratch.buffer_like(np.zeros(100)).ctypes.data
    assert group.scratch.buffer_like(np.zeros(10, np.int32)).ctypes.data == first
    assert group.scratch.buffer_like(np.zeros(100, np.float32)).ctypes.data == first
