"""Fits recover the parameters of a machine from its times, also from noisy ones."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.tuning.model import cost, fit

SIZES = [4, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23]


@pytest.mark.parametrize("noise", [0, 0.05])
def test_a_machine_from_its_algorithms(noise):
    machine, rng = cost.Machine(3e-6, 2e-10, 7e-11), np.random.default_rng(0)
    paths = [path(n, p) for path in cost.ALLREDUCE.values() for n in SIZES for p in (2, 3, 4, 8)]
    times = [machine.seconds(item) * rng.uniform(1 - noise, 1 + noise) for item in paths]
    result = fit.fit_machine(zip(paths, times, strict=True))
    assert (result.alpha, result.beta, result.gamma) == pytest.approx(
        (machine.alpha, machine.beta, machine.gamma), rel=1e-6 if not noise else 0.2
    )


def test_a_wire_from_its_messages():
    one_way = [(m, 2e-6 + m * 1e-9) for m in SIZES]
    there_and_back = [(m, 9e-6 + m * 1e-9) for m in SIZES]
    both_ways = [(m, 9e-6 + m * 3e-9) for m in SIZES]
    result = fit.fit_wire(one_way, there_and_back, both_ways, overhead=1e-6)
    expected = (7e-6, 1e-6, 2e-6, 1e-9, 3e-9)
    assert (*vars(result).values(),) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("seconds", [[1.0, 1.0, 0.5], [1e-6, 2e-6, 1e-7], [1.0, 1.0, 1.0]])
def test_no_cost_is_below_zero(seconds):
    """Times that fall with the length would be fitted best by bytes that cost less than nothing."""
    a, b = fit.fit_line(list(zip([4, 1000, 10**6], seconds, strict=True)))
    assert a >= 0 and b == pytest.approx(0, abs=1e-15)
