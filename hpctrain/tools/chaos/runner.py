"""A case from its first attempt to its verdict.

Runs without faults, whose parameters a case must reach, are each trained once per campaign.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from hpctrain.tools.chaos import hosts, jobs, oracle, regimes, threads
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import SAMPLES, Case, Fault, FullDisk, LinkCall, Signal
from hpctrain.tools.chaos.draw import ORPHAN_MS
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Marked, Scope

RESULT_FILE = "result.json"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: Facts of an elastic run that a line of results repeats.
FACTS = ("recoveries", "lost_s", "ettr", "spares_used", "wall_s", "world_size")
TIMEOUT_S = 300.0  #: `[run] timeout_s`: a busy machine is no hang
TEST_SAMPLES = 64


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
            "case": asdict(case), "mpi": jobs.mpi_name(), "verdict": self.word,
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
    prepare(case, place, scope)
    verdict = Verdict(unchecked=[*scope.unchecked])
    if not isolated and any(isinstance(fault, FullDisk) for fault in case.faults):
        verdict.skipped = "a full disk needs namespaces, in which the case may mount one"
    else:
        verdict.problems += _inject_faults(case, place, scope, verdict)
        if not verdict.problems:
            verdict.problems += _compare_parameters(case, place, scope, verdict)
    if isolated and (keep or verdict.problems):  # the disk goes with the namespace
        shutil.copytree(place.run, place.home / "run", symlinks=True, dirs_exist_ok=True)
    verdict.seconds = time.monotonic() - start_s
    (place.home / RESULT_FILE).write_text(json.dumps(verdict.table(case)))


def _inject_faults(case: Case, place: Place, scope: Scope, verdict: Verdict) -> Iterator[str]:
    """Let the job suffer its faults, then resume it until it has completed."""
    for number, faults in enumerate([*case.attempts, []]):
        if case.is_elastic and verdict.attempts and verdict.attempts[-1].code == 0:
            break
        launcher = case.launcher if faults or not number else jobs.undisturbed_launcher(case)
        orphaned = any(isinstance(fault, Signal) and fault.is_orphaning for fault in faults)
        settings = (f"faults.step_ms={ORPHAN_MS}",) * orphaned
        kills = link_calls(case, faults, place.work, scope)
        order = Order(launcher, resume=number > 0, settings=settings, kills=kills)
        ending = threads.train(
            case, place, scope, order, faults, place.home / f"attempt-{number}.stderr"
        )
        verdict.attempts.append(ending)
        for problem in oracle.problems_of(case, faults, ending, place.run):
            yield f"attempt {number}: {problem}"
        if ending.code is None or (not faults and ending.code):
            return
    hung = any(ending.code == 86 for ending in verdict.attempts)
    yield from oracle.problems_at_end(case, place.run, hung=hung)
    summary = oracle.read_summary(place.run) or {}
    verdict.facts = {key: summary[key] for key in FACTS if case.is_elastic and key in summary}


def _compare_parameters(case: Case, place: Place, scope: Scope, verdict: Verdict) -> Iterator[str]:
    """Compare the parameters with a run without faults, or with the replay."""
    verdict.params_sha256 = recorded_sha256(place.run)
    if regimes.is_deterministic(case.recipe):
        if _had_fewer_ranks(case, verdict) and not regimes.is_ordered(case.recipe):
            verdict.unchecked = [*verdict.unchecked, "parameters: fewer ranks add in another order"]
            return
        verdict.reference_sha256 = train_once(case, place.work, scope).sha256
        if verdict.params_sha256 != verdict.reference_sha256:
            yield "other parameters than the run without faults"
    elif _had_fewer_ranks(case, verdict) or verdict.facts.get("recoveries"):
        verdict.unchecked = [*verdict.unchecked, "parameters: no replay of a run that lost ranks"]
    elif not any(oracle.GAP in ending.stderr for ending in verdict.attempts):
        verdict.reference_sha256, problems = replay(case, place, scope)
        yield from problems
        if not problems and verdict.params_sha256 != verdict.reference_sha256:
            yield "other parameters than its replay"


def _had_fewer_ranks(case: Case, verdict: Verdict) -> bool:
    """Return whether fewer ranks than at the beginning trained for a part of the run."""
    ended_early = case.is_elastic and len(verdict.attempts) > 1
    return ended_early or verdict.facts.get("world_size", case.ranks) < case.ranks


def prepare(case: Case, place: Place, scope: Scope) -> None:
    """Make the folder of a case, its recipe and its disk."""
    shutil.rmtree(place.home, ignore_errors=True)
    place.temporary.mkdir(parents=True)
    if scope.has_own_mounts:
        hosts.mount(place.disk, hosts.ROOM_KIB)
    else:
        place.disk.mkdir()
    data = (
        {"kind": "npz", "path": str(_sample_file(place.work))} if "data" not in case.recipe else {}
    )
    recipe = {**({"data": data} if data else {}), **case.recipe}
    place.recipe.write_text(tomli_w.dumps(recipe))


@dataclass(frozen=True)
class Reference:
    """A run without faults: the hash of its parameters, and the link calls of ranks as threads."""

    sha256: str | None
    problems: list[str]
    calls: list[int]


def train_once(case: Case, work: Path, scope: Scope) -> Reference:
    """Return the run of `case` without faults; train it if no case has done so yet.

    Raises RuntimeError if that run breaks a promise too.
    """
    plain = _without_faults(case)
    table = asdict(plain)
    launcher = "threads" if plain.launcher == "threads" else jobs.mpi_name()
    key = json.dumps([table["ranks"], table["spares"], table["recipe"], launcher], sort_keys=True)
    name = f"reference-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    note = work / f"{name}.json"
    with locked(note):
        if not note.exists():
            place = Place(work, work / name)
            prepare(plain, place, scope)
            note.write_text(json.dumps(asdict(_train(plain, place, scope))))
    result = Reference(**json.loads(note.read_text()))
    if result.problems:
        raise RuntimeError(
            f"the run without faults has problems: {result.problems}; see {work / name}"
        )
    return result


def link_calls(case: Case, faults: Sequence[Fault], work: Path, scope: Scope) -> dict[int, int]:
    """Return {rank: number of the link call} in which `faults` kill ranks that are threads."""
    kills: dict[int, int] = {}
    for fault in faults:
        if isinstance(fault, LinkCall):
            calls = train_once(case, work, scope).calls
            for rank in (fault.rank, *fault.others):
                number = 1 + int(fault.part * calls[rank]) + fault.later
                kills[rank] = min(number, kills.get(rank, number))
    return kills


def _without_faults(case: Case) -> Case:
    recipe = {**case.recipe, "run": {**case.recipe["run"], "timeout_s": TIMEOUT_S}}
    launcher: Any = jobs.undisturbed_launcher(case)
    spares = case.spares if launcher == "threads" else 0  # they count as ranks of the job
    return replace(case, recipe=recipe, faults=[], launcher=launcher, spares=spares)


def _train(plain: Case, place: Place, scope: Scope) -> Reference:
    ending, problems = run_plainly(plain, place, scope, Order(plain.launcher))
    problems += oracle.problems_at_end(plain, place.run, hung=False)
    return Reference(recorded_sha256(place.run), problems, ending.calls)


def run_plainly(case: Case, place: Place, scope: Scope, order: Order) -> tuple[Attempt, list[str]]:
    """Train without faults; return the attempt and the promises that it breaks."""
    ending = threads.train(case, place, scope, order, [], place.home / "attempt.stderr")
    return ending, list(oracle.problems_of(case, [], ending, place.run))


def replay(case: Case, place: Place, scope: Scope) -> tuple[str | None, list[str]]:
    """Repeat the asynchronous run of `place`; return the hash of its parameters, and problems."""
    repeated = Place(place.work, place.home / "replay")
    plain = _without_faults(case)
    prepare(plain, repeated, scope)
    _, problems = run_plainly(plain, repeated, scope, Order(plain.launcher, replay=place.run))
    return recorded_sha256(repeated.run), [f"replay: {problem}" for problem in problems]


def recorded_sha256(run: Path) -> str | None:
    """Return the hash of the parameters at the end of a run, as its summary has it."""
    return (oracle.read_summary(run) or {}).get("params_sha256")


def _sample_file(work: Path) -> Path:
    """Return a file of samples that a small network can learn; made once."""
    path = work / "data.npz"
    with locked(path):
        if not path.exists():
            draw = np.random.default_rng(0)
            x = draw.standard_normal((SAMPLES + TEST_SAMPLES, 8, 8)).astype(np.float32)
            y = (x.reshape(len(x), -1) @ draw.standard_normal((64, 10))).argmax(1)
            first, rest = slice(SAMPLES), slice(SAMPLES, None)
            np.savez(path, x=x[first], y=y[first], x_test=x[rest], y_test=y[rest])
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path` against the other cases of the campaign."""
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
