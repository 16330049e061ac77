"""Sweeps of `hpctrain train`, alone or under `launch`: settings with several values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cluster import sweep as sweeps
from hpctrain.core import launchers
from hpctrain.core.config.sweep import read_axes
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder, sweep_folder
from hpctrain.core.run_files.sweep_folder import SweepFile
from hpctrain.tools.report import sweep as report
from hpctrain.training import recipe
from hpctrain.training.sweep import make_file, read_members


def train_sweep(
    options: Mapping[str, Any], settings: Sequence[str], start: Sequence[str], ranks: int | None
) -> int | None:
    """Train the sweep that `options` of `hpctrain train` describe; return the exit code.

    None if they describe one run. `settings`: `table.key=value`, from the options; `start`: the
    words of hpctrain's command line before `train`; `ranks`: of `launch`. Raises UsageError.
    """
    name, out, resume = options["name"], options["out"], options["resume"]
    is_known = bool(out and resume and sweep_folder.is_sweep(out))
    if is_known and name is None:
        file = sweep_folder.read(out)
        if file.folder != os.getcwd():
            raise UsageError(f"the sweep in {out} began in {file.folder}: call this there")
        name, settings = file.recipe, [*file.settings, *settings]
    if name is None:
        return None
    if not read_axes(settings).values:
        if is_known:
            raise UsageError(f"{out} holds a sweep: go on by --resume={out} alone")
        return None
    sweeps.must_be_alone(launchers.launched(os.environ))
    if options["is_dry"] or options["replay"]:
        raise UsageError("--dry-run and --replay take one run: give each key one value")
    members = read_members(settings, partial(recipe.load, name), ranks or 1)
    file = make_file(name, settings, members)
    sweep = sweeps.Sweep(name, file, members)
    if out is None and resume:
        out = _find_newest(file)
    out = out or run_folder.default_path(members[0].spec.run.name)
    code = sweeps.train(sweep, out.absolute(), resume, start)
    report.print_result(report.compare(out))
    return code


def _find_newest(file: SweepFile) -> Path:
    """Return the folder of the same sweep that began last in runs/; raise UsageError."""
    folders = sweep_folder.find(Path("runs"))
    if folder := next((path for path in folders if sweep_folder.read(path).is_same(file)), None):
        return folder
    raise UsageError("--resume: expected this sweep in runs/, seen none; name its --out")
