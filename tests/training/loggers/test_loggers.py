"""Loggers: the trackers' own readers return the rows of metrics.jsonl, as one curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trackers

from hpctrain.core.run_files import run_folder
from hpctrain.training.loggers import to_csv
from hpctrain.training.loggers.tracker import Target

#: takes 9 s of processor time, for its imports and its tables
MLFLOW = pytest.param("mlflow", marks=pytest.mark.full)
LIB = Path(trackers.__file__).parent


def contents_of(kind: str, run: Path, *command: object) -> trackers.Contents:
    """Return what `command` prints last: of a process of its own, as libraries leave threads."""
    words = [sys.executable, *map(str, command), kind, str(run)]
    text = subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd=LIB, text=True).stdout
    return trackers.Contents(*json.loads(text.splitlines()[-1]))


def must_equal(contents: trackers.Contents, kind: str, run: Path) -> None:
    """Compare every value of every row, step by step, the configuration and the summary."""
    rows, summary = run_folder.rows(run), run_folder.read_summary(run)
    number = np.float32 if kind == "tensorboard" else float
    names = {name for row in rows for name, x in row.items() if isinstance(x, int | float)}
    assert len(names) > 10
    expected = {
        name: [[row["step"], number(row[name])] for row in rows if row.get(name) is not None]
        for name in names - {"step"}
    }
    assert contents.values == expected
    facts = ("world_size", "hosts", "versions", "engine", "algorithm", "workers")
    job = dict(trackers.leaves({"job": {name: summary[name] for name in facts}}))
    assert {name: contents.config.get(name) for name in job} == job
    assert contents.summary["status"] == summary["status"] == "done"
    assert float(contents.summary["test_loss"]) == summary["test_loss"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["csv", "tensorboard", "wandb", MLFLOW])
def test_a_run_that_is_killed_and_loses_rank_0_is_one_curve(kind, tmp_path):
    run = tmp_path / "run"
    contents = contents_of(kind, run, LIB / "curve.py")
    must_equal(contents, kind, run)
    steps = [step for step, _ in contents.values["train_loss"]]
    assert steps == sorted({*range(2, 33, 2), *range(5, 31, 5)})  # also the ends of epochs
    assert contents.config["mine"] == "[1, 2]"
    assert contents.config["options.interval_steps"] == "2"
    (counts,) = run_folder.read_summary(run)["loggers"]
    assert (counts["kind"], counts["dropped"], counts["fault"]) == (kind, 0, None)


def test_csv_is_written_again_for_a_new_column_alone(tmp_path, monkeypatch):
    tracker = to_csv.CsvTracker(Target(tmp_path, "mine", "run", {}))
    tracker.begin(0, has_rows=False)
    reads, read_rows = [], to_csv.read_rows
    monkeypatch.setattr(to_csv, "read_rows", lambda path: reads.append(path) or read_rows(path))
    for step in range(1, 21):
        for name in ("loss", "acc"):
            tracker.log(step, {name: 10.0**-step})
    tracker.log(20, {"acc": 1.0})
    tracker.end({})
    assert len(reads) == 2
    values = trackers.read("csv", tmp_path).values
    assert values["loss"] == [(step, 10.0**-step) for step in range(1, 21)]
    assert values["acc"] == [*values["loss"][:-1], (20, 1.0)]
