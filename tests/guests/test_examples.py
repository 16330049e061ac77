"""The examples of docs/pytorch.md run, and end alike on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.either

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "pytorch"


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("script", ["ddp.py", "loop.py", "survive.py", "trainer.py"])
def test_the_scripts_of_the_page_learn(start, script, ranks):
    done = start(EXAMPLES / script, ranks=ranks).finish(timeout=60)
    assert done.returncode == 0, done.stderr
    (count, accuracy) = re.findall(r"(\d) ranks: accuracy (0\.\d+)", done.stdout)[0]
    assert int(count) == (ranks or 1)
    assert float(accuracy) > 0.95
