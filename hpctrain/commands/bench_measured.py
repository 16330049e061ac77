"""`hpctrain bench allreduce | reduce-scatter | all-gather | broadcast | p2p | step`."""

from __future__ import annotations

from typing import Any

import click

from hpctrain import world
from hpctrain.commands import _options
from hpctrain.commands._options import complete_recipes
from hpctrain.tools.bench import collectives
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
      --algorithms auto,direct,share-parameters --rivals gloo,horovod --json training_step.json
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32 --model torch

`share-parameters` keeps one array of parameters per node; all other names are algorithms of [wire].
Steps without communication are always timed too. Rivals are PyTorch with DistributedDataParallel
on Gloo (gloo) and on our backend (ddp), with ht.torch.sync (sync) and with Horovod's
DistributedOptimizer (horovod); they train a dense model by SGD. The schedule of the recipe is
ignored: all steps use its constant rate. --model torch takes the rivals gloo, ddp and sync.
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
@_options.set_option
@_options.iterations_option
@_options.warm_up_option(2)
@_options.json_option
@_options.plot_option
def step(name: str, rivals: str, **option_values: Any) -> None:
    """Time whole training steps of RECIPE's model, beside other libraries."""
    from hpctrain.tools.bench import training_step  # late: it imports the trainer

    options = training_step.parse_options(name, rivals_text=rivals, **option_values)
    training_step.run(world.init("cpu"), options)
