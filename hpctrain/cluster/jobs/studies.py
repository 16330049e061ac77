"""Jobs of `hpctrain scale --on slurm`: their folders, and one row for all jobs of a size.

STUDY/trials/SIZE/repeat-0/        a run
STUDY/trials/SIZE/repeat-0.job/    the submission that makes it: see submit.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.jobs.job_status import Row, is_done, read_job_history
from hpctrain.cluster.slurm.queries import numbers_in
from hpctrain.cluster.slurm.submit import END_STATES, JOBS_FILE
from hpctrain.core.run_files import run_folder


def find_job_folders(path: Path) -> list[Path]:
    """Return the folders in `path` with submitted jobs: itself, or those of a study's trials.

    Also the folders of the tasks of a job array submitted by hand, and of a sweep's members with a
    job each. Empty if there is no job.
    """
    if (path / JOBS_FILE).exists() or run_folder.slurm_job(path):
        return [path]
    trials = [job.parent for job in path.glob(f"trials/*/*/{JOBS_FILE}")]
    tasks = [
        task
        for pattern in ("nodes-*", "*=*")
        for task in path.glob(pattern)
        if run_folder.slurm_job(task) or (task / JOBS_FILE).exists()
    ]
    return sorted(trials or tasks, key=lambda job: numbers_in(f"{job.parent.name} {job.name}"))


def sort_by_age(paths: Iterable[Path]) -> list[Path]:
    """Return the folders with submitted jobs in all `paths`, the folder of the newest job last."""
    groups = [group for path in paths if (group := find_job_folders(path))]
    return [folder for group in sorted(groups, key=_newest_job_key) for folder in group]


def _newest_job_key(group: Sequence[Path]) -> tuple[int, str]:
    """Return the sort key of a group of folders: its highest job number, 0 if none, its path."""
    job_ids = [0]
    for folder in group:
        with suppress(OSError, ValueError):
            jobs = read_job_history(folder).jobs
            job_ids += [int(match[0]) for job in jobs if (match := re.match(r"\d+", job))]
    return max(job_ids), str(group[0])


def merge_by_size(rows: Sequence[Row]) -> list[Row]:
    """Return `rows` with all rows of one size of a study merged into one."""
    groups: dict[object, list[Row]] = {}
    for row_number, row in enumerate(rows):
        folder = Path(row["run"]).parent
        is_trial = folder.parent.name == "trials"
        groups.setdefault(folder if is_trial else row_number, []).append(row)
    return [
        _merge_rows(key, group) if isinstance(key, Path) else group[0]
        for key, group in groups.items()
    ]


def _merge_rows(size: Path, rows: list[Row]) -> Row:
    """Return one row: the counts of states, and the metrics of the running or latest job."""
    states = [row["state"] for row in rows]
    chosen_row = min(reversed(rows), key=_display_order)
    has_several_jobs = len(rows) > 1
    done_count = sum(is_done(row) for row in rows)
    state_counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    cwd = Path.cwd()
    return chosen_row | {
        "job": ", ".join(row["job"] for row in rows),
        "state": ", ".join(state_counts) if has_several_jobs else states[0],
        "restarts": sum(row["restarts"] or 0 for row in rows),
        "status": f"{done_count} of {len(rows)} done" if has_several_jobs else chosen_row["status"],
        "run": str(size.relative_to(cwd) if size.is_relative_to(cwd) else size),
    }


def _display_order(row: Row) -> int:
    """Return 0 for a running job with a step, 1 for an ended job with a step, 2 for others."""
    if row["state"] not in END_STATES and row["step"] is not None:
        return 0
    return 1 if row["step"] is not None else 2
