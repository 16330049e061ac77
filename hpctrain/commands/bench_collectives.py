"""`hpctrain bench allreduce | reduce-scatter | all-gather | broadcast`."""

from __future__ import annotations

from typing import Any

import click

from hpctrain import world
from hpctrain.commands import _options
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
