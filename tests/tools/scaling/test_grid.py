"""The grid of a recipe with pipelines: its column, and sizes that do not fit."""

from __future__ import annotations

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.tools.scaling import trial_recipe
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.training import recipe

CHANGES = ["mesh.pipe=2", "optimizer.micro_batches=2"]


def test_sizes_that_do_not_divide_are_refused_as_a_run_refuses_them():
    spec = recipe.load("digits", CHANGES)
    with pytest.raises(UsageError) as of_run:
        spec.mesh.workers(3)
    with pytest.raises(UsageError) as refused:
        trial_recipe.check_divisible(spec, "strong", 128, [Size(2), Size(3)])
    assert str(refused.value) == f"3 ranks: {of_run.value}"
    assert "start 2 or 4 ranks, or set pipe = 1 or 3" in str(refused.value)


def test_workers_are_replicas():
    spec = recipe.load("digits", CHANGES)
    assert [trial_recipe.count_workers(spec, Size(ranks)) for ranks in (2, 4, 8)] == [1, 2, 4]
