"""benchmarks/gpu/first_day.sh: verdicts, limits, archives; other commands stand for hpctrain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.either
SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu/first_day.sh"
#: part: how many questions it asks
PARTS = {"correct": 6, "pointers": 4, "fast": 2, "sanitized": 2}
GPU = 'case "$*" in *visible_gpus*) exit {found} ;; *) {rest} ;; esac\n'


def run(folder: Path, *parts: str, found=0, doctor="exit 0", python="exit 0", limit=90):
    """Run parts in an environment of these commands; return the process and archived names."""
    script = folder / "benchmarks/gpu/first_day.sh"
    (tools := folder / ".first-day/environment/bin").mkdir(parents=True)
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.read_text().replace("doctor 90", f"doctor {limit}"))
    commands = {
        "hpctrain": doctor, "python": GPU.format(found=found, rest=python),
        "compute-sanitizer": python,
    }  # fmt: skip
    for name, body in commands.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash"), script, *parts], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    archives = sorted((folder / ".first-day/out").glob("*.tar.gz"))
    return done, {name for archive in archives for name in tarfile.open(archive).getnames()}


@pytest.mark.parametrize(
    "commands, verdicts",
    [
        ({}, ["yes: "] * 4),
        ({"python": "echo 3 passed"}, ["yes: ", *["yes: 3 passed"] * 3]),
        ({"doctor": "echo no driver; exit 1"}, ["NO, exit code 1: no driver", *["yes: "] * 3]),
        ({"doctor": "sleep 30", "limit": 1}, ["not over within 1 s", *["yes: "] * 3]),
        (
            {"python": "kill -9 $$"},
            ["yes: ", *(f"killed, or not over within {n} s" for n in (200, 120, 150))],
        ),
    ],
)
def test_a_step_that_fails_leaves_the_others(tmp_path, commands, verdicts):
    done, archived = run(tmp_path, "pointers", **commands)
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == verdicts
    assert {f"pointers/{name}" for name in ("verdicts.txt", "doctor.log", "torch.log")} <= archived


def test_each_part_asks_all_its_questions_and_has_an_archive(tmp_path):
    """In any order where they are asked side by side; what a part exports ends with it."""
    seen = 'echo "$OMPI_MCA_pml" "$@"'
    done, archived = run(tmp_path, *PARTS, doctor=seen, python=seen)
    assert done.returncode == 0, done.stderr
    questions = re.findall(r"^ *\d+ s  (.*?): ", done.stdout, re.M)
    text = SCRIPT.read_text()
    for part, count in PARTS.items():
        asked, questions = questions[:count], questions[count:]
        block = re.search(rf"^{part}\(\)(.*?)^}}", text, re.S | re.M)[1]
        for question in set(asked):
            assert re.sub("^(mem|race)check", "$tool", question) in block
        assert f"{part}/verdicts.txt" in archived
        log = (tmp_path / f".first-day/out/{part}").glob("*.log")
        assert all(("ucx" in file.read_text()) == (part == "pointers") for file in log)
    assert not questions


@pytest.mark.parametrize(
    "part, found, message",
    [
        ("5", 0, "expected parts of correct, pointers, fast, sanitized; seen '5'"),
        ("correct", 1, "no GPU is found by CuPy"),
    ],
)
def test_nothing_is_asked_without_a_part_or_a_gpu(tmp_path, part, found, message):
    done, archived = run(tmp_path, part, found=found)
    assert done.returncode == 2 and message in done.stderr and not archived
