"""Times whole training steps: forward, backward, reduction, update; ours and other libraries'.

All start from the same weights, read the same samples in the same order and use the same update:
after 20 steps the losses must be equal, or the times mean nothing. A library's *exposed*
communication is its step minus its own step without communication: for ours the algorithm `null`,
for PyTorch's the same network without a wrapper. Contenders take turns, a few steps each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, prod
from typing import Any

import numpy as np

from hpctrain import engines
from hpctrain.bench.rivals import Dense, Rival, StepFunction
from hpctrain.core.errors import UsageError
from hpctrain.data import Sampler, Samples, share
from hpctrain.engines.engine import Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Key, Model
from hpctrain.nn.zoo import MlpOptions
from hpctrain.optim import Optimizer, SgdOptions
from hpctrain.training.recipe import Recipe
from hpctrain.transport.placement.core_binding import unbound
from hpctrain.tuning.measure import ContextFactory, interleaved, paired_ratio, spread
from hpctrain.world import World

SHARED, NULL, TORCH = "share-parameters", "null", "torch-null"
EQUAL_AFTER, EQUAL_WITHIN = 20, 1e-3  # steps, and relative to our loss
STEPS = 3  # of one contender between two readings of the clock
Row = dict[str, Any]


@dataclass(frozen=True)
class StepPlan:
    """The contenders, batch sizes and rounds of a measurement."""

    spec: Recipe
    algorithms: Sequence[str]
    batches: Sequence[int]  #: samples per rank and step
    rounds: int
    warm_up: int


@dataclass
class StepContender:
    """A trainer and its progress; `base` names the same trainer without communication."""

    step: StepFunction
    shares: Sequence[Batch]
    base: str
    awake: ContextFactory = nullcontext  #: context manager around the steps
    step_count: int = 0
    losses: list[float] = field(default_factory=list)  #: this rank's share of each step's

    def __call__(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            self.losses.append(self.step(*self.shares[self.step_count % len(self.shares)]))
            self.step_count += 1

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Wake up and take a first step, which fills the caches."""
        with self.awake():
            self(1)
            yield


def run(
    world: World, plan: StepPlan, model: Model, train: Samples, rivals: Mapping[str, Rival]
) -> Iterator[list[Row]]:
    """Yield the rows of each batch size; collective."""
    for batch in plan.batches:
        shares = world.on_all_ranks(partial(_shares, world, train, batch, plan.spec.run.seed))
        own_engines: list[Any] = []
        contenders = _contenders(world, plan, model, shares, rivals, own_engines)
        yield _rows(world, plan, batch, model, contenders)
        for engine in own_engines:
            engine.close()


def refusal(spec: Recipe) -> str | None:
    """Return the reason why the rivals cannot train `spec`; None if they can."""
    model, optimizer = spec.model, spec.optimizer
    if not isinstance(model, MlpOptions) or model.dropout:
        return 'only [model] kind = "mlp" without dropout has its equal there'
    if not isinstance(optimizer, SgdOptions) or optimizer.clip_norm or optimizer.exempt_vectors:
        return 'only [optimizer] kind = "sgd" without clip_norm, exempt_vectors has its equal there'
    return None


def _shares(world: World, train: Samples, batch: int, seed: int) -> list[Batch]:
    """Return this rank's shares of the first batches, which are repeated in turn."""
    total = batch * world.size
    if len(train) < total:
        raise UsageError(
            f"--batch-per-rank: expected at most {len(train) // world.size} with "
            f"{len(train)} samples on {world.size} ranks, seen {batch}"
        )
    sampler = Sampler(len(train), total, seed)
    steps = range(min(EQUAL_AFTER, len(train) // total))
    parts = (share(sampler.batch_indexes(step), world.rank, world.size)[1] for step in steps)
    return [Batch(*train.rows(indexes)) for indexes in parts]


def _contenders(
    world: World,
    plan: StepPlan,
    model: Model,
    shares: list[Batch],
    rivals: Mapping[str, Rival],
    own_engines: list[Any],
) -> dict[str, StepContender]:
    contenders = {}
    for name in dict.fromkeys((*plan.algorithms, NULL)):
        engine = _options(name).build(world, _replica(plan, model), _optimizer(plan.spec))
        own_engines.append(engine)
        contenders[name] = StepContender(_step_of(world, engine, plan.spec.run.seed), shares, NULL)
    for name, rival in rivals.items():
        dense = _dense(plan, model)
        if TORCH not in contenders:
            step_without_messages = rival.step(dense, alone=True)
            contenders[TORCH] = StepContender(step_without_messages, shares, TORCH, unbound)
        with rival.awake():
            trainer = rival.step(dense, alone=False)
        contenders[name] = StepContender(trainer, shares, TORCH, rival.awake)
    return contenders


def _options(name: str) -> engines.AllReduce:
    if name == SHARED:
        return engines.AllReduce(share_parameters=True)
    return engines.AllReduce(algorithm=name)


def _replica(plan: StepPlan, model: Model) -> ModelReplica:
    return ModelReplica(model, plan.spec.run.seed, np.float32)


def _optimizer(spec: Recipe) -> Optimizer:
    """Return the recipe's optimizer with a constant learning rate."""
    built: Optimizer = spec.optimizer.build(lambda step: spec.optimizer.rate)
    return built


def _step_of(world: World, engine: Any, seed: int) -> StepFunction:
    """Return a function that takes one training step with `engine`."""
    numbers = iter(range(1 << 62))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        key = Key(seed, next(numbers), world.rank * len(y))
        sums, _ = engine.step(Task(Batch(x, y), 1 / (len(y) * world.size), key), Flags())
        return float(sums.loss)

    return step


def _dense(plan: StepPlan, model: Model) -> Dense:
    """Return our initial values and the hyperparameters of SGD, for the rivals."""
    replica, rule = _replica(plan, model), plan.spec.optimizer
    values = list(replica.arena.views(replica.arena.param).values())
    return Dense(
        list(zip(values[::2], values[1::2], strict=True)),
        {
            "lr": rule.rate,
            "momentum": rule.momentum,
            "nesterov": rule.nesterov,
            "weight_decay": rule.weight_decay,
        },
    )


def _rows(
    world: World, plan: StepPlan, batch: int, model: Model, contenders: Mapping[str, StepContender]
) -> list[Row]:
    for contender in contenders.values():
        with contender.awake():
            contender(EQUAL_AFTER)
    losses = {name: _loss(world, contender, batch) for name, contender in contenders.items()}
    calls = {name: partial(contender, STEPS) for name, contender in contenders.items()}
    around = {
        name: contender.warmed_up
        for name, contender in contenders.items()
        if contender.awake is not nullcontext
    }
    timings = interleaved(world.link, calls, plan.rounds, plan.warm_up, contexts=around)
    seconds = {name: np.array(times) / STEPS for name, times in timings.items()}
    about = {
        "operation": "step",
        "bytes": 4 * sum(prod(p.shape) for p in model.parameters.values()),
        "batch_per_rank": batch,
        "ranks": world.size,
        "rounds": plan.rounds,
        "calls": STEPS,
    }
    first = losses[plan.algorithms[0]]
    return [
        about
        | {
            "algorithm": name,
            **_times(seconds, name, contender),
            **_loss_of(losses, name, contender, first),
        }
        | {"samples_per_s": batch * world.size / float(np.median(seconds[name]))}
        for name, contender in contenders.items()
    ]


def _times(seconds: Mapping[str, np.ndarray], name: str, contender: StepContender) -> Row:
    """Return percentiles of a step, its exposed communication, and ratios to other contenders."""
    own_seconds, compute_seconds = seconds[name], seconds[contender.base]
    names = [other for other in seconds if other not in (name, NULL, TORCH)]
    return {
        **spread(own_seconds.tolist()),
        "alone_s": float(np.median(compute_seconds)),
        "exposed_s": None
        if name == contender.base
        else float(np.median(own_seconds - compute_seconds)),
        "times": {
            other: paired_ratio(seconds[other].tolist(), own_seconds.tolist()) for other in names
        },
    }


def _loss_of(losses: Mapping[str, float], name: str, contender: StepContender, first: float) -> Row:
    """Return the loss, and whether it equals ours; null without communication."""
    if name == contender.base:
        return {"loss": None, "correct": isfinite(losses[name])}
    return {"loss": losses[name], "correct": abs(losses[name] / first - 1) <= EQUAL_WITHIN}


def _loss(world: World, contender: StepContender, batch: int) -> float:
    """Return the mean loss of the last step over all ranks; collective."""
    return sum(map(float, world.gather(str(contender.losses[-1])))) / (batch * world.size)
