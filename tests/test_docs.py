"""Whatever README and docs show runs: Python blocks, marked commands, and docs/examples.

A ```python block runs unless its fence says ```python no-run: REASON. The blocks of a file run in
one process, in order, as a reader would. Lines after `$` run in blocks fenced ```console run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, LAUNCHER

ROOT = Path(__file__).parent.parent
FILES = sorted(f for f in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if f.exists())
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
EXAMPLES = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "docs" / "examples").glob("*.py"))


def blocks(text: str) -> list[tuple[str, int, list[str]]]:
    """Return (info string, index of the first line, lines) of each fenced block."""
    found, lines = [], text.splitlines()
    fences = [n for n, line in enumerate(lines) if line.lstrip().startswith("```")]
    for first, last in zip(fences[::2], fences[1::2], strict=True):
        info = lines[first].strip().removeprefix("```")
        found.append((info, first + 1, lines[first + 1 : last]))
    return found


def script(text: str) -> str:
    """Return the Python blocks of a page, each on the line it has in the page."""
    lines = [""] * len(text.splitlines())
    for info, first, code in blocks(text):
        if info == "python":
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def commands(text: str) -> list[str]:
    """Return the commands of blocks fenced `console run`."""
    run = [code for info, _, code in blocks(text) if info == "console run"]
    return [line.removeprefix("$ ") for code in run for line in code if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES)
def test_fences_are_known(page):
    for info, first, _ in blocks(PAGES[page]):
        known = info.split(" ")[0] in ("python", "console", "toml", "text", "bash", "json")
        reason = "no-run" not in info or info.startswith("python no-run: ")
        assert known and reason, f"{page}:{first}: fence {info!r}"


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if script(text).strip()])
def test_python_blocks(page, start, tmp_path):
    file = tmp_path / f"{Path(page).name}.py"
    file.write_text(script(PAGES[page]))
    done = start(file).finish()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands(text)])
def test_commands(page, tmp_path):
    env = {**os.environ, **LAUNCHER, "PATH": f"{BIN}:{os.environ['PATH']}"}
    for command in commands(PAGES[page]):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, ranks, start):
    done = start(ROOT / example, ranks=ranks).finish()
    assert done.returncode == 0, done.stdout + done.stderr


PAGE = """\
text
```python
a = 1
```
```python no-run: needs a GPU
b
```
```console run
$ ls
out
```
"""


def test_page_is_taken_apart():
    assert script(PAGE).splitlines()[2] == "a = 1"
    assert script(PAGE).split() == ["a", "=", "1"]
    assert commands(PAGE) == ["ls"]
