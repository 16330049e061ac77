"""Runs the whole comparison under two MPIs in turn, several times each, and merges what they say.

    python benchmarks/compare.py OPENMPI_ENVIRONMENT MPICH_ENVIRONMENT [--times 5] [--ranks 2]
                                 [--parts allreduce,private,step] [--resume]

An environment is a virtual environment with hpctrain and one MPI; Horovod and PyTorch are measured
where it has them (benchmarks/install_horovod.sh). Each run is `hpctrain bench` in a job of its own.
Per size the better native median of both MPIs is the rival: a user could have either. What `auto`
adds to a call is seen against the native of its own MPI: a bound call against `own native`, which
is bound as well (a partial of Allreduce and a specification made before), the plain call,
`ht.allreduce(x)`, and the same with `check=False` (`auto-unchecked`), against `own native-plain`,
`comm.Allreduce(MPI.IN_PLACE, x)`.

Every run is kept as soon as it has ended. With --resume those of an interrupted comparison count,
if they were asked for the same, of the same algorithms: only what is missing of --times is run.

    results/compare-PART-N-ranks.json   all runs, what was merged, claims
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

from _compared import Row, claims, merge

from hpctrain.bench import plot
from hpctrain.tuning import table

HERE = Path(__file__).parent
#: Near others: more lines would hide them.
NOT_DRAWN = ("ring", "auto-unchecked", "auto-bound", "direct-bound", "native-plain")
MEET_RIVALS = ("allreduce", "step")
_ROWS = "rows come here"
#: Prints a hash of all sources, and where they lie.
SOURCES = """
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
    "step": ["step", str(HERE / "mlp-10m.toml"), "--batch-per-rank", "32,128",
             "--algorithms", "auto,direct,share-parameters,native"],
}  # fmt: skip


def main() -> None:
    arguments = _arguments()
    for environment in arguments.environments:
        _must_have_this_hpctrain(environment)
    fine = [_measure(part, arguments) for part in arguments.parts.split(",")]
    sys.exit(0 if all(fine) else 1)


def _arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("environments", nargs="+", type=Path)
    parser.add_argument("--times", type=int, default=5, help="runs of each environment")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4B:128MiB")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rivals", default="horovod,gloo", help='"" for none')
    parser.add_argument("--resume", action="store_true", help="count the runs there are already")
    return parser.parse_args()


def _must_have_this_hpctrain(environment: Path) -> None:
    """End if `environment` has another hpctrain than this process: it would be measured instead."""
    ours, theirs = (
        subprocess.run(
            [python, "-c", SOURCES], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for python in (sys.executable, environment / "bin" / "python")
    )
    if ours.split()[0] != theirs.split()[0]:
        sys.exit(
            f"{environment} has another hpctrain, {theirs.split()[1]}, than the one that is to be "
            f"measured, {ours.split()[1]}: install that one there, or set PYTHONPATH"
        )


def _measure(part: str, arguments: argparse.Namespace) -> bool:
    """Make the runs of `part`, keep each when it has ended; return whether all claims hold."""
    sizes = [] if part == "step" else ["--sizes", arguments.sizes]
    rivals = ["--rivals", arguments.rivals] if part in MEET_RIVALS and arguments.rivals else []
    rest = [*PARTS[part], *rivals, *sizes, "--iterations", str(arguments.iterations)]
    path = HERE / "results" / f"compare-{part}-{arguments.ranks}-ranks.json"
    asked = {"bench": _named(rest), "algorithms": table.sources()}
    runs = _kept(path, asked) if arguments.resume else []
    for number in range(1, arguments.times + 1):
        for environment in arguments.environments:
            if sum(run["environment"] == environment.name for run in runs) >= number:
                continue
            print(f"{part}: run {number} of {arguments.times}, {environment}", end="", flush=True)
            began = perf_counter()
            found = _run(environment, arguments.ranks, rest)
            print(f": {perf_counter() - began:.0f} s", flush=True)
            runs.append({"environment": environment.name, "asked": asked, **found})
            _keep(path, part, arguments.ranks, runs)
    return _tell(path, part, arguments.ranks, runs)


def _named(rest: Sequence[str]) -> str:
    """Return what `hpctrain bench` was asked for, files by their names."""
    return " ".join(word.replace(f"{HERE}{os.sep}", "") for word in rest)


def _kept(path: Path, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs in `path` that were asked for the same."""
    there = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [run for run in there if run.get("asked") == asked]
    print(f"{path.name}: {len(runs)} of {len(there)} runs count", flush=True)
    return runs


def _run(environment: Path, ranks: int, rest: Sequence[str]) -> dict[str, Any]:
    """Return what one job kept; end where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "rows.json")
        launch = [environment / "bin" / "python", "-m", "hpctrain", "launch", "-n", str(ranks)]
        path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        job = subprocess.run(
            [*map(str, launch), "bench", *rest, "--json", str(kept)],
            env={**os.environ, "PATH": path},
            stdout=subprocess.DEVNULL,
        )
        if job.returncode:
            sys.exit(f"{environment}: hpctrain bench ended with {job.returncode}")
        found: dict[str, Any] = json.loads(kept.read_text())
        return found


def _mpi(run: Mapping[str, Any]) -> str:
    return str(run["machine"]["mpi"]).rsplit(maxsplit=1)[0]


def _found(part: str, ranks: int, runs: Sequence[Any]) -> tuple[list[Row], dict[str, bool | None]]:
    """Return what was merged, and what holds of the claims."""
    merged = merge([run["rows"] for run in runs], [_mpi(run) for run in runs], part)
    return merged, claims(part, ranks, merged)


def _keep(path: Path, part: str, ranks: int, runs: Sequence[Any]) -> None:
    """Write all of it, a row a line, whole or not at all: we may be stopped at any time."""
    merged, held = _found(part, ranks, runs)
    kept = {"claims": held, "merged": _ROWS, "runs": [{**run, "rows": _ROWS} for run in runs]}
    tables = iter([merged, *(run["rows"] for run in runs)])
    pieces = json.dumps(kept, indent=1).split(json.dumps(_ROWS))
    text = pieces[0] + "".join(_lines(next(tables)) + piece for piece in pieces[1:])
    aside = path.with_suffix(".part")
    aside.write_text(text + "\n")
    aside.replace(path)


def _lines(rows: Sequence[Row]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "]"


def _tell(path: Path, part: str, ranks: int, runs: Sequence[Any]) -> bool:
    """Draw what was merged, print the claims; return whether all hold."""
    merged, held = _found(part, ranks, runs)
    named = [
        {**row, "algorithm": f"{row['algorithm']}, {row['mpi']}"}
        for row in merged
        if row["algorithm"] not in NOT_DRAWN
    ]
    draw = plot.draw_step_bars if part == "step" else plot.draw_size_plot
    draw(named, f"{part}, {ranks} ranks on 1 node", path.with_suffix(".png"))
    for claim, holds in held.items():
        print({True: "holds:", False: "DOES NOT HOLD:", None: "shown:"}[holds], claim)
    print(f"-> {path.name}, {path.stem}.png", flush=True)
    return False not in held.values()


if __name__ == "__main__":
    main()
