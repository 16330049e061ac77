"""Times whole training steps: forward, backward, reduction, update; ours and other libraries'.

All begin with the same weights, see the same samples in the same order and train by the same rule:
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
from hpctrain.bench.rivals import Dense, Rival, Step
from hpctrain.data import Sampler, Samples, share
from hpctrain.engines.engine import Flags, Task
from hpctrain.errors import UsageError
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Key, Model
from hpctrain.nn.zoo import MlpOptions
from hpctrain.optim import Optimizer, SgdOptions
from hpctrain.recipe import Recipe
from hpctrain.transport.bind import unbound
from hpctrain.tuning.measure import Around, interleaved, paired_ratio, spread
from hpctrain.world import World

SHARED, NULL, TORCH = "share-parameters", "null", "torch-null"
EQUAL_AFTER, EQUAL_WITHIN = 20, 1e-3  # steps, and relative to our loss
STEPS = 3  # of one contender between two looks at the clock
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    spec: Recipe
    algorithms: Sequence[str]
    batches: Sequence[int]  #: samples per rank and step
    rounds: int
    warm_up: int


@dataclass
class Contender:
    """A trainer and how far it is; `base` names the contender that is it without communication."""

    step: Step
    shares: Sequence[Batch]
    base: str
    awake: Around = nullcontext  #: what steps are taken in
    done: int = 0
    losses: list[float] = field(default_factory=list)  #: this rank's share of each step's

    def __call__(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            self.losses.append(self.step(*self.shares[self.done % len(self.shares)]))
            self.done += 1

    @contextmanager
    def warm(self) -> Iterator[None]:
        """Be awake, and past the first step, in which caches are filled."""
        with self.awake():
            self(1)
            yield


def run(
    world: World, plan: Plan, model: Model, train: Samples, rivals: Mapping[str, Rival]
) -> Iterator[list[Row]]:
    """Yield the rows of each batch size; collective."""
    for batch in plan.batches:
        shares = world.together(partial(_shares, world, train, batch, plan.spec.run.seed))
        made: list[Any] = []
        found = _contenders(world, plan, model, shares, rivals, made)
        yield _rows(world, plan, batch, model, found)
        for engine in made:
            engine.close()


def why_not(spec: Recipe) -> str | None:
    """Return what of `spec` the rivals have no equal of; None if they can train it."""
    model, optimizer = spec.model, spec.optimizer
    if not isinstance(model, MlpOptions) or model.dropout:
        return 'only [model] kind = "mlp" without dropout has its equal there'
    if not isinstance(optimizer, SgdOptions) or optimizer.clip_norm or optimizer.exempt_vectors:
        return 'only [optimizer] kind = "sgd" without clip_norm, exempt_vectors has its equal there'
    return None


def _shares(world: World, train: Samples, batch: int, seed: int) -> list[Batch]:
    """Return this rank's part of whole batches, each of which comes again and again."""
    total = batch * world.size
    if len(train) < total:
        raise UsageError(
            f"--batch-per-rank: expected at most {len(train) // world.size} with "
            f"{len(train)} samples on {world.size} ranks, seen {batch}"
        )
    sampler = Sampler(len(train), total, seed)
    steps = range(min(EQUAL_AFTER, len(train) // total))
    mine = (share(sampler.batch_indexes(step), world.rank, world.size)[1] for step in steps)
    return [Batch(*train.rows(own)) for own in mine]


def _contenders(
    world: World,
    plan: Plan,
    model: Model,
    shares: list[Batch],
    rivals: Mapping[str, Rival],
    made: list[Any],
) -> dict[str, Contender]:
    found = {}
    for name in dict.fromkeys((*plan.algorithms, NULL)):
        engine = _options(name).build(world, _replica(plan, model), _optimizer(plan.spec))
        made.append(engine)
        found[name] = Contender(_ours(world, engine, plan.spec.run.seed), shares, NULL)
    for name, rival in rivals.items():
        dense = _dense(plan, model)
        if TORCH not in found:
            alone = rival.step(dense, alone=True)
            found[TORCH] = Contender(alone, shares, TORCH, unbound)
        with rival.awake():
            trainer = rival.step(dense, alone=False)
        found[name] = Contender(trainer, shares, TORCH, rival.awake)
    return found


def _options(name: str) -> engines.AllReduce:
    if name == SHARED:
        return engines.AllReduce(share_parameters=True)
    return engines.AllReduce(algorithm=name)


def _replica(plan: Plan, model: Model) -> ModelReplica:
    return ModelReplica(model, plan.spec.run.seed, np.float32)


def _optimizer(spec: Recipe) -> Optimizer:
    """Return the recipe's optimizer at its rate, without a schedule."""
    built: Optimizer = spec.optimizer.build(lambda step: spec.optimizer.rate)
    return built


def _ours(world: World, engine: Any, seed: int) -> Step:
    """Return what takes one step of `engine`."""
    numbers = iter(range(1 << 62))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        key = Key(seed, next(numbers), world.rank * len(y))
        sums, _ = engine.step(Task(Batch(x, y), 1 / (len(y) * world.size), key), Flags())
        return float(sums.loss)

    return step


def _dense(plan: Plan, model: Model) -> Dense:
    """Return our initial values and the rule of the update, for the rivals."""
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
    world: World, plan: Plan, batch: int, model: Model, found: Mapping[str, Contender]
) -> list[Row]:
    for one in found.values():
        with one.awake():
            one(EQUAL_AFTER)
    losses = {name: _loss(world, one, batch) for name, one in found.items()}
    calls = {name: partial(one, STEPS) for name, one in found.items()}
    around = {name: one.warm for name, one in found.items() if one.awake is not nullcontext}
    taken = interleaved(world.link, calls, plan.rounds, plan.warm_up, around=around)
    seconds = {name: np.array(of_one) / STEPS for name, of_one in taken.items()}
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
        | {"algorithm": name, **_times(seconds, name, one), **_loss_of(losses, name, one, first)}
        | {"samples_per_s": batch * world.size / float(np.median(seconds[name]))}
        for name, one in found.items()
    ]


def _times(seconds: Mapping[str, np.ndarray], name: str, one: Contender) -> Row:
    """Return the spread of a step, what of it is communication, and how others compare."""
    own, alone = seconds[name], seconds[one.base]
    others = [other for other in seconds if other not in (name, NULL, TORCH)]
    return {
        **spread(own.tolist()),
        "alone_s": float(np.median(alone)),
        "exposed_s": None if name == one.base else float(np.median(own - alone)),
        "times": {other: paired_ratio(seconds[other].tolist(), own.tolist()) for other in others},
    }


def _loss_of(losses: Mapping[str, float], name: str, one: Contender, first: float) -> Row:
    """Return the loss, and whether it is ours; without communication there is none to compare."""
    if name == one.base:
        return {"loss": None, "correct": isfinite(losses[name])}
    return {"loss": losses[name], "correct": abs(losses[name] / first - 1) <= EQUAL_WITHIN}


def _loss(world: World, one: Contender, batch: int) -> float:
    """Return the mean loss of the last step over all ranks; collective."""
    return sum(map(float, world.gather(str(one.losses[-1])))) / (batch * world.size)
