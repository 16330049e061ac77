"""Time whole training steps (forward, backward, reduction, update), ours and other libraries'.

All contenders have the same initial weights, samples and updates: after 20 steps their losses must
be equal, otherwise the times are not comparable. The *exposed* communication of a library is its
step minus its own step without communication: the algorithm `null` for ours, the network without a
wrapper for PyTorch. Contenders take turns, a few steps each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from hpctrain import engines
from hpctrain.core import frameworks
from hpctrain.core.errors import UsageError
from hpctrain.data import Sampler, Samples, share
from hpctrain.engines.engine import Flags, Task
from hpctrain.gradients.precision import make_replica
from hpctrain.gradients.replica import Batch, ModelReplica, Replica
from hpctrain.nn import Key, Model
from hpctrain.nn.mlp import MlpOptions
from hpctrain.optim import Optimizer, SgdOptions
from hpctrain.tools.bench.base import Bench
from hpctrain.tools.bench.rivals import DenseModel, Rival, StepFunction
from hpctrain.training.recipe import Recipe
from hpctrain.transport.placement.core_binding import allow_all_cores
from hpctrain.tuning.measure import ContextFactory, median_ratio, summarize_times, time_interleaved
from hpctrain.world import World

SHARE_PARAMETERS, NULL_ALGORITHM, TORCH_NULL = "share-parameters", "null", "torch-null"
EQUAL_LOSS_STEPS, LOSS_TOLERANCE = 20, 1e-3  # steps, and relative to our loss
STEPS_PER_CALL = 3  # by the same contender between two readings of the clock
Row = dict[str, Any]


@dataclass(frozen=True)
class StepPlan(Bench):
    """The contenders and batch sizes of a measurement."""

    spec: Recipe
    algorithms: Sequence[str]
    batches: Sequence[int]  #: samples per rank and step
    in_torch: bool = False  #: our engines train the same model as a module of PyTorch


@dataclass
class Contender:
    """A trainer and its progress; `baseline` names the same trainer without communication."""

    step: StepFunction
    shares: Sequence[Batch]
    baseline: str
    awake_context: ContextFactory = nullcontext  #: context manager around the steps
    step_count: int = 0
    losses: list[float] = field(default_factory=list)  #: this rank's share of the loss of each step

    def __call__(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            batch = self.shares[self.step_count % len(self.shares)]
            self.losses.append(self.step(batch.inputs, batch.targets))
            self.step_count += 1

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Take one untimed step, which fills the caches."""
        with self.awake_context():
            self(1)
            yield


def run(
    world: World, plan: StepPlan, model: Model, train_samples: Samples, rivals: Mapping[str, Rival]
) -> Iterator[list[Row]]:
    """Yield the rows of each batch size; collective."""
    for batch in plan.batches:
        shares = world.on_all_ranks(
            partial(_rank_shares, world, train_samples, batch, plan.spec.run.seed)
        )
        built_engines: list[Any] = []
        contenders = _make_contenders(world, plan, model, shares, rivals, built_engines)
        yield _measure_batch(world, plan, batch, model, contenders)
        for engine in built_engines:
            engine.close()


def rival_refusal(spec: Recipe) -> str | None:
    """Return the reason why the rivals cannot train `spec`; None if they can."""
    model, optimizer = spec.model, spec.optimizer
    if not isinstance(model, MlpOptions) or model.dropout:
        return 'only [model] kind = "mlp" without dropout has its equal there'
    if not isinstance(optimizer, SgdOptions) or optimizer.clip_norm or optimizer.exempt_vectors:
        return 'only [optimizer] kind = "sgd" without clip_norm, exempt_vectors has its equal there'
    return None


def _rank_shares(world: World, train_samples: Samples, batch: int, seed: int) -> list[Batch]:
    """Return this rank's shares of the first batches; contenders cycle through them."""
    global_batch = batch * world.size
    if len(train_samples) < global_batch:
        raise UsageError(
            f"--batch-per-rank: expected at most {len(train_samples) // world.size} with "
            f"{len(train_samples)} samples on {world.size} ranks, seen {batch}"
        )
    sampler = Sampler(len(train_samples), global_batch, seed)
    steps = range(min(EQUAL_LOSS_STEPS, len(train_samples) // global_batch))
    share_indexes = (
        share(sampler.batch_indexes(step), world.rank, world.size)[1] for step in steps
    )
    return [Batch.of(*train_samples.rows(indexes)) for indexes in share_indexes]


def _make_contenders(
    world: World,
    plan: StepPlan,
    model: Model,
    shares: list[Batch],
    rivals: Mapping[str, Rival],
    built_engines: list[Any],
) -> dict[str, Contender]:
    contenders = {}
    for name in dict.fromkeys((*plan.algorithms, NULL_ALGORITHM)):
        shares_parameters = name == SHARE_PARAMETERS
        algorithm = "auto" if shares_parameters else name
        options = engines.AllReduce(algorithm=algorithm, share_parameters=shares_parameters)
        engine = options.build(world, *_make_replica(plan, model))
        built_engines.append(engine)
        contenders[name] = Contender(
            _engine_step(world, engine, plan.spec.run.seed), shares, NULL_ALGORITHM
        )
    for name, rival in rivals.items():
        dense = _dense_model(plan, ModelReplica(model, plan.spec.run.seed, np.float32))
        if TORCH_NULL not in contenders:
            step_without_messages = rival.step(dense, without_communication=True)
            contenders[TORCH_NULL] = Contender(
                step_without_messages, shares, TORCH_NULL, allow_all_cores
            )
        with rival.awake_context():
            trainer = rival.step(dense, without_communication=False)
        contenders[name] = Contender(trainer, shares, TORCH_NULL, rival.awake_context)
    return contenders


def _make_replica(plan: StepPlan, model: Model) -> tuple[Replica, Optimizer]:
    """Return a new replica of the model for an engine, and its optimizer."""
    replica = make_replica(model, plan.spec.run.seed, "float32", on_gpu=False)
    if not plan.in_torch:
        optimizer = plan.spec.optimizer
        return replica, optimizer.build(lambda step: optimizer.rate)
    from hpctrain.tools.bench.rivals.training import build_network, make_optimizer
    from hpctrain.torch.modules.optimizers.conversion import as_optimizer

    dense = _dense_model(plan, replica)
    network = build_network(dense)
    optimizer = as_optimizer(make_optimizer(network, dense), network)
    return frameworks.as_model(network).make_replica(0, "float32", on_gpu=False), optimizer


def _engine_step(world: World, engine: Any, seed: int) -> StepFunction:
    """Return a function that takes one training step with `engine`."""
    step_numbers = iter(range(1 << 62))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        key = Key(seed, next(step_numbers), world.rank * len(y))
        metric_sums, _ = engine.step(Task(Batch.of(x, y), 1 / (len(y) * world.size), key), Flags())
        return float(metric_sums["loss"].sum) if metric_sums else 0.0

    return step


def _dense_model(plan: StepPlan, replica: ModelReplica) -> DenseModel:
    """Return the initial weights of `replica` and the options of SGD, for PyTorch."""
    sgd = plan.spec.optimizer
    initial_arrays = list(replica.arena.views(replica.arena.param).values())
    return DenseModel(
        list(zip(initial_arrays[::2], initial_arrays[1::2], strict=True)),
        {
            "lr": sgd.rate,
            "momentum": sgd.momentum,
            "nesterov": sgd.nesterov,
            "weight_decay": sgd.weight_decay,
        },
    )


def _measure_batch(
    world: World, plan: StepPlan, batch: int, model: Model, contenders: Mapping[str, Contender]
) -> list[Row]:
    for contender in contenders.values():
        with contender.awake_context():
            contender(EQUAL_LOSS_STEPS)
    losses = {
        name: sum(map(float, world.gather(str(contender.losses[-1])))) / (batch * world.size)
        for name, contender in contenders.items()
    }
    step_calls = {
        name: partial(contender, STEPS_PER_CALL) for name, contender in contenders.items()
    }
    contender_contexts = {
        name: contender.warmed_up
        for name, contender in contenders.items()
        if contender.awake_context is not nullcontext
    }
    timings = time_interleaved(
        world.link, step_calls, plan.iterations, plan.warm_up, contexts=contender_contexts
    )
    seconds = {name: np.array(times) / STEPS_PER_CALL for name, times in timings.items()}
    shared_columns = {
        "operation": "step",
        "bytes": 4 * model.parameter_count,
        "batch_per_rank": batch,
        "ranks": world.size,
        "rounds": plan.iterations,
        "calls": STEPS_PER_CALL,
    }
    reference_loss = losses[plan.algorithms[0]]
    return [
        shared_columns
        | {
            "algorithm": name,
            **_time_columns(seconds, name, contender),
            **_loss_columns(losses, name, contender, reference_loss),
        }
        | {"samples_per_s": batch * world.size / float(np.median(seconds[name]))}
        for name, contender in contenders.items()
    ]


def _time_columns(seconds: Mapping[str, np.ndarray], name: str, contender: Contender) -> Row:
    """Return percentiles, the exposed communication and ratios to the other contenders."""
    own_seconds, compute_seconds = seconds[name], seconds[contender.baseline]
    other_names = [
        other_name for other_name in seconds if other_name not in (name, NULL_ALGORITHM, TORCH_NULL)
    ]
    return {
        **summarize_times(own_seconds.tolist()),
        "alone_s": float(np.median(compute_seconds)),
        "exposed_s": None
        if name == contender.baseline
        else float(np.median(own_seconds - compute_seconds)),
        "times": {
            other_name: median_ratio(seconds[other_name].tolist(), own_seconds.tolist())
            for other_name in other_names
        },
    }


def _loss_columns(
    losses: Mapping[str, float], name: str, contender: Contender, reference_loss: float
) -> Row:
    """Return the loss, and whether it equals ours; no loss without communication."""
    if name == contender.baseline:
        return {"loss": None, "correct": isfinite(losses[name])}
    return {
        "loss": losses[name],
        "correct": abs(losses[name] / reference_loss - 1) <= LOSS_TOLERANCE,
    }
