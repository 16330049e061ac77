"""The examples of docs/pytorch.md run, and end alike on any number of ranks; the tutorial runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import BIN, LAUNCHER

pytestmark = pytest.mark.either

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples" / "pytorch"


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("script", ["ddp.py", "loop.py", "survive.py", "trainer.py"])
def test_the_scripts_of_the_page_learn(start, script, ranks):
    done = start(EXAMPLES / script, ranks=ranks).finish(timeout=60)
    assert done.returncode == 0, done.stderr
    (count, accuracy) = re.findall(r"(\d) ranks: accuracy (0\.\d+)", done.stdout)[0]
    assert int(count) == (ranks or 1)
    assert float(accuracy) > 0.95


def test_the_tutorial_runs(tmp_path):
    """Fences as in tests/project/test_docs.py; its commands need PyTorch."""
    page = (DOCS / "tutorial-pytorch.md").read_text()
    for name, code in re.findall(r"^```python as (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    blocks = re.findall(r"^```console with PyTorch\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    env = {**os.environ, **LAUNCHER, "PATH": f"{BIN}:{os.environ['PATH']}"}
    printed = ""
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed += done.stdout
    assert len(commands) == 3 and printed.count(" of 2: loss 0.") == 2
    assert "(Python)" in printed  # the list of runs
