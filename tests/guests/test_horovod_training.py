"""Training by Horovod's names equals plain PyTorch on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: scripts, and one of their rows, which is printed when it is over
SCRIPTS = {"horovod_training.py": "options", "horovod_states.py": "objects"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_row_holds(start, script, ranks):
    completed = start(HERE / script, ranks=ranks).finish(timeout=280)
    assert completed.returncode == 0, completed.stderr
    assert SCRIPTS[script] in completed.stdout
