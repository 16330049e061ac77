"""Jobs of `hpctrain scale --on slurm`: their folders, and one row for all jobs of a size.

STUDY/trials/SIZE/repeat-0/        a run
STUDY/trials/SIZE/repeat-0.job/    the submission that makes it: see submit.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.cluster.slurm.status import is_done, job_history
from hpctrain.cluster.slurm.submit import END_STATES, JOBS
from hpctrain.run_files import run_folder

Row = dict[str, Any]


def folders(path: Path) -> list[Path]:
    """Return the folders that hold jobs of `path`: itself, or those of the trials of a study.

    For a job array submitted by hand, the folders of its sizes. Empty where no job was submitted.
    """
    if (path / JOBS).exists() or run_folder.slurm_job(path):
        return [path]
    trials = [job.parent for job in path.glob(f"trials/*/*/{JOBS}")]
    sizes = [size for size in path.glob("nodes-*") if run_folder.slurm_job(size)]
    return sorted(trials or sizes, key=_numbers)


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that hold jobs of all `paths`, the one of the newest job last."""
    groups = [group for path in paths if (group := folders(path))]
    return [folder for group in sorted(groups, key=_newest) for folder in group]


def _newest(group: Sequence[Path]) -> tuple[int, str]:
    """Return the highest id of a job in a group of folders; 0 if it is damaged."""
    numbers = [0]
    for folder in group:
        with suppress(OSError, ValueError):
            numbers += [int(job.partition("_")[0]) for job in job_history(folder).jobs]
    return max(numbers), str(group[0])


def _numbers(job: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", f"{job.parent.name} {job.name}")]


def by_size(rows: Sequence[Row]) -> list[Row]:
    """Return `rows`, those of one size of a study as one."""
    groups: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(_size(row) or number, []).append(row)
    return [
        _merge(key, group) if isinstance(key, Path) else group[0] for key, group in groups.items()
    ]


def _size(row: Row) -> Path | None:
    """Return the folder of the size that the run of `row` is a trial of; None for other runs."""
    folder = Path(row["run"]).parent
    return folder if folder.parent.name == "trials" else None


def _merge(size: Path, rows: list[Row]) -> Row:
    """Return one row: the counts of states, and the numbers of the job that runs or ended last."""
    states = [row["state"] for row in rows]
    chosen = min(reversed(rows), key=_rank)
    has_several = len(rows) > 1
    done_count = sum(is_done(row) for row in rows)
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    cwd = Path.cwd()
    return chosen | {
        "job": ", ".join(row["job"] for row in rows),
        "state": ", ".join(counts) if has_several else states[0],
        "restarts": sum(row["restarts"] or 0 for row in rows),
        "status": f"{done_count} of {len(rows)} done" if has_several else chosen["status"],
        "run": str(size.relative_to(cwd) if size.is_relative_to(cwd) else size),
    }


def _rank(row: Row) -> int:
    """Return 0 for a job that runs, 1 for an ended one that reported a step, 2 for others."""
    if row["state"] not in END_STATES and row["step"] is not None:
        return 0
    return 1 if row["step"] is not None else 2
