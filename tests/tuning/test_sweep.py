"""The measurements of `hpctrain tune`: dropped candidates, duration, results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.tuning import choose, select, sweep
from hpctrain.tuning.alpha_beta import measure_constants, measured_pairs
from hpctrain.tuning.choose import AlgorithmTime

KIB, MIB = 1 << 10, 1 << 20
#: Seconds of a call, made up: native is best, ring good, tree slow, double-tree hopeless.
FACTORS = {"native": 1.0, "ring": 1.5, "tree": 3.0, "double-tree": 5.0}


def even(name, nbytes):
    return FACTORS[name] * nbytes * 1e-9


def measured(monkeypatch, sizes, rounds=5, limit_s=1e9, steps=0.0, slower=1.0, took=even):
    """Return the rows that one rank finds, and how often each was timed at each size.

    A call took `took(name, nbytes)` seconds; from the fourth round on the machine is `slower`. A
    look at the clock finds `steps` seconds gone since the last.
    """
    counts: Counter = Counter()
    now = iter(np.arange(10_000) * steps)

    def bind(group, x, op, allreduce):
        return lambda: (select.algorithm_name(allreduce, group, x), x.nbytes)

    def timed(link, call, calls, on):
        name, nbytes = call()
        counts[name, nbytes] += 1
        # The first round is another process's.
        now_slower = slower if counts[name, nbytes] > sweep.MIN_ROUNDS else 1.0
        return 1.0 if counts[name, nbytes] == 1 else took(name, nbytes) * now_slower

    def body(world):
        monkeypatch.setattr(sweep, "time_calls", timed)
        monkeypatch.setattr(sweep, "perf_counter", lambda: float(next(now)))
        monkeypatch.setattr(sweep, "applicable_algorithms", lambda group, xp: list(FACTORS))
        monkeypatch.setattr(select, "bind", bind)
        *_, rows = sweep.sweep(world.main, sizes, rounds, limit_s)
        return rows

    return run_on("threads", 1, body)[0], counts


def test_who_is_slow_leaves(monkeypatch):
    rows, counts = measured(monkeypatch, [KIB, 2 * MIB])
    for size in (KIB, 2 * MIB):
        assert counts["native", size] == counts["ring", size] == 5
        assert counts["tree", size] == counts["double-tree", size] == 3
    assert (
        AlgorithmTime("ring", False, KIB, 1.5 * KIB * 1e-9, spread=0.0) in rows
    )  # one slow round of five
    assert {row.algorithm for row in rows if row.spread is None} == {"tree", "double-tree"}
    assert sum(row.bytes == KIB for row in rows) == 4


def test_who_has_left_is_not_taken_because_the_machine_became_slower(monkeypatch):
    rows, _ = measured(monkeypatch, [KIB], rounds=20, slower=10.0)
    seconds = {row.algorithm: row.seconds / (KIB * 1e-9) for row in rows}
    assert seconds == pytest.approx({"native": 10, "ring": 15, "tree": 30, "double-tree": 50})


@pytest.mark.parametrize(("limit_s", "rounds"), [(0.0, 3), (9.5, 4), (1e9, 50)])
def test_no_round_is_begun_that_would_not_be_done_in_time(monkeypatch, limit_s, rounds):
    """A round takes 1 s here, and as long passes between two; a fifth is kept for a second look."""
    _, counts = measured(monkeypatch, [KIB], rounds=50, limit_s=limit_s, steps=1.0)
    assert counts["native", KIB] == rounds


def jumps(at):
    """Return times of calls: native is best up to `at` bytes, then three times as slow."""

    def took(name, nbytes):
        if name == "native":
            return 0.9e-6 if nbytes < at else 2.7e-6
        return {"ring": 1.05e-6, "tree": 3e-6, "double-tree": 5e-6}[name]

    return took


def trees(name, nbytes):
    """Native far ahead of a tree at 2 KiB, a ring far ahead of both at 4 KiB."""
    slow = {"native": 1, "tree": 4, "ring": 9} if nbytes < 4 * KIB else {"ring": 1}
    return slow.get(name, 20) * 1e-6


#: What calls took -> who is measured at 3 KiB, for how many rounds; where `auto` steps to the ring.
#: From rows at 2 and 4 KiB alone the step would be at 2257, 2257 and 2746.
JUMPS = [
    (jumps(4 * KIB), {"native": 5, "ring": 5}, 3199),
    (jumps(3 * KIB), {"native": 3, "ring": 5}, 2168),
    (trees, {"native": 5, "tree": 3, "ring": 3}, 3470),
    (even, {}, None),
]


@pytest.mark.parametrize(("took", "rounds", "step"), JUMPS)
def test_between_two_picks_the_middle_is_measured_too(monkeypatch, took, rounds, step):
    rows, counts = measured(monkeypatch, [2 * KIB, 4 * KIB], took=took)
    assert {name: counts[name, 3 * KIB] for name in rounds} == rounds
    assert {row.algorithm for row in rows if row.bytes == 3 * KIB} == set(rounds)
    plan = choose.make_plan(rows, (), measured=True)
    assert plan.default == ((0, "native"), *([(step, "ring")] if step else []))
    assert plan.non_mpi[0] == (0, "tree" if took is trees else "ring")


def test_the_middle_is_measured_in_the_time_that_was_kept(monkeypatch):
    """A round takes 1 s, and as long passes between two: five fit into 80 % of 12 s."""
    took = jumps(4 * KIB)
    _, counts = measured(monkeypatch, [2 * KIB, 4 * KIB], 50, 12.0, steps=1.0, took=took)
    assert counts["ring", 2 * KIB] == 5
    assert counts["ring", 3 * KIB] == sweep.MIN_ROUNDS  # however little is left


@pytest.mark.sample(1)
@on_ranks(2, 3, mpi=(2, 3))
def test_all_ranks_find_the_same(ranks, monkeypatch):
    result = [(4, 70_000, {"native", "ring", "direct"})]  # sets have an order of their own per rank
    monkeypatch.setattr(choose, "find_changes", lambda rows: result)

    def body(world):
        group = world.main
        *_, rows = sweep.sweep(group, [4, 70_000], 3, 1e9)
        return rows, sweep.measure_buckets(group, rows, 200_000, 1), measure_constants(group, 1)

    results = ranks(body)
    for rows, buckets, (node, across) in results:
        assert (rows, buckets, (node, across)) == results[0]
        assert {row.bytes for row in rows} == {4, 35_000, 70_000}
        names = {(row.algorithm, row.in_memory) for row in rows}
        assert {("direct", True), ("native", False), ("ring", True)} <= names
        assert not {("null", False), ("hierarchical", False)} & names
        assert [n for n, _ in buckets] == [64 * KIB, 128 * KIB]
        assert across is None and min(node.alpha, node.beta, node.gamma) > 0


@pytest.mark.parametrize(
    ("nodes", "inside", "across"),
    [
        ([[0, 1]], (0, 1), None),
        ([[0], [1]], None, (0, 1)),
        ([[0, 2], [1, 3]], (0, 2), (0, 1)),
        ([[0], [1, 2]], (1, 2), (0, 1)),
    ],
)
def test_between_whom_alpha_and_beta_are_measured(nodes, inside, across):
    class Group:
        pass

    group = Group()
    group.nodes = nodes
    assert measured_pairs(group) == (inside, across)
