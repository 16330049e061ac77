"""Claims: P ranks on GPUs train as one rank on a CPU does, and every engine trains on GPUs.

    python benchmarks/gpu/equal.py [--ranks 2,4] [--device gpu]

`digits`, float32. Of the regimes that equal one rank the parameters after 50 steps are compared
with those of one rank on the CPU; of the others the test accuracy counts. Several ranks share a GPU
where there are more of them.
"""

from __future__ import annotations

import json
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
from _common import RESULTS

from hpctrain import rundir
from hpctrain.machine import facts

STEPS, CLOSE, LIMIT_S = 50, 1e-4, 120
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
LEAST_ACCURACY = 0.8  # after 4 epochs and a bit of 30


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "equal.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trained(Path(folder, "reference"), 1, "cpu", ("engine.kind=single",))
        reference = weights(found["run"])
        rows = [
            compared(Path(folder), name, ranks, given.device, reference)
            for ranks in map(int, given.ranks.split(","))
            for name in (["single"] if ranks == 1 else REGIMES)
        ]
    claims = {
        f"{row['regime']} on {row['ranks']} ranks: {row['said']}": row["holds"] for row in rows
    }
    about = {"machine": facts(("here",), "mpi"), "steps": STEPS}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({**about, "claims": claims, "rows": rows}, indent=1) + "\n")
    for claim, holds in claims.items():
        print("holds:" if holds else "DOES NOT HOLD:", claim)
    sys.exit(not all(claims.values()))


def compared(
    folder: Path, name: str, ranks: int, device: str, reference: np.ndarray
) -> dict[str, Any]:
    """Train, and return how near the parameters are, or how good the model."""
    settings, equal = REGIMES.get(name, (("engine.kind=single",), True))
    found = trained(folder / f"{name}-{ranks}", ranks, device, settings)
    row = {"regime": name, "ranks": ranks, "device": device, "accuracy": found["accuracy"]}
    if found["fault"]:
        return {**row, "said": found["fault"], "holds": False}
    if not equal:
        said = f"accuracy {found['accuracy']:.3f}, >= {LEAST_ACCURACY}"
        return {**row, "said": said, "holds": found["accuracy"] >= LEAST_ACCURACY}
    away = float(np.linalg.norm(weights(found["run"]) - reference) / np.linalg.norm(reference))
    said = f"parameters {away:.1e} away from one CPU rank's, <= {CLOSE}"
    return {**row, "away": away, "said": said, "holds": away <= CLOSE}


def trained(run: Path, ranks: int, device: str, settings: Sequence[str]) -> dict[str, Any]:
    """Train `digits` for STEPS steps; return its folder, accuracy, and what went wrong."""
    keys = (*settings, "run.epochs=", f"run.steps={STEPS}", f"run.device={device}")
    words = [word for key in keys for word in ("--set", key)]
    line = [sys.executable, "-m", "hpctrain", "-q", "launch", "-n", str(ranks), "train", "digits"]
    try:
        done = subprocess.run(
            [*line, *words, "--out", str(run)], capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"run": run, "accuracy": None, "fault": f"still training after {LIMIT_S} s"}
    summary = rundir.read_summary(run) or {}
    fault = "" if done.returncode == 0 else told(done.stderr)
    return {"run": run, "accuracy": summary.get("test_accuracy"), "fault": fault}


def told(errors: str) -> str:
    """Return the line that names the error: launchers say much after it."""
    lines = [line for line in errors.splitlines() if "Error" in line or "hpctrain: " in line]
    return lines[0] if lines else " ".join(errors.split())[-300:]


def weights(run: Path) -> np.ndarray:
    """Return all parameters of a run's last checkpoint as one array."""
    file = run / "weights.safetensors"
    line = [sys.executable, "-m", "hpctrain", "checkpoint", "export", str(run), "--output"]
    subprocess.run([*line, str(file)], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    tensors = load_file(file)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


if __name__ == "__main__":
    main()
