"""Every operation on every dtype and layout, in both modes of reduction, also in a thread."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "reductions.py"
#: With cores to spare a communication thread makes the asynchronous calls.
THREADED = """
import runpy, sys
from hpctrain.torch import job
job.has_spare_cores = lambda world: True
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_operations_dtypes_and_layouts(start, ranks, reduction):
    ended = start(SCRIPT, ranks=ranks, env={"HPCTRAIN_REDUCTION": reduction}).finish(timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 700


def test_the_same_in_a_communication_thread(start):
    ended = start("-c", THREADED, SCRIPT, ranks=3).finish(timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 700


def test_an_unknown_mode_of_reduction_is_refused(start):
    ended = start(SCRIPT, ranks=2, env={"HPCTRAIN_REDUCTION": "slow"}).finish(timeout=60)
    assert ended.returncode != 0
    assert "HPCTRAIN_REDUCTION: expected fast or ordered, seen 'slow'" in ended.stderr
