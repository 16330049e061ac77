"""Runs of job scripts with simulated commands, and the options that sbatch reads in a script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def fake(folder: Path, name: str, script: str) -> None:
    """Put a command into `folder`/bin."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


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
