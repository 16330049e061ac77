"""The loggers of a call of fit: they get the rows of metrics.jsonl, on rank 0 alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import UsageError
from hpctrain.training import run_facts
from hpctrain.training.loggers.feed import END_S, STOP_S, Feed
from hpctrain.training.loggers.loggers import PROJECT, Logger
from hpctrain.training.loggers.tracker import row_values

if TYPE_CHECKING:
    from hpctrain.training.fit import FitSegment

#: facts of summary.json that are known from the first step on
JOB_FACTS = ("engine", "algorithm", "transport", "world_size", "workers", "servers", "hosts",
             "rank_hosts", "gpus", "gpu_paths", "restarts", "threads", "versions")  # fmt: skip


def split(callbacks: Sequence[Any]) -> tuple[list[Any], list[Logger]]:
    """Return the callbacks of a Trainer that are called, and its loggers."""
    loggers = [item for item in callbacks if isinstance(item, Logger)]
    return [item for item in callbacks if item not in loggers], loggers


def check(loggers: Sequence[Logger], run: Path | None, is_new: bool) -> None:
    """Raise UsageError for a logger without a folder, or with one in use.

    `is_new`: the run begins at its first step, so that its files may not be there. The run's own
    folder is checked as a whole.
    """
    places = [logger.target(run, {}).folder / logger.kind for logger in loggers]
    for logger, place in zip(loggers, places, strict=True):
        if places.count(place) > 1:
            raise UsageError(f"{logger}: two loggers write to {place}; give each its folder")
        if is_new and logger.folder is not None and place.exists():
            raise UsageError(
                f"{logger}: {place} holds another run; resume that run, or name a new folder"
            )


class RunLoggers:
    """The loggers of a segment of fit; none on ranks other than 0."""

    def __init__(self, segment: FitSegment):
        self._segment = segment
        self._loggers = segment.fit.loggers if segment.world.rank == 0 else []
        self._feeds: list[Feed] = []
        self.rows: Sequence[Mapping[str, Any]] = ()  #: of the earlier segments

    def begin(self, step: int) -> None:
        """Go on after `step`; the files are opened by threads."""
        if not self._loggers:
            return
        segment, recipe = self._segment, self._segment.fit.origin.recipe
        config = recipe.tables if recipe else _describe(segment)
        config = make_config(config, run_facts.of_run(segment.world, segment.engine))
        project = (recipe.log.project or recipe.run.name) if recipe else PROJECT
        rows = self.rows if segment.run or not step else None  # without a folder nothing has them
        self._feeds = [
            logger.begin(logger.target(segment.run, config, project), step, rows)
            for logger in self._loggers
        ]

    def add(self, row: Mapping[str, Any]) -> None:
        """Log a row."""
        for feed in self._feeds:
            feed.log(row["step"], row_values(row))

    def end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Log the summary, wait for the threads, and return the counts of rows for it."""
        limit_s = END_S if summary["status"] == "done" else STOP_S
        # The other ranks wait meanwhile: the watch must not report them.
        limit_s = min(limit_s, self._segment.fit.options.timeout_s / 2)
        feeds, self._feeds = self._feeds, []
        return _end(feeds, summary, limit_s)

    def end_before(
        self, summary: Mapping[str, Any], write: Callable[[dict[str, Any]], str]
    ) -> tuple[str, dict[str, Any]]:
        """End, `write` the summary with the counts; return the fault of that, and the counts."""
        counts = self.end(summary)
        return write({**counts, **summary}), counts


def end_open(loggers: Sequence[Logger], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Log the summary of a run that cannot go on; return the counts of rows for it."""
    return _end([feed for logger in loggers if (feed := logger.open_feed)], summary, STOP_S)


def _end(feeds: Sequence[Feed], summary: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    end = time.monotonic() + limit_s
    for feed in feeds:
        feed.finish(summary)
    counts = [feed.wait(max(end - time.monotonic(), 0.0)) for feed in feeds]
    return {"loggers": counts} if counts else {}


def make_config(tables: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run: its recipe, and the job in the words of summary.json."""
    return {**tables, "job": {name: facts[name] for name in JOB_FACTS if name in facts}}


def _describe(segment: FitSegment) -> dict[str, Any]:
    """Return the arguments of a call of fit without a recipe, as JSON data."""
    fit, model = segment.fit, segment.replica.model
    return {
        "model": repr(model),
        "rate": fit.rate if isinstance(fit.rate, float) else repr(fit.rate),
        "batch": fit.batch,
        "micro_batches": fit.micro_batches,
        "steps": segment.total_steps,
        "seed": fit.seed,
        "options": asdict(fit.options),
    }
