"""Predicted steps against sums computed by hand, and against a queue with one server."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.tuning.model import cost
from hpctrain.tuning.model.loggp import Clocks, uniform_cluster
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.model.training_step import Step, step_time, uniform_step


def clocks(ranks: int, slow=1.0) -> Clocks:
    return Clocks(uniform_cluster(cost.Machine(0, 1, 0)), np.zeros(ranks, int), 0.0, slow)


def meet(clocks_, n):
    """An all-reduce of n seconds that begins when the last rank does."""
    clocks_.now = np.full(clocks_.size, clocks_.now.max() + n)


@pytest.mark.parametrize(
    ("step", "slow", "overlap", "expected"),
    [  # (step, wire, exposed)
        (Step((4.0, 6.0), (1.0, 1.0), 2.0), 1, True, (9, 2, 1)),  # bucket 0 is hidden
        (Step((4.0, 6.0), (1.0, 1.0), 2.0), 1, False, (10, 2, 2)),
        (Step((4.0, 6.0), (5.0, 1.0), 2.0), 1, True, (12, 6, 4)),  # bucket 1 waits for bucket 0
        (Step((4.0, 6.0), (0.0, 0.0)), 1, True, (6, 0, 0)),
        (Step((4.0, 6.0), (1.0, 1.0), 2.0), [1, 2], True, (17, 2 + 2 + 0.5, 1)),
    ],
    ids=["hidden", "after", "queued", "nothing", "slow rank"],
)
def test_a_step_in_the_head(step, slow, overlap, expected):
    result = step_time(step, meet, clocks(2, slow), overlap)
    assert (result.step, result.exposed) == (expected[0], expected[2])
    assert result.wire == pytest.approx(sum(step.buckets) + _waits(step, slow, overlap))


def _waits(step, slow, overlap):
    """Return the mean time for which a rank's bucket waits for the slower one's."""
    if np.ndim(slow) == 0 or not overlap:
        return 0.0
    waits, free = 0.0, 0.0
    for full, seconds in zip(step.full_times, step.buckets, strict=True):
        starts = [max(free, full * factor) for factor in slow]
        waits += max(starts) - float(np.mean(starts))
        free = max(starts) + seconds
    return waits


def test_buckets_wait_for_each_other_on_every_wire():
    step = uniform_step(0.003, 8e6, 1e6)
    assert step.compute == pytest.approx(0.003)
    assert sum(step.buckets) == 8e6 and len(step.buckets) == 8
    machine = cost.Machine(1e-6, 1e-9, 0)
    result = step_time(step, SCHEDULES["ring"], Clocks(uniform_cluster(machine), np.zeros(4, int)))
    item = machine.seconds(cost.ring(1_000_000, 4))
    assert result.wire == pytest.approx(8 * item)
    assert result.step == pytest.approx(
        step.full_times[0] + 8 * item
    )  # the wire is never idle again


def test_strong_scaling_computes_less_and_sends_the_same():
    step = Step((4.0, 6.0), (1.0, 1.0), 2.0).split_over(2)
    assert step == Step((2.0, 3.0), (1.0, 1.0), 2.0)
    assert step.compute == 5.0
