"""The trainer: a model, an optimizer and an engine, checked before the loop over steps begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import hpctrain.world
from hpctrain import engines, nn
from hpctrain.core import progress
from hpctrain.core.errors import LostRankError, RecoveryError, TransportError, UsageError
from hpctrain.core.names import counted
from hpctrain.core.signals import StopRequest
from hpctrain.core.xp import shortage_raised
from hpctrain.data import Sampler, Samples, order_of
from hpctrain.engines import Engine
from hpctrain.gradients.precision import Precision, choose_precision
from hpctrain.gradients.replica import Replica, TrainableModel
from hpctrain.nn.metrics import Metric, check_metrics
from hpctrain.optim import Optimizer
from hpctrain.optim.absent import skip_absent
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.options import MeshOptions, PipelineOptions
from hpctrain.training import orders, split_model
from hpctrain.training.arguments import as_engine, as_model, as_optimizer, as_samples, check_sets
from hpctrain.training.centered_loss import centered_loss
from hpctrain.training.evaluation import Evaluation, bind_on_ranks
from hpctrain.training.faults import FaultsOptions, Slowdown, SlowedReplica
from hpctrain.training.fit import Fit, FitSegment, RunOrigin
from hpctrain.training.fit_call import run_segment
from hpctrain.training.loggers import run_loggers
from hpctrain.training.run_options import (
    CheckpointOptions,
    ElasticOptions,
    FitOptions,
    TraceOptions,
)
from hpctrain.training.survival.survival import Survival, last_words
from hpctrain.world import World


class Trainer:
    """A model, an optimizer and an engine, ready to be trained; every rank makes its own.

    A context manager: `with ht.Trainer(...) as trainer:` closes it at the end.
    """

    @shortage_raised()
    def __init__(
        self,
        model: nn.Model | TrainableModel | Any,
        optimizer: Optimizer | str,
        engine: Any = "allreduce",
        seed: int = 0,
        precision: Precision | None = None,
        world: World | None = None,
        callbacks: Sequence[Any] = (),
        faults: FaultsOptions = FaultsOptions(),  # noqa: B008  (frozen)
        init: str | Path | None = None,
        mesh: MeshOptions = MeshOptions(),  # noqa: B008  (frozen)
        pipeline: PipelineOptions = PipelineOptions(),  # noqa: B008  (frozen)
        *,
        metrics: Sequence[str | Metric] = (),
    ):
        """Lay the model out and build the engine; collective.

        `optimizer`: such as `ht.optim.adamw(rate=0.001)`, or the name "sgd" or "adamw" for its
        default rate. `engine`: options such as `ht.engines.AllReduce(algorithm="ring")`, or a
        name, such as "ps-async", for their defaults. `precision`: float32 or float64; on a GPU also
        tf32, bf16 or fp16, see `hpctrain.gradients.precision`; by default float32, or the dtype of
        a torch.nn.Module. `callbacks`: functions of each row of metrics, objects with hooks, see
        `ht.callbacks`, and loggers, see `ht.loggers`. `faults`: planted delays of ranks, see
        `training.faults`. `init`: the folder of a run or a checkpoint, or a .safetensors file,
        with the initial weights. `mesh`, `pipeline`: see `hpctrain.parallel.options`; with
        MeshOptions(pipe=2) two ranks hold a replica together. `metrics`: see `ht.metrics`. Raises
        UsageError on all ranks if engine, mesh, faults or `init` do not fit, or if ranks have other
        models, and GpuMemoryError, on the rank itself, if its GPU has too little memory.
        """
        world = world or hpctrain.world.init()
        self.world = cast(World, world.membership or world)  # it has the ranks that are left
        model, optimizer, engine = as_model(model), as_optimizer(optimizer), as_engine(engine)
        chosen_precision = self.world.on_all_ranks(lambda: choose_precision(model, precision))
        if getattr(model, "marks_absent", False):
            optimizer = skip_absent(optimizer)
        self._metrics = self.world.on_all_ranks(lambda: check_metrics(metrics))
        self.seed, self.rate = seed, optimizer.rate
        self.callbacks, self.loggers = run_loggers.split(callbacks)
        self.summary: dict[str, Any] | None = None  #: of the last `fit`
        self.world.on_all_ranks(
            lambda: split_model.check(mesh, pipeline, engine, chosen_precision, faults, model=model)
        )
        self.engine_options, self._optimizer, self._faults = engine, optimizer, faults
        make = split_model.make_replica
        self._make_replica = partial(
            make, model, seed, chosen_precision, mesh=mesh, pipeline=pipeline, init=init
        )
        self._unit = mesh.pipe
        self._built_on: World | None = None  #: the World of the engine
        present = world.membership.world if world.membership else world
        if not (present.is_spare and self._unit > 1):
            self.mesh, self.replica = self._make_replica(present)
        if not present.is_spare:
            self._build_engine()

    def _build_engine(self, source: int | None = 0) -> None:
        """Build the engine on the replica, with the parameters of rank `source`; collective."""
        engine, data = self.engine_options, replace(self.mesh.data, source=source)
        replica = self.world.on_all_ranks(lambda: self._slowed_replica(self._faults))
        build = partial(engine.build, data, replica, self._optimizer)
        self.engine: Engine = self.world.on_all_ranks(build)
        if self.mesh.pipeline is not None:
            self.mesh.pipeline.wait = split_model.StageWait(self.engine.times, self.world.trace)
        self.blocks = engines.blocks_of(engine, self.engine.workers)
        self._built_on = self.mesh.everyone

    def _renew(self, restores: bool = False, has_steps: bool = False) -> None:
        """Build the engine for the ranks that are left, if a loss came after it; collective.

        `restores`, `has_steps`: whether ranks hold a state of this call of fit, and whether it has
        taken steps. Raises RecoveryError if ranks are too few, or have lost an earlier training.
        """
        world = self.world.membership.world if self.world.membership else self.world
        if world is self._built_on:
            return
        if self.summary is not None and not (restores or has_steps):
            split_model.announce_reset(world, self._unit)
        if self._built_on is not None:
            with suppress(TransportError):  # its threads end, whatever its links
                self.engine.close()
        marks = world.gather("has weights" * (self._built_on is not None and self._unit == 1))
        source = None if restores else marks.index(max(marks))  # not a spare that joins
        try:
            if self._unit > 1:
                self.mesh, self.replica = self._make_replica(world)
            else:
                self.mesh = Mesh(world, world, world)
            self._build_engine(source)
        except UsageError as error:
            ranks = counted(world.size, "rank")
            raise RecoveryError(f"only {ranks} left: {error}; start the job again") from error

    def fit(
        self,
        train: Samples | tuple[Any, Any],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int = 128,
        micro_batches: int = 1,
        evaluate: Samples | tuple[Any, Any] | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        replay: str | Path | None = None,
        options: FitOptions = FitOptions(),  # noqa: B008  (frozen)
        checkpoints: CheckpointOptions = CheckpointOptions(),  # noqa: B008  (frozen)
        trace: TraceOptions = TraceOptions(),  # noqa: B008  (frozen)
        origin: RunOrigin = RunOrigin(),  # noqa: B008  (immutable)
        elastic: ElasticOptions = ElasticOptions(),  # noqa: B008  (frozen)
    ) -> dict[str, Any]:
        """Train for `epochs` or `steps` with `batch` samples per step over all ranks; collective.

        `train` and `evaluate` are pairs (x, y) of arrays, or of dicts and tuples of arrays, or data
        sets, the same on all ranks. The `evaluate` set is used after each epoch, see `options`, and
        at the end. Each rank computes its share of a step in `micro_batches` pieces, which need
        less memory. Returns the summary, which also lies in `out`/summary.json if `out` is given,
        beside metrics and checkpoints; `resume` goes on from the newest good checkpoint there.
        `replay` is the folder of an asynchronous run whose order of events is repeated. With
        `trace` the run leaves a trace.json; see `timeline.py`. `origin`: the recipe of the run.
        `elastic`: in a job that survives the loss of ranks, see docs/reliability.md. This call then
        goes on with the ranks that are left; `world.rank` and `world.size` change.

        Raises UsageError, TrainingError (loss or gradient not finite), StoppedError (by a signal;
        there is a checkpoint, or it is an UnsavedError: without `out` nothing is saved) or
        SaveError, each on all ranks.
        """
        progress.show_by_default(self.world.rank)
        finite = options.not_finite != "skip"
        train = as_samples(train, "fit", finite)
        test = None if evaluate is None else as_samples(evaluate, "evaluate", finite)
        fit = Fit(
            train=train,
            test=test,
            epochs=epochs,
            steps=steps,
            batch=batch,
            micro_batches=micro_batches,
            resume=resume,
            replay=replay,
            options=options,
            checkpoints=checkpoints,
            trace=trace,
            origin=origin,
            seed=self.seed,
            rate=self.rate,
            callbacks=self.callbacks,
            loggers=self.loggers,
            metrics=self._metrics,
        )
        survival = Survival(self.world, elastic, None if out is None else str(out), self._unit)
        with ExitStack() as stack:
            stop_request = StopRequest(partial(last_words, survival, self.world))
            catch_signals = cache(partial(stack.enter_context, stop_request))
            if self.world.is_spare:
                catch_signals()  # a signal to stop the job must not end it
            stack.enter_context(survival.failure_written(self.loggers))
            for world in survival:
                with survival.segment():
                    self.summary = summary = self._train(world, fit, survival, catch_signals)
                    break
        return summary

    def _train(
        self, world: World, fit: Fit, survival: Survival, catch_signals: Callable[[], StopRequest]
    ) -> dict[str, Any]:
        """Return the summary of a call of fit on the ranks that are there; collective.

        A spare sleeps, and returns the summary of the others.
        """
        if world.is_spare:
            return survival.sleep()
        self._renew(survival.reader is not None, survival.recoveries.last_step > 0)
        summary = run_segment(self._make_segment(fit, survival.run), survival, catch_signals)
        survival.end({"summary": summary})
        return summary

    def _make_segment(self, fit: Fit, run: str | None) -> FitSegment:
        """Return a segment of a call of fit on the ranks that are there; collective.

        Raises UsageError on all ranks if the batches do not fit the ranks.
        """
        test = None if fit.test is None else orders.select(self.world, fit.test, fit.seed)

        def make_sampler() -> Sampler:
            ranks, samples = self.mesh.data.size, len(order_of(fit.train) or fit.train)
            engines.must_fit(self.engine_options, ranks, fit.batch, samples)
            check_sets(self.replica.model, self.replica.loss, test=test)  # before its metrics
            return Sampler.of(fit.train, fit.batch, fit.seed)

        return FitSegment(
            fit=fit,
            test=test,
            sampler=self.world.on_all_ranks(make_sampler),
            mesh=self.mesh,
            replica=self.replica,
            engine=self.engine,
            blocks=self.blocks,
            evaluation=self._evaluation(test),
            run=None if run is None else Path(run),
        )

    def close(self) -> None:
        """End the engine's threads and free its links; collective."""
        if self._built_on is not None and not self.world.is_spare:
            with suppress(LostRankError):  # in a call of another Trainer
                self.engine.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trainer({self.replica.model!r}, {self.engine_options!r}, {self.world!r})"

    def evaluate(self, samples: Samples | tuple[Any, Any]) -> dict[str, Any]:
        """Return the metrics over all samples, scaled as in `fit`: {"loss": 0.31}; collective."""
        self._renew()
        samples = orders.select(self.world, as_samples(samples, "evaluate"), self.seed)
        model, loss = self.replica.model, self.replica.loss
        self.world.on_all_ranks(lambda: check_sets(model, loss, evaluated=samples))
        with centered_loss(model, samples):
            return self._evaluation(samples).evaluate(samples)

    def _evaluation(self, samples: Samples | None) -> Evaluation:
        """Return the evaluation of `samples`, None for no set, with the metrics; collective."""
        bound = bind_on_ranks(self.world, self._metrics, self.replica.model, samples)
        return Evaluation(self.engine, bound, self.blocks, logs=self.world.rank == 0)

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...), such as logits (n, classes).

        Each rank computes the outputs for its own `x`, scaled as in `fit`. Collective: with some
        engines the ranks first agree on one model.
        """
        self._renew()
        self.engine.settle()
        return self.replica.predict(x)

    def _slowed_replica(self, faults: FaultsOptions) -> Replica:
        faults.check(self.world.size, self.engine_options.workers(self.mesh.data.size))
        if not faults.any:
            return self.replica
        return SlowedReplica(self.replica, Slowdown(faults, self.world.rank))
