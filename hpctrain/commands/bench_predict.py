"""`hpctrain bench predict`: predicts all-reduces and steps on a machine that you do not have."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._options import FILE_TYPE, add_options, write_results
from hpctrain.core.fitted_table import fit_table, stdout_console
from hpctrain.core.printing import say
from hpctrain.tools.bench.prediction import tables
from hpctrain.tools.bench.prediction.command import (
    DEFAULT_LATENCY,
    DEFAULT_LINK,
    DEFAULT_MEMORY_BANDWIDTH,
    DEFAULT_NODE_LATENCY,
    DEFAULT_NODE_LINK,
    Prediction,
    run,
)

EPILOG = """\b
Examples:
  hpctrain bench predict --ranks 4096 --link 400Gbit --ranks-per-node 8
  hpctrain bench predict --ranks 2:65536 --sizes 1KiB:1GiB*32 --plot predicted.png
  hpctrain bench predict --ranks 1:1024 --step 50ms,100MiB --mode strong
  hpctrain bench predict --ranks 64 --step mnist
  hpctrain bench predict --ranks 2:256 --measured allreduce.json --json predicted.json

No ranks are started; --step RECIPE computes a gradient of RECIPE in this process. Values that were
not measured are marked as predicted; docs/model.md has the equations.
"""


#: Adds the options of a machine that is not there: its nodes and links.
machine_options = add_options(
    click.option(
        "--ranks-per-node",
        type=int,
        default=1,
        show_default=True,
        metavar="R",
        help="Ranks fill nodes in order.",
    ),
    click.option(
        "--link", metavar="SPEED", help=f"Rate of a network card; default {DEFAULT_LINK}."
    ),
    click.option(
        "--latency", metavar="TIME", help=f"Latency between nodes; default {DEFAULT_LATENCY}."
    ),
    click.option("--cards", type=int, default=1, show_default=True, help="Network cards per node."),
    click.option(
        "--node-link", metavar="SPEED", help=f"Rate inside a node; default {DEFAULT_NODE_LINK}."
    ),
    click.option(
        "--node-latency",
        metavar="TIME",
        help=f"Latency inside a node; default {DEFAULT_NODE_LATENCY}.",
    ),
    click.option(
        "--memory-bandwidth",
        metavar="SPEED",
        help=f"Memory bandwidth of a node; default {DEFAULT_MEMORY_BANDWIDTH}.",
    ),
)


@click.command(epilog=EPILOG)
@click.option("--ranks", required=True, metavar="N,...", help="4096; 2,4,8; 2:65536 doubles.")
@machine_options
@click.option(
    "--sizes",
    default="1KiB:1GiB*8",
    show_default=True,
    metavar="SIZES",
    help="As for bench allreduce.",
)
@click.option("--algorithms", metavar="NAMES", help="Default: all that suit these ranks.")
@click.option(
    "--step",
    metavar="SECONDS,BYTES|RECIPE",
    help="Also predict training steps, from compute time and gradient size, or from a recipe.",
)
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="Fixed number of samples per rank (weak) or in total (strong).",
)
@click.option(
    "--bucket",
    default="4MiB",
    show_default=True,
    metavar="SIZE",
    help="Size of a gradient bucket.",
)
@click.option("--measured", type=FILE_TYPE, help="Times from bench allreduce --json or from tune.")
@click.option("--json", type=FILE_TYPE, help="Write all rows to this file.")
@click.option("--plot", type=FILE_TYPE, help="Plot time over size and over ranks.")
def bench_predict(**option_values: Any) -> None:
    """Predict how long all-reduces take on N ranks, and whole training steps; needs no MPI."""
    prediction = run(option_values)
    console = stdout_console(160)
    for title, table in tables.make_tables(prediction.rows):
        say(title)
        console.print(fit_table(table, console))
    say(f"assumed: {prediction.machine_text}")
    content = {
        "machine": asdict(prediction.machine),
        "assumed": prediction.machine_text,
        "rows": prediction.rows,
    }
    files = option_values["json"], option_values["plot"]
    write_results(content, files[0], partial(_draw, prediction), files[1])
    for file in filter(None, files):
        say(f"wrote {file}", err=True)


def _draw(prediction: Prediction, plot: Path) -> None:
    from hpctrain.tools.bench.prediction.plots import draw_prediction  # needs matplotlib

    draw_prediction(prediction.rows, prediction.machine_text, plot)
