"""Intervals against closed values; laws and forecasts on machines that are known."""

from __future__ import annotations

import math

import pytest

from hpctrain.bench import predict
from hpctrain.scaling import laws
from hpctrain.scaling.forecast import Seen, fitted, replay, schedule_of
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.student import estimate, quantile
from hpctrain.tuning.loggp import Cluster

ONE, TWO = math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (1 - 0.95**2))
FOUR = math.acos(math.sqrt(0.0975)) / 3  # the cubic of four degrees, in its trigonometric form
CLOSED = {1: ONE, 2: TWO, 4: 2 * math.sqrt(math.cos(FOUR) / math.sqrt(0.0975) - 1)}
#: Of published tables (NIST/SEMATECH e-Handbook of statistical methods, 1.3.6.7.2).
PUBLISHED = {3: 3.182, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 100: 1.984}


@pytest.mark.parametrize("freedom", CLOSED)
def test_quantiles_with_a_closed_form(freedom):
    assert quantile(freedom) == pytest.approx(CLOSED[freedom], rel=1e-12)


@pytest.mark.parametrize("freedom", PUBLISHED)
def test_quantiles_of_published_tables(freedom):
    assert round(quantile(freedom), 3) == PUBLISHED[freedom]


def test_intervals():
    found = estimate([9.0, 10.0, 11.0])
    assert (found.mean, found.count) == (10.0, 3)
    assert found.half == pytest.approx(TWO / math.sqrt(3), rel=1e-12)
    assert estimate([9.0, 11.0]).half == pytest.approx(ONE, rel=1e-12)
    assert estimate([5.0]).half is None


SIZES = {"from one": [1, 2, 4, 8], "from two": [2, 4, 16], "two sizes": [1, 2], "odd": [3, 5, 7]}
FRACTIONS = [0.0, 0.03, 0.5, 1.0]


@pytest.mark.parametrize("ranks", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_laws_find_the_serial_fraction(fraction, ranks):
    seconds = [7e-3 / laws.amdahl_speed_up(fraction, n) for n in ranks]
    rates = [900 * laws.gustafson_speed_up(fraction, n) for n in ranks]
    assert laws.amdahl(ranks, seconds) == pytest.approx(fraction, abs=1e-9)
    assert laws.gustafson(ranks, rates) == pytest.approx(fraction, abs=1e-9)


def test_better_than_ideal_is_a_serial_fraction_of_nothing():
    assert laws.amdahl([1, 2, 4], [1.0, 0.4, 0.15]) == 0.0
    assert laws.gustafson([1, 2, 4], [1.0, 2.2, 5.0]) == 0.0


WIRE = predict.wire(125e6, 50e-6)
MACHINE = Cluster(WIRE, WIRE, 5e-11, 2e-11)
NBYTES = 4_000_000


def step_on(size, compute, buckets, algorithm="ring", other=1e-4):
    """Return what is seen of a step on MACHINE, of which nothing is left to chance."""
    wire, exposed = replay(MACHINE, algorithm, NBYTES, size, compute, buckets)
    step = compute + exposed + other
    return Seen(size, step, compute, wire, exposed, f"auto ({algorithm})")


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("buckets", [0, 4])
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
@pytest.mark.parametrize("measured", [True, False], ids=["messages", "no messages"])
def test_four_hosts_from_two_on_a_known_machine(mode, buckets, algorithm, measured):
    strong = mode == "strong"
    seen = [
        step_on(Size(n, n), 20e-3 / n + 2e-3 if strong else 22e-3, buckets, algorithm)
        for n in (1, 2, 4, 8)
    ]
    model = fitted(seen[:2], NBYTES, strong, None, WIRE if measured else None)
    for one in seen[2:]:
        error = model.forecast(one.size).step_s / one.step_s - 1
        assert abs(error) < (0.02 if measured else 0.15)


def test_hosts_that_share_cores_compute_as_much_slower():
    model = fitted([step_on(Size(n, n), 20e-3, 0) for n in (1, 2)], NBYTES, False, None, WIRE)
    alone, shared = model.forecast(Size(4, 4)), model.forecast(Size(4, 4), share=2.0)
    assert shared.compute_s == pytest.approx(2 * alone.compute_s)
    assert shared.step_s - alone.step_s == pytest.approx(20e-3, rel=0.01)


def test_wires_are_told_by_the_times_of_two_sizes():
    seen = [step_on(Size(n, n), 20e-3, 0) for n in (2, 4, 8)]
    model = fitted(seen, NBYTES, False, None, None)
    assert model.beta_s == pytest.approx(8e-9, rel=0.05)


def test_one_rank_alone_tells_nothing_of_others():
    assert fitted([step_on(Size(1), 20e-3, 0)], NBYTES, True, None, None) is None


NAMED = {"auto (ring, native)": "ring", "auto (direct-shared)": "direct", "tree": "tree",
         "native": "halving-doubling", None: "ring", "null": "ring"}  # fmt: skip


@pytest.mark.parametrize("told", NAMED)
def test_the_schedule_of_an_algorithm(told):
    assert schedule_of(told) == NAMED[told]
