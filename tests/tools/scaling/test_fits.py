"""Confidence intervals against closed values; laws and predictions on known machines."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.tools.bench.prediction import predict
from hpctrain.tools.scaling import statistics
from hpctrain.tools.scaling.collect import TrialResult
from hpctrain.tools.scaling.forecast import (
    FROM_DEFAULTS,
    FROM_MESSAGES,
    FROM_WIRE_TIMES,
    StepTimes,
    choose_schedule,
    fit_model,
    predict_communication,
)
from hpctrain.tools.scaling.results import SizeTrials
from hpctrain.tools.scaling.statistics import estimate_mean, quantile
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tuning.model.loggp import Cluster

ITEM, TWO = math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (1 - 0.95**2))
FOUR = math.acos(math.sqrt(0.0975)) / 3  # the cubic of four degrees, in its trigonometric form
CLOSED = {1: ITEM, 2: TWO, 4: 2 * math.sqrt(math.cos(FOUR) / math.sqrt(0.0975) - 1)}
#: Of published tables (NIST/SEMATECH e-Handbook of statistical methods, 1.3.6.7.2).
PUBLISHED = {3: 3.182, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 100: 1.984}


@pytest.mark.parametrize("freedom", CLOSED)
def test_quantiles_with_a_closed_form(freedom):
    assert quantile(freedom) == pytest.approx(CLOSED[freedom], rel=1e-12)


@pytest.mark.parametrize("freedom", PUBLISHED)
def test_quantiles_of_published_tables(freedom):
    assert round(quantile(freedom), 3) == PUBLISHED[freedom]


def test_intervals():
    result = estimate_mean([9.0, 10.0, 11.0])
    assert (result.mean, result.count) == (10.0, 3)
    assert result.half == pytest.approx(TWO / math.sqrt(3), rel=1e-12)
    assert estimate_mean([9.0, 11.0]).half == pytest.approx(ITEM, rel=1e-12)
    assert estimate_mean([5.0]).half is None


def share_that_holds(truth, make, studies=1000):
    """Return in what part of made studies the interval holds the truth."""
    rng = np.random.default_rng(7)
    result = [estimate_mean(make(rng)) for _ in range(studies)]
    return sum(abs(item.mean - truth) <= item.half for item in result) / studies


@pytest.mark.parametrize("count", [2, 3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(count):
    held = share_that_holds(10.0, lambda rng: rng.normal(10.0, 3.0, count).tolist())
    assert held == pytest.approx(0.95, abs=0.02)  # three standard errors of 1000 studies


def trials_of(size, rates):
    subset = {i: TrialResult(rate, 1.0, 1.0, 0.0, 0.0, None, ()) for i, rate in enumerate(rates)}
    return SizeTrials(Size(size), subset, 1.0)


def test_the_interval_of_an_efficiency_knows_that_the_base_was_measured_too():
    def study(rng):
        drift = rng.normal(1.0, 0.2, 3)  # of a whole pass: in both, so in neither's ratio
        base, four = (rate * drift * rng.normal(1.0, 0.03, 3) for rate in (100.0, 320.0))
        return trials_of(4, four).efficiencies(trials_of(1, base))

    assert share_that_holds(0.8, study) == pytest.approx(0.95, abs=0.02)


SIZES = {"from one": [1, 2, 4, 8], "from two": [2, 4, 16], "two sizes": [1, 2], "odd": [3, 5, 7]}
FRACTIONS = [0.0, 0.03, 0.5, 1.0]


@pytest.mark.parametrize("ranks", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_laws_find_the_serial_fraction(fraction, ranks):
    seconds = [7e-3 / statistics.amdahl_speed_up(fraction, n) for n in ranks]
    rates = [900 * statistics.gustafson_speed_up(fraction, n) for n in ranks]
    assert statistics.fit_amdahl(ranks, seconds) == pytest.approx(fraction, abs=1e-9)
    assert statistics.fit_gustafson(ranks, rates) == pytest.approx(fraction, abs=1e-9)


@pytest.mark.parametrize("law, speed_up, sign", [
    (statistics.fit_amdahl, statistics.amdahl_speed_up, -1),
    (statistics.fit_gustafson, statistics.gustafson_speed_up, 1),
])  # fmt: skip
def test_the_fraction_of_noisy_repeats_and_its_interval(law, speed_up, sign):
    ranks = [1, 2, 4, 8]
    exact = np.array([speed_up(0.1, n) ** sign for n in ranks])

    def study(rng):
        return [law(ranks, exact * rng.normal(1.0, 0.02, 4)) for _ in range(3)]

    assert np.mean(study(np.random.default_rng(1))) == pytest.approx(0.1, abs=0.03)
    assert share_that_holds(0.1, study, 400) == pytest.approx(0.95, abs=0.035)


def test_how_far_sizes_miss_a_law():
    assert statistics.max_misfit([1.0, 2.0, 3.0], [5.0, 10.0, 15.0]) == pytest.approx(
        0.0, abs=1e-12
    )
    assert statistics.max_misfit([1.0, 1.0], [1.0, 1.1]) == pytest.approx(0.05, abs=0.005)


def test_better_than_ideal_is_a_serial_fraction_of_nothing():
    assert statistics.fit_amdahl([1, 2, 4], [1.0, 0.4, 0.15]) == 0.0
    assert statistics.fit_gustafson([1, 2, 4], [1.0, 2.2, 5.0]) == 0.0


WIRE = predict.make_wire(125e6, 50e-6)
MACHINE = Cluster(WIRE, WIRE, 5e-11, 2e-11)
NBYTES = 4_000_000


def step_on(size, compute, buckets, algorithm="ring", other=1e-4):
    """Return what is seen of a step on MACHINE, of which nothing is left to chance."""
    wire, exposed = predict_communication(MACHINE, algorithm, NBYTES, size, compute, buckets)
    step = compute + exposed + other
    return StepTimes(size, step, compute, wire, exposed, f"auto ({algorithm})")


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("buckets", [0, 4])
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
@pytest.mark.parametrize("measured", [True, False], ids=["messages", "no messages"])
def test_four_hosts_from_two_on_a_known_machine(mode, buckets, algorithm, measured):
    strong = mode == "strong"
    observed = [
        step_on(Size(n, n), 20e-3 / n + 2e-3 if strong else 22e-3, buckets, algorithm)
        for n in (1, 2, 4, 8)
    ]
    model = fit_model(observed[:2], NBYTES, strong, None, WIRE if measured else None)
    for item in observed[2:]:
        error = model.forecast(item.size).step_s / item.step_s - 1
        assert abs(error) < (0.02 if measured else 0.15)


def ring_by_formula(ranks):
    """Return a step of 20 ms of compute and a ring after it, as its cost is published."""
    alpha, beta = 50e-6, 8e-9
    wire = 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * NBYTES * beta
    return StepTimes(Size(ranks, ranks), 20e-3 + wire, 20e-3, wire, wire, "ring")


def test_eight_and_sixteen_hosts_by_the_published_cost_of_a_ring():
    model = fit_model([ring_by_formula(n) for n in (1, 2, 4)], NBYTES, False, None, None)
    for observed in map(ring_by_formula, (8, 16)):
        assert model.forecast(observed.size).step_s == pytest.approx(observed.step_s, rel=0.03)


#: compute by ranks that is no b / P + a: caches that hold a smaller share, a slow largest size
ODD_COMPUTE = {
    "far better than its share": (1.0, 0.45, 0.15),
    "better than its share": (1.0, 0.48, 0.2),
    "worse than before": (1.0, 0.5, 0.6),
}


@pytest.mark.parametrize("compute", ODD_COMPUTE.values(), ids=ODD_COMPUTE)
@pytest.mark.parametrize("wait_s", [0.0, 0.02])
def test_predictions_stay_above_nothing_and_begin_where_measurements_end(compute, wait_s):
    observed = [
        StepTimes(Size(n), own + wait_s * (n > 1), own, 0.02 * (n > 1), wait_s * (n > 1), "ring")
        for n, own in zip((1, 2, 4), compute, strict=True)
    ]
    model = fit_model(observed, NBYTES, True, WIRE, None)
    assert model.forecast(Size(4)).step_s == pytest.approx(observed[-1].step_s, rel=1e-9)
    beyond = [model.forecast(Size(n)) for n in (8, 16, 32, 64)]
    assert all(min(item.compute_s, item.step_s) > 0 and item.wait_s >= 0 for item in beyond)
    assert [item.compute_s for item in beyond] == sorted(item.compute_s for item in beyond)[::-1]


def test_hosts_that_share_cores_compute_as_much_slower():
    model = fit_model([step_on(Size(n, n), 20e-3, 0) for n in (1, 2)], NBYTES, False, None, WIRE)
    alone, shared = model.forecast(Size(4, 4)), model.forecast(Size(4, 4), share=2.0)
    assert shared.compute_s == pytest.approx(2 * alone.compute_s)
    assert shared.step_s - alone.step_s == pytest.approx(20e-3, rel=0.01)


def test_wires_are_told_by_the_times_of_two_sizes():
    observed = [step_on(Size(n, n), 20e-3, 0) for n in (2, 4, 8)]
    model = fit_model(observed, NBYTES, False, None, None)
    assert model.beta_s == pytest.approx(8e-9, rel=0.05)
    assert (model.origin, model.ranks) == (FROM_WIRE_TIMES, (2, 4, 8))


#: how many sizes communicate, and whether messages were measured: is there one to test the model?
TESTED = {
    (1, False): (FROM_DEFAULTS, False),
    (2, False): (FROM_WIRE_TIMES, False),
    (3, False): (FROM_WIRE_TIMES, True),
    (1, True): (FROM_MESSAGES, False),
    (2, True): (FROM_MESSAGES, True),
}


@pytest.mark.parametrize("case", TESTED, ids=str)
def test_a_model_with_as_many_sizes_as_unknowns_is_untested(case):
    observed = [step_on(Size(n, n), 20e-3, 0) for n in (2, 4, 8)[: case[0]]]
    model = fit_model(observed, NBYTES, False, None, WIRE if case[1] else None)
    assert (model.origin, model.tested) == TESTED[case]


def noisy(item, rng):
    """Return a step as it is seen among others: each of its times is off by some 2 %."""
    times = ("step_s", "compute_s", "wire_s", "wait_s")
    return replace(item, **{name: getattr(item, name) * rng.normal(1.0, 0.02) for name in times})


@pytest.mark.parametrize("wire, off", [(WIRE, 0.05), (None, 0.25)])
def test_wires_and_forecasts_of_noisy_steps(wire, off):
    rng, exact = np.random.default_rng(3), [step_on(Size(n, n), 20e-3, 0) for n in (1, 2, 4, 8)]
    for _ in range(5):
        model = fit_model([noisy(item, rng) for item in exact[:3]], NBYTES, False, None, wire)
        assert model.beta_s == pytest.approx(8e-9, rel=off)
        forecast = model.forecast(exact[3].size)
        assert forecast.step_s == pytest.approx(exact[3].step_s, rel=0.05)
        assert forecast.wire_s == pytest.approx(exact[3].wire_s, rel=0.05)


def test_one_rank_alone_tells_nothing_of_others():
    assert fit_model([step_on(Size(1), 20e-3, 0)], NBYTES, True, None, None) is None


NAMED = {"auto (ring, native)": "ring", "auto (direct-shared)": "direct", "tree": "tree",
         "native": "halving-doubling", None: "ring", "null": "ring"}  # fmt: skip


@pytest.mark.parametrize("reported", NAMED)
def test_the_schedule_of_an_algorithm(reported):
    assert choose_schedule(reported) == NAMED[reported]
