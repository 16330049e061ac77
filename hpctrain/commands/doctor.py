"""`hpctrain doctor`: what is wrong, or would be slow, on this node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpctrain.errors import UsageError

EPILOG = """\b
Examples:
  hpctrain doctor
  srun -N 1 -n 1 --gpus-per-node=4 hpctrain doctor --json doctor.json

Ends with 1 if something would break a run, else with 0.
"""
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog=EPILOG)
@click.option("--json", "file", type=FILE, metavar="FILE", help="Keep all that was found.")
@click.pass_context
def doctor(context: click.Context, file: Path | None) -> None:
    """Look at MPI, cores, memory, GPUs and network of this node; tell what to do."""
    from hpctrain.doctor import check, examine, show  # `--help` stays quick

    _write(file, {})  # refused now, rather than after a minute
    found = examine.examine()
    show.show(found, show.console())
    _write(file, found.table())
    context.exit(check.exit_code(found.checks))


def _write(file: Path | None, found: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
