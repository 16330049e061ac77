"""slurm/interactive.sh on a real Slurm, used from a terminal; see real_slurm.py.

The other templates: test_on_slurm.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.run_files import run_folder

pytestmark = [pytest.mark.processes, pytest.mark.either]

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
SCRIPT = ". slurm/site.env && bash slurm/interactive.sh"
TRAIN = "hpctrain train digits --out run"

# what is called, what is typed in its shell
CALLS = {
    "a shell": (SCRIPT, f"$HPCTRAIN_LAUNCHER {TRAIN}; exit\n"),
    "a command": (f"{SCRIPT} {TRAIN}", ""),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=[] if c == "a shell" else pytest.mark.full) for c in CALLS]
)
def test_interactive_trains(slurm, tmp_path, call):
    shutil.copytree(Path(__file__).parents[2] / "slurm", tmp_path / "slurm")
    command, typed = CALLS[call]
    completed = subprocess.run(
        [sys.executable, "-c", TERMINAL, "bash", "-c", command], env=slurm.environ, cwd=tmp_path,
        input=typed, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Granted job allocation" in completed.stdout
    result = run_folder.read_summary(tmp_path / "run")
    assert (result["status"], result["world_size"], len(result["hosts"])) == ("done", 4, 1)
    assert result["test_accuracy"] > 0.96
    assert f"{result['test_accuracy']:.4f}" in completed.stdout
