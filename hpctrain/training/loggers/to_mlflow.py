"""MLflow: a run in mlflow/mlflow.db, a file of SQLite.

SQLite locks its file at each row, which parallel file systems do badly: the file lies in the node's
temporary folder, and is copied into the run's every minute and at the end.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hpctrain.training.loggers.tracker import Tracker, Values, flatten, present

log = logging.getLogger(__name__)
COPY_S = 60.0
#: MLflow cannot take values back, and its parameters never change. These tables are as in MLflow 1.
DROP = """
delete from metrics where run_uuid = :run and step > :step;
delete from latest_metrics where run_uuid = :run;
insert into latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
  select key, value, max(timestamp), step, is_nan, run_uuid from metrics m where run_uuid = :run
    and step = (select max(step) from metrics n where n.run_uuid = :run and n.key = m.key)
  group by key;
delete from params where run_uuid = :run;
"""


class MLflowTracker(Tracker):
    """A run of MLflow, in a database of its own: parameters, metrics by step, tags."""

    kind = "mlflow"
    _database: Path | None = None

    def begin(self, step: int, has_rows: bool) -> int:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow.tracking import MlflowClient

        if os.environ.get("MLFLOW_TRACKING_URI"):
            log.warning("MLFLOW_TRACKING_URI is not used: MLflow writes to %s", self.folder)
        if self._database is None:
            self._database = Path(tempfile.mkdtemp(prefix="hpctrain-mlflow-"), "mlflow.db")
            with suppress(FileNotFoundError):
                shutil.copyfile(self.folder / "mlflow.db", self._database)
        self._client = MlflowClient(f"sqlite:///{self._database}")
        experiments = [item.experiment_id for item in self._client.search_experiments()]
        if runs := self._client.search_runs(experiments, max_results=1):
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._create_run()
        with closing(sqlite3.connect(self._database)) as database, database:
            for statement in DROP.split(";"):
                database.execute(statement, {"run": self._run, "step": step})
            (last_step,) = database.execute("select coalesce(max(step), 0) from metrics").fetchone()
        self._describe("params", dict(flatten(self.target.config)))
        self._copy()
        return last_step

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        stamp = int(1000 * time.time())
        metrics = [Metric(name, float(x), stamp, step) for name, x in present(values).items()]
        self._client.log_batch(self._run, metrics=metrics)
        if time.monotonic() > self._copy_due:
            self._copy()

    def end(self, summary: Mapping[str, Any]) -> None:
        self._describe("tags", {f"summary.{name}": x for name, x in flatten(summary)})
        if (status := end_status(summary)) != "RUNNING":  # which `begin` has set
            self._client.set_terminated(self._run, status)
        self._copy()
        assert self._database is not None
        shutil.rmtree(self._database.parent)
        self._database = None

    def _create_run(self) -> str:
        name, place = self.target.project, (self.folder / "artifacts").absolute().as_uri()
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, place)
        return self._client.create_run(experiment, run_name=self.target.name).info.run_id

    def _describe(self, kind: str, entries: Mapping[str, Any]) -> None:
        """Write parameters or tags, in batches that MLflow takes."""
        from mlflow.entities import Param, RunTag

        make = {"params": Param, "tags": RunTag}[kind]
        items = [make(name, str(value)) for name, value in entries.items()]
        for start in range(0, len(items), 100):
            self._client.log_batch(self._run, **{kind: items[start : start + 100]})

    def _copy(self) -> None:
        """Copy the database, which is whole between calls of the client, into the run's folder."""
        began = time.monotonic()
        self._copy_due = began + COPY_S
        assert self._database is not None
        copy = self.folder / ".mlflow.db.copy"
        shutil.copyfile(self._database, copy)
        os.replace(copy, self.folder / "mlflow.db")
        self._copy_due += 10 * (time.monotonic() - began)


def end_status(summary: Mapping[str, Any]) -> str:
    """Return the status of a run in MLflow's words."""
    if summary.get("status") in ("running", "killed"):
        return str(summary["status"]).upper()
    return "FAILED" if summary.get("exit_code") else "FINISHED"
