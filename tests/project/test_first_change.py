"""The first change of CONTRIBUTING.md, made in a copy of the repository as its readers make it.

Files, places, blocks and commands are those of the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT, copy, tracked_files
from processes import BIN, Completed, Job

PLACE = re.compile(
    r"In (?:the new file )?`([^`]+)`"
    r"(?:, (before|after|in place of) the line that begins with (`+)(.+?)\3)?:$"
)
FENCE = re.compile(r"^ {3}```(\w*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """Lines that a reader puts into a file, at the only line that begins with `anchor`."""

    file: str
    place: str | None
    anchor: str | None
    lines: list[str]

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        assert path.exists() == (self.anchor is not None), self.file
        lines = path.read_text().splitlines() if self.anchor else []
        places = [n for n, line in enumerate(lines) if line.strip().startswith(str(self.anchor))]
        assert len(places) == (self.anchor is not None), f"{self.file}: {self.anchor}"
        first = sum(places) + (self.place == "after")
        lines[first : first + (self.place == "in place of")] = self.lines
        path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Step:
    """A step of the page."""

    edits: list[Edit]
    commands: list[str]


def read_steps() -> list[Step]:
    """Return the steps of the page: blocks of bash are commands, all others are edits."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Your first change\n")[1]
    texts = re.split(r"^\d+\. ", section.split("\n## ")[0], flags=re.MULTILINE)[1:]
    return [read_step(text) for text in texts]


def read_step(text: str) -> Step:
    step, parts = Step([], []), FENCE.split(text)  # words, language, block, "", words, ...
    for words, language, block in zip(parts[::4], parts[1::4], parts[2::4], strict=False):
        lines = [line[3:] for line in block.splitlines()]
        if language == "bash":
            step.commands.extend(lines)
            continue
        match = PLACE.search(" ".join(words.split()))
        assert match, f"where does a reader put this?\n{words}{block}"
        step.edits.append(Edit(match[1], match[2], match[4], lines))
    return step


class Checkout:
    """A copy of the repository, and the commands that run in it."""

    def __init__(self, folder: Path, jobs: list[Job]) -> None:
        self.folder, self.jobs = folder, jobs

    def start(self, command: str) -> Job:
        log = self.folder.parent / f"job-{len(self.jobs)}"
        variables = {
            "BIN": str(self.folder.parent / "environment" / "bin"),
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        self.jobs.append(Job(["bash", "-c", command], variables, self.folder, log))
        return self.jobs[-1]

    def run(self, commands: list[str]) -> Completed:
        """Run commands, of which only the last may fail."""
        assert commands
        for command in commands[:-1]:
            must_pass(self.start(command).finish())
        return self.start(commands[-1]).finish()


def must_pass(completed: Completed) -> None:
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    jobs: list[Job] = []
    # The page does not quote $BIN, and the path of a checkout may have a blank.
    (tmp_path / "environment").symlink_to(BIN.parent)
    yield Checkout(copy(tracked_files(), tmp_path / "checkout"), jobs)
    for job in jobs:
        job.kill()


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.either
def test_the_first_change(checkout, tmp_path):
    algorithm, name, tests, messages, breakages, mpi, cost, description = read_steps()
    make(algorithm, checkout)
    make(name, checkout)
    package = checkout.run(['$BIN/python -c "import hpctrain; print(hpctrain.__file__)"']).stdout
    assert package == f"{checkout.folder}/hpctrain/__init__.py\n"

    broken = []  # begun early, since one ends after 20 s
    for number, edit in enumerate(breakages.edits):
        folder = shutil.copytree(checkout.folder, tmp_path / f"broken-{number}")
        edit.apply(folder)
        broken += [Checkout(folder, checkout.jobs).start(line) for line in breakages.commands]

    output = checkout.run(tests.commands).stdout
    failed = re.findall(r"^FAILED \S+::(\w+)\[star\b", output, re.MULTILINE)
    assert set(failed) == {"test_what_each_rank_sends"}, output
    assert "add the messages of 'star' to tests/oracles/messages.py" in output
    make(messages, checkout)
    must_pass(checkout.run(tests.commands))
    must_pass(checkout.run(mpi.commands))
    make(cost, checkout)
    must_pass(checkout.run(cost.commands))
    make(description, checkout)
    must_pass(checkout.run(description.commands))
    must_pass(checkout.run(["$BIN/ruff check . && $BIN/ruff format --check ."]))

    wrong, silent = (job.finish() for job in broken)
    assert (wrong.returncode, silent.returncode) == (1, 1)
    assert "AssertionError" in wrong.stdout and "HungError" not in wrong.stdout
    assert re.search(r"HungError: rank \d: irecv of \d+ bytes from rank \d", silent.stdout)


def make(step: Step, checkout: Checkout) -> None:
    assert step.edits
    for edit in step.edits:
        edit.apply(checkout.folder)
