"""Timing loops: interleaved, as often as requested; the slowest rank counts."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial

from ranks import on_ranks, run_on

from hpctrain.tuning.measure import median_ratio, summarize_times, time_calls, time_interleaved


@on_ranks(1, 3, mpi=(2,))
def test_rivals_are_taken_in_turn(ranks):
    def body(world):
        order = []
        rivals = {name: partial(order.append, name) for name in "ab"}
        seconds = time_interleaved(world.link, rivals, rounds=2, warm_up=1, calls=2)
        return order, seconds

    for order, seconds in ranks(body):
        assert "".join(order) == "aabb" * 3
        assert {name: len(chosen) for name, chosen in seconds.items()} == {"a": 2, "b": 2}


def test_the_slowest_rank_counts_for_all():
    def body(world):
        return time_calls(world.link, lambda: time.sleep(0.05 * world.rank), calls=2)

    first, *rest = run_on("threads", 3, body)
    assert first >= 0.1 and all(item == first for item in rest)


def test_spread_and_ratio():
    assert summarize_times([1.0, 2.0, 9.0])["median_s"] == 2.0
    assert summarize_times([1.0, 2.0, 9.0])["spread"] == 2.0  # (5.5 - 1.5) / 2
    assert median_ratio([2.0, 8.0, 3.0], [1.0, 2.0, 1.0]) == 3.0


def test_what_a_rival_is_given_lasts_for_its_turns_only():
    order = []

    @contextmanager
    def awake():
        order.append("<")
        yield
        order.append(">")

    def body(world):
        rivals = {name: partial(order.append, name) for name in "ab"}
        time_interleaved(world.link, rivals, rounds=1, warm_up=1, contexts={"b": awake})

    run_on("threads", 1, body)
    assert "".join(order) == "a<b>" * 2
