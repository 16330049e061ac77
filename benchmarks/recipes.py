"""Claims: what the built-in recipes reach, as shipped, and that pylm does on 1, 2 and 4 ranks.

    python benchmarks/recipes.py [mnist] [--seeds 3] [--runs DIR]

Each row is a run of `hpctrain launch -n RANKS train RECIPE` from its start to its last evaluation.
All of them take long; with `--runs` they are kept, and what is done there is not done again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from typing import Any

from lib.common import report_result

from hpctrain.cluster.launch import launch
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe
from hpctrain.world import init

# recipe -> ranks that train it with seed 0, ranks that train it with the other seeds
RANKS = {"digits": ([2], 2), "mnist": ([2], 2), "pylm": ([1, 2, 4], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", choices=list(RANKS), help="all, one after the other")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="folder of the runs; a temporary one if not said")
    arguments = parser.parse_args()
    if arguments.recipe is None:
        commands = [[sys.executable, *sys.argv, name] for name in RANKS]
        sys.exit(max(subprocess.run(command).returncode for command in commands))
    seed_0_ranks, other_ranks = RANKS[arguments.recipe]
    cases = [(n, 0) for n in seed_0_ranks] + [
        (other_ranks, seed) for seed in range(1, arguments.seeds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.runs or Path(folder)
        rows = [train_row(arguments.recipe, *case, runs) for case in cases]
    claims = CLAIMS[arguments.recipe](rows)
    losses = [row.pop("train_losses") for row in rows]
    # Only now: from a process that is a rank itself, no other job can be started.
    report_result(init(), f"recipes-{arguments.recipe}", rows, claims, train_losses=losses)


def train_row(name: str, ranks: int, seed: int, runs: Path) -> dict[str, Any]:
    """Return what a run of the recipe came to, in its folder among `runs`."""
    out, seed_setting = runs / f"{name}-{ranks}-ranks-seed-{seed}", f"run.seed={seed}"
    if not is_done(out, recipe.load(name, [seed_setting])):
        launch(ranks, ["train", name, "--set", seed_setting, "--out", str(out)])
    summary = run_folder.read_summary(out)
    assert summary and summary["status"] == "done"
    losses = [row["train_loss"] for row in run_folder.rows(out)]
    keys = ("steps", "test_accuracy", "test_loss", "train_loss", "wall_s", "compute_s", "wait_s",
            "samples_per_s", "threads", "params_sha256")  # fmt: skip
    summary_values = {key: summary[key] for key in keys}
    return {"recipe": name, "ranks": ranks, "seed": seed, **summary_values, "train_losses": losses}


def is_done(out: Path, spec: recipe.Recipe) -> bool:
    """Return whether `out` holds a complete run of this very recipe."""
    summary, summary_values = run_folder.read_summary(out), out / run_folder.RECIPE
    return (
        bool(summary) and summary["status"] == "done" and summary_values.read_text() == spec.toml()
    )


def accuracy_claims(minimum: float) -> Any:
    """Return claims that every run of an image recipe is right on `minimum` of the test set."""

    def claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
        worst = min(row["test_accuracy"] for row in rows)
        claim = f"{rows[0]['recipe']} is right on {worst:.4f} or more, >= {minimum}"
        return {claim: worst >= minimum}

    return claims


def text_claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the claims on bits per byte, and on how far runs of one seed lie apart."""
    for row in rows:
        row["test_bits_per_byte"] = row["test_loss"] / log(2)
    worst = max(row["test_bits_per_byte"] for row in rows)
    curves = [[*row["train_losses"], row["test_loss"]] for row in rows if row["seed"] == 0]
    max_difference = max(
        max(step_losses) / min(step_losses) - 1 for step_losses in zip(*curves, strict=True)
    )
    return {
        f"{rows[0]['recipe']} needs {worst:.3f} bits per byte or less, < 2.6": worst < 2.6,
        f"losses on 1, 2 and 4 ranks lie {max_difference:.2%} apart, <= 1 %": max_difference
        <= 0.01,
    }


CLAIMS = {"digits": accuracy_claims(0.96), "mnist": accuracy_claims(0.98), "pylm": text_claims}


if __name__ == "__main__":
    main()
