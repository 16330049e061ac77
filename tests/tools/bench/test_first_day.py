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
GPU = 'case "$*" in *visible_gpus*) exit {found} ;; *) {rest} ;; esac\n'


def run(folder: Path, part: str, *, found=0, doctor="exit 0", python="exit 0", limit=80):
    """Run a part where the environment has these commands; return its code, output and archive."""
    script = folder / "benchmarks/gpu/first_day.sh"
    (tools := folder / ".first-day/environment/bin").mkdir(parents=True)
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.read_text().replace("doctor 80", f"doctor {limit}"))
    for name, body in (("hpctrain", doctor), ("python", GPU.format(found=found, rest=python))):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash"), script, part], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    archive = folder / f".first-day/out/part-{part}.tar.gz"
    return done, tarfile.open(archive).getnames() if archive.exists() else []


@pytest.mark.parametrize(
    "commands, verdicts",
    [
        ({}, ["yes", "yes"]),
        ({"doctor": "echo no driver; exit 1"}, ["NO, exit code 1: no driver", "yes"]),
        ({"doctor": "sleep 30", "limit": 1}, ["not over within 1 s", "yes"]),
        ({"python": "kill -9 $$"}, ["yes", "killed, or not over within 350 s"]),
    ],
)
def test_a_step_that_fails_leaves_the_others(tmp_path, commands, verdicts):
    done, archived = run(tmp_path, "1", **commands)
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == verdicts
    assert {"part-1/verdicts.txt", "part-1/doctor.log", "part-1/kernels.log"} <= set(archived)


@pytest.mark.parametrize("part", ["1", "2", "3", "4"])
def test_each_part_fits_into_nine_minutes(tmp_path, part):
    done, archived = run(tmp_path, part, python='echo "$@"')
    assert f"part-{part}/verdicts.txt" in archived, done.stderr
    text = SCRIPT.read_text()
    block = re.search(rf"^    {part}\)(.*?);;", text, re.S | re.M)[1]
    limits = [int(n) for n in re.findall(r"(?:step|tests|measure) \w+ (\d+)", block)]
    assert len(limits) == len(done.stdout.splitlines()) and sum(limits) <= 520


@pytest.mark.parametrize(
    "part, found, message",
    [
        ("5", 0, "expected the number of a part, 1 to 4, seen '5'"),
        ("1", 1, "no GPU is found by CuPy"),
    ],
)
def test_nothing_is_asked_without_a_part_or_a_gpu(tmp_path, part, found, message):
    done, archived = run(tmp_path, part, found=found)
    assert done.returncode == 2 and message in done.stderr and not archived
