"""Checkpoints of a run: when to save, the metadata beside the state, and the best value so far."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import checkpoint
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.core.files import brief
from hpctrain.core.trees import shape_from_json
from hpctrain.data import unwrap
from hpctrain.data.scaling import Scale
from hpctrain.engines.saved_state import SavedState
from hpctrain.gradients.loss_scale import LossScale
from hpctrain.training import weights
from hpctrain.training.callbacks import Callbacks, Row
from hpctrain.training.fit import FitSegment
from hpctrain.training.journal import Journal

log = logging.getLogger(__name__)
SCALE = "loss_scale"


class Checkpointer:
    """The checkpoints of a call of fit; all ranks decide alike when to save."""

    def __init__(self, segment: FitSegment, journal: Journal, callbacks: Callbacks):
        self._segment, self._world, self._engine = segment, segment.world, segment.engine
        self._journal, self._options, replica = journal, segment.fit.checkpoints, segment.replica
        self._loss = replica.loss
        self._loss_scale: LossScale | None = getattr(replica, "loss_scale", None)
        origin = segment.fit.origin
        self._about: dict[str, Any] = {  # facts of model, data and callbacks for checkpoints
            "model": {"input_shape": replica.model.input_shape, "outputs": origin.outputs},
            **({"scale": scale.as_json()} if (scale := segment.fit.scale) else {}),
            **({"class_weights": origin.class_weights} if origin.class_weights else {}),
            "callbacks": callbacks.saved,  # which changes with each row
        }
        self._best_value: float | None = None  # of the metric `keep_best`

    @property
    def periods(self) -> tuple[int, int]:
        """The periods of checkpoints in steps, by either rule; 0 for never."""
        options, epoch = self._options, self._segment.sampler.steps_per_epoch
        return (options.every_epochs or 0) * epoch, options.every_steps or 0

    def resume(self, run: Path, loaded: Path) -> None:
        """Read the value of the best checkpoint in `run`, unless it is `loaded`; collective."""
        if criterion := self._options.best:
            self._best_value = checkpoint.best_value(run, criterion, self._world.link, loaded)

    def load(self, saved: SavedState) -> None:
        """Request this worker's loss scale, if there is one.

        A new worker takes the mean over the saved workers.
        """
        scale_names = [name for name in (self._scale_name, SCALE) if name in saved.sizes]
        if self._loss_scale is not None and scale_names:
            state = np.zeros(2)
            saved.request(scale_names[0], state)
            saved.on_arrival(partial(self._loss_scale.restore, state))

    def must_fit(self, reader: checkpoint.Reader) -> None:
        """Raise UsageError if the facts of a checkpoint differ from model, engine and scale."""
        fit, about = self._segment.fit, reader.about
        recipe = fit.origin.recipe
        saved_model, own_model = about.get("model") or {}, self._about["model"]
        is_same_run = recipe is not None and about.get("recipe_sha256") == recipe.sha256
        facts: dict[str, tuple[Any, Any]] = {
            "weights": (weights.layout(self._engine.replica.arena), about.get("weights")),
            "model.input_shape": (
                own_model["input_shape"],
                shape_from_json(saved_model.get("input_shape")),
            ),
        }
        if open_row := about.get("open_row"):
            facts["open_row.sums"] = sorted(self._loss.terms), sorted(open_row["sums"])
        if is_same_run and about.get("world_size") == self._world.size:
            updates = self._engine.updates_per_step
            facts["updates_per_step"] = updates, about.get("updates_per_step")
        for name, (expected, saved) in facts.items():
            if saved is not None and saved != expected:
                raise UsageError(
                    f"{reader.origin} does not fit the recipe: 'about.{name}' of its manifest: "
                    f"expected {brief(expected)}, seen {brief(saved)}; resume with the model and "
                    "the engine that it was made with"
                )
        if fit.scale is not None and about.get("scale") is not None:
            recorded = Scale.from_json(about["scale"])
            fit.scale.must_equal(recorded, unwrap(fit.train), reader.origin)

    def is_due(self, step: int, row: Row) -> bool:
        """Return whether to save after `step`; `row`: its row of metrics, empty if it has none."""
        is_periodic = any(period and step % period == 0 for period in self.periods)
        return is_periodic or self._new_best(row) is not None

    def save(self, step: int, row: Row, must: bool) -> Path | None:
        """Write a checkpoint and return its folder, None if there is none.

        A failure ends the run only if the checkpoint is the last one (`must`).
        """
        run = self._segment.run
        if run is None:
            return None
        self._engine.settle()
        self._journal.files.sync()
        try:
            with self._world.trace.span("save a checkpoint", "other"):
                state, options, link = self.state(), self._options, self._world.link
                about = self.about(self._journal.about_now(step)) | {
                    "metrics": self._row_metrics(row),
                    "keep_best": options.best and options.best._asdict(),
                }
                path = checkpoint.save(run, step, state, about, link, options.keep, options.best)
                best = self._new_best(row)
                self._best_value = self._best_value if best is None else best
                return path
        except SaveError as error:
            if must:
                raise
            if self._world.rank == 0:
                log.warning("%s; training goes on", error)
            return None

    def about(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of journal and model that a checkpoint stores with its arrays."""
        return {**facts, **self._about, **weights.facts(self._engine.replica.arena)}

    def state(self) -> list[checkpoint.Piece]:
        """Return this rank's pieces: the engine's, and the loss scale of a worker that has one."""
        is_saver = self._engine.worker is not None and self._engine.replica.arena.has_first_slot
        if self._loss_scale is None or not is_saver:
            return self._engine.state()
        piece = checkpoint.Piece(self._scale_name, 0, 2, self._loss_scale.state)
        return [*self._engine.state(), piece]

    @property
    def _scale_name(self) -> str:
        return f"worker.{self._engine.worker}.{SCALE}"

    def _new_best(self, row: Row) -> float | None:
        """Return the value of the metric `keep_best` if it is better than all before."""
        criterion = self._options.best
        value = self._row_metrics(row)[criterion.metric] if criterion else None
        is_best = criterion and value is not None and criterion.better(value, self._best_value)
        return value if is_best else None

    def _row_metrics(self, row: Row) -> dict[str, float | None]:
        """Return the metrics of a row; None for each if a stop cut the row short."""
        complete_row = {} if row.get("interrupted") else row
        test_names = (f"test_{name}" for name in self._segment.evaluation.scalars)
        metric_names = [*test_names, *(f"train_{name}" for name in self._loss.metrics)]
        return {name: complete_row.get(name) for name in metric_names}
