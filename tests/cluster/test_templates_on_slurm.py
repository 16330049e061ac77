"""slurm/interactive.sh on a real Slurm, as somebody at a terminal uses it; see real_slurm.py.

The other templates: test_on_slurm.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run_files import run_folder

pytestmark = [pytest.mark.processes, pytest.mark.either]

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
SCRIPT = ". slurm/site.env && bash slurm/interactive.sh"
TRAIN = "hpctrain train digits --out run"

# what is called, what is typed in its shell
CALLS = {
    "a shell": (SCRIPT, f"$HPCTRAIN_LAUNCHER {TRAIN}; exit\n"),
    "a command": (f"{SCRIPT} {TRAIN}", ""),
}


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=[] if c == "a shell" else pytest.mark.full) for c in CALLS]
)
def test_interactive_trains(slurm, tmp_path, call):
    shutil.copytree(Path(__file__).parents[2] / "slurm", tmp_path / "slurm")
    command, typed = CALLS[call]
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, "bash", "-c", command], env=slurm.environ, cwd=tmp_path,
        input=typed, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Granted job allocation" in done.stdout
    found = run_folder.read_summary(tmp_path / "run")
    assert (found["status"], found["world_size"], len(found["hosts"])) == ("done", 4, 1)
    assert found["test_accuracy"] > 0.96
    assert f"{found['test_accuracy']:.4f}" in done.stdout
