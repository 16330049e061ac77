"""Rows written for a test of the tests, run by a pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import BIN, LAUNCHER

LIB = Path(__file__).parent


def run_rows(
    folder: Path, conftest: str, rows: str, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `rows` as a test file in `folder`, whose conftest.py may import from tests/lib."""
    launcher = [] if ranks is None else [str(BIN / "mpiexec"), "-n", str(ranks)]
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_rows.py").write_text(rows)
    code = f"import sys; sys.path.insert(0, {str(LIB)!r}); import pytest; sys.exit(pytest.main())"
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "test_rows.py"]
    return subprocess.run(
        [*launcher, sys.executable, "-c", code, *words], cwd=folder, env={**os.environ, **LAUNCHER},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
