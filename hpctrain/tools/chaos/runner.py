"""A case from its first attempt to its verdict."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.tools.chaos import jobs, oracle, reference, regimes, threads
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import Case, Fault, FullDisk, Signal, dump
from hpctrain.tools.chaos.draw import ORPHAN_MS
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Marked, Scope

RESULT_FILE = "result.json"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: Facts of an elastic run that a line of results repeats.
FACTS = ("recoveries", "lost_s", "ettr", "spares_used", "wall_s", "world_size")


@dataclass
class Verdict:
    """The outcome of a case: its attempts, broken promises, and hashes of parameters."""

    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: str = ""  #: the reason why the case was not run
    unchecked: list[str] = field(default_factory=list)
    params_sha256: str | None = None
    reference_sha256: str | None = None  #: of a run without faults, or of the replay
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """Return passed, failed or skipped."""
        return FAILED if self.problems else SKIPPED if self.skipped else PASSED

    def table(self, case: Case) -> dict[str, Any]:
        """Return the line of results."""
        attempts = [
            {"code": item.code, "fired": item.fired, "seconds": round(item.seconds, 2),
             "lingered_s": round(item.lingered_s, 2)}
            for item in self.attempts
        ]  # fmt: skip
        return {
            "case": dump(case), "mpi": jobs.mpi_name(), "verdict": self.word,
            "problems": self.problems, "attempts": attempts, "params_sha256": self.params_sha256,
            "reference_sha256": self.reference_sha256, "seconds": round(self.seconds, 2),
            "skipped": self.skipped, "unchecked": self.unchecked, **self.facts,
        }  # fmt: skip


def home_of(case: Case, work: Path) -> Path:
    """Return the folder of a case."""
    return work / f"case-{case.seed}-{case.index}"


def run(case: Case, work: Path, *, isolated: bool, keep: bool) -> None:
    """Run a case, in this process's namespaces if `isolated`; leave result.json in its folder."""
    place, start_s = Place(work, home_of(case, work)), time.monotonic()
    mark, is_elsewhere = f"{place.home}-{time.time_ns()}", case.launcher not in jobs.ON_THIS_HOST
    scope = Scope() if isolated else Marked(mark, is_elsewhere)
    reference.prepare(case, place, scope)
    verdict = Verdict(unchecked=[*scope.unchecked])
    if not isolated and any(isinstance(fault, FullDisk) for fault in case.faults):
        verdict.skipped = "a full disk needs namespaces, in which the case may mount one"
    else:
        verdict.problems += _suffer(case, place, scope, verdict)
        if not verdict.problems:
            verdict.problems += _compare(case, place, scope, verdict)
    if isolated and (keep or verdict.problems):  # the disk goes with the namespace
        shutil.copytree(place.run, place.home / "run", symlinks=True, dirs_exist_ok=True)
    verdict.seconds = time.monotonic() - start_s
    (place.home / RESULT_FILE).write_text(json.dumps(verdict.table(case)))


def _suffer(case: Case, place: Place, scope: Scope, verdict: Verdict) -> Iterator[str]:
    """Let the job suffer its faults, then resume it until it has completed."""
    for number, faults in enumerate([*case.attempts, []]):
        if case.is_elastic and verdict.attempts and verdict.attempts[-1].code == 0:
            break
        ending = _attempt(case, place, scope, number, faults)
        verdict.attempts.append(ending)
        for problem in oracle.problems_of(case, faults, ending, place.run):
            yield f"attempt {number}: {problem}"
        if ending.code is None or (not faults and ending.code):
            return
    hung = any(ending.code == 86 for ending in verdict.attempts)
    yield from oracle.problems_at_end(case, place.run, hung=hung)
    summary = oracle.read_summary(place.run) or {}
    verdict.facts = {key: summary[key] for key in FACTS if case.is_elastic and key in summary}


def _attempt(case: Case, place: Place, scope: Scope, number: int, faults: list[Fault]) -> Attempt:
    launcher = case.launcher if faults or not number else jobs.undisturbed_launcher(case)
    orphaned = any(isinstance(fault, Signal) and fault.is_orphaning for fault in faults)
    settings = (f"faults.step_ms={ORPHAN_MS}",) * orphaned
    kills = reference.link_calls(case, faults, place.work, scope)
    order = Order(launcher, resume=number > 0, settings=settings, kills=kills)
    return threads.train(case, place, scope, order, faults, place.home / f"attempt-{number}.stderr")


def _compare(case: Case, place: Place, scope: Scope, verdict: Verdict) -> Iterator[str]:
    """Compare the parameters with a run without faults, or with the replay."""
    verdict.params_sha256 = reference.recorded_sha256(place.run)
    if regimes.is_deterministic(case.recipe):
        if _had_fewer_ranks(case, verdict) and not regimes.is_ordered(case.recipe):
            verdict.unchecked = [*verdict.unchecked, "parameters: fewer ranks add in another order"]
            return
        verdict.reference_sha256 = reference.train_once(case, place.work, scope).sha256
        if verdict.params_sha256 != verdict.reference_sha256:
            yield "other parameters than the run without faults"
    elif _had_fewer_ranks(case, verdict) or verdict.facts.get("recoveries"):
        verdict.unchecked = [*verdict.unchecked, "parameters: no replay of a run that lost ranks"]
    elif not any(oracle.GAP in ending.stderr for ending in verdict.attempts):
        verdict.reference_sha256, problems = reference.replay(case, place, scope)
        yield from problems
        if not problems and verdict.params_sha256 != verdict.reference_sha256:
            yield "other parameters than its replay"


def _had_fewer_ranks(case: Case, verdict: Verdict) -> bool:
    """Return whether fewer ranks than at the beginning trained for a part of the run."""
    ended_early = case.is_elastic and len(verdict.attempts) > 1
    return ended_early or verdict.facts.get("world_size", case.ranks) < case.ranks
