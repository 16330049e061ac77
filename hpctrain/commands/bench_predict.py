"""`hpctrain bench predict | pipeline predict`: predictions for a machine that you do not have.

The first predicts all-reduces and steps, the second steps on grids of data x pipe ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._options import (
    FILE_TYPE,
    add_options,
    complete_choices,
    complete_recipes,
    write_results,
)
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import fit_table, stdout_console
from hpctrain.core.printing import say
from hpctrain.parallel.schedules import SCHEDULES
from hpctrain.tools.bench import units
from hpctrain.tools.bench.prediction import grids
from hpctrain.tools.bench.prediction import predict as predictions
from hpctrain.tools.bench.prediction.command import (
    DEFAULT_LATENCY,
    DEFAULT_LINK,
    DEFAULT_MEMORY_BANDWIDTH,
    DEFAULT_NODE_LATENCY,
    DEFAULT_NODE_LINK,
    check_counts,
    machine_text,
    make_machine,
    run,
)
from hpctrain.training import recipe

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
GRIDS_EPILOG = """\b
Examples:
  hpctrain pipeline predict pylm --ranks 4,8,16 --pipe 1,2,4
  hpctrain pipeline predict --model 13e9,40,5120,2048 --flops 400e12 --ranks 1024:16384 --pipe 8,16
      --ranks-per-node 8 --cards 8 --link 400Gbit --node-link 200GB/s --memory-bandwidth 10TB/s

The layers of a RECIPE are timed in this process, and layers of --model are assumed. Nothing is
started.
"""


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
    rows, machine, text = run(option_values)
    console = stdout_console(160)
    for title, table in predictions.make_tables(rows):
        say(title)
        console.print(fit_table(table, console))
    say(f"assumed: {text}")

    files = option_values["json"], option_values["plot"]
    content = {"machine": asdict(machine), "assumed": text, "rows": rows}
    write_results(content, *files, lambda plots, file: plots.draw_prediction(rows, text, file))
    for file in filter(None, files):
        say(f"wrote {file}", err=True)


@click.command(epilog=GRIDS_EPILOG)
@click.argument("recipe", required=False, shell_complete=complete_recipes)
@click.option(
    "--model",
    metavar="N,LAYERS,WIDTH,LENGTH",
    help="In place of RECIPE: a transformer, by parameters, layers, width, tokens of a text.",
)
@click.option("--flops", type=float, metavar="F", help="Of --model: operations/s of a rank.")
@click.option("--ranks", required=True, metavar="N,...", help="1024,4096; 1024:16384 doubles.")
@click.option("--pipe", required=True, metavar="P,...", help="Ranks that hold a replica together.")
@click.option(
    "--schedule",
    default="1f1b",
    show_default=True,
    metavar="NAME",
    shell_complete=complete_choices(SCHEDULES),
    help=f"One of: {', '.join(SCHEDULES)}.",
)
@click.option("--micro-batches", type=int, default=16, show_default=True, metavar="M")
@click.option(
    "--batch",
    type=int,
    metavar="B",
    help="Samples per replica (weak) or in total; default M.",
)
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="Fixed number of samples per replica (weak) or in total (strong).",
)
@machine_options
@click.option("--json", type=FILE_TYPE, help="Write all rows to this file.")
@click.option("--plot", type=FILE_TYPE, help="Plot time and efficiency over ranks.")
def predict(json: Path | None, plot: Path | None, **options: Any) -> None:
    """Predict the step of a model on grids of data x pipe ranks; needs no MPI."""
    check_counts(options, ("ranks_per_node", "cards", "micro_batches", "batch"))
    machine = make_machine(options)
    count, per_node = options["micro_batches"], options["ranks_per_node"]
    ranks, pipes = (
        units.parse_counts(options["ranks"]),
        units.parse_counts(options["pipe"], "--pipe"),
    )
    batch = options["batch"] or count
    shapes = grids.fitting_grids(ranks, pipes, batch if options["mode"] == "strong" else math.inf)
    model = _model_layers(options)
    rows = list(
        grids.grid_rows(
            model, shapes, options["schedule"], count, batch,
            options["mode"], machine, per_node,
        )
    )  # fmt: skip
    title = f"{options['recipe'] or options['model']}, {options['schedule']}"
    predictions.print_table(rows, f"predicted: a step, {options['mode']} scaling, {title}")
    text = machine_text(machine, per_node)
    say(f"assumed: {text}; data x pipe ranks, gradients reduced after the last action")
    assumed_text = f"{title}; {text}"
    content = {"assumed": assumed_text, "rows": rows}
    write_results(
        content, json, plot, lambda plots, file: plots.draw_grids(rows, assumed_text, file)
    )


def _model_layers(options: dict[str, Any]) -> Any:
    """Return the layers of the recipe or of `--model`; raise UsageError."""
    if (options["recipe"] is None) == (options["model"] is None):
        raise UsageError("expected one of RECIPE and --model, such as --model 13e9,40,5120,2048")
    if options["recipe"] is not None:
        samples = max(1, (options["batch"] or options["micro_batches"]) // options["micro_batches"])
        return grids.measure_recipe(recipe.load(options["recipe"]), samples)
    model_sizes, flops = _parse_model(options["model"]), options["flops"]
    if flops is None or not flops > 0:
        raise UsageError(f"--flops: expected operations per second such as 400e12, seen {flops}")
    return grids.transformer(*model_sizes, flops)


def _parse_model(text: str) -> tuple[float, int, int, int]:
    try:
        parameters, layers, width, length = map(float, text.split(","))
    except ValueError:
        parameters = layers = width = length = 0.0
    if min(parameters, layers, width, length) < 1:
        raise UsageError(
            "--model: expected parameters, layers, width and tokens of a text, such as "
            f"13e9,40,5120,2048, seen '{text}'"
        )
    return parameters, int(layers), int(width), int(length)
