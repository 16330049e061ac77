"""Whole runs: from a recipe to a trained model in a folder, and back to the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from hpctrain import checkpoint, nn
from hpctrain.core import config, frameworks, trees
from hpctrain.core.config import code_ownership
from hpctrain.core.errors import UsageError
from hpctrain.core.labels import find_invalid_label
from hpctrain.core.launchers import launched
from hpctrain.core.run_files import run_folder
from hpctrain.core.xp import on_device
from hpctrain.data import Split, has_known_targets, known_targets
from hpctrain.data.sampler import Sampler
from hpctrain.data.scaling import Scale, scale_split
from hpctrain.gradients.precision import Precision, make_reading_replica
from hpctrain.nn.from_function import FunctionModel
from hpctrain.training import loading, recipe, weights
from hpctrain.training.callbacks import FirstRank
from hpctrain.training.fit import RunOrigin
from hpctrain.training.recipe import Recipe
from hpctrain.training.trained_model import TrainedModel
from hpctrain.training.trainer import Trainer
from hpctrain.transport.device import gpus
from hpctrain.transport.device.gpus import Device
from hpctrain.world import World, current_world

log = logging.getLogger(__name__)


def train(
    spec: Recipe, world: World, out: Path | None, resume: bool, replay: Path | None = None
) -> dict[str, Any]:
    """Train the recipe `spec` in folder `out` (rank 0 names one if None); return the summary.

    Collective; raises the errors of Trainer.fit.
    """
    has_begun, scale = loading.read_begun(spec, world, out if resume else None)
    with prepare(spec, world, init=not has_begun, recorded=scale) as job:
        path = out or run_folder.default_path(spec.run.name)
        return job.fit(
            evaluate=job.split.test,
            out=world.from_first(lambda: str(path.absolute())),
            resume=resume,
            replay=replay,
            checkpoints=spec.checkpoint,
            trace=spec.trace,
            origin=RunOrigin(spec, job.outputs, job.scale, job.class_weights),
            elastic=spec.elastic,
        )


@dataclass(frozen=True)
class Job:
    """A recipe with its data and its trainer, ready to be trained."""

    spec: Recipe
    split: Split
    scale: Scale  #: of the samples of `split`
    outputs: int | None  #: of the model, see `count_outputs`
    class_weights: tuple[float, ...] | None
    trainer: Trainer
    batch: int  #: samples per step of all ranks
    steps_per_epoch: int
    total_steps: int

    def fit(self, steps: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Train for `steps`, by default the recipe's number of steps; see Trainer.fit."""
        return self.trainer.fit(
            self.split.train,
            steps=steps or self.total_steps,
            batch=self.batch,
            micro_batches=self.spec.batch.micro_batches,
            options=self.spec.run,
            **arguments,
        )


@contextmanager
def prepare(
    spec: Recipe, world: World, init: bool = True, recorded: Scale | None = None
) -> Iterator[Job]:
    """Yield the job of a recipe, with the weights of `[model] init` if `init`; collective.

    `recorded`: the scale of the data of a run that is resumed.
    """
    loggers = world.on_all_ranks(spec.log.make)
    nodes = 1 if world.is_spare else len(world.main.nodes)  # a spare does not know them
    sizes = world.on_all_ranks(lambda: spec.must_fit(world.size, nodes))
    current_code, recorded_code = spec.code.sha256, spec.code.recorded
    world.must_agree(str(sorted(current_code.items())), "the code that the recipe names")
    changed_modules = [
        name
        for name in current_code.keys() & recorded_code.keys()
        if current_code[name] != recorded_code[name]
    ]
    if changed_modules and world.rank == 0:
        log.warning(
            "code has changed since the run was recorded: module %s", ", ".join(changed_modules)
        )
    split = world.on_all_ranks(lambda: loading.load_raw(spec))
    world.must_agree(
        loading.fingerprint(split.train), "training data (by the hash of a few samples)"
    )
    outputs = world.on_all_ranks(lambda: count_outputs(spec, split))
    class_weights = loading.choose_class_weights(spec, split, outputs, world)
    shape = split.train.sample_shape
    model = world.on_all_ranks(lambda: _build_seeded_model(spec, shape, outputs, class_weights))
    scale = loading.choose_scale(spec, split, model, world, recorded)
    split = scale_split(split, scale)
    steps_per_epoch = Sampler.of(split.train, sizes.batch, spec.run.seed).steps_per_epoch
    total_steps = spec.run.steps or (spec.run.epochs or 0) * steps_per_epoch
    # The schedule counts updates, not the regime's steps.
    periods = (round(steps * sizes.updates_per_step) for steps in (steps_per_epoch, total_steps))
    trainer = Trainer(
        model,
        spec.optimizer.build(spec.schedule.build(sizes.rate, *periods)),
        spec.engine,
        spec.run.seed,
        spec.run.precision,
        world,
        callbacks=[*world.on_all_ranks(lambda: _make_callbacks(spec)), *loggers],
        faults=spec.faults,
        init=spec.init if init else None,
        mesh=spec.mesh,
        pipeline=spec.pipeline,
        metrics=spec.run.metrics,
    )
    lengths = sizes.batch, steps_per_epoch, total_steps
    yield Job(spec, split, scale, outputs, class_weights, trainer, *lengths)
    trainer.close()  # not after a failure: it is collective, and other ranks do not take part


def _make_callbacks(spec: Recipe) -> list[Any]:
    """Return this rank's callbacks: early stop on each rank, a user's own where they belong."""
    callbacks: list[Any] = [spec.early_stop] if spec.early_stop else []
    for options in spec.run.callback_options:
        make = partial(options.make, spec.code.folder)
        callbacks.append(FirstRank(make) if options.ranks == "first" else make())
    return callbacks


def build_model(spec: Recipe, split: Split) -> Any:
    """Return the model of a recipe for the samples of `split`."""
    weights = spec.loss and spec.loss.class_weights
    given = weights if isinstance(weights, list) else None  # others are counted by all ranks
    return _build_seeded_model(spec, split.train.sample_shape, count_outputs(spec, split), given)


def _build_seeded_model(
    spec: Recipe, input_shape: Any, outputs: int | None, class_weights: Any = None
) -> Any:
    if isinstance(spec.model, FunctionModel):
        spec.model.find()  # its imports first: they may draw random numbers
    with frameworks.seeded_generators(spec.run.seed):
        model = spec.model.build(input_shape, outputs)
    if spec.loss is not None:
        weighted = nn.CrossEntropy(class_weights)
        model.loss = nn.LOSSES[spec.loss.kind] if class_weights is None else weighted
    return model


def count_outputs(spec: Recipe, split: Split) -> int | None:
    """Return the outputs that a model for `split` needs; None if only its function can know.

    The outputs are the classes of the data, or the features of its targets. Raises UsageError for
    labels of a user's own Samples without the number of classes, since not every label is read
    beforehand, and for test labels that no training sample has.
    """
    if split.classes is not None:
        return split.classes
    targets = known_targets(split.train)
    if isinstance(targets, dict | tuple):
        return None
    usual_loss = nn.mean_squared_error if targets.dtype.kind == "f" else nn.cross_entropy
    loss = usual_loss if spec.loss is None else nn.LOSSES[spec.loss.kind]
    if loss is nn.cross_entropy and targets.dtype.kind == "f":
        raise UsageError(f"[data]: {loss.find_fault(targets, (1,))}")
    outputs = loss.count_outputs(targets)
    if loss is nn.cross_entropy:
        if not has_known_targets(split.train):
            raise UsageError(
                "[data]: expected the number of classes beside your own Samples; for labels in "
                "files give [data] classes"
            )
        test_labels = targets[:0] if split.test is None else known_targets(split.test)
        if fault := find_invalid_label(test_labels, outputs):
            raise UsageError(f"[data]: test {fault}")
    return outputs


def load(
    run: str | Path,
    best: bool = False,
    model: nn.Model | None = None,
    device: Device = "auto",
    trust: bool = False,
) -> TrainedModel:
    """Return the model of the run in folder `run`, with the weights of its newest checkpoint.

    `best` takes the weights of the checkpoint kept by `keep_best`. `model` is required for a run
    which a Trainer made without a recipe. It computes on `device`: "cpu", "gpu", or "auto", the
    device that `init` chose for this process, else a GPU if there is one. On a GPU it has the run's
    precision, on cores at least float32. No MPI is needed. A model that is a user's own function is
    called: foreign code, or code that has changed since the run was trained, only with `trust`.
    Raises UsageError if there is no recipe or no good checkpoint, if the model is another, or if a
    "gpu" is not available.
    """
    folder = Path(run)
    if model is not None:
        loaded = weights.checkpoint_of(folder, best)
        precision: Precision = "float64" if loaded.arrays["param"].itemsize == 8 else "float32"
        replica = make_reading_replica(model, 0, precision, _on_gpu(device))
        return _fill_replica(replica, loaded, Scale.from_json(loaded.about.get("scale")))
    spec = _recipe_of(folder, trust)
    return with_weights(spec, weights.checkpoint_of(folder, best), _on_gpu(device))


def _recipe_of(run: Path, trust: bool) -> Recipe:
    """Return the recipe of a run; raise UsageError if its code may not be executed."""
    file = run_folder.recipe_file(run, "ht.load(DIR, model=model).evaluate((x, y))")
    spec = recipe.load(str(file))
    if spec.code.exists and not trust:
        code_ownership.must_be_own(run, file, spec.code)
    return spec


def with_weights(spec: Recipe, loaded: checkpoint.Loaded, on_gpu: bool = False) -> TrainedModel:
    """Return the model of `spec` with the weights of the checkpoint `loaded`.

    `on_gpu`: on the current device, in the precision of `spec`.
    """
    model_facts = loaded.about.get("model")
    if model_facts is None:  # an older checkpoint: the data have the shape and the classes
        model = build_model(spec, loading.load_raw(spec))
    else:
        shape = trees.shape_from_json(model_facts["input_shape"])
        weights = loaded.about.get("class_weights")
        model = _build_seeded_model(spec, shape, model_facts["outputs"], weights)
    replica = make_reading_replica(model, spec.run.seed, spec.run.precision, on_gpu)
    scale = loading.recorded_scale(loaded.about, spec)
    return _fill_replica(replica, loaded, scale, spec.run.metrics)


def _on_gpu(device: Device) -> bool:
    """Return whether the model computes on a GPU, which is then current in this thread."""
    config.pick(dict.fromkeys(get_args(Device)), device, "device")
    world = current_world()
    if world is None or world.gpu is None:
        on_cores = world is not None and device == "auto"  # as `init` chose
        return not on_cores and gpus.select_gpu(device, launched(os.environ)) is not None
    if device != "cpu":
        gpus.use_gpu(world.gpu.ordinal)
    return device != "cpu"


def _fill_replica(
    replica: Any, loaded: checkpoint.Loaded, scale: Scale, metrics: Sequence[str] = ()
) -> TrainedModel:
    if scale.shift is not None:
        scale.must_fit(replica.model.input_shape, str(loaded.path))
    weights.copy_into(replica.arena, weights.tensors_of(loaded), str(loaded.path))
    if hasattr(replica, "read_arena"):  # a module may have tensors outside of the arena
        replica.read_arena()
    return TrainedModel(replica, scale, metrics)


def evaluate(
    run: str | Path, best: bool = False, device: Device = "auto", trust: bool = False
) -> dict[str, Any]:
    """Return the metrics of a run's model on its test set, the number of samples, and its step.

    The newest checkpoint is evaluated, with `best` the one kept by `keep_best`; `device` and
    `trust`: see `load`.
    """
    folder = Path(run)
    spec = _recipe_of(folder, trust)
    split = loading.load_raw(spec)
    if split.test is None:
        raise UsageError(f"{run}: the data of this run has no test set to evaluate on")
    loaded = weights.checkpoint_of(folder, best)
    model = with_weights(spec, loaded, _on_gpu(device))
    return {
        "step": loaded.step,
        **{f"test_{name}": value for name, value in model.evaluate(split.test).items()},
        "samples": len(split.test),
        "device": "gpu" if on_device(model.replica.arena.param) else "cpu",
    }
