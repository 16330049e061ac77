"""Cuts of a model against an exhaustive search."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from hpctrain.core.errors import UsageError
from hpctrain.parallel.pipeline.balance import check_cut, cut


def search(seconds, stages, nbytes):
    """Return the best of all cuts: slowest stage, bytes over boundaries, layers of each stage."""
    layers = len(seconds)
    return min(
        (
            max(sum(seconds[a:b]) for a, b in zip((0, *inner), (*inner, layers), strict=True)),
            sum(nbytes[bound - 1] for bound in inner),
            tuple(b - a for a, b in zip((0, *inner), (*inner, layers), strict=True)),
        )
        for inner in combinations(range(1, layers), stages - 1)
    )


def test_cuts_are_those_of_an_exhaustive_search():
    random = np.random.default_rng(5)
    for _ in range(300):
        layers = int(random.integers(1, 9))
        stages = int(random.integers(1, layers + 1))
        seconds = random.integers(0, random.choice([9, 999]), layers).tolist()
        nbytes = random.integers(0, 4, layers - 1).tolist()
        assert cut(seconds, stages, nbytes) == search(seconds, stages, nbytes)[2]
        assert cut(seconds, stages) == search(seconds, stages, [0] * layers)[2]


def test_the_output_layer_of_a_language_model_stands_alone():
    assert cut([1, 4, 4, 4, 4, 9], 3) == (3, 2, 1)


def test_fractions_of_a_second_are_cut_into_all_stages():
    for stages in range(1, 11):
        assert len(cut([0.1] * 10, stages)) == stages
    assert cut([0.1] * 10, 5) == (2,) * 5


#: (function, arguments): what the refusal says
REFUSALS = [
    (cut, ([1, 2, 3], 4), "expected 1 to 3 stages for 3 layers, seen 4; take 3 or fewer"),
    (cut, ([1, 2, 3], 0), "seen 0; take 1"),
    (cut, ([1, 2, 3], 2, [1]), "bytes of 2 boundaries between 3 layers, seen 1"),
    (cut, ([1, float("nan")], 2), "layer 1: expected seconds from 0 up, seen nan"),
    (cut, ([-1, 2], 2), "layer 0: expected seconds from 0 up, seen -1"),
    (check_cut, ([2, 1], 3, 3), "expected the layers of 3 stages, seen 2 numbers"),
    (check_cut, ([2, 2], 3, 2), "add up to 3 layers, seen 2, 2, which add up to 4"),
    (check_cut, ([3, 0], 3, 2), "2 numbers from 1 up that add up to 3 layers, seen 3, 0"),
    (check_cut, ([1] * 4, 3, 4), "expected 1 to 3 stages for 3 layers, seen 4; take 3 or fewer"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSALS)
def test_cuts_that_do_not_fit_are_refused(function, arguments, message):
    with pytest.raises(UsageError, match=message):
        function(*arguments)


def test_a_cut_by_hand_is_returned():
    assert check_cut([2, 1], 3, 2) == (2, 1)
