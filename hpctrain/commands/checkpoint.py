"""`hpctrain checkpoint | evaluate`: lists, verifies, exports, evaluates checkpoints."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain import checkpoint as checkpoints
from hpctrain.commands._lazy import WholeGroup
from hpctrain.commands._options import FILE_TYPE
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.training import weights
from hpctrain.transport.device.gpus import Device

RUN_ARGUMENT = click.argument("run", type=click.Path(path_type=Path, exists=True), metavar="DIR")


@click.group(
    cls=WholeGroup, epilog="\b\nExample:\n  hpctrain checkpoint verify runs/digits-20260101-120000"
)
def checkpoint() -> None:
    """List, verify or export the checkpoints of a run."""


@checkpoint.command("list")
@RUN_ARGUMENT
def list_checkpoints(run: Path) -> None:
    """Print a line per checkpoint in DIR, oldest first; the best one is marked."""
    entries = checkpoints.listing(run)
    criterion = checkpoints.best_criterion(entries)
    best_entries = checkpoints.rank_by(entries, criterion)[:1] if criterion else []
    for entry in entries:
        ranks = entry.about.get("world_size", "?") if entry.about else "?"
        note = f"  (cannot be used: {entry.fault})" if entry.fault else ""
        note = "  (damaged, set aside)" if entry.set_aside else note
        if criterion and entry in best_entries:
            value = checkpoints.metric_value(entry, criterion.metric)
            note = f"  (best {criterion.metric}: {value:.6g})"
        say(f"step {entry.step}  {entry.size_bytes} bytes  {ranks} ranks  {entry.path}{note}")


@checkpoint.command()
@RUN_ARGUMENT
def verify(run: Path) -> None:
    """Read every checkpoint in DIR and compare all hashes; exit with 2 if one is damaged."""
    entries = [entry for entry in checkpoints.listing(run) if not entry.set_aside]
    if not entries:
        raise UsageError(f"{run} holds no checkpoint")
    fault_by_path = {entry.path: checkpoints.verify(entry.path) for entry in entries}
    for path, fault in fault_by_path.items():
        say(f"{path}: {fault or 'good'}")
    if any(fault_by_path.values()):
        raise UsageError(
            "at least one checkpoint is damaged; --resume uses the newest undamaged one"
        )


@checkpoint.command()
@RUN_ARGUMENT
@click.option("--best", is_flag=True, help="Use the best checkpoint, not the newest.")
@click.option(
    "--output",
    type=FILE_TYPE,
    metavar="FILE",
    help="Default: DIR/weights-step-NNNNNNNN.safetensors.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def export(run: Path, best: bool, output: Path | None, force: bool) -> None:
    """Write the weights in DIR, a run or a checkpoint, to one safetensors file.

    The file holds a named tensor per parameter and buffer. Other frameworks can read it, and
    [model] init starts a run from it.
    """
    file = weights.export(run, output, best, force)
    say(f"{file}  {file.stat().st_size} bytes")


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
    from hpctrain.training import runs  # late: the other commands train nothing

    say(to_json(runs.evaluate(run, best, device, trust)))
