"""Claims: after kill -9 the next step is complete in 50 ms (p50), and training loses 12 % at most.

    python benchmarks/survival.py kills [--engines fast,ordered] [--kills 60]
    python benchmarks/survival.py ettr --period 5 --duration 180 --spares 36
    python benchmarks/survival.py ettr --period 30 --duration 1200 --spares 40
    python benchmarks/survival.py cost [--rounds 8]
    python benchmarks/survival.py before --folder OTHER_CHECKOUT [--rounds 8]

Run them with the Python of an environment of Open MPI 5: its ULFM is needed. All jobs train
`digits` with steps that sleep 10 ms, since four ranks rarely have a core each where this is run.

kills   SIGKILL to any of four ranks, from the killer's clock until the last survivor has completed
        a step after it: with spares, then without; beside MPI's bare Revoke, Shrink and all-reduce,
        and beside a restart from the newest checkpoint. Engines "on free cores" lose a rank of one
        more than there are cores, so that each rank left has a core.
ettr    a rank killed every --period seconds: the part of the time in which steps are completed,
        with a spare for each loss; with one spare, and a restart when it is used up; and with
        restarts alone, which write checkpoints at the interval of Young (1974) and Daly (2006).
cost    a step with ULFM's vote, the recorder and the watch beside one without --with-ft ulfm.
before  the same without ULFM, and all-reduces, beside another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lib.common import RESULTS, save_result
from lib.results import find_file, read_text
from lib.survival_cost import against_checkout, against_plain
from lib.survival_ettr import measure_ettr
from lib.survival_job import (
    RANKS,
    STEP_MS,
    TRAIN,
    Job,
    Kill,
    count_cores,
    describe_kill,
    progress,
    settings,
)

from hpctrain.transport.machine import facts

#: name: settings of the engine
ENGINES = {
    "fast": [],
    "ordered": ["wire.reduction=ordered"],
    "shards": ["engine.shard_optimizer=true"],
    "ps-sync": ["engine.kind=ps-sync", "engine.servers=2", "engine.placement=colocated"],
    "local-sgd": ["engine.kind=local-sgd"],
}
FREE_CORES = " on free cores"
ENGINES |= {name + FREE_CORES: ENGINES[name] for name in ("fast", "ordered")}
SPARES = 6  #: of a job whose ranks are killed, after which it is killed down to two ranks
CHECKPOINT_STEPS = 100  #: of the jobs that are started again, in `kills`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("study", nargs="?", default="kills", choices=STUDIES)
    parser.add_argument("--engines", default=",".join((*ENGINES, "bare", "restart")))
    parser.add_argument("--kills", type=int, default=60, help="of each engine")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which an engine's "
                        "last job begins, whatever --kills")  # fmt: skip
    parser.add_argument("--restarts", type=int, default=10, help="kills that end a job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--period", type=float, default=5.0, help="seconds from fault to fault")
    parser.add_argument("--duration", type=float, default=180.0, help="seconds of training")
    parser.add_argument("--spares", type=int, default=36)
    parser.add_argument("--variants", default="spares,one spare,restart")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", help="of the other checkout")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # jobs end with it
    rows, claims = STUDIES[arguments.study](arguments)
    load = os.getloadavg()  # of other work of the machine, too
    save(arguments.study, [{**row, "load": load} for row in rows], claims)


def save(study: str, rows: Sequence[Mapping[str, Any]], claims: Mapping[str, bool]) -> None:
    """Save the rows of a study; those of another part of it that was measured before stay."""
    path = RESULTS / f"survival-{study}-openmpi.json"
    has_results = find_file(path).exists()
    before = json.loads(read_text(path)) if has_results else {"rows": [], "claims": {}}
    parts = {row["part"] for row in rows}
    rows = [row for row in before["rows"] if row["part"] not in parts] + list(rows)
    prefixes = tuple(f"{part}: " for part in parts)
    old_claims = {c: h for c, h in before["claims"].items() if not c.startswith(prefixes)}
    about = {"machine": facts(["localhost"], "mpi"), "step_ms": STEP_MS, "ranks": RANKS}
    save_result(f"survival-{study}", about, rows, {**old_claims, **claims})
    if not all(claims.values()):
        sys.exit(1)


def measure_kills(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return a row per engine, with each of its kills."""
    rows, claims = [], {}
    for name in arguments.engines.split(","):
        chance = random.Random(f"{arguments.seed} {name}")
        kills: list[dict[str, Any]] = []
        if name == "restart":
            kills = kill_and_restart(chance, arguments.restarts)
        end_s = time.monotonic() + arguments.limit
        while name != "restart" and len(kills) < arguments.kills:
            if kills and time.monotonic() > end_s:
                break
            kills += kill_ranks(name, chance)
        rows.append(summarize(name, kills))
        print({key: value for key, value in rows[-1].items() if key != "each"}, flush=True)
        claims |= claims_of_kills(rows[-1])
    return rows, claims


def kill_ranks(name: str, chance: random.Random) -> list[dict[str, Any]]:
    """Kill ranks of one job, until its spares are used up and two ranks are left."""
    kills = []
    # Bare MPI has no spares: all processes reduce, as many as there are in the other jobs.
    ranks, spares = (RANKS + SPARES, 0) if name == "bare" else (RANKS, SPARES)
    least = 2
    if name.endswith(FREE_CORES):
        least = count_cores()
        ranks, spares = least + 1, 0
    arguments = ["bare"] if name == "bare" else [*TRAIN, *settings(*ENGINES[name])]
    with tempfile.TemporaryDirectory() as out:
        if name != "bare":
            arguments += ["--out", out, "--resume"]
        with Job(arguments, ranks, spares) as job:
            for left in range(ranks + spares, least, -1):
                await_steps(job, min(left, ranks), 20)
                time.sleep(chance.uniform(0, 0.2))
                kill = job.kill(chance)
                await_steps(job, min(left - 1, ranks), 2)
                uses_spare = spares > 0 and left > ranks
                kills.append({**describe_kill(job, kill), "spare": uses_spare})
    return kills


def await_steps(job: Job, members: int, steps: int) -> None:
    if not job.await_steps(members, steps):
        raise RuntimeError(f"the job has ended: {job.tail()}")


def kill_and_restart(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Kill a rank of jobs without ULFM, and start them again from the newest checkpoint."""
    kills = []
    with tempfile.TemporaryDirectory() as out:
        arguments = [*TRAIN, *settings(f"checkpoint.every_steps={CHECKPOINT_STEPS}"),
                     "--out", out, "--resume"]  # fmt: skip
        kill: Kill | None = None
        for _ in range(count + 1):
            with Job(arguments, RANKS, elastic=False) as job:
                await_steps(job, RANKS, 1)
                if kill:
                    last_s = max(float(progress([e])[0][0]) for e in job.events().values())
                    kills.append({"rank": kill.number, "next_step_s": last_s - kill.at_s,
                                  "spare": False})  # fmt: skip
                await_steps(job, RANKS, CHECKPOINT_STEPS)
                time.sleep(chance.uniform(0, 0.5))
                kill = job.kill(chance)
                job.process.wait(60)
    return kills


def summarize(name: str, kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of an engine: percentiles in seconds, and each kill."""
    row: dict[str, Any] = {"part": name, "kills": len(kills)}
    for label, flags in (("", (True, False)), ("_with_spare", (True,)), ("_without", (False,))):
        times = [kill["next_step_s"] for kill in kills if kill["spare"] in flags]
        if times:
            p50, p99 = np.percentile(times, (50, 99))
            row |= {f"p50{label}_s": float(p50), f"p99{label}_s": float(p99)}
    return {**row, "max_s": max(kill["next_step_s"] for kill in kills), "each": list(kills)}


def claims_of_kills(row: Mapping[str, Any]) -> dict[str, bool]:
    if row["part"] not in ENGINES:
        return {}
    p50, p99 = 1e3 * row["p50_s"], 1e3 * row["p99_s"]
    return {
        f"{row['part']}: {row['kills']} kills, next step complete after {p50:.0f} ms (p50), <= 50":
            p50 <= 50,
        f"{row['part']}: ... and {p99:.0f} ms (p99), <= 250 and a step of {STEP_MS}":
            p99 <= 250 + STEP_MS,
    }  # fmt: skip


STUDIES: dict[str, Callable[..., tuple[list[dict[str, Any]], dict[str, bool]]]] = {
    "kills": measure_kills,
    "ettr": measure_ettr,
    "cost": against_plain,
    "before": against_checkout,
}

if __name__ == "__main__":
    main()
