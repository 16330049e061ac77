"""Runs without faults, whose parameters a case must reach: each is trained once per campaign."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from hpctrain.tools.chaos import hosts, jobs, oracle, threads
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import SAMPLES, Case, Fault, LinkCall, dump
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Scope

TIMEOUT_S = 300.0  #: `[run] timeout_s`: a busy machine is no hang
TEST_SAMPLES = 64


class BrokenReferenceError(RuntimeError):
    """A run without faults that breaks a promise."""


def prepare(case: Case, place: Place, scope: Scope) -> None:
    """Make the folder of a case, its recipe and its disk."""
    shutil.rmtree(place.home, ignore_errors=True)
    place.temporary.mkdir(parents=True)
    if scope.has_own_mounts:
        hosts.mount(place.disk, hosts.ROOM_KIB)
    else:
        place.disk.mkdir()
    data = {"kind": "npz", "path": str(_data(place.work))} if "data" not in case.recipe else {}
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

    Raises BrokenReferenceError if that run breaks a promise too.
    """
    plain = _without_faults(case)
    table = dump(plain)
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
        raise BrokenReferenceError(
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
    """Train without faults; return how that ended, and the promises that the end breaks."""
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


def _data(work: Path) -> Path:
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
