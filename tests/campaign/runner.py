"""A case from its first attempt to its verdict, in its own namespaces."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from campaign import attempt as attempts
from campaign import disks, isolation, oracle
from campaign.attempt import Attempt, Place
from campaign.case import ORPHAN_MS, SAMPLES, Case, Fault, dump, orphans
from hpctrain.run_files import run_folder


@dataclass
class Verdict:
    """What came of a case: its attempts, problems, and hashes of parameters."""

    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    params_sha256: str | None = None
    reference_sha256: str | None = None  #: of a run that was not hurt, or of the replay
    seconds: float = 0.0

    def table(self, case: Case) -> dict[str, Any]:
        """Return the line of results."""
        reported = [
            {"code": item.code, "fired": item.fired, "seconds": round(item.seconds, 2),
             "lingered_s": round(item.lingered_s, 2)}
            for item in self.attempts
        ]  # fmt: skip
        return {
            "case": dump(case),
            "mpi": attempts.mpi(),
            "verdict": "failed" if self.problems else "passed",
            "problems": self.problems,
            "attempts": reported,
            "params_sha256": self.params_sha256,
            "reference_sha256": self.reference_sha256,
            "seconds": round(self.seconds, 2),
        }


def run(case: Case, work: Path) -> None:
    """Run a case in this process's namespaces; leave its verdict in result.json of its folder."""
    place, began = Place(work, home_of(case, work)), time.monotonic()
    prepare(case, place)
    verdict = Verdict()
    verdict.problems += _attempts(case, place, verdict)
    if not verdict.problems:
        verdict.problems += _compared(case, place, verdict)
    if verdict.problems:  # the disk goes with the namespace
        shutil.copytree(place.run, place.home / "run", symlinks=True, dirs_exist_ok=True)
    verdict.seconds = time.monotonic() - began
    (place.home / "result.json").write_text(json.dumps(verdict.table(case)))


def home_of(case: Case, work: Path) -> Path:
    """Return the folder of a case."""
    return work / f"case-{case.seed}-{case.index}"


def prepare(case: Case, place: Place) -> None:
    """Make the folder of a case, its recipe and its disk; and the data of all cases."""
    shutil.rmtree(place.home, ignore_errors=True)
    (place.home / "tmp").mkdir(parents=True)
    disks.mount(place.home / "disk", disks.ROOM_KIB)
    data = {"kind": "npz", "path": str(_data(place.work))}
    text = tomli_w.dumps({**case.recipe, "data": data})
    (place.home / "recipe.toml").write_text(text)


def _data(work: Path) -> Path:
    """Return a file of samples that a small network can learn; made once."""
    path = work / "data.npz"
    with _lock(path):
        if not path.exists():
            draw = np.random.default_rng(0)
            x = draw.standard_normal((SAMPLES + 64, 8, 8)).astype(np.float32)
            y = (x.reshape(len(x), -1) @ draw.standard_normal((64, 10))).argmax(1)
            first, rest = slice(SAMPLES), slice(SAMPLES, None)
            np.savez(path, x=x[first], y=y[first], x_test=x[rest], y_test=y[rest])
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _attempts(case: Case, place: Place, verdict: Verdict) -> Iterator[str]:
    """Let the job suffer its faults, then resume it until it has completed."""
    planned: list[Fault | None] = [*case.faults, None]
    for number, fault in enumerate(planned):
        # The launcher's own part is tested under faults; without it a resume costs less.
        launcher = case.launcher if fault else "mpiexec"
        options = ["--resume"] if number else []
        if fault and orphans(fault):
            options += ["--set", f"faults.step_ms={ORPHAN_MS}"]
        line = attempts.command(case, place, options, launcher)
        log = place.home / f"attempt-{number}.stderr"
        observed = attempts.attempt(case, place, line, fault, log)
        isolation.clear(place.home / "tmp")
        verdict.attempts.append(observed)
        for problem in oracle.problems_of(case, fault, observed, place.run):
            yield f"attempt {number}: {problem}"
        if observed.code is None or (fault is None and observed.code):
            return
    hung = any(observed.code == 86 for observed in verdict.attempts)
    yield from oracle.problems_at_end(case, place.run, hung)


def _compared(case: Case, place: Place, verdict: Verdict) -> Iterator[str]:
    """Compare the parameters with those of a run that was not hurt, or of the replay."""
    verdict.params_sha256 = _sha256(place.run)
    if case.synchronous:
        verdict.reference_sha256 = reference(case, place.work)
        if verdict.params_sha256 != verdict.reference_sha256:
            yield "other parameters than the run that was not hurt"
    elif not any(oracle.GAP in observed.stderr for observed in verdict.attempts):
        yield from _replayed(case, place, verdict)


def _replayed(case: Case, place: Place, verdict: Verdict) -> Iterator[str]:
    again = Place(place.work, place.home / "replay")
    prepare(case, again)
    line = attempts.command(case, again, ["--replay", str(place.run)], "mpiexec")
    observed = attempts.attempt(case, again, line, None, again.home / "replay.stderr")
    verdict.reference_sha256 = _sha256(again.run)
    for problem in oracle.problems_of(replace(case, launcher="mpiexec"), None, observed, again.run):
        yield f"replay: {problem}"
    if observed.code == 0 and verdict.params_sha256 != verdict.reference_sha256:
        yield "other parameters than its replay"


def reference(case: Case, work: Path) -> str | None:
    """Return the hash of the parameters of `case` without faults; each is trained once."""
    timeless = {**case.recipe, "run": {**case.recipe["run"], "timeout_s": 300.0}}
    plain = replace(case, recipe=timeless, faults=[], launcher="mpiexec")
    key = json.dumps([plain.ranks, plain.recipe, attempts.mpi()], sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    note = work / f"reference-{name}.json"
    with _lock(note):
        if not note.exists():
            place = Place(work, work / f"reference-{name}")
            prepare(plain, place)
            line = attempts.command(plain, place, [], "mpiexec")
            observed = attempts.attempt(plain, place, line, None, place.home / "stderr")
            problems = [*oracle.problems_of(plain, None, observed, place.run)]
            problems += oracle.problems_at_end(plain, place.run, False)
            note.write_text(json.dumps({"sha256": _sha256(place.run), "problems": problems}))
            isolation.clear()
    reported = json.loads(note.read_text())
    if reported["problems"]:
        raise RuntimeError(
            f"the run without faults has problems: {reported['problems']}; see {note}"
        )
    sha256: str | None = reported["sha256"]
    return sha256


def _sha256(run: Path) -> str | None:
    return (run_folder.read_summary(run) or {}).get("params_sha256")
