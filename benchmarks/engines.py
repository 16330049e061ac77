"""Claims: which regime is fast beside a slow worker, and what staleness does to the accuracy.

    python benchmarks/engines.py [STUDY ...] [--only METHOD,...] [--seeds 5] [--jobs 3]

straggler  8 workers, of which one computes 1, 3 or 10 times as long: time to 95 % on digits
staleness  8 and 16 workers: test error over the rate, with the plain rate and with rate/staleness,
           for n-softsync; the shape of Zhang, Gupta, Lian and Liu (2016)
period     parameters exchanged every 10 steps: Downpour SGD, EASGD, EAMSGD; the shape of Zhang,
           Choromanska and LeCun (2015)
bytes      local SGD with H = 1 ... 64, and DiLoCo: test error over bytes sent

Compute is a sleep of `step_ms` and a small model; ranks are threads of one process (lib/trials.py).
Rates are tuned per method on one grid, with seeds of their own; the results are of other seeds.
`--only` measures some methods again and leaves the other rows of a result as they are.
Draw the results with benchmarks/plots/engines.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
from lib.claims import claims_of
from lib.common import RESULTS, machine_facts, short_text
from lib.results import find_file, read_text, write_text
from lib.trials import Trial, run

from hpctrain.engines import ENGINES
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

GRID = (0.5, 0.2, 1.0, 0.1, 0.05)
TUNING_SEEDS = (100, 101)
CURVE_POINTS = 30  #: of a curve that is kept
Row = dict[str, Any]
SGD = {"kind": "sgd"}


@dataclass(frozen=True)
class Cell:
    """One line of a study's table: what is trained, and which rates are tried."""

    study: str
    method: str
    trial: Trial
    grid: Sequence[float]
    facts: Mapping[str, Any]  #: more columns
    every_rate: bool = False  #: results at every rate, instead of at the best
    curves: bool = False

    @property
    def name(self) -> str:
        return "  ".join([self.study, self.method, *map(str, self.facts.values())])


def straggler_cells() -> list[Cell]:
    methods: dict[str, tuple[dict[str, Any], int]] = {
        "sync (all-reduce)": ({"kind": "allreduce"}, 0),
        "sync (server)": ({"kind": "ps-sync"}, 1),
        "1 backup worker": ({"kind": "ps-sync", "backup_workers": 1}, 1),
        "SSP s = 3": ({"kind": "ps-async", "staleness": 3}, 1),
        "async": ({"kind": "ps-async"}, 1),
        "local SGD H = 8": ({"kind": "local-sgd", "period": 8}, 0),
        "EASGD H = 4": ({"kind": "easgd", "period": 4}, 1),
        "gossip": ({"kind": "gossip"}, 0),
    }
    return [
        Cell("straggler", name,
             Trial(engine, SGD, 8, servers=servers, target=0.95, limit_s=30.0,
                   faults={"step_ms": 20.0, "slow_rank": 1, "slow_factor": factor}),
             GRID, {"slow_factor": factor})
        for factor in (10.0, 3.0, 1.0)
        for name, (engine, servers) in methods.items()
    ]  # fmt: skip


def staleness_cells() -> list[Cell]:
    grid = (0.05, 0.1, 0.2, 0.5, 1.0)
    cells = [Cell("staleness", "single", Trial({"kind": "single"}, SGD, 1, batch=16, steps=1800),
                  grid, {"workers": 1, "softsync": 1}, every_rate=True)]  # fmt: skip
    for workers in (8, 16):
        for rule in ("none", "inverse-staleness"):
            for n in (1, 4, workers):
                engine = {"kind": "ps-async", "rate_rule": rule, "softsync": n}
                trial = Trial(engine, SGD, workers, servers=1, batch=16 * workers,
                              steps=1800 // workers, faults={"step_ms": 10.0})  # fmt: skip
                facts = {"workers": workers, "softsync": n}
                cells.append(Cell("staleness", rule, trial, grid, facts, every_rate=True))
    return cells


def period_cells() -> list[Cell]:
    momentum = {"kind": "sgd", "momentum": 0.9, "nesterov": True}
    methods: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
        "single": ({"kind": "single"}, SGD, 0),
        "Downpour": ({"kind": "ps-async", "rate_rule": "none", "push_every": 10,
                      "pull_every": 10}, SGD, 1),
        "EASGD": ({"kind": "easgd", "period": 10}, SGD, 1),
        "EAMSGD": ({"kind": "easgd", "period": 10}, momentum, 1),
    }  # fmt: skip
    return [
        Cell("period", name,
             Trial(engine, optimizer, 4 if servers else 1, servers=servers, data="mnist",
                   batch=128 if servers else 32, steps=600, faults={"step_ms": 4.0}),
             (0.5, 0.2, 0.1, 0.05, 0.02, 0.005), {}, curves=True)
        for name, (engine, optimizer, servers) in methods.items()
    ]  # fmt: skip


def bytes_cells() -> list[Cell]:
    adamw = {"kind": "adamw", "weight_decay": 0.01}
    rates = (1.0, 0.5, 2.0, 0.2, 0.1)
    local: dict[str, Any] = {"kind": "local-sgd"}
    diloco = local | {"outer": "nesterov"}
    periods = (1, 2, 4, 8, 16, 32, 64)
    methods = [
        ("all-reduce, SGD", {"kind": "allreduce"}, SGD, rates, (1,)),
        ("all-reduce, AdamW", {"kind": "allreduce"}, adamw, [r / 100 for r in rates], (1,)),
        ("local SGD", local, SGD, rates, periods),
        ("DiLoCo", diloco, adamw, [r / 100 for r in rates], periods[3:]),
    ]
    return [
        Cell("bytes", name,
             Trial(engine if engine["kind"] == "allreduce" else engine | {"period": period},
                   optimizer, 4, data="mnist", steps=192, schedule="cosine"),
             grid, {"period": period})
        for name, engine, optimizer, grid, method_periods in methods
        for period in method_periods
    ]  # fmt: skip


STUDIES = {
    "straggler": straggler_cells,
    "staleness": staleness_cells,
    "period": period_cells,
    "bytes": bytes_cells,
}


def main() -> int:
    arguments, failed_claims = parse_arguments(), 0
    for study in arguments.studies or STUDIES:
        cells = [cell for cell in STUDIES[study]() if cell.trial.engine["kind"] in ENGINES]
        if arguments.only:
            cells = [cell for cell in cells if cell.method in arguments.only.split(",")]
        rows = measure_cells(cells, arguments.jobs, arguments.seeds)
        failed_claims += save_rows(study, rows, {cell.method for cell in cells})
    return int(failed_claims > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES])
    parser.add_argument("--only", help="methods, with commas between them")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=3, help="trainings at the same time")
    return parser.parse_args()


def measure_cells(cells: Sequence[Cell], jobs: int, seeds: int) -> list[Row]:
    """Return the rows of all cells, each measured in one of `jobs` processes."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = []
        for cell_rows in pool.map(measure_cell, cells, [seeds] * len(cells)):
            rows += cell_rows
            print(cell_line(cell_rows), flush=True)
    return rows


def measure_cell(cell: Cell, seeds: int) -> list[Row]:
    """Return the rows of the trainings of a cell: those that tune the rate, and the results."""
    if cell.every_rate:
        return [
            train_once(cell, rate, seed, "result") for rate in cell.grid for seed in range(seeds)
        ]
    tuning: list[Row] = []
    best_rate, best_loss = cell.grid[0], np.inf
    for rate in cell.grid:
        # What takes longer than the best of the rates before need not be known exactly.
        limit_s = min(cell.trial.limit_s, 1.2 * best_loss) if is_timed(cell) else cell.trial.limit_s
        rows = [train_once(cell, rate, seed, "tuning", limit_s) for seed in TUNING_SEEDS]
        loss = float(np.mean([loss_of(cell, row) for row in rows]))
        tuning += rows
        if loss < best_loss:
            best_rate, best_loss = rate, loss
    return tuning + [train_once(cell, best_rate, seed, "result") for seed in range(seeds)]


def is_timed(cell: Cell) -> bool:
    return cell.trial.target <= 1


def loss_of(cell: Cell, row: Row) -> float:
    """Return what a good rate makes small: the time to the target, or the test error."""
    if not is_timed(cell):
        return 1 - row["accuracy"]
    target_s = row["time_to_target_s"]
    return 2 * row["wall_s"] if target_s is None else target_s


def train_once(cell: Cell, rate: float, seed: int, role: str, limit_s: float | None = None) -> Row:
    optimizer = {**cell.trial.optimizer, "rate": rate}
    limit_s = cell.trial.limit_s if limit_s is None else limit_s
    result = run(replace(cell.trial, optimizer=optimizer, seed=seed, limit_s=limit_s))
    curve = result.pop("curve")
    if cell.curves and role == "result":
        result["curve"] = curve[:: max(1, len(curve) // CURVE_POINTS)]
    facts = {"workers": cell.trial.workers, **cell.facts, "rate": rate, "seed": seed}
    return {"method": cell.method, "role": role, **facts, **result}


def cell_line(rows: Sequence[Row]) -> str:
    """Return a cell as a line: the medians of its results."""
    results = [row for row in rows if row["role"] == "result"]
    by_rate = {row["rate"]: [r for r in results if r["rate"] == row["rate"]] for row in results}
    first = results[0]
    parts = [f"{first['method']}", *(f"{k}={first[k]}" for k in CELL_KEYS if k in first)]
    for rate, rate_rows in by_rate.items():
        medians = {name: median(rate_rows, key) for name, key in PRINTED_COLUMNS.items()}
        parts.append(
            f"rate {rate:g}: "
            + ", ".join(f"{name} {short_text(m)}" for name, m in medians.items() if m is not None)
        )
    return "  ".join(parts)


CELL_KEYS = ("slow_factor", "workers", "softsync", "period")
PRINTED_COLUMNS = {"s": "time_to_target_s", "accuracy": "accuracy", "staleness": "staleness_mean"}


def median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows]
    return None if None in values else float(np.median(values))


def save_rows(study: str, rows: Sequence[Row], methods: set[str]) -> int:
    """Write the rows, those of other methods as they were; return how many claims do not hold."""
    path = RESULTS / f"engines-{study}.json"
    saved_rows = json.loads(read_text(path))["rows"] if find_file(path).exists() else []
    rows = [row for row in saved_rows if row["method"] not in methods] + list(rows)
    order = list(dict.fromkeys(cell.method for cell in STUDIES[study]()))
    rows = sorted(rows, key=lambda row: order.index(row["method"]))
    facts = run_ranks(1, lambda link: machine_facts(over_threads(link)))[0]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    claims = claims_of(study, rows)
    header = json.dumps({"machine": facts, "study": study, "claims": claims}, indent=1)[:-2]
    file = write_text(path, f'{header},\n "rows": [\n  {lines}\n ]\n}}\n')
    for claim, is_held in claims.items():
        print("holds:" if is_held else "DOES NOT HOLD:", claim)
    print(f"-> {file.name}")
    return list(claims.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
