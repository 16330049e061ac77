"""`hpctrain doctor`: reports faults and slow settings of this node, or of this job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._options import FILE_TYPE
from hpctrain.core import config, launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.strict_json import to_json
from hpctrain.transport.device import gpus

EPILOG = """\b
Examples:
  hpctrain doctor
  hpctrain doctor --script train.py
  srun -N 1 -n 1 --gpus-per-node=4 hpctrain doctor --json doctor.json
  srun --kill-on-bad-exit=1 hpctrain doctor --job --out /scratch/me/runs --recipe my.toml
  mpirun -n 4 hpctrain doctor --job
  hpctrain launch -n 4 doctor --job --json job.json

With --job all ranks take part, as they would in training: their versions, placement, clocks, cores
and the messages between them are compared. Exits with 1 if a fault would break a run, else with 0.

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
"""
DEVICES: dict[str, gpus.Device] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu"}


@click.command(epilog=EPILOG)
@click.option("--job", is_flag=True, help="Check all ranks of this job together.")
@click.option("--json", "file", type=FILE_TYPE, metavar="FILE", help="Write all results.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="With --job: the output folder of runs; default: this folder.")  # fmt: skip
@click.option(
    "--recipe", metavar="RECIPE", help="With --job: the recipe that all ranks will train."
)
@click.option(
    "--script", metavar="FILE", help="Read a script, of Python or of a job, for traps of clusters."
)
@click.option("--device", metavar="DEVICE", help="With --job: auto, cpu or gpu.")
@click.pass_context
def doctor(
    context: click.Context, /, job: bool, file: Path | None, script: str | None, **job_options: Any
) -> None:
    """Check MPI, cores, memory, GPUs, network and the traps of clusters; name remedies."""
    options = {name: value for name, value in job_options.items() if value is not None}
    if options and not job:
        raise UsageError(f"--{next(iter(options))} applies to a whole job: add --job")
    context.exit(
        _examine_job(file, {**options, "script": script}) if job else _examine_node(file, script)
    )


def _examine_node(file: Path | None, script: str | None) -> int:
    from hpctrain.core.fitted_table import stdout_console
    from hpctrain.tools.doctor import check, examine, show  # late, so that `--help` stays fast

    _write_json(file, {})  # fails now if the file is not writable, rather than after a minute
    report = examine.examine_node(script)
    show.print_result(report, stdout_console(show.DEFAULT_WIDTH))
    _write_json(file, report.table())
    return check.exit_code(report.checks)


def _examine_job(file: Path | None, options: dict[str, Any]) -> int:
    from hpctrain.tools.doctor.job import examine

    if "device" in options:
        options["device"] = config.pick(DEVICES, options["device"], "--device")
    if launchers.launched(os.environ).rank == 0:
        _write_json(file, {})
    return examine.examine_job(examine.Options(json=file, **options))


def _write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(to_json(content, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
