"""`hpctrain horovodrun`, also `hpctrain-horovodrun`: the options of horovodrun, for `launch`."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import click

from hpctrain import __version__
from hpctrain.commands._options import Decorator, add_options
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted
from hpctrain.core.printing import say
from hpctrain.horovod import __version__ as horovod_version
from hpctrain.horovod.alias import SEARCH_PATH
from hpctrain.horovod.variables import FUSION_THRESHOLD

EPILOG = """\b
Examples:
  hpctrain-horovodrun -np 4 python train.py --epochs 3
  hpctrain-horovodrun -np 4 -H localhost:4 python train.py
  hpctrain-horovodrun -np 4 --min-np 2 python train_elastic.py
  hpctrain-horovodrun --check-build

The script may say `import horovod.torch as hvd`: it finds hpctrain.horovod.torch. Ranks start on
this host, or on those of a Slurm job: `hpctrain launch -n 4 -- python train.py` does the same.

Every other option of horovodrun is accepted; a line on stderr names those that have no use here,
and the few that would change the job are refused. --help of `hpctrain launch` has its own options.
"""
_HOST = re.compile(r"([\w.-]+):(\d+)")
LOCAL_NAMES = ("localhost", "127.0.0.1")
#: why options have no use here -> the options, with the names of their values
IGNORED = {
    "nothing is cached, and no cycle is marked": (
        "--disable-cache", "--cache-capacity N", "--timeline-mark-cycles",
        "--no-timeline-mark-cycles",
    ),
    "the all-reduce is chosen by size and hosts, see `hpctrain tune`": (
        "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
        "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce",
        "--autotune", "--no-autotune", "--autotune-log-file FILE", "--autotune-warmup-samples N",
        "--autotune-steps-per-sample N", "--autotune-bayes-opt-max-samples N",
        "--autotune-gaussian-process-noise X",
    ),
    "a watch names silent ranks and ends the job": (
        "--start-timeout S", "--gloo-timeout-seconds S",
    ),
    "ranks write to this stdout and stderr": (
        "--output-filename FOLDER", "-prefix-timestamp --prefix-output-with-timestamp",
        "--log-level LEVEL", "--log-with-timestamp", "--log-without-timestamp",
        "--log-hide-timestamp", "--no-log-hide-timestamp",
    ),
    "MPI and hpctrain choose adapters and threads": (
        "--network-interface NAME", "--network-interfaces NAMES", "--tcp", "--num-nccl-streams N",
        "--thread-affinity N", "--mpi-threads-disable", "--no-mpi-threads-disable",
    ),
    "no ssh is used": ("-p --ssh-port PORT", "-i --ssh-identity-file FILE"),
    "no rank joins a running job": (
        "--max-num-proc --max-np N", "--slots-per-host N", "--elastic-timeout S", "--reset-limit N",
        "--blacklist-cooldown-range MIN MAX",
    ),
    "messages are MPI's": ("--gloo",),
}  # fmt: skip
#: options for hpctrain.horovod.torch -> the variable that it reads, and the value of a flag
VARIABLES = {
    "--cycle-time-ms MS": ("HOROVOD_CYCLE_TIME", ""),
    "--timeline-filename FILE": ("HOROVOD_TIMELINE", ""),
    "--stall-check-warning-time-seconds S": ("HOROVOD_STALL_CHECK_TIME_SECONDS", ""),
    "--stall-check-shutdown-time-seconds S": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
}
#: options that would change the job -> what to do
REFUSED = {
    "--host-discovery-script FILE": "no rank joins a running job; leave it out: with --min-np M "
    "the ranks that are left go on",
    "--mpi-args ARGS": "give them to MPI's own launcher: mpirun -n {ranks} {value} {script}",
    "--binding-args ARGS": "give them to MPI's own launcher: mpirun -n {ranks} {value} {script}",
    "--jsrun": "start the script by it: jsrun -n {ranks} {script}",
    "--config-file FILE": "give its values as options",
}
SCRIPT = "python -m hpctrain.horovod SCRIPT"
_GIVEN_KEY = "hpctrain.commands.horovodrun.given"  #: key in click's context: options of the tables


def _names(text: str) -> list[str]:
    """Return the names of the option `text`, a key of `REFUSED` or an item of `IGNORED`."""
    return [word for word in text.split() if word.startswith("-")]


def _note(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        context.meta.setdefault(_GIVEN_KEY, {})[option.opts[-1]] = value


def _noted_option(text: str) -> Decorator:
    """Return the decorator that adds an option by its names and the names of its values."""
    kwargs: dict[str, Any] = {"expose_value": False, "callback": _note}
    if text in VARIABLES:
        kwargs |= {"help": f"Set {VARIABLES[text][0]}.", "metavar": text.partition(" ")[2] or None}
    nargs = len(text.split()) - len(_names(text))
    kind: dict[str, Any] = {"nargs": nargs} if nargs else {"is_flag": True}
    return click.option(*_names(text), hidden=text not in VARIABLES, **kind, **kwargs)


@click.command(
    epilog=EPILOG,
    options_metavar="-np N [OPTIONS]",
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("-np", "--num-proc", "ranks", type=int, metavar="N", help="Number of MPI ranks.")
@click.option(
    "-H", "--hosts", metavar="HOST:SLOTS,...", help="This host, or every host of the Slurm job."
)
@click.option(
    "-hostfile",
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The same, with a line `HOST slots=SLOTS` per host.",
)
@click.option(
    "--min-np",
    "--min-num-proc",
    "min_ranks",
    type=int,
    metavar="M",
    help="Go on with the survivors of lost ranks, while M are left: `launch --elastic`.",
)
@click.option(
    "--fusion-threshold-mb",
    type=click.IntRange(min=0),
    metavar="MB",
    help="MiB of tensors that one all-reduce takes; 0: one tensor.",
)
@click.option("--mpi", is_flag=True, expose_value=False, help="Exchange by MPI, as always here.")
@click.option("--verbose", is_flag=True, help="Print the command of `hpctrain launch`.")
@click.option("-cb", "--check-build", is_flag=True, help="Print frameworks and MPI of this host.")
@click.version_option(
    __version__,
    "-v",
    "--version",
    message=f"hpctrain %(version)s, with the names of Horovod {horovod_version}",
)
@add_options(*map(_noted_option, [*VARIABLES, *REFUSED, *chain.from_iterable(IGNORED.values())]))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.pass_context
def horovodrun(
    context: click.Context,
    /,
    ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    min_ranks: int | None,
    fusion_threshold_mb: int | None,
    verbose: bool,
    check_build: bool,
    command: tuple[str, ...],
) -> None:
    """Run a script of Horovod on N ranks, by the options of horovodrun.

    It exits with the job's exit code.
    """
    if check_build:
        say(_describe_build())
        context.exit()
    if ranks is None or not command:
        missing = "the number of ranks" if ranks is None else "the command"
        raise click.UsageError(f"{missing} is missing: hpctrain-horovodrun -np 4 python train.py")
    if min_ranks is not None and not 1 <= min_ranks <= ranks:
        raise UsageError(f"--min-np: expected 1 to {ranks}, the ranks of -np, seen {min_ranks}")
    given = context.meta.get(_GIVEN_KEY, {})
    _refuse(given, ranks)
    _check_hosts(hosts, hostfile, ranks)
    _announce(given)
    # Ranks and the processes that they start find the package `horovod` on this path.
    paths = [SEARCH_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    for text, (variable, value) in VARIABLES.items():
        if (name := _names(text)[-1]) in given:
            variables[variable] = value or given[name]
    if fusion_threshold_mb is not None:
        variables[FUSION_THRESHOLD] = str(fusion_threshold_mb << 20)
    if verbose:
        elastic = [] if min_ranks is None else ["--elastic", "--min-ranks", str(min_ranks)]
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += ["hpctrain", "launch", "-n", str(ranks), *elastic, "--", *command]
        say(f"hpctrain: {shlex.join(words)}", err=True)
    os.environ.update(variables)
    from hpctrain.cluster import launch as launcher  # late, so that `--help` stays fast
    from hpctrain.cluster.loss_policy import LossPolicy

    policy = LossPolicy(elastic=min_ranks is not None, min_ranks=min_ranks)
    context.exit(launcher.launch_program(ranks, command, policy))


def _refuse(given: Mapping[str, Any], ranks: int) -> None:
    """Raise UsageError for the first option `given` that would change the job."""
    for text, remedy in REFUSED.items():
        name = _names(text)[-1]
        if name in given:
            remedy = remedy.format(ranks=ranks, value=given[name], script=SCRIPT)
            raise UsageError(f"{name} would change the job, and is refused: {remedy}")


def _announce(given: Mapping[str, Any]) -> None:
    """Name the options `given` that have no use here, in one line."""
    ignored = {
        reason: [name for text in texts if (name := _names(text)[-1]) in given]
        for reason, texts in IGNORED.items()
    }
    parts = [f"{', '.join(names)} ({reason})" for reason, names in ignored.items() if names]
    if parts:
        say(f"hpctrain: ignored: {'; '.join(parts)}", err=True)


def _check_hosts(text: str | None, file: Path | None, ranks: int) -> None:
    """Raise UsageError unless `hpctrain launch` starts `ranks` on the hosts of -H or the file."""
    from hpctrain.cluster.hosts import allocated_hosts

    if text is not None and file is not None:
        raise UsageError("-H and --hostfile both name the hosts: leave one out")
    if file is not None:
        lines = filter(None, map(str.split, files.read_text(file, files.MIB).splitlines()))
        text = ",".join(":".join(line).replace("slots=", "") for line in lines)
    if text is None:
        return
    matches = [_HOST.fullmatch(word.strip()) for word in text.split(",")]
    slots = {match[1]: int(match[2]) for match in matches if match}
    if None in matches:
        raise UsageError(f"hosts: expected HOST:SLOTS,..., or lines HOST slots=SLOTS, seen {text}")
    if sum(slots.values()) < ranks:
        raise UsageError(
            f"-np {ranks}: the hosts {text} have {counted(sum(slots.values()), 'slot')}"
        )
    names, allocated = {*slots}, {host.name for host in allocated_hosts(os.environ)}
    own_names = {*LOCAL_NAMES, socket.gethostname(), socket.gethostname().partition(".")[0]}
    if names != allocated and not own_names >= names | allocated:
        raise UsageError(
            f"hosts {text}: `hpctrain launch` starts ranks on this host, or on every host of a "
            f"Slurm job; on others let MPI's own launcher start them: mpirun -n {ranks} --host "
            f"{text} {SCRIPT} (MPICH: -hosts)"
        )


def _describe_build() -> str:
    """Return the frameworks and libraries of this host, as horovodrun lists its own."""
    from hpctrain.cluster.launch import find_mpi
    from hpctrain.tools.doctor.examine import torch_version
    from hpctrain.transport.gpu_probe import verdicts
    from hpctrain.transport.paths import POINTER_PATHS

    try:
        mpi = find_mpi()
        mpi_text = f"{mpi.vendor} {mpi.version}, {mpi.libmpi}"
        verdict = verdicts.cached_result(os.environ).verdict
    except UsageError as error:
        mpi_text, verdict = "", None
        say(f"hpctrain: {error}", err=True)
    takes_pointers = verdict and {verdict.same_gpu, verdict.same_node} & {*POINTER_PATHS}
    gpu_text = verdict.reason if verdict else ""
    facts = {
        "Available Frameworks": {"TensorFlow": "", "PyTorch": torch_version() or "", "MXNet": ""},
        "Available Controllers": {"MPI": mpi_text, "Gloo": ""},
        "Available Tensor Operations": {
            "NCCL": "", "DDL": "", "CCL": "", "MPI": mpi_text,
            "MPI on GPU memory (CUDA-aware)": gpu_text if takes_pointers else "", "Gloo": "",
        },
    }  # fmt: skip
    lines = [f"hpctrain v{__version__}, with the names of Horovod v{horovod_version}:"]
    for title, rows in facts.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if row else ' '}] {name}{row and f': {row}'}"
                  for name, row in rows.items()]  # fmt: skip
    return "\n".join(lines)
