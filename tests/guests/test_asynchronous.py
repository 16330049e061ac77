"""Asynchronous operations of `torch.distributed` make progress, whatever cores are free."""

from __future__ import annotations

from pathlib import Path

import pytest
from guests import asynchronous

SCRIPT = Path(__file__).parent / "asynchronous.py"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", asynchronous.MODES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_asynchronous_operations_end_while_ranks_go_on(start, ranks, mode):
    job = start(SCRIPT, mode, ranks=ranks).finish(timeout=180)
    assert job.returncode == 0, job.stdout + job.stderr
    for case in asynchronous.CASES:
        assert job.stdout.count(f"{case.__name__}: ") == ranks, job.stdout


@pytest.mark.timeout(100)
def test_the_table_detects_operations_that_wait_in_their_calls(start):
    """As before: `send_after_all_reduce` then hangs until the limit."""
    planted = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "sys.argv[1:] = ['full', 'send_after_all_reduce']\n"
        "import asynchronous, torch\n"
        "from hpctrain.torch.progress import Progress\n"
        "asynchronous.LIMIT_S = 3.0\n"
        "Progress._is_begun_soon = lambda *_: True\n"
        "asynchronous.main()\n"
    )
    job = start("-c", planted, ranks=2).finish(timeout=80)
    assert job.returncode != 0
    assert "Timeout (0:00:03)!" in job.stderr
