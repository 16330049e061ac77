"""`hpctrain evaluate`: loss and accuracy of a run's model on its test set."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.training import runs
from hpctrain.transport.device.gpus import Device


@click.command(epilog="\b\nExample:\n  hpctrain evaluate runs/digits-20260101-120000")
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--best", is_flag=True, help="Use the best checkpoint, not the newest.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    help="The device to compute on; auto: a GPU if there is one.",
)
@click.option("--trust", is_flag=True, help="Run the code that DIR names, even if others own it.")
def evaluate(run: Path, best: bool, device: Device, trust: bool) -> None:
    """Evaluate the newest checkpoint in DIR on the test set.

    Loss and accuracy are printed as JSON.

    If data or model are functions of the user, their code is run. Without --trust this requires
    that DIR and the code belong to you, that nobody else can write to them, and that the code has
    not changed since the training.
    """
    say(to_json(runs.evaluate(run, best, device, trust)))
