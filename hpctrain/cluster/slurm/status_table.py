"""The status of jobs as a table; those of one size of a scaling study share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.cluster.slurm.status import meaning
from hpctrain.cluster.slurm.studies import by_size

WIDTH = 130  # where there is no terminal


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row per job, or per size of a study, and below the reason for each job's state."""
    out = Console()
    out = out if out.is_terminal else Console(width=WIDTH)
    grid = Table("job", "state", "restarts", "run", "step", "loss", "accuracy")
    grid.add_column("folder", overflow="fold")  # to be copied
    for row in by_size(rows):
        grid.add_row(*map(Text, _cells(row)))
    out.print(grid)
    for line in _lines_below(rows):
        out.print(Text(line), soft_wrap=True)


def _lines_below(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines below the table: each reason once, with its jobs."""
    jobs: dict[str, list[str]] = {}
    for row in rows:
        job = row["run"] if row["job"] == "-" else row["job"]
        jobs.setdefault(meaning(row), []).append(job)
        if row["earlier"]:
            jobs[f"before it in this folder: {row['earlier']}"] = [job]
    return [f"{', '.join(names)}: {reason}" for reason, names in jobs.items() if reason]


def _cells(row: dict[str, Any]) -> list[str]:
    def number(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    restarts = "-" if row["restarts"] is None else str(row["restarts"])
    status = row["status"] or ("training" if row["state"] == "RUNNING" and row["step"] else "-")
    return [row["job"], row["state"], restarts, status, _progress(row), number("train_loss"),
            number("test_accuracy"), row["run"]]  # fmt: skip


def _progress(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return "-"
    if row["steps"]:
        return f"{row['step']} of {row['steps']}"
    return f"{row['step']}, epoch {row['epoch']} of {row['epochs']}"
