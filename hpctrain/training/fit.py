"""A call of fit: what the user asked, and what each of its segments trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.core.errors import UsageError
from hpctrain.data import Sampler, Samples, batches_to_read_ahead
from hpctrain.data.scaling import Scale, scale_of
from hpctrain.engines import Engine
from hpctrain.nn.metrics import Metric
from hpctrain.optim.optimizer import Schedule
from hpctrain.parallel.mesh import Mesh
from hpctrain.training.evaluation import Evaluation
from hpctrain.training.loggers.loggers import Logger
from hpctrain.training.recipe import Recipe
from hpctrain.training.run_options import CheckpointOptions, FitOptions, TraceOptions
from hpctrain.world import World


class RunOrigin(NamedTuple):
    """The recipe of a run, kept beside its results, and what follows from its data."""

    recipe: Recipe | None = None
    outputs: int | None = None  #: of the model
    scale: Scale | None = None
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The arguments of a call of fit and of its Trainer, checked; see `Trainer`."""

    train: Samples
    test: Samples | None
    epochs: int | None
    steps: int | None
    batch: int
    micro_batches: int
    resume: bool
    replay: str | Path | None
    options: FitOptions
    checkpoints: CheckpointOptions
    trace: TraceOptions
    origin: RunOrigin
    seed: int
    rate: float | Schedule | None
    callbacks: Sequence[Any]
    loggers: Sequence[Logger]
    metrics: Sequence[str | Metric]

    def __post_init__(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if (self.epochs is None) == (self.steps is None):
            raise UsageError("fit needs exactly one of epochs and steps")
        self.options.check()

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.origin.recipe.run.name if self.origin.recipe else "training"

    @property
    def scale(self) -> Scale | None:
        """The scale of the samples, for checkpoints: the recipe's, or the scale of `train`."""
        return self.origin.scale if self.origin.recipe else scale_of(self.train) or Scale()


@dataclass(frozen=True)
class FitSegment:
    """A segment of a call of fit: what the ranks train until the end, or until ranks are lost."""

    fit: Fit
    test: Samples | None  #: the samples of `fit.test` that an evaluation uses
    sampler: Sampler
    mesh: Mesh
    replica: Any  #: of the engine, without planted delays
    engine: Engine
    blocks: int  #: parts of a batch; see hpctrain.engines.blocks_of
    evaluation: Evaluation  #: of the test set
    run: Path | None  #: the folder of the run

    @property
    def world(self) -> World:
        """All ranks."""
        return self.mesh.everyone

    @property
    def total_steps(self) -> int:
        """The steps of the whole call."""
        return self.fit.steps or (self.fit.epochs or 0) * self.sampler.steps_per_epoch

    @property
    def prefetch(self) -> int:
        """Batches that a thread reads ahead."""
        prefetch = self.fit.options.prefetch
        return batches_to_read_ahead(self.fit.train) if prefetch is None else prefetch
