"""Runs the whole comparison under two MPIs in turn, several times each, and merges what they say.

    python benchmarks/compare.py OPENMPI_ENVIRONMENT MPICH_ENVIRONMENT [--times 5] [--ranks 2]
                                 [--parts allreduce,private,step] [--resume]
    python benchmarks/compare.py --draw [--ranks 2] [--parts allreduce,private,step]

An environment is a virtual environment with hpctrain and one MPI; Horovod and PyTorch are measured
where it has them (benchmarks/install_horovod.sh). Each run is `hpctrain bench` in a job of its own.
Per size the better native median of both MPIs is the rival: a user could have either. What `auto`
adds to a call is seen against the native of its own MPI: a bound call against `own native`, which
is bound as well (a partial of Allreduce and a specification made before), the plain call,
`ht.allreduce(x)`, and the same with `check=False` (`auto-unchecked`), against `own native-plain`,
`comm.Allreduce(MPI.IN_PLACE, x)`.

Every run is kept as soon as it has ended. With --resume those of an interrupted comparison count,
if they were asked for the same, of the same algorithms: only what is missing of --times is run.
With --draw nothing is measured: claims and picture come from the runs that there are.

    results/compare-PART-N-ranks.json   all runs, what was merged, claims; .json.gz if it is long
    results/compare-PART-N-ranks.png    PART: allreduce (arrays in node memory, where gradients
                                        are), private (elsewhere), step (whole training steps)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from lib.compared import Row, check_claims, merge_runs
from lib.results import find_file, read_text, write_text

from hpctrain.tools.bench import plot
from hpctrain.tuning import table

BENCHMARKS = Path(__file__).parent
#: Near others: more lines would hide them.
HIDDEN_CONTENDERS = ("ring", "auto-unchecked", "auto-bound", "direct-bound", "native-plain")
PARTS_WITH_RIVALS = ("allreduce", "step")
TITLES = {"allreduce": "all-reduce of arrays in node memory",
          "private": "all-reduce of private arrays",
          "step": "a step of an MLP of 10 M parameters"}  # fmt: skip
ROWS_PLACEHOLDER = "rows come here"
#: Prints a hash of all sources, and where they lie.
SOURCES_SCRIPT = """
import hashlib, pathlib, hpctrain
folder = pathlib.Path(hpctrain.__path__[0])
texts = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
print(hashlib.sha256(texts).hexdigest(), folder)
"""
PARTS: dict[str, list[str]] = {
    "allreduce": ["allreduce", "--algorithms",
                  "auto,auto-unchecked,auto-bound,direct,direct-bound,direct-shared,ring,native,"
                  "native-plain"],
    "private": ["allreduce", "--algorithms", "auto,auto-bound,direct,ring,native",
                "--buffers", "private"],
    "step": ["step", str(BENCHMARKS / "mlp-10m.toml"), "--batch-per-rank", "32,128",
             "--algorithms", "auto,direct,share-parameters,native"],
}  # fmt: skip


def main() -> None:
    arguments = _arguments()
    for environment in arguments.environments:
        _check_same_sources(environment)
    report_part = _draw_part if arguments.draw else _measure_part
    outcomes = [report_part(part, arguments) for part in arguments.parts.split(",")]
    sys.exit(0 if all(outcomes) else 1)


def _arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("environments", nargs="*", type=Path)
    parser.add_argument("--times", type=int, default=5, help="runs of each environment")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4B:128MiB")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rivals", default="horovod,gloo", help='"" for none')
    parser.add_argument("--resume", action="store_true", help="count the runs there are already")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    arguments = parser.parse_args()
    if bool(arguments.environments) == arguments.draw:
        parser.error("expected environments, or --draw alone")
    return arguments


def _check_same_sources(environment: Path) -> None:
    """End if `environment` has another hpctrain than this process: it would be measured instead."""
    own_sources, other_sources = (
        subprocess.run(
            [python, "-c", SOURCES_SCRIPT], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for python in (sys.executable, environment / "bin" / "python")
    )
    if own_sources.split()[0] != other_sources.split()[0]:
        sys.exit(
            f"{environment} has another hpctrain, {other_sources.split()[1]}, than the one "
            f"that is to be measured, {own_sources.split()[1]}: install that one there, or set "
            "PYTHONPATH"
        )


def _measure_part(part: str, arguments: argparse.Namespace) -> bool:
    """Make the runs of `part`, keep each when it has ended; return whether all claims hold."""
    sizes = [] if part == "step" else ["--sizes", arguments.sizes]
    rivals = (
        ["--rivals", arguments.rivals] if part in PARTS_WITH_RIVALS and arguments.rivals else []
    )
    bench_arguments = [*PARTS[part], *rivals, *sizes, "--iterations", str(arguments.iterations)]
    path = _result_path(part, arguments)
    request = {"bench": _command_text(bench_arguments), "algorithms": table.hash_sources()}
    runs = _load_runs(path, request) if arguments.resume else []
    for run_number in range(1, arguments.times + 1):
        for environment in arguments.environments:
            if sum(run["environment"] == environment.name for run in runs) >= run_number:
                continue
            print(
                f"{part}: run {run_number} of {arguments.times}, {environment}", end="", flush=True
            )
            start_s = perf_counter()
            report = _run_job(environment, arguments.ranks, bench_arguments)
            print(f": {perf_counter() - start_s:.0f} s", flush=True)
            runs.append({"environment": environment.name, "asked": request, **report})
            _save_runs(path, part, arguments.ranks, runs)
    return _report_part(path, part, arguments.ranks, runs)


def _draw_part(part: str, arguments: argparse.Namespace) -> bool:
    path = _result_path(part, arguments)
    return _report_part(path, part, arguments.ranks, json.loads(read_text(path))["runs"])


def _result_path(part: str, arguments: argparse.Namespace) -> Path:
    return BENCHMARKS / "results" / f"compare-{part}-{arguments.ranks}-ranks.json"


def _command_text(bench_arguments: Sequence[str]) -> str:
    """Return what `hpctrain bench` was asked for, files by their names."""
    return " ".join(word.replace(f"{BENCHMARKS}{os.sep}", "") for word in bench_arguments)


def _load_runs(path: Path, request: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs in `path` that were asked for the same."""
    saved_runs = json.loads(read_text(path))["runs"] if find_file(path).exists() else []
    runs = [run for run in saved_runs if run.get("asked") == request]
    print(f"{path.name}: {len(runs)} of {len(saved_runs)} runs count", flush=True)
    return runs


def _run_job(environment: Path, ranks: int, bench_arguments: Sequence[str]) -> dict[str, Any]:
    """Return what one job kept; end where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        json_path = Path(folder, "rows.json")
        launch = [environment / "bin" / "python", "-m", "hpctrain", "launch", "-n", str(ranks)]
        path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        job = subprocess.run(
            [*map(str, launch), "bench", *bench_arguments, "--json", str(json_path)],
            env={**os.environ, "PATH": path},
            stdout=subprocess.DEVNULL,
        )
        if job.returncode:
            sys.exit(f"{environment}: hpctrain bench ended with {job.returncode}")
        report: dict[str, Any] = json.loads(json_path.read_text())
        return report


def _mpi_name(run: Mapping[str, Any]) -> str:
    return str(run["machine"]["mpi"]).rsplit(maxsplit=1)[0]


def _merge_and_check(
    part: str, ranks: int, runs: Sequence[Any]
) -> tuple[list[Row], dict[str, bool | None]]:
    """Return what was merged, and what holds of the claims."""
    merged = merge_runs([run["rows"] for run in runs], [_mpi_name(run) for run in runs], part)
    return merged, check_claims(part, ranks, merged)


def _save_runs(path: Path, part: str, ranks: int, runs: Sequence[Any]) -> None:
    """Write all of it, a row a line, whole or not at all: we may be stopped at any time."""
    merged, claims_held = _merge_and_check(part, ranks, runs)
    document = {
        "claims": claims_held,
        "merged": ROWS_PLACEHOLDER,
        "runs": [{**run, "rows": ROWS_PLACEHOLDER} for run in runs],
    }
    tables = iter([merged, *(run["rows"] for run in runs)])
    text_parts = json.dumps(document, indent=1).split(json.dumps(ROWS_PLACEHOLDER))
    text = text_parts[0] + "".join(
        _rows_text(next(tables)) + text_part for text_part in text_parts[1:]
    )
    write_text(path, text + "\n")


def _rows_text(rows: Sequence[Row]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "]"


def _report_part(path: Path, part: str, ranks: int, runs: Sequence[Any]) -> bool:
    """Draw what was merged, print the claims; return whether all hold."""
    merged, claims_held = _merge_and_check(part, ranks, runs)
    drawn_rows = [
        {**row, "algorithm": f"{row['algorithm']}, {row['mpi']}"}
        for row in merged
        if row["algorithm"] not in HIDDEN_CONTENDERS
    ]
    draw_plot = plot.draw_step_bars if part == "step" else plot.draw_size_plot
    draw_plot(drawn_rows, f"{TITLES[part]}, {ranks} ranks on 1 node", path.with_suffix(".png"))
    for claim, is_held in claims_held.items():
        print({True: "holds:", False: "DOES NOT HOLD:", None: "shown:"}[is_held], claim)
    print(f"-> {find_file(path).name}, {path.stem}.png", flush=True)
    return False not in claims_held.values()


if __name__ == "__main__":
    main()
