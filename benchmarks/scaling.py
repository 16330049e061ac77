"""Claims: from trials on 1 and 2 hosts a scaling study predicts a step on 4 hosts within 15 %,
in weak and in strong scaling.

    python benchmarks/scaling.py [--link 1gbit] [--repeats 3] [--modes weak,strong]

The hosts are those of a `hpctrain netlab` on this machine; where they are more than its cores they
share them, which the prediction for 4 hosts takes into account. The recipe is the MLP of 10 million
parameters, 32 samples per rank. Whole studies are made by `hpctrain scale`, plots and all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.common import RESULTS, save_result

RECIPE = Path(__file__).with_name("mlp-10m.toml")
HOSTS = "1,2,4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--modes", default="weak,strong")
    arguments = parser.parse_args()
    outcomes = [
        run_study(mode, arguments.link, arguments.repeats) for mode in arguments.modes.split(",")
    ]
    sys.exit(0 if all(outcomes) else 1)


def run_study(mode: str, link: str, repeats: str) -> bool:
    """Make a study, keep its rows and plots, and return whether its claim holds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--mode", mode, "--link", link, "--repeats", repeats, "--out", folder]
        command = [sys.executable, "-m", "hpctrain", "scale", str(RECIPE), "--on", "netlab"]
        subprocess.run([*command, "--nodes", HOSTS, *flags], check=True)
        report = json.loads(Path(folder, "scaling.json").read_text())
        last_row = [row for row in report["rows"] if row["kind"] == "measured"][-1]
        error = last_row["prediction_error"]
        claims = {
            f"{mode} scaling, {last_row['nodes']} hosts from fewer: {error:+.1%} off, within "
            "15 %": abs(error) <= 0.15
        }
        name = f"scaling-{link}-{mode}"
        about = {key: report[key] for key in ("machine", "study", "law", "model")}
        save_result(name, about, report["rows"], claims)
        mpi = report["machine"]["mpi"].rsplit(maxsplit=1)[0].lower().replace(" ", "")
        for plot in ("scaling", "time"):
            shutil.copy(Path(folder, f"{plot}.png"), RESULTS / f"{name}-{plot}-{mpi}.png")
    return all(claims.values())


if __name__ == "__main__":
    main()
