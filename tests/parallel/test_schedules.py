"""Pipeline schedules against the formulas of their papers, and against planted errors."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from oracles.pipelines import makespan, simulate

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import LOOPED, SCHEDULES, make
from hpctrain.parallel.schedules.actions import Action, PipelineSchedule, action_lists
from hpctrain.parallel.schedules.check import check, execution_order, needs
from hpctrain.parallel.schedules.messages import destination, inbound, outbound, source

UNIT = {"F": 1, "I": 1, "W": 1, "B": 2}


def admitted(name: str, ranks: int, micro_batches: int) -> bool:
    return name != "interleaved" or micro_batches % ranks == 0


def step(schedule: PipelineSchedule, costs=UNIT, **options) -> Fraction:
    """Return the makespan in times of a rank's whole share of the layers."""
    share = schedule.stages_per_rank
    times = simulate(
        schedule, lambda group: Fraction(sum(costs[a.op] for a in group), share), **options
    )
    return makespan(times)


#: name: (bubble, peak of activations on rank r in whole ranks' shares), for F = I = W = 1, by
#: (P, M, v, r); zb-v's bubble is the least that any schedule has
FORMULAS = {
    "gpipe": (lambda p, m, v: 3 * (p - 1), lambda p, m, v, r: m),
    "1f1b": (lambda p, m, v: 3 * (p - 1), lambda p, m, v, r: p - r),
    "interleaved": (
        lambda p, m, v: Fraction(3 * (p - 1), v),
        lambda p, m, v, r: min(Fraction(2 * (p - 1 - r) + (v - 1) * p + 1, v), m),
    ),
    "breadth-first": (lambda p, m, v: Fraction(3 * (p - 1), v), lambda p, m, v, r: m),
    "zb-h1": (lambda p, m, v: p - 1, lambda p, m, v, r: p),
    "zb-v": (lambda p, m, v: Fraction(p - 1, 2), lambda p, m, v, r: p),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", FORMULAS)
def test_steps_and_memory_are_those_of_the_papers(name, ranks):
    bubble, peak = FORMULAS[name]
    least = 2 * ranks if name == "zb-v" else ranks
    for micro_batches in (m for m in range(max(4, least), 33) if admitted(name, ranks, m)):
        for v in (2, 3, 4) if name in LOOPED else (None,):
            schedule = make(name, ranks, micro_batches, v)
            args = ranks, micro_batches, schedule.stages_per_rank
            assert step(schedule) == 3 * micro_batches + bubble(*args)
            assert check(schedule).peak_activations == tuple(
                args[2] * peak(*args, rank) for rank in range(ranks)
            )


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_its_check(name, ranks):
    for micro_batches in (m for m in range(1, 2 * ranks + 4) if admitted(name, ranks, m)):
        schedule = make(name, ranks, micro_batches)
        report = check(schedule, boundary_bytes=10)
        assert step(schedule) >= 3 * micro_batches
        between_ranks = sum(a != b for a, b in pairwise(schedule.placement))
        assert sum(report.messages.values()) == 2 * micro_batches * between_ranks
        assert {pair: 10 * n for pair, n in report.messages.items()} == report.bytes


#: (F, I, W): seconds of a stage
COSTS = [(1, 1, 1), (2, 3, 1), (2, 2, 1), (3, 3, 2)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bubbles_are_those_of_the_table_of_deepseek(ranks, costs):
    """1F1B (P-1)(F+B), ZB1P (P-1)(F+B-2W), DualPipe-V (P-1)(F&B+B-3W), where B = I+W.

    The last counts a forward and a backward side by side as one: F&B; hpctrain runs one after the
    other, and sends the output of each at once, so that its bubble is at most as large.
    """
    forward, inputs, weights = costs
    backward = inputs + weights
    seconds = {"F": forward, "I": inputs, "W": weights, "B": backward}
    micro_batches = 2 * ranks + 1
    ideal = micro_batches * sum(costs)
    one_f_one_b, zb1p = (step(make(n, ranks, micro_batches), seconds) for n in ("1f1b", "zb-h1"))
    assert one_f_one_b - ideal == (ranks - 1) * (forward + backward)
    assert zb1p - ideal == (ranks - 1) * (forward + backward - 2 * weights)
    dualpipe = make("dualpipe-v", ranks, micro_batches)
    bubble = step(dualpipe, seconds, fuse=True) - ideal
    assert bubble == Fraction((ranks - 1) * (forward + 2 * backward - 3 * weights), 2)
    assert step(dualpipe, seconds) - ideal <= bubble
    assert set(check(dualpipe).peak_activations) <= {2 * ranks + 1, 2 * ranks}


@pytest.mark.parametrize(("ranks", "side_by_side"), [(2, 5), (4, 5), (8, 4)])
def test_a_forward_and_a_backward_side_by_side_may_take_less_time(ranks, side_by_side):
    """With F&B < F+B the idle time of the last rank is DeepSeek's formula."""
    seconds = {"F": 2, "I": 3, "W": 1, "B": 4}
    times = simulate(
        make("dualpipe-v", ranks, 2 * ranks),
        lambda g: Fraction(side_by_side if len(g) == 2 else seconds[g[0].op], 2),
        fuse=True,
    )
    busy = sum(end - start for start, end in times[-1])
    assert makespan(times) - busy == Fraction((ranks - 1) * (side_by_side + 4 - 3), 2)


def swap(schedule: PipelineSchedule, rank: int, i: int, j: int) -> PipelineSchedule:
    lists = [list(actions) for actions in schedule.actions]
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    return replace(schedule, actions=action_lists(lists))


def in_order(schedule: PipelineSchedule) -> bool:
    """Return whether each stage takes each operation in the order of micro-batches."""
    for rank, stage in ((r, s) for s, r in enumerate(schedule.placement)):
        for ops in ("F", "IB", "WB"):
            chosen = [a for a in schedule.actions[rank] if a.stage == stage and a.op in ops]
            if chosen != sorted(chosen, key=lambda action: action.micro):
                return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_swapped_actions_are_refused_unless_they_do_no_harm(name):
    random, refusals = np.random.default_rng(7), 0
    schedule = make(name, 4, 8)
    for _ in range(60):
        rank = int(random.integers(4))
        i, j = random.choice(len(schedule.actions[rank]), 2, replace=False)
        swapped = swap(schedule, rank, i, j)
        runs = simulate(swapped, lambda group: Fraction(1)) is not None
        if runs and in_order(swapped):
            check(swapped)
            continue
        refusals += 1
        with pytest.raises(UsageError, match=r"deadlock|takes micro-batches in order"):
            check(swapped)
    assert refusals > 20


def without(schedule: PipelineSchedule, action: Action) -> PipelineSchedule:
    return replace(
        schedule, actions=action_lists([a for a in of if a != action] for of in schedule.actions)
    )


def with_action(schedule: PipelineSchedule, rank: int, action: Action) -> PipelineSchedule:
    lists = [(*of, action) if r == rank else of for r, of in enumerate(schedule.actions)]
    return replace(schedule, actions=tuple(lists))


ZB_H1, ONE_F_ONE_B = make("zb-h1", 4, 8), make("1f1b", 4, 8)
#: (schedule, what the refusal says)
FAULTS = {
    "no W": (without(ZB_H1, Action("W", 2, 5)), "rank 2, stage 2, micro-batch 5: .*seen F I$"),
    "no F": (without(ZB_H1, Action("F", 0, 0)), "rank 0, stage 0, micro-batch 0: .*seen I W$"),
    "nothing": (
        without(without(ONE_F_ONE_B, Action("F", 3, 1)), Action("B", 3, 1)),
        "rank 3, stage 3, micro-batch 1: .*seen no action$",
    ),
    "F twice": (with_action(ONE_F_ONE_B, 1, Action("F", 1, 3)), "rank 1, .* seen F F B"),
    "B and W": (with_action(ONE_F_ONE_B, 1, Action("W", 1, 3)), "rank 1, .* seen F B W"),
    "another rank's": (
        with_action(ONE_F_ONE_B, 1, Action("F", 2, 3)),
        "rank 1: F of micro-batch 3 in stage 2, which is on rank 2; move",
    ),
    "no such stage": (
        with_action(ONE_F_ONE_B, 1, Action("F", 4, 3)),
        "expected 4 stages and 8 micro-batches, seen F of micro-batch 3 in stage 4",
    ),
    "deadlock": (
        swap(ONE_F_ONE_B, 3, 0, 1),
        "deadlock; .*rank 3, action 0: B of micro-batch 0 in stage 3 waits for "
        "F of micro-batch 0 in stage 3 of rank 3",
    ),
    "order": (
        swap(make("gpipe", 2, 4), 1, 0, 1),
        "rank 1, stage 1: expected F of micro-batch 0, seen F of micro-batch 1 in stage 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(fault):
    schedule, message = FAULTS[fault]
    with pytest.raises(UsageError, match=message):
        check(schedule)


def needed(schedule: PipelineSchedule, rank: int) -> dict[int, tuple]:
    """Return the messages from each peer in the order in which `rank` needs them."""
    result: dict[int, tuple] = {}
    for action in schedule.actions[rank]:
        message = source(schedule, action)
        if message is not None and message[0] != rank:
            result[message[0]] = (*result.get(message[0], ()), message[1])
    return result


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_messages_that_arrive_are_those_that_are_needed(name):
    for ranks in (1, 2, 3, 4):
        schedule = make(name, ranks, 2 * ranks)
        for rank in range(ranks):
            arrivals, uses = inbound(schedule, rank), needed(schedule, rank)
            assert {p: sorted(m) for p, m in arrivals.items()} == {
                p: sorted(m) for p, m in uses.items()
            }


def test_messages_arrive_in_another_order_than_that_of_need():
    """At P = 2 rank 1 of zb-v needs messages in another order than rank 0 sends them."""
    schedule = make("zb-v", 2, 4)
    assert inbound(schedule, 1) != needed(schedule, 1)


def test_messages_of_neighbouring_stages():
    schedule = make("zb-v", 2, 4)  # stages 0 and 3 on rank 0, 1 and 2 on rank 1
    assert destination(schedule, Action("F", 0, 3)) == (1, ("activation", 1, 3))
    assert destination(schedule, Action("F", 1, 3)) == (1, ("activation", 2, 3))  # tip of the V
    assert destination(schedule, Action("I", 3, 1)) == (1, ("gradient", 2, 1))
    for action in (Action("W", 3, 1), Action("I", 0, 1), Action("F", 3, 0)):
        assert destination(schedule, action) is None
    assert source(schedule, Action("F", 1, 3)) == (0, ("activation", 1, 3))
    assert source(schedule, Action("I", 2, 1)) == (0, ("gradient", 2, 1))
    assert source(schedule, Action("I", 3, 1)) is None
    assert [peer for peer, _ in outbound(schedule, 1)] == [0] * 8  # none between stages 1 and 2


def test_an_order_of_execution_has_each_action_after_those_that_it_needs():
    schedule = make("interleaved", 4, 8, 3)
    results = set()
    for rank, action in execution_order(schedule):
        assert schedule.placement[action.stage] == rank
        assert set(needs(schedule, action)) <= results
        results.add(action._replace(op="I") if action.op == "B" else action)
    assert len(results) == 2 * 8 * 12


#: arguments of make: what the refusal says
REFUSALS = {
    ("zb-h2", 4, 8): "unknown pipeline schedule 'zb-h2'; did you mean 'zb-h1'?",
    ("interleaved", 4, 6): "expected a multiple of 4 ranks as micro-batches, seen 6; take 4 or 8",
    ("interleaved", 4, 3): "seen 3; take 4$",
    ("interleaved", 4, 8, 1): "expected 2 stages per rank or more, seen 1; take 1f1b",
    ("breadth-first", 4, 8, 1): "expected 2 stages per rank or more, seen 1; take gpipe",
    ("zb-v", 4, 8, 3): "expected 2 stages per rank, seen 3; take 2, or interleaved",
    ("1f1b", 4, 8, 2): "expected 1 stage per rank, seen 2; take 1, or interleaved",
    ("gpipe", 0, 8): "expected 1 rank or more, seen 0",
    ("zb-v", 4, 0): "expected 1 micro-batch or more, seen 0",
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_numbers_that_a_schedule_does_not_take_are_refused(arguments):
    with pytest.raises(UsageError, match=REFUSALS[arguments]):
        make(*arguments)


def test_bytes_per_boundary_are_as_many_as_boundaries():
    schedule = make("1f1b", 3, 2)
    report = check(schedule, [5, 7])
    assert report.bytes == {(0, 1): 10, (1, 0): 10, (1, 2): 14, (2, 1): 14}
    assert report.sent(1) == (4, 24)
    with pytest.raises(UsageError, match="bytes of 2 boundaries between 3 stages, seen 3"):
        check(schedule, [1, 2, 3])
