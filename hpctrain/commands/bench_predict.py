"""`hpctrain bench predict`: predicts all-reduces and steps on a machine that you do not have."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hpctrain.bench.prediction import tables
from hpctrain.bench.prediction.command import (
    DEFAULT_LATENCY,
    DEFAULT_LINK,
    DEFAULT_MEMORY_BANDWIDTH,
    DEFAULT_NODE_LATENCY,
    DEFAULT_NODE_LINK,
    Prediction,
    run,
)
from hpctrain.commands.report import MISSING
from hpctrain.core.errors import UsageError

EPILOG = """\b
Examples:
  hpctrain bench predict --ranks 4096 --link 400Gbit --ranks-per-node 8
  hpctrain bench predict --ranks 2:65536 --sizes 1KiB:1GiB*32 --plot predicted.png
  hpctrain bench predict --ranks 1:1024 --step 50ms,100MiB --mode strong
  hpctrain bench predict --ranks 64 --step mnist
  hpctrain bench predict --ranks 2:256 --measured allreduce.json --json predicted.json

Nothing is started but, for --step RECIPE, that recipe's gradient in this process. What was not
measured is called predicted; docs/model.md has the equations.
"""
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog=EPILOG)
@click.option("--ranks", required=True, metavar="N,...", help="4096; 2,4,8; 2:65536 doubles.")
@click.option(
    "--ranks-per-node",
    type=int,
    default=1,
    show_default=True,
    metavar="R",
    help="Ranks fill nodes in order.",
)
@click.option("--link", metavar="SPEED", help=f"Of a node's network card: {DEFAULT_LINK}.")
@click.option("--latency", metavar="TIME", help=f"Short message between nodes: {DEFAULT_LATENCY}.")
@click.option("--cards", type=int, default=1, show_default=True, help="Network cards of a node.")
@click.option("--node-link", metavar="SPEED", help=f"Between ranks of a node: {DEFAULT_NODE_LINK}.")
@click.option("--node-latency", metavar="TIME", help=f"In a node: {DEFAULT_NODE_LATENCY}.")
@click.option(
    "--memory-bandwidth",
    metavar="SPEED",
    help=f"Memory bandwidth of all cores of a node: {DEFAULT_MEMORY_BANDWIDTH}.",
)
@click.option(
    "--sizes",
    default="1KiB:1GiB*8",
    show_default=True,
    metavar="SIZES",
    help="As of bench allreduce.",
)
@click.option("--algorithms", metavar="NAMES", help="Default: all that fit the ranks.")
@click.option(
    "--step",
    metavar="SECONDS,BYTES|RECIPE",
    help="Also predict training steps: compute time and gradient bytes, or measured here.",
)
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="A fixed number of samples per rank (weak), or in total (strong).",
)
@click.option(
    "--bucket",
    default="4MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes that are reduced at once.",
)
@click.option("--measured", type=FILE, help="Of bench allreduce --json, or of tune.")
@click.option("--json", type=FILE, help="Write all rows there.")
@click.option("--plot", type=FILE, help="Draw time over size and over ranks there.")
def bench_predict(**words: Any) -> None:
    """Predict how long all-reduces take on N ranks, and whole training steps; needs no MPI."""
    result = run(words)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, table in tables.make_tables(result.rows):
        click.echo(title)
        console.print(table)
    click.echo(f"assumed: {result.machine_text}")
    _keep(result, words["json"], words["plot"])


def _keep(result: Prediction, json_file: Path | None, plot: Path | None) -> None:
    content = {
        "machine": asdict(result.machine),
        "assumed": result.machine_text,
        "rows": result.rows,
    }
    try:
        if json_file:
            json_file.write_text(json.dumps(content, indent=1) + "\n")
        if plot:
            from hpctrain.bench.prediction.plots import draw_prediction  # needs matplotlib

            draw_prediction(result.rows, result.machine_text, plot)
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error})") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--json, --plot: cannot be written: {error}") from None
