"""Whatever README and docs show runs: Python blocks, marked commands, and docs/examples.

A ```python block runs unless its fence says ```python no-run: REASON. The blocks of a file run in
one process, in order, as a reader would. Lines after `$` run in blocks fenced ```console run; in
those fenced ```console train they train for a few steps only, with ranks as threads.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import BIN, LAUNCHER
from ranks import run_on

from hpctrain import world as worlds
from hpctrain.commands.train import train
from hpctrain.world import World

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


def commands(text: str, fence: str = "console run") -> list[str]:
    """Return the commands of blocks with this `fence`."""
    run = [code for info, _, code in blocks(text) if info == fence]
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


TRAIN, STEPS = "console train", 3


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands(text, TRAIN)])
def test_commands_that_train(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a command may name the run of one before it
    for command in commands(PAGES[page], TRAIN):
        train_briefly(command, monkeypatch)


def train_briefly(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `hpctrain [launch -n N] train ...` does, cut short and with ranks as threads."""
    program, *words = command.split()
    ranks = int(words[2]) if words[0] == "launch" else 1
    verb, *arguments = words[3:] if words[0] == "launch" else words
    assert (program, verb) == ("hpctrain", "train")
    steps = 2 * STEPS if "--resume" in arguments else STEPS
    for change in ("run.epochs=", f"run.steps={steps}", f"run.interval_steps={STEPS}"):
        arguments += ["--set", change]
    here = threading.local()
    monkeypatch.setattr(worlds, "init", lambda device: here.world)

    def rank(world: World) -> None:
        here.world = world
        train.main(arguments, standalone_mode=False)

    run_on("threads", ranks, rank)


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
