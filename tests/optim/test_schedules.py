"""Schedules against values computed by hand."""

from __future__ import annotations

import math

import pytest

from hpctrain.core.config import read_kind
from hpctrain.optim import SCHEDULES

HALF = math.sqrt(0.5)
#: table, total steps (10 an epoch, rate 0.4), {step: rate}
ROWS = {
    "constant": ({"kind": "constant"}, 50, {0: 0.4, 49: 0.4, 500: 0.4}),
    "constant, warm-up": (
        {"kind": "constant", "warm_up_epochs": 0.4},
        50,
        {0: 0.1, 1: 0.2, 3: 0.4, 4: 0.4, 49: 0.4},
    ),
    "cosine": (
        {"kind": "cosine"},
        40,
        {0: 0.4, 10: 0.2 * (1 + HALF), 20: 0.2, 30: 0.2 * (1 - HALF), 40: 0, 41: 0},
    ),
    "cosine, warm-up": (
        {"kind": "cosine", "warm_up_epochs": 1},
        50,
        {0: 0.04, 9: 0.4, 10: 0.4, 30: 0.2, 50: 0},
    ),
    "step": (
        {"kind": "step", "at_epochs": [1, 2.5], "factor": 0.5},
        50,
        {0: 0.4, 9: 0.4, 10: 0.2, 24: 0.2, 25: 0.1, 49: 0.1},
    ),
    "step, warm-up": (
        {"kind": "step", "at_epochs": [3], "warm_up_epochs": 1},
        50,
        {0: 0.04, 9: 0.4, 10: 0.4, 29: 0.4, 30: 0.04},
    ),
    "step in the warm-up": (
        {"kind": "step", "at_epochs": [1], "warm_up_epochs": 2},
        50,
        {10: 0.22, 19: 0.4, 20: 0.04},
    ),
    "over before the top": ({"kind": "cosine", "warm_up_epochs": 2}, 10, {0: 0.02, 9: 0.2}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rate_of_a_step(name):
    table, total, expected = ROWS[name]
    schedule = read_kind(SCHEDULES, table, "schedule").build(0.4, 10, total)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
