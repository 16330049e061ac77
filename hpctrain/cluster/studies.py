"""Jobs of `hpctrain scale --on slurm`: where they lie, and one row for all of a size.

STUDY/trials/SIZE/repeat-0/        a run
STUDY/trials/SIZE/repeat-0.job/    what was submitted to make it: see submit.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster.status import is_done, kept
from hpctrain.cluster.submit import ENDED, JOBS

Row = dict[str, Any]


def folders(path: Path) -> list[Path]:
    """Return the folders that hold jobs of `path`: itself, or those of the trials of a study.

    So do the folders of sizes that a job array has made which was given to sbatch by hand. Nothing
    where no job was submitted.
    """
    if (path / JOBS).exists() or rundir.begun_by(path):
        return [path]
    trials = [job.parent for job in path.glob(f"trials/*/*/{JOBS}")]
    sizes = [size for size in path.glob("nodes-*") if rundir.begun_by(size)]
    return sorted(trials or sizes, key=_in_order)


def newest_last(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that hold jobs of all `paths`, of which the newest job comes last."""
    found = [some for path in paths if (some := folders(path))]
    return [folder for some in sorted(found, key=_newest) for folder in some]


def _newest(some: Sequence[Path]) -> tuple[int, str]:
    """Return the highest id of a job in folders that are shown together; 0 if it is damaged."""
    numbers = [0]
    for folder in some:
        with suppress(OSError, ValueError):
            numbers += [int(job.partition("_")[0]) for job in kept(folder).jobs]
    return max(numbers), str(some[0])


def _in_order(job: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", f"{job.parent.name} {job.name}")]


def by_size(rows: Sequence[Row]) -> list[Row]:
    """Return `rows`, those of one size of a study as one."""
    found: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        found.setdefault(_size(row) or number, []).append(row)
    return [_joined(key, some) if isinstance(key, Path) else some[0] for key, some in found.items()]


def _size(row: Row) -> Path | None:
    """Return the folder of the size that the run of `row` is a trial of; None for other runs."""
    folder = Path(row["run"]).parent
    return folder if folder.parent.name == "trials" else None


def _joined(size: Path, rows: list[Row]) -> Row:
    """Return one row: how many are where, and the numbers of the one that runs, or ended last."""
    states = [row["state"] for row in rows]
    shown = min(reversed(rows), key=_rank)
    many = len(rows) > 1
    done = sum(is_done(row) for row in rows)
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    here = Path.cwd()
    return shown | {
        "job": ", ".join(row["job"] for row in rows),
        "state": ", ".join(counts) if many else states[0],
        "restarts": sum(row["restarts"] or 0 for row in rows),
        "status": f"{done} of {len(rows)} done" if many else shown["status"],
        "run": str(size.relative_to(here) if size.is_relative_to(here) else size),
    }


def _rank(row: Row) -> int:
    """Return 0 for a job that runs, 1 for one that has told of itself, 2 for others."""
    if row["state"] not in ENDED and row["step"] is not None:
        return 0
    return 1 if row["step"] is not None else 2
