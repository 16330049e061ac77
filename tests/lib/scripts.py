"""Runs of job scripts with simulated commands, and the options that sbatch reads in a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpctrain.cluster.slurm import batch_job

SENT = Path(batch_job.__file__)
#: For slurm/site.env: USR1 every 20 ms, once, until the job has heard it; a start may take seconds.
STORM = """[ -e stormed ] || (
    >stormed
    for i in {1..1500}; do kill -USR1 $$ || exit; sleep 0.02; done
) >/dev/null 2>&1 &
sleep 0.5
"""


def fake(folder: Path, name: str, script: str) -> None:
    """Put a command into `folder`/bin."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


#: Of requests to Slurm and of repeated signals: tests do not wait for the real ones.
PAUSES = {"_REPEAT_S = 3.0": "_REPEAT_S = 0.01", "_REFUSALS = 1.0, 30.0": "_REFUSALS = 0.01, 0.01"}


def fake_hpctrain(folder: Path, rank: str = "") -> None:
    """Put hpctrain into `folder`/bin: its `launch --in-slurm` does not pause, else it is `rank`."""
    text = SENT.read_text()
    for pause, short in PAUSES.items():
        assert pause in text
        text = text.replace(pause, short)
    launch = f'exec {sys.executable} -I -S {folder}/bin/batch_job.py "$@"'
    fake(folder, "hpctrain", f'if [ "$1" = launch ]; then\nshift 2\n{launch}\nfi\n{rank}')
    (folder / "bin/batch_job.py").write_text(text)


def run_script(folder: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run what was rendered, with the commands of `folder`/bin first."""
    (folder / "job.sh").write_text(text)
    reference = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}
    return subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=reference | {"SLURM_JOB_ID": "7"} | environ,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def directives(text: str) -> list[str]:
    """Return the lines that sbatch reads: those before the first command."""
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    return [line for line in lines[:first] if line.startswith("#SBATCH")]
