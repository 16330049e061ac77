"""The files of this repository, and copies of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked_files() -> set[str]:
    """Return the names of all files in version control; skip the test where there is none."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not in a repository")
    return {name for name in listing.stdout.splitlines() if (ROOT / name).exists()}


def copy(names: Iterable[str], folder: Path) -> Path:
    """Copy the files of these names into `folder`."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder
