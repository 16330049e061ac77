"""The record of a run, with its bar and log: on every rank, but rank 0 alone writes and prints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain import data
from hpctrain.collectives import all_gather_short
from hpctrain.core import progress
from hpctrain.core.errors import SaveError
from hpctrain.core.metrics import idle
from hpctrain.core.run_files.writer import RunFiles
from hpctrain.engines import staleness
from hpctrain.engines.staleness import Staleness
from hpctrain.nn import Sums, losses
from hpctrain.optim.optimizer import rate_at, rate_curve
from hpctrain.training import run_facts
from hpctrain.training.counters import OpenRow, RunTimes, SkipCounter
from hpctrain.training.fit import FitSegment
from hpctrain.training.loggers.run_loggers import RunLoggers
from hpctrain.training.stragglers import Stragglers
from hpctrain.training.survival.recoveries import Recoveries
from hpctrain.training.timeline import Timeline
from hpctrain.transport.machine import versions

log = logging.getLogger(__name__)


class Journal:
    """The record of a run."""

    def __init__(self, segment: FitSegment, recoveries: Recoveries, earlier_times: RunTimes | None):
        """`recoveries`, `earlier_times`: of this call of fit before a loss of ranks."""
        world, engine, run = segment.world, segment.engine, segment.run
        self.segment, self._world, self._engine = segment, world, engine
        self._sampler, self._recoveries = segment.sampler, recoveries
        recipe = self._recipe = segment.fit.origin.recipe
        self.times = RunTimes(engine, earlier_times)
        self._steps_redone = 0
        self._versions = versions()  # now, since a recovery waits for `about_here`
        self.intervals: int | None = 0  #: since the first step; each ends with a collective call
        self.skips = SkipCounter(world, engine)
        self._stragglers = Stragglers(
            segment.mesh, engine, recipe.faults.slow_rank if recipe else None
        )
        self.files = RunFiles(None if world.rank else run)
        self._loggers = RunLoggers(segment)
        self._timeline = Timeline(world, run, segment.fit.trace)
        self._bar: progress.Bar | None = None  # on rank 0, if it has a terminal
        self._last_row: dict[str, Any] = {}  # the latest row
        self._done_summary: dict[str, Any] | None = None  # of a run that was done before
        self._loss = engine.replica.loss
        self._test_metrics = segment.evaluation.as_entries(None)
        self._suspicious: Sequence[str] = ()  # sentences about the results
        self.open_row = OpenRow()  #: not due yet
        self._earlier_staleness: Staleness | None = None  # in the parts before this one

    def resume(self, step: int, about: dict[str, Any]) -> list[dict[str, Any]]:
        """Go on after `step`: drop the rows of later steps, return the earlier rows; collective."""
        if about.get("batch") not in (None, self._sampler.batch):
            log.warning("batch was %s before, now %s", about["batch"], self._sampler.batch)
        if about.get("staleness"):
            self._earlier_staleness = Staleness.from_json(about["staleness"])
        self.intervals = about.get("intervals", None if step else 0)
        self.skips.resume(about)
        # Each rank then has the sums of all workers.
        with_sums = self.segment.mesh.data.rank == 0 or self._engine.commit.shares_sums
        self.open_row.restore(about.get("open_row"), step, with_sums=with_sums)
        rows, summary, self._steps_redone = self._world.from_first(
            lambda: self.files.go_back(step, about)
        )
        is_done = summary and (summary["status"], summary.get("steps")) == ("done", step)
        self._done_summary = summary if is_done else None
        if rows and rows[-1]["step"] == step:  # the row was made after this state
            self.open_row.close(step)
        self._loggers.rows = rows
        # A run that was complete makes no new row: its summary is from the last one.
        self._last_row = rows[-1] if rows else {}
        self.open_row.since_s = (self._last_row.get("wall_s") or 0.0) * self._recoveries.has_begun
        self._test_metrics = {key: self._last_row.get(key) for key in self._test_metrics}
        return rows

    def begin(self, step: int) -> None:
        """Write the recipe, start the clocks and the bar; raise UsageError; collective."""
        is_first, elapsed_s = not self._recoveries.has_begun, self._recoveries.begin(step)
        if is_first:
            recipe_text = self._recipe.toml() if self._recipe else None
            self._world.on_all_ranks(lambda: self.files.begin(recipe_text))
        self._loggers.begin(step)
        self._timeline.begin()
        if self._world.rank == 0 and log.isEnabledFor(logging.INFO):
            self._bar = progress.open_bar(self.segment.fit.name, step, self.segment.total_steps)
        self.times.begin(elapsed_s)
        self.skips.begin()

    def step(self, step: int, sums: Sums) -> None:
        """Add this rank's share of a step that is done."""
        self.open_row.add(sums)
        self._recoveries.count_step(step)
        wall_s = self.times.wall_s
        if self._bar is not None and self._bar.is_due(wall_s) and self.open_row.sums:
            loss = self.open_row.sums["loss"].mean or 0.0
            self._bar.show(step, self._epoch(step), loss, self._trained_samples(step) / wall_s)

    def row(
        self, step: int, tested: dict[str, Any] | None, interrupted: bool = False
    ) -> dict[str, Any] | None:
        """Close an interval: write its row and, if no bar is drawn, log it; collective.

        Returns the row, None if no step was done; every rank has its own times in it, and all the
        same sums. `interrupted`: the row is made only because of a request to stop.
        """
        since_step, since_s = self.open_row.since_step, self.open_row.since_s
        if step == since_step:
            return None
        sums, rank_facts = self._sum_over_ranks()
        wall_s = float(rank_facts["wall_s"][self._world.rank])
        samples = self._trained_samples(step) - max(self._trained_samples(since_step), 0)
        rate = self.segment.fit.rate
        self._test_metrics = self.segment.evaluation.as_entries(tested)
        self._last_row = {
            "step": step,
            "steps": step - since_step,
            "total_steps": self.segment.total_steps,
            "since_step": self._recoveries.since_step,  # start of the clocks, also of a resumed run
            "epoch": self._epoch(step),
            "samples": self._sampler.samples_before(step),
            **losses.evaluate(self._loss, sums, "train_"),
            **self._test_metrics,
            "skipped_steps": self.skips.skipped_steps,
            "rate": None if rate is None else rate_at(rate, self._updates_before(step)),
            "rates": rate_curve(rate, since_step + 1, step, self._updates_before),
            "samples_per_s": samples / max(wall_s - since_s, 1e-9),
            "wall_s": wall_s,
            **self.times.of_engine(),
            "ranks": {name: rank_facts[name].round(6).tolist() for name in self.times.of_engine()},
            **staleness.metrics(self._staleness),
            "dropped_gradients": self.skips.dropped_gradients(rank_facts, self._staleness),
            "idle_fraction": idle(rank_facts),
            **({"interrupted": True} if interrupted else {}),
            **({"lost_ranks": ranks_lost} if (ranks_lost := self._recoveries.row_ranks) else {}),
        }
        self._recoveries.row_ranks = []
        self.open_row.close(step, wall_s)
        self._stragglers.row(rank_facts)
        if self._world.rank == 0:
            self.files.add(self._last_row)
            self._loggers.add(self._last_row)
            if self._bar is None:
                log.info(progress.line(self._last_row, self.segment.total_steps))
        return self._last_row

    def about_now(self, step: int) -> dict[str, Any]:
        """Return the facts beside the arrays of a checkpoint after `step` steps; collective."""
        return self._about(step, *self._sum_over_ranks())

    def about_here(self, step: int) -> dict[str, Any]:
        """Return the same facts without communication; each rank must record all sums."""
        own_counts = {name: np.array([number]) for name, number in self.skips.rank_counts().items()}
        about = self._about(step, self.open_row.sums, own_counts)
        # The rank that writes may have been lost between the sums of the row and its writing.
        return {**about, "rows_due": [*about["rows_due"], *filter(None, [self._last_row])]}

    def _about(self, step: int, sums: Sums, ranks: dict[str, np.ndarray]) -> dict[str, Any]:
        epoch, index = self._sampler.locate_step(step)
        return {
            "step": step,
            "epoch": epoch,
            "sample_index": index,
            "open_row": self.open_row.to_json(step, sums),
            "world_size": self._world.size,
            **self._sampler.facts(),
            "versions": self._versions,
            "updates_per_step": self._engine.updates_per_step,
            "staleness": self._staleness and self._staleness.to_json(),
            "steps_redone": self._steps_redone,
            "intervals": self.intervals,
            "rows_due": self.files.pending,
            **self.skips.state(ranks),
            "recipe": self.segment.fit.name,
            "recipe_sha256": self._recipe and self._recipe.sha256,
        }

    def finish(
        self, status: str, exit_code: int, reason: str | None, suspicious: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Write pending rows and the summary, show the closing table, return the summary.

        Collective. `suspicious`: sentences about the results, see suspicions.py. Raises SaveError
        if a run that is done cannot be written.
        """
        self._recoveries.end_loss()
        self._suspicious = suspicious or self._suspicious  # also where the first end has failed
        summary = self._make_summary(status, exit_code, reason)
        if (
            self._done_summary
            and status == "done"
            and self.open_row.since_step == self._recoveries.since_step
        ):
            summary = self._done_summary  # nothing was done: what was measured stands
        self.close_bar()
        self._timeline.end()  # summary.json is the last of all files
        fault, counts = self._world.from_first(
            lambda: self._loggers.end_before(summary, self.files.end)
        )
        summary = {**counts, **summary}  # of a run that was done: its own counts
        if fault and status == "done":
            raise SaveError(fault)
        if fault and self._world.rank == 0:
            log.warning("%s", fault)
        if self._world.rank == 0 and status == "done" and log.isEnabledFor(logging.INFO):
            is_text = self._recipe is not None and isinstance(self._recipe.data, data.TextOptions)
            progress.console().print(progress.closing_table(summary, is_text))
            log.info("results: %s", self.segment.run or "not kept, as no folder was given")
        return summary

    def close_bar(self) -> None:
        """Take the bar from the terminal."""
        if self._bar is not None:
            self._bar.close(self.open_row.since_step)

    def end_alone(self, summary: dict[str, Any]) -> dict[str, Any]:
        """End bar, trace and loggers on a rank that fails alone; return the loggers' counts."""
        self.close_bar()
        self._timeline.end_alone()
        return self._loggers.end(summary)

    def _make_summary(self, status: str, exit_code: int, reason: str | None) -> dict[str, Any]:
        world, engine, step = self._world, self._engine, self.open_row.since_step
        _, rank_facts = self._sum_over_ranks()
        wall_s = float(rank_facts["wall_s"][world.rank])
        return {
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "recipe": self.segment.fit.name,
            **run_facts.of_run(world, engine),
            "mesh": run_facts.of_mesh(self.segment.mesh, engine),
            "epochs": step / self._sampler.steps_per_epoch,
            "steps": step,
            "since_step": self._recoveries.since_step,  # start of the clocks of a resumed run
            "steps_redone": self._steps_redone,
            **self._recoveries.summary(wall_s),
            "skipped_steps": self.skips.skipped_steps,
            "samples": self._sampler.samples_before(step),
            "samples_per_s": self._trained_samples(step) / max(wall_s, 1e-9),
            "wall_s": wall_s,
            **{name: float(rank_facts[name].mean()) for name in self.times.of_engine()},
            "bytes_sent_per_rank": int(rank_facts["bytes_sent"].mean()),
            "train_loss": self._last_row.get("train_loss"),
            **self._test_metrics,
            **staleness.metrics(self._staleness),
            "dropped_gradients": self.skips.dropped_gradients(rank_facts, self._staleness),
            "idle_fraction": idle(rank_facts),
            "straggler_scores": self._stragglers.scores(rank_facts),
            "params_sha256": run_facts.trained_sha256(world, engine),
            "seed": self._sampler.seed,
            "suspicious": [*self._suspicious],
        }

    def _sum_over_ranks(self) -> tuple[Sums, dict[str, np.ndarray]]:
        """Return sums of this interval, and by name each rank's numbers: (ranks,), equal on all."""
        own_facts = {
            **self.times.of_engine(),
            "wall_s": self.times.wall_s,
            "bytes_sent": self.times.bytes_sent,
            **self.skips.rank_counts(),
            **self._stragglers.rank_facts(),
        }
        own_row = np.array(list(own_facts.values()), np.float64)
        with self._world.trace.span("sum for a row", "other"):
            own_sums = losses.pack(self.open_row.sums, self._loss.terms)
            sums = own_sums if self._engine.commit.shares_sums else self._engine.sum(own_sums)
            rows = all_gather_short(self._world.link, own_row.view(np.uint8))
        ranks = np.ascontiguousarray(rows.view(np.float64).T)
        return losses.unpack(sums, self._loss.terms), dict(zip(own_facts, ranks, strict=True))

    @property
    def _staleness(self) -> Staleness | None:
        """The counts since the first step, including the steps before the run was resumed."""
        since_resume, earlier = self._engine.staleness, self._earlier_staleness
        return since_resume.merge(earlier) if since_resume and earlier else since_resume or earlier

    def _updates_before(self, step: int) -> int:
        """Return the number of updates before the 1-based step `step` updates."""
        return int(max(step - 1 - self.skips.skipped_steps, 0) * self._engine.updates_per_step)

    def _epoch(self, step: int) -> int:
        return -(-step // self._sampler.steps_per_epoch)

    def _trained_samples(self, step: int) -> int:
        return self._sampler.samples_before(step) - self._sampler.samples_before(
            self._recoveries.since_step
        )
