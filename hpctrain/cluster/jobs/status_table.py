"""The status of jobs as a table; jobs of one size of a scaling study share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hpctrain.cluster.jobs.job_status import explain_state
from hpctrain.cluster.jobs.studies import merge_by_size
from hpctrain.core.fitted_table import fit_table, stdout_console

DEFAULT_WIDTH = 130  # characters, if stdout is no terminal


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row per job, or per size of a study, then the reasons for the jobs' states."""
    console = stdout_console(DEFAULT_WIDTH)
    table = Table("job", "state", "restarts", "run", "step", "loss", "accuracy", "folder")
    for row in merge_by_size(rows):
        table.add_row(*map(Text, _row_cells(row)))
    console.print(fit_table(table, console))
    for line in _reason_lines(rows):
        console.print(Text(line), soft_wrap=True)


def _reason_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each reason, with the jobs to which it applies."""
    jobs_by_reason: dict[str, list[str]] = {}
    for row in rows:
        name = row["run"] if row["job"] == "-" else row["job"]
        jobs_by_reason.setdefault(explain_state(row), []).append(name)
        if row["earlier"]:
            jobs_by_reason[f"earlier jobs in this folder: {row['earlier']}"] = [name]
    return [f"{', '.join(names)}: {reason}" for reason, names in jobs_by_reason.items() if reason]


def _row_cells(row: dict[str, Any]) -> list[str]:
    def format_number(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    restarts = "-" if row["restarts"] is None else str(row["restarts"])
    status = row["status"] or ("training" if row["state"] == "RUNNING" and row["step"] else "-")
    metrics = [format_number("train_loss"), format_number("test_accuracy")]
    return [row["job"], row["state"], restarts, status, _format_progress(row), *metrics, row["run"]]


def _format_progress(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return "-"
    if row["steps"]:
        return f"{row['step']} of {row['steps']}"
    return f"{row['step']}, epoch {row['epoch']} of {row['epochs']}"
