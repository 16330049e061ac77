"""Claims: `pylm` in tf32, bf16 and fp16 reaches the test loss of float32 within 2 %.

    python benchmarks/gpu/precision.py [--steps 400] [--set data.test_fraction=0.001]

One rank, one GPU, the same seed, samples and schedule, which ends with the last step. Each
precision is a run of the command line: what one does to the process does not reach the next. Each
may take its share of what is left of `--limit`, seconds for all, and is kept when it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from equal import error_line
from lib.common import RESULTS
from lib.outcomes import print_claims, save_result

from hpctrain.core.run_files import run_folder
from hpctrain.transport.machine import facts

PRECISIONS = ("float32", "bf16", "fp16", "tf32")
TOLERANCE = 0.02


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all of it")
    parser.add_argument("--set", action="append", default=[], help="further keys of the recipe")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "precision.json")
    options = parser.parse_args()
    deadline = monotonic() + options.limit
    about = {"machine": facts(("here",), "mpi"), "steps": options.steps}
    rows: list[dict[str, Any]] = []
    claims: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(PRECISIONS):
            share_s = (deadline - monotonic()) / (len(PRECISIONS) - i)
            rows.append(train_run(Path(folder, name), name, options.steps, options.set, share_s))
            claims = make_claims(rows)
            save_result(options.json, about, claims, rows)
    sys.exit(not print_claims(claims))


def train_run(
    run: Path, precision: str, steps: int, extra_settings: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Train `pylm`; return its losses, samples per second, and what went wrong."""
    keys = (
        f"run.steps={steps}",
        f"run.precision={precision}",
        "run.interval_steps=20",
        *extra_settings,
    )
    set_options = [word for key in keys for word in ("--set", key)]
    line = [
        sys.executable,
        "-m",
        "hpctrain",
        "-q",
        "train",
        "pylm",
        "--device",
        "gpu",
        *set_options,
    ]
    try:
        process = subprocess.run(
            [*line, "--out", str(run)], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"precision": precision, "fault": f"still training after {limit_s:.0f} s"}
    if process.returncode != 0:
        return {"precision": precision, "fault": error_line(process.stderr)}
    summary, curve = run_folder.read_summary(run) or {}, run / "metrics.jsonl"
    lines = [json.loads(one) for one in curve.read_text().splitlines()] if curve.exists() else []
    return {
        "precision": precision,
        "fault": "",
        **{key: summary.get(key) for key in ("test_loss", "train_loss", "samples_per_s")},
        "curve": [[one["step"], one["train_loss"]] for one in lines if one.get("train_loss")],
    }


def make_claims(rows: Sequence[dict[str, Any]]) -> dict[str, bool | None]:
    """Return what is claimed of each precision against float32's run, the first."""
    reference_loss = rows[0].get("test_loss")
    found: dict[str, bool | None] = {}
    for row in rows[1:] or rows:
        if row["fault"]:
            found[f"{row['precision']}: {row['fault']}"] = False
        elif row is not rows[0] and reference_loss is not None:
            difference = row["test_loss"] / reference_loss - 1
            loss = f"{row['precision']} ends with a test loss of {row['test_loss']:.4f}"
            claim = f"{loss}, {difference:+.1%} from float32's {reference_loss:.4f}"
            found[f"{claim}, <= {TOLERANCE:.0%}"] = difference <= TOLERANCE
    return found


if __name__ == "__main__":
    main()
