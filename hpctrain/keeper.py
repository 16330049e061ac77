"""When a checkpoint of a run is due, what it tells beside the state, and which one is the best."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import checkpoint, weights
from hpctrain.callbacks import Row
from hpctrain.engines import Engine
from hpctrain.errors import SaveError, UsageError
from hpctrain.files import brief
from hpctrain.gradients.mixed import MixedReplica
from hpctrain.gradients.replica import Replica
from hpctrain.journal import Journal
from hpctrain.metrics import METRICS, better
from hpctrain.recipe import CheckpointOptions
from hpctrain.world import World

log = logging.getLogger(__name__)
SCALE = "loss_scale"


class Keeper:
    """The checkpoints of one call of fit; every rank has one, and all decide alike."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        replica: Replica,
        journal: Journal,
        options: CheckpointOptions,
        about: dict[str, Any],
    ):
        """`about` is what checkpoints tell of the model, `replica` what the engine was built on."""
        self._world, self._engine, self._journal = world, engine, journal
        self._scaled = replica if isinstance(replica, MixedReplica) else None
        self._options, self._about = options, about
        self._best: float | None = None  # of the metric by which the best checkpoint is kept

    @property
    def periods(self) -> tuple[int, int]:
        """Every how many steps a checkpoint is due, by either rule; 0 for never."""
        options, epoch = self._options, self._journal.sampler.steps_per_epoch
        return (options.every_epochs or 0) * epoch, options.every_steps or 0

    def resume(self, run: Path) -> None:
        """Learn how good the best checkpoint is that lies there; collective."""
        if metric := self._options.keep_best:
            self._best = checkpoint.best_value(run, metric, self._world.link)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the loss scale out of the `arrays` of a checkpoint, if there is one: the worker's.

        A worker that had none takes the mean of all.
        """
        names = [name for name in (self._scale_name, SCALE) if name in arrays]
        if self._scaled is not None and self._scaled.scaling is not None and names:
            self._scaled.scale_as(arrays[names[0]])

    def must_fit(self, found: checkpoint.Loaded) -> None:
        """Raise UsageError for a checkpoint whose facts are not those of this model and engine."""
        recipe, seen = self._journal.recipe, found.about
        model, here = seen.get("model") or {}, self._about["model"]
        same_run = recipe is not None and seen.get("recipe_sha256") == recipe.sha256
        facts: dict[str, tuple[Any, Any]] = {
            "weights": (weights.layout(self._engine.replica.arena), seen.get("weights")),
            "model.input_shape": (list(here["input_shape"]), model.get("input_shape")),
        }
        if same_run and seen.get("world_size") == self._world.size:
            updates = self._engine.updates_per_step
            facts["updates_per_step"] = updates, seen.get("updates_per_step")
        for name, (expected, told) in facts.items():
            if told is not None and told != expected:
                raise UsageError(
                    f"{found.path} does not fit the recipe: 'about.{name}' of its manifest: "
                    f"expected {brief(expected)}, seen {brief(told)}; resume with the model and "
                    "the engine that it was made with"
                )

    def due(self, step: int, row: Row) -> bool:
        """Return whether to save after `step`, whose row of metrics is `row`, empty for none."""
        regular = any(period and step % period == 0 for period in self.periods)
        return regular or self._new_best(row) is not None

    def save(self, step: int, row: Row, must: bool) -> None:
        """Write a checkpoint; a failure ends the run only if nothing comes after (`must`)."""
        run = self._journal.run
        if run is None:
            return
        self._engine.settle()
        self._journal.files.sync()
        try:
            with self._world.trace.span("save a checkpoint", "other"):
                self._write(run, step, row)
        except SaveError as error:
            if must:
                raise
            if self._world.rank == 0:
                log.warning("%s; training goes on", error)

    def _write(self, run: Path, step: int, row: Row) -> None:
        state, options, link = self._state(), self._options, self._world.link
        about = {
            **self._journal.about_now(step),
            **self._about,
            "metrics": _metrics(row),
            "keep_best": options.keep_best,
            "weights": weights.layout(self._engine.replica.arena),
        }
        checkpoint.save(run, step, state, about, link, options.keep, options.keep_best)
        best = self._new_best(row)
        self._best = self._best if best is None else best

    def _state(self) -> list[checkpoint.Piece]:
        """Return this rank's pieces: the engine's, and the loss scale of a worker that has one."""
        scaling = self._scaled.scaling if self._scaled is not None else None
        if scaling is None or self._engine.worker is None:
            return self._engine.state()
        return [*self._engine.state(), checkpoint.Piece(self._scale_name, 0, 2, scaling)]

    @property
    def _scale_name(self) -> str:
        return f"worker.{self._engine.worker}.{SCALE}"

    def _new_best(self, row: Row) -> float | None:
        """Return the value of the metric that is kept, if it is better than all before."""
        metric = self._options.keep_best
        value = _metrics(row)[metric] if metric else None
        return value if metric and value is not None and better(metric, value, self._best) else None


def _metrics(row: Row) -> dict[str, float | None]:
    """Return the metrics of a row; of one cut short by a stop there are none."""
    told = {} if row.get("interrupted") else row
    return {metric: told.get(metric) for metric in METRICS}
