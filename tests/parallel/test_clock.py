"""The clock against the slow simulator, by hand, and predicted steps of grids."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from oracles.pipelines import simulate

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import SCHEDULES, make
from hpctrain.parallel.timing.clock import StageCosts, Timeline, run_clock, uniform_costs
from hpctrain.parallel.timing.predict import Grid, predict_step
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire
from hpctrain.tuning.model.message_schedules import ring

DELAY = Wire(latency=3.0, overhead=0.0, gap=0.0, seconds_per_byte=0.0)


def random_costs(schedule, random: np.random.Generator) -> StageCosts:
    """Return costs that are integers, so that sums are exact."""
    return StageCosts(*(tuple(random.integers(1, 9, schedule.stages).astype(float)) for _ in "FIW"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clock_is_that_of_the_slow_simulator(name, ranks):
    random = np.random.default_rng(ranks)
    for micro_batches in (ranks, 2 * ranks, 3 * ranks):
        schedule = make(name, ranks, micro_batches)
        costs = random_costs(schedule, random)
        seconds = costs.by_op()
        for wire in (Wire(0.0, 0.0, 0.0, 0.0), DELAY):
            timeline = run_clock(schedule, costs, wire)
            times = simulate(
                schedule,
                lambda group: Fraction(seconds[group[0].op][group[0].stage]),  # noqa: B023
                Fraction(wire.latency),
            )
            pairs = zip(timeline.starts, timeline.ends, strict=True)
            assert [list(zip(*rank, strict=True)) for rank in pairs] == times


def test_a_message_takes_overheads_its_port_and_the_wire():
    """Two stages, two micro-batches forward, as tuning/model/loggp.py draws them; times by hand.

    F ends at 10, its overhead at 11, its port at 11 + gap 2 + 5 bytes x 1 = 18; it arrives at
    18 - 2 + 4 = 20, and the receiver begins after its overhead, at 21. The second F ends at 21, and
    its message, whose port is free at 18, arrives at 31.
    """
    wire = Wire(latency=4.0, overhead=1.0, gap=2.0, seconds_per_byte=1.0)
    schedule = make("gpipe", 2, 2)
    timeline = run_clock(schedule, uniform_costs(schedule, 10, 1, 1), wire, boundary_bytes=5)
    assert timeline.starts[0][:2] == (0.0, 11.0)
    assert timeline.starts[1][:2] == (21.0, 32.0)


def test_messages_of_a_rank_leave_one_after_the_other():
    """A long message holds up the next of the same port: 1, 101, 201, not 1, 2, 3."""
    wire = Wire(latency=0.0, overhead=0.0, gap=0.0, seconds_per_byte=1.0)
    schedule = make("gpipe", 2, 3)
    timeline = run_clock(schedule, uniform_costs(schedule, 1, 1, 1), wire, boundary_bytes=100)
    assert timeline.starts[1][:3] == (101.0, 201.0, 301.0)


def test_wires_may_depend_on_the_pair():
    schedule = make("gpipe", 3, 1)
    costs = uniform_costs(schedule, 1, 1, 1)
    free = Wire(0.0, 0.0, 0.0, 0.0)
    timeline = run_clock(schedule, costs, lambda a, b: DELAY if {a, b} == {1, 2} else free)
    assert timeline.starts == ((0.0, 13.0), (1.0, 11.0), (5.0, 6.0))


def test_idle_shares_and_the_bubble():
    schedule = make("1f1b", 4, 8)
    timeline = run_clock(schedule, uniform_costs(schedule, 1, 1, 1))
    assert timeline.makespan == 33
    np.testing.assert_allclose(timeline.idle_shares, [3 / 11] * 4)
    assert timeline.bubble == pytest.approx(3 / 11)
    assert isinstance(timeline, Timeline) and timeline.schedule is schedule


def test_costs_of_another_number_of_stages_are_refused():
    schedule = make("1f1b", 4, 8)
    with pytest.raises(
        UsageError, match="costs of input: expected the seconds of 4 stages, seen 3"
    ):
        run_clock(schedule, StageCosts((1.0,) * 4, (1.0,) * 3, (1.0,) * 4))


INSIDE, BETWEEN = Wire(1e-6, 5e-7, 5e-7, 1 / 200e9), Wire(2e-6, 5e-7, 5e-7, 1 / 50e9)
CLUSTER = Cluster(INSIDE, BETWEEN, 1e-12, 1e-12, 1)
GRADIENTS = 26 * 10**9  # bytes of all stages


def predicted(name: str, data: int, pipe: int, micro_batches: int, cluster=CLUSTER, per_node=8):
    schedule = make(name, pipe, micro_batches)
    costs = uniform_costs(schedule, 0.1, 0.1, 0.1)
    gradients = [GRADIENTS // schedule.stages] * schedule.stages
    return predict_step(schedule, costs, Grid(cluster, data, per_node), 50_000_000, gradients)


@pytest.mark.sample(2)
@pytest.mark.parametrize("data", [256, 2048])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_16384_ranks_are_predicted_from_one_pipeline(name, data):
    pipe = 16_384 // data
    step = predicted(name, data, pipe, 2 * pipe)
    assert step.ranks == 16_384
    assert step.compute == pytest.approx(0.3 * 2 * pipe)
    assert step.compute < step.pipeline < step.step
    rank_bytes = GRADIENTS / pipe
    wire = 2 * rank_bytes * (data - 1) / data * BETWEEN.seconds_per_byte * min(pipe, 8)
    assert step.step - step.pipeline >= 0.9 * wire
    assert step.efficiency == step.compute / step.step
    assert predicted(name, 2, pipe, 2 * pipe).pipeline == step.pipeline


def test_a_step_ends_with_the_ring_of_the_slowest_rank():
    """Without a bubble in time to spare the last ring begins after the last backward of rank 0."""
    schedule = make("1f1b", 2, 2)
    costs = uniform_costs(schedule, 1, 1, 1)
    cluster = Cluster(*[Wire(0.0, 0.0, 0.0, 1e-9)] * 2, gamma=0.0, memory=0.0)
    even, uneven = (
        predict_step(schedule, costs, Grid(cluster, 2), 0, gradients)
        for gradients in ([10**9, 10**9], [0, 4 * 10**9])
    )
    assert even.pipeline == uneven.pipeline == 9
    assert even.step == pytest.approx(9 + 1)  # 2 (D-1)/D n G
    assert uneven.step == pytest.approx(7 + 4)  # rank 1 ends at 7


def test_a_ring_alone_shares_no_cards():
    schedule = make("1f1b", 1, 1)
    costs = uniform_costs(schedule, 1, 1, 1)
    step = predict_step(schedule, costs, Grid(CLUSTER, 16, 4), 0, [10**8])
    clocks = Clocks(CLUSTER, np.arange(16) // 4)
    ring(clocks, 10**8)
    assert step.step == pytest.approx(3 + clocks.now.max())


def test_one_pipeline_reduces_nothing():
    step = predicted("1f1b", 1, 4, 8)
    assert (step.ranks, step.step) == (4, step.pipeline)


def test_grids_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="seen 6 ranks and 4 per node; take 4 in place of 6"):
        predicted("1f1b", 2, 6, 8, per_node=4)
    schedule = make("1f1b", 4, 8)
    with pytest.raises(UsageError, match="expected the gradient bytes of 4 stages, seen 1"):
        predict_step(schedule, uniform_costs(schedule, 1, 1, 1), Grid(CLUSTER, 2), 0, [5])
