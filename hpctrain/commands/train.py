"""`hpctrain train`: trains the model of a recipe on all ranks of the job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from hpctrain import engines, world
from hpctrain.commands import _options
from hpctrain.commands._options import (
    complete_choices,
    complete_recipes,
    may_be_sweep,
    verbosity,
)
from hpctrain.core.run_files import run_folder
from hpctrain.tools.report import history
from hpctrain.training import recipe, runs
from hpctrain.training.dry_run import dry_run
from hpctrain.transport.device.gpus import Device

EPILOG = """\b
Examples:
  hpctrain train digits --epochs 3
  mpirun -n 4 hpctrain train digits --set wire.algorithm=ring --out runs/ring
  hpctrain launch -n 4 train my.toml --set optimizer.rate=0.05
  hpctrain launch -n 4 train my.toml --dry-run        memory of a rank, time per step
  mpirun -n 8 hpctrain train digits --resume          the newest run of this recipe in runs/
  mpirun -n 8 hpctrain train --resume=runs/ring       that run, by its own recipe
  hpctrain train my.toml --set optimizer.rate=0.1,0.3 --set run.seed=1,2,3 --out runs/sweep
  hpctrain train --resume=runs/sweep                  its members that are not done

Values between commas make a sweep: a run for each combination, one after the other, in a folder
below --out; with `launch` each is a job. `[1,2]` is one list, `[1,2],[3]` two, `"a,b"` one text.
Called again with --resume, members that are done are skipped, interrupted ones go on at their last
checkpoint, and failed ones are repeated. The exit code is not 0 if a member failed.

A recipe is the name of a built-in one or a TOML file. Exit codes: 0 done; 1 a lost rank or a bug;
2 wrong usage, recipe or data; 3 a loss or gradient is not finite; 75 stopped on request after a
checkpoint (resume with --resume); 86 hung, ended by the watch; 130 interrupted.

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.

A recipe may name functions in files beside it: training a recipe runs this code.
"""


class ResumingCommand(click.Command):
    """A command whose `--resume=DIR` is `--out=DIR --resume`, and whose `--resume` takes no word.

    An optional value would take RECIPE in `--resume RECIPE`.
    """

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        if "-n" in words:
            i = words.index("-n")
            line = shlex.join([*words[i : i + 2], "train", *words[:i], *words[i + 2 :]])
            raise click.UsageError(f"-n belongs to the launcher: hpctrain launch {line}")
        named = [word for word in words if word.startswith("--resume=")]
        if named and any(word.partition("=")[0] == "--out" for word in words):
            raise click.UsageError(f"{named[0]} names the folder of the run: leave out --out")
        parts = (
            [f"--out={word.partition('=')[2]}", "--resume"] if word in named else [word]
            for word in words
        )
        return super().parse_args(context, [word for part in parts for word in part])


@click.command(cls=ResumingCommand, epilog=EPILOG)
@click.argument("name", metavar="RECIPE", required=False, shell_complete=complete_recipes)
@click.option(
    "--engine",
    metavar="KIND",
    shell_complete=complete_choices(engines.ENGINES),
    help=f"The training regime: {', '.join(engines.ENGINES)}.",
)
@click.option("--epochs", type=int, metavar="N", help="Passes over the training data.")
@click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=complete_choices(get_args(Device)),
    help="auto, cpu or gpu.",
)
@_options.set_option
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: runs/RECIPE-TIME."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest checkpoint in --out, or in the newest run of RECIPE in runs/; "
    "--resume=DIR: in DIR.",
)
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Train a few steps, write nothing, and show sizes, memory and time per step.",
)
@click.option("--trace", is_flag=True, help="Record what each thread does: DIR/trace.json.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Repeat the asynchronous run in DIR, bit for bit.",
)
@click.pass_context
def train(
    context: click.Context,
    name: str | None,
    engine: str | None,
    epochs: int | None,
    device: str | None,
    sets: tuple[str, ...],
    out: Path | None,
    resume: bool,
    is_dry: bool,
    trace: bool,
    replay: Path | None,
) -> None:
    """Train the model that RECIPE describes.

    Results go to the folder --out.
    """
    if is_dry and (resume or replay):
        raise click.UsageError("--dry-run begins a new training: leave out --resume and --replay")
    if may_be_sweep(sets, out if resume else None):
        code = train_sweep(context.params, verbosity(context))
        if code is not None:
            context.exit(code)
    if name is None:
        if not resume or out is None:
            raise click.UsageError(
                "Missing argument 'RECIPE', as in `train digits`; `train --resume=runs/first` "
                "takes the recipe of that run"
            )
        name = str(run_folder.recipe_file(out, "fit(..., out=DIR, resume=True) in its script"))
    resolved_recipe = recipe.load(name, settings_of(context.params))
    job = world.init(resolved_recipe.run.device, resolved_recipe.run.start_timeout_s)
    if is_dry:
        dry_run(resolved_recipe, job, out)
        return
    if resume and out is None:
        name = resolved_recipe.run.name
        out = Path(job.from_first(lambda: str(history.find_newest(Path("runs"), name))))
    runs.train(resolved_recipe, job, out, resume, replay)


def settings_of(options: Mapping[str, Any]) -> list[str]:
    """Return the `table.key=value` settings that the options of `train` make."""
    keys = {"engine": "engine.kind", "epochs": "run.epochs", "device": "run.device"}
    settings = [f"{key}={options[name]}" for name, key in keys.items() if options[name] is not None]
    return [*settings, *["trace.enabled=true"] * options["trace"], *options["sets"]]


def train_sweep(
    options: Mapping[str, Any], start: Sequence[str], ranks: int | None = None
) -> int | None:
    """Train the sweep that the options of `train` describe, None if they describe one run.

    `start`: hpctrain's words before `train`; `ranks`: of `launch`. Returns the exit code.
    """
    from hpctrain.commands._sweep import train_sweep as train_members  # late: a rank needs no jobs

    return train_members(options, settings_of(options), start, ranks)
