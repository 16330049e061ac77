"""Weights & Biases: a run in wandb/, offline unless WANDB_MODE says otherwise.

`wandb sync DIR/wandb/offline-run-*` sends it from a node with a network. Offline a run that goes on
is written again from its first row, under the same id, since W&B cannot take rows back.

W&B writes by a process of its own, `wandb-core`. It is started with `subprocess`, in which the
child runs nothing of the rank's before `exec`: MPI forbids a fork that goes on.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

from hpctrain.training.loggers.tracker import Tracker, Values, present

MODE = "WANDB_MODE"


class WandBTracker(Tracker):
    """A run of W&B with the number of the step as its step."""

    kind = "wandb"
    _run: Any = None

    def begin(self, step: int, has_rows: bool) -> int:
        mode = os.environ.get(MODE, "offline")
        is_offline = mode == "offline"
        if is_offline:  # else wandb-core reports its errors to W&B
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if self._run is not None:
            self._run.finish()
        folders = [path for path in self.folder.glob("*run-*-*") if not path.is_symlink()]
        # run-DATE_TIME-ID
        earlier_id = max(folders).name.partition("run-")[2].partition("-")[2] if folders else ""
        for path in folders if is_offline and has_rows else []:
            shutil.rmtree(path, ignore_errors=True)
        settings = wandb.Settings(
            mode=mode,
            root_dir=str(self.target.folder),
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        wandb.setup(settings)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.target.project),
            name=os.environ.get("WANDB_NAME", self.target.name),
            id=earlier_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8],
            resume="allow" if folders else None,
            reinit="create_new",
            config=dict(self.target.config),
            settings=settings,
        )
        return 0 if is_offline and has_rows else step

    def log(self, step: int, values: Values) -> None:
        self._run.log(present(values), step=step)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(
            exit_code=summary.get("exit_code") or int(summary.get("status") == "killed")
        )
        self._run = None
