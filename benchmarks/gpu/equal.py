"""Claims: P ranks on GPUs train as one rank on a CPU does, and every engine trains on GPUs.

    python benchmarks/gpu/equal.py [--ranks 2,4] [--device gpu]

`digits`. Of the regimes that equal one rank the parameters after 50 steps are compared with those
of one rank on the CPU: in float32 one ReLU that flips by rounding already moves them by 5e-5, in
float64 nothing does. So one rank, and float64, come first. Of the others the test accuracy counts.
Several ranks share a GPU where there are more of them. What is found is kept after each run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS
from lib.outcomes import print_claims, save_result

from hpctrain.core.run_files import run_folder
from hpctrain.transport.machine import facts

STEPS, LIMIT_S = 50, 120
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
#: regime: its settings, and whether it equals one rank
REGIMES: dict[str, tuple[Sequence[str], bool]] = {
    "allreduce": ((), True),
    "allreduce direct": (("wire.algorithm=direct",), True),
    "allreduce ring": (("wire.algorithm=ring",), True),
    "ps-sync": (("engine.kind=ps-sync",), True),
    "ps-async": (("engine.kind=ps-async",), False),
    "local-sgd": (("engine.kind=local-sgd",), False),
    "easgd": (("engine.kind=easgd",), False),
    "gossip": (("engine.kind=gossip",), False),
}
MIN_ACCURACY = 0.8  # after 4 epochs and a bit of 30


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "equal.json")
    options = parser.parse_args()
    about = {"machine": facts(("here",), "mpi"), "steps": STEPS}
    rows: list[dict[str, Any]] = []
    claims: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        references = {kind: train_reference(Path(folder), kind) for kind in TOLERANCE}
        for ranks, name, kind in plan_runs(list(map(int, options.ranks.split(",")))):
            rows.append(
                compare_run(Path(folder), name, ranks, options.device, kind, references[kind])
            )
            claims = make_claims(rows)
            save_result(
                options.json, about, claims, rows
            )  # now: the time may be over before the next ends
    sys.exit(not print_claims(claims))


def make_claims(rows: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
    """Return what is claimed of each run, and whether it holds."""
    return {
        f"{row['regime']} on {row['ranks']} ranks, {row['precision']}: {row['said']}": row["holds"]
        for row in rows
    }


def train_reference(folder: Path, precision: str) -> np.ndarray:
    """Return the parameters that one rank on the CPU comes to."""
    settings = ("engine.kind=single", f"run.precision={precision}")
    outcome = train_run(folder / f"reference-{precision}", 1, "cpu", settings)
    if outcome["fault"]:
        sys.exit(f"one rank on the CPU: {outcome['fault']}")
    return load_weights(outcome["run"])


def plan_runs(ranks: Sequence[int]) -> list[tuple[int, str, str]]:
    """Return what is trained, the surest first: one rank, float64, all regimes, what equals."""
    all_regimes = [(ranks[0], name, "float32") for name in REGIMES]
    equal = [name for name, (_, equal) in REGIMES.items() if equal]
    further_ranks = [(n, name, "float32") for n in ranks[1:] for name in equal]
    float64_runs = [(1, "single", "float64"), (ranks[-1], "allreduce direct", "float64")]
    return [*float64_runs, (1, "single", "float32"), *all_regimes, *further_ranks]


def compare_run(
    folder: Path, name: str, ranks: int, device: str, precision: str, reference: np.ndarray
) -> dict[str, Any]:
    """Train, and return how near the parameters are, or how good the model."""
    settings, equal = REGIMES.get(name, (("engine.kind=single",), True))
    settings = (*settings, f"run.precision={precision}")
    outcome = train_run(folder / f"{name}-{ranks}-{precision}", ranks, device, settings)
    row = {"regime": name, "ranks": ranks, "device": device, "precision": precision,
           "accuracy": outcome["accuracy"]}  # fmt: skip
    if outcome["fault"]:
        return {**row, "said": outcome["fault"], "holds": False}
    if not equal:
        message = f"accuracy {outcome['accuracy']:.3f}, >= {MIN_ACCURACY}"
        return {**row, "said": message, "holds": outcome["accuracy"] >= MIN_ACCURACY}
    distance = float(
        np.linalg.norm(load_weights(outcome["run"]) - reference) / np.linalg.norm(reference)
    )
    tolerance = TOLERANCE[precision]
    message = f"parameters {distance:.1e} away from one CPU rank's, <= {tolerance}"
    return {**row, "away": distance, "said": message, "holds": distance <= tolerance}


def train_run(run: Path, ranks: int, device: str, settings: Sequence[str]) -> dict[str, Any]:
    """Train `digits` for STEPS steps; return its folder, accuracy, and what went wrong."""
    keys = (*settings, "run.epochs=", f"run.steps={STEPS}")
    # By these words the launcher knows whether to try the ways between GPUs.
    words = ["--device", device, *(word for key in keys for word in ("--set", key))]
    line = [sys.executable, "-m", "hpctrain", "-q", "launch", "-n", str(ranks), "train", "digits"]
    try:
        process = subprocess.run(
            [*line, *words, "--out", str(run)], capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"run": run, "accuracy": None, "fault": f"still training after {LIMIT_S} s"}
    summary = run_folder.read_summary(run) or {}
    fault = "" if process.returncode == 0 else error_line(process.stderr)
    return {"run": run, "accuracy": summary.get("test_accuracy"), "fault": fault}


def error_line(errors: str) -> str:
    """Return the line with the error: launchers print more lines after it."""
    lines = [line for line in errors.splitlines() if "Error" in line or "hpctrain: " in line]
    return lines[0] if lines else " ".join(errors.split())[-300:]


def load_weights(run: Path) -> np.ndarray:
    """Return all parameters of a run's last checkpoint as one array."""
    file = run / "weights.safetensors"
    line = [sys.executable, "-m", "hpctrain", "checkpoint", "export", str(run), "--output"]
    subprocess.run([*line, str(file)], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    tensors = load_file(file)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


if __name__ == "__main__":
    main()
