"""`hpctrain pipeline predict`: steps on grids of data x pipe ranks; needs no MPI."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._complete import complete_choices, complete_recipes
from hpctrain.commands._options import FILE_TYPE, write_results
from hpctrain.commands.bench_predict import machine_options
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.parallel.schedules import SCHEDULES
from hpctrain.tools.bench import units
from hpctrain.tools.bench.prediction.command import check_counts, machine_text, make_machine

EPILOG = """\b
Examples:
  hpctrain pipeline predict pylm --ranks 4,8,16 --pipe 1,2,4
  hpctrain pipeline predict --model 13e9,40,5120,2048 --flops 400e12 --ranks 1024:16384 --pipe 8,16
      --ranks-per-node 8 --cards 8 --link 400Gbit --node-link 200GB/s --memory-bandwidth 10TB/s

The layers of a RECIPE are timed in this process, and layers of --model are assumed. Nothing is
started.
"""


@click.command(epilog=EPILOG)
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
    from hpctrain.tools.bench.prediction import grids, tables

    check_counts(options, ("ranks_per_node", "cards", "micro_batches", "batch"))
    machine = make_machine(options)
    count, per_node = options["micro_batches"], options["ranks_per_node"]
    ranks, pipes = (
        units.parse_counts(options["ranks"]),
        units.parse_counts(options["pipe"], "--pipe"),
    )
    batch = options["batch"] or count
    shapes = grids.fitting_grids(ranks, pipes, batch if options["mode"] == "strong" else math.inf)
    model = _model(options)
    rows = list(
        grids.grid_rows(
            model, shapes, options["schedule"], count, batch,
            options["mode"], machine, per_node,
        )
    )  # fmt: skip
    title = f"{options['recipe'] or options['model']}, {options['schedule']}"
    tables.print_table(rows, f"predicted: a step, {options['mode']} scaling, {title}")
    text = machine_text(machine, per_node)
    say(f"assumed: {text}; data x pipe ranks, gradients reduced after the last action")
    assumed = f"{title}; {text}"

    def draw(path: Path) -> None:
        from hpctrain.tools.bench.prediction.plots import draw_grids

        draw_grids(rows, assumed, path)

    write_results({"assumed": assumed, "rows": rows}, json, draw, plot)


def _model(options: dict[str, Any]) -> Any:
    """Return the layers of the recipe or of `--model`; raise UsageError."""
    from hpctrain.tools.bench.prediction import grids
    from hpctrain.training import recipe

    if (options["recipe"] is None) == (options["model"] is None):
        raise UsageError("expected one of RECIPE and --model, such as --model 13e9,40,5120,2048")
    if options["recipe"] is not None:
        samples = max(1, (options["batch"] or options["micro_batches"]) // options["micro_batches"])
        return grids.measure_recipe(recipe.load(options["recipe"]), samples)
    sizes, flops = _sizes(options["model"]), options["flops"]
    if flops is None or not flops > 0:
        raise UsageError(f"--flops: expected operations per second such as 400e12, seen {flops}")
    return grids.transformer(*sizes, flops)


def _sizes(text: str) -> tuple[float, int, int, int]:
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
