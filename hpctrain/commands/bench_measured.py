"""`hpctrain bench allreduce | reduce-scatter | all-gather | broadcast | p2p | step`, and `tune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpctrain import world
from hpctrain.commands import _options
from hpctrain.commands._options import complete_recipes
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import collectives
from hpctrain.tools.bench import tune as tuning
from hpctrain.tools.bench.measured_collectives import COLLECTIVES

DEFAULTS = {
    "allreduce": "auto,auto-unchecked,ring,native",
    "reduce-scatter": "ring,native",
    "all-gather": "ring,native",
    "broadcast": "tree,native",
}
EPILOG = """\b
Examples:
  mpirun -n 4 hpctrain bench {name}
  mpirun -n 2 hpctrain bench {name} --sizes 4B:128MiB --rivals horovod,gloo
  srun -n 16 hpctrain bench {name} --sizes 1MiB,64MiB --json out.json --plot out.png

Algorithms: {algorithms}. `native` is the MPI library's own collective, called directly.
Rivals that are not installed are reported and left out. Columns: docs/benchmarks.md.

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
"""
P2P_EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench p2p
  srun -N 2 -n 2 hpctrain bench p2p --sizes 1B:64MiB --json link.json --plot link.png
  srun -N 2 -n 2 --gpus-per-node=1 hpctrain bench p2p --device gpu
  mpirun -n 8 hpctrain bench p2p --ranks 0,7 --sizes 64KiB,1MiB
"""
STEP_EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench step digits --batch-per-rank 64
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32,128 \\
      --algorithms auto,direct,share-parameters --rivals gloo,horovod --json step.json
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32 --model torch

`share-parameters` keeps one array of parameters per node; all other names are algorithms of [wire].
Steps without communication are always timed too. Rivals are PyTorch with DistributedDataParallel
on Gloo (gloo) and on our backend (ddp), with ht.torch.sync (sync) and with Horovod's
DistributedOptimizer (horovod); they train a dense model by SGD. The schedule of the recipe is
ignored: all steps use its constant rate. --model torch takes the rivals gloo, ddp and sync.
"""
FILE_TYPE = click.Path(path_type=Path)
TUNE_EPILOG = """\b
Examples:
  mpirun -n 4 hpctrain tune
  mpirun -n 4 hpctrain tune --device gpu
  mpirun -n 4 hpctrain tune --sizes 1KiB:16MiB --rounds 30 --plot tuning.png
  hpctrain tune --show
  hpctrain tune --show --device gpu

The table lies in $XDG_CACHE_HOME/hpctrain/tuning, by default ~/.cache/hpctrain/tuning; the
environment variable HPCTRAIN_TUNING names another folder, or one file. `auto` uses it wherever
machine, MPI and layout of the ranks are the same: see docs/tuning.md. Arrays on GPUs have a table
of their own, for these GPUs and this GPU path.

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
"""


def _make_command(name: str) -> click.Command:
    algorithms = ", ".join(COLLECTIVES[name].names)
    add_options = _options.add_options(
        click.option("--sizes", default="4B:128MiB", show_default=True, metavar="SIZES",
                     help="A:B doubles, A:B*4 quadruples; or a list."),
        click.option("--algorithms", default=DEFAULTS[name], show_default=True, metavar="NAMES",
                     help="Algorithms of hpctrain, in the order in which they take turns."),
        click.option("--rivals", default="", metavar="NAMES",
                     help="Other libraries: horovod, gloo."),
        click.option("--dtype", default="float32", show_default=True, metavar="DTYPE",
                     help="A dtype of ht.allreduce, such as bfloat16 or int32."),
        click.option("--op", default="sum", show_default=True, metavar="OP",
                     help="Of reductions: sum, prod, min, max, and, or, xor."),
        click.option("--buffers", default="node", show_default=True, metavar="WHERE",
                     help="node: in node memory, like gradients; or private."),
        click.option("--iterations", default=20, show_default=True, metavar="N",
                     help="Timed rounds per algorithm."),
        _options.warm_up_option(3),
        _options.json_option,
        _options.plot_option,
    )  # fmt: skip

    @click.command(
        name,
        help=f"Time {name} over sizes: hpctrain, the MPI library and other libraries.",
        short_help=f"Time {name} over sizes.",
        epilog=EPILOG.format(name=name, algorithms=algorithms),
    )
    @add_options
    def command(sizes: str, rivals: str, **option_values: Any) -> None:
        options = collectives.parse_options(
            name, sizes_text=sizes, rivals_text=rivals, **option_values
        )
        collectives.run(world.init("cpu"), options)

    return command


allreduce, reduce_scatter, all_gather, broadcast = map(_make_command, DEFAULTS)


@click.command(epilog=P2P_EPILOG)
@click.option("--sizes", default="1B:64MiB", show_default=True, metavar="SIZES",
              help="A:B doubles, A:B*4 quadruples; or a list.")  # fmt: skip
@click.option(
    "--ranks", metavar="A,B", help="The two ranks; default: 0 and a rank on another node."
)
@_options.iterations_option
@_options.warm_up_option(3)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="Memory of the messages; gpu times each available path.",
)
@_options.json_option
@_options.plot_option
def p2p(sizes: str, **option_values: Any) -> None:
    """Time messages between two ranks: latency by ping-pong, bandwidth one way."""
    from hpctrain.tools.bench import p2p as bench

    options = bench.parse_options(sizes, **option_values)
    bench.run(world.init(options.device), options)


@click.command(epilog=STEP_EPILOG)
@click.argument("name", metavar="RECIPE", shell_complete=complete_recipes)
@click.option("--algorithms", default="auto,share-parameters", show_default=True, metavar="NAMES",
              help="Algorithms of hpctrain.")  # fmt: skip
@click.option("--rivals", default="", metavar="NAMES", help="Others: horovod, gloo, ddp, sync.")
@click.option("--model", default="ours", show_default=True, metavar="ours|torch",
              help="What our engines train: our layers, or the same model in PyTorch.")  # fmt: skip
@click.option(
    "--batch-per-rank", "batches", metavar="N,...", help="Samples per rank; default: as in RECIPE."
)
@_options.single_set_option
@_options.iterations_option
@_options.warm_up_option(2)
@_options.json_option
@_options.plot_option
def step(name: str, rivals: str, **option_values: Any) -> None:
    """Time whole training steps of RECIPE's model, beside other libraries."""
    from hpctrain.tools.bench import training_step  # late: it imports the trainer

    options = training_step.parse_options(name, rivals_text=rivals, **option_values)
    training_step.run(world.init("cpu"), options)


@click.command(epilog=TUNE_EPILOG)
@click.option(
    "--sizes",
    metavar="SIZES",
    help=f"Default: {tuning.DEFAULT_SIZES}; also the size midway where the fastest changes.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="The memory of the arrays.",
)
@click.option(
    "--rounds", type=int, metavar="N", help="Rounds; default: as many as fit into a minute."
)
@click.option(
    "--out", type=FILE_TYPE, metavar="FILE", help="Write the table to FILE instead of the cache."
)
@click.option(
    "--show",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Measure nothing: show the table in FILE, or the newest of this machine.",
)
@click.option(
    "--keep-noisy",
    is_flag=True,
    help="Keep the table also if the machine was too busy to conclude.",
)
@click.option("--plot", type=FILE_TYPE, metavar="FILE", help="Plot the table: .png or .svg.")
@click.pass_context
def tune(
    context: click.Context,
    /,
    sizes: str | None,
    device: str,
    rounds: int | None,
    out: Path | None,
    show: str | None,
    keep_noisy: bool,
    plot: Path | None,
) -> None:
    """Measure which all-reduce is fastest here; `auto` then uses it.

    If the machine was too busy to conclude, no table is kept, unless --out or --keep-noisy asks for
    it, and the exit code is 1.
    """
    if show is None:
        options = tuning.parse_options(sizes, rounds, out, plot, device, keep_noisy)
        context.exit(0 if tuning.run(world.init(options.device), options) else 1)
    elif (sizes, rounds, out, keep_noisy) != (None, None, None, False):
        raise UsageError(
            "--show measures nothing: leave out --sizes, --rounds, --out and --keep-noisy"
        )
    elif (launched := launchers.launched(os.environ)).rank == 0:
        tuning.show_table(Path(show) if show else None, launched.size, plot, device)
