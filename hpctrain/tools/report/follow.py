"""The live view of a run in another job or on another node, from its files alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.core import progress
from hpctrain.core.printing import say
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.folder_lock import is_locked
from hpctrain.tools.report import record

log = logging.getLogger(__name__)
POLL_S = 1.0
SILENT_S = 30.0  #: a shared file system may show a lock, or its end, so much later


def follow(run: Path, wait: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Show rows of metrics as they come, on stderr; return the summary once the run has ended.

    On a terminal a progress bar, else a line per row. A run that was killed writes no summary:
    after a while without its lock this is said, and the view goes on, as the run may be resumed.
    Raises UsageError if `run` holds no run, FileError for damaged files.
    """
    record.read(run)
    bar: progress.Bar | None = None
    last_step, silent_s = 0, 0.0
    while True:
        summary = run_folder.read_summary(run)  # first: rows that were written before it count
        rows = [row for row in run_folder.rows(run) if row["step"] > last_step]
        for row in rows:
            last_step, total = row["step"], row.get("total_steps") or row["step"]
            if bar is None and summary is None:
                bar = progress.open_bar(run.resolve().name, last_step, total)
            if bar is None:
                say(progress.line(row, total), err=True)
            else:
                facts = map(row.get, ("epoch", "train_loss", "samples_per_s"))
                bar.show(last_step, *facts)
                if lost := progress.describe_lost(row):
                    bar.print(f"step {last_step}: {lost}")
        if summary is not None:
            if bar is not None:
                bar.close(last_step)
            return summary
        silent_s = 0.0 if rows or is_locked(run) else silent_s + POLL_S
        if silent_s == SILENT_S:
            log.warning("%s: no job holds its lock: it may have been killed; Ctrl-C ends this", run)
        wait(POLL_S)
