"""A gradient that is not finite in one stage of one replica: no rank of the grid applies the step.

A layer of the replica writes the value into its own gradient; the data axis alone is the reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pipelines import OwnScale, samples
from ranks import on_ranks, run_on

from hpctrain import engines, nn, optim
from hpctrain.core.errors import TrainingError
from hpctrain.engines import Engine
from hpctrain.parallel import MeshOptions, PipelineOptions
from hpctrain.training import run_facts
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

STEPS, BAD, BAD_REPLICA = 7, 3, 1
TOGETHER: dict[str, Any] = {
    "no overlap": engines.AllReduce(overlap="never"),
    "overlap": engines.AllReduce(overlap="always", bucket_bytes=256),
    "shards": engines.AllReduce(shard_optimizer=True),
    "ordered": engines.AllReduce(reduction="ordered"),
    "local-sgd, at first": engines.LocalSgd(start_after=100),
}
APART: dict[str, Any] = {
    "local-sgd": engines.LocalSgd(period=3),
    "outer": engines.LocalSgd(period=2, outer="nesterov"),
}


@dataclass(frozen=True)
class Planted(OwnScale):
    """Write `value` into the gradient of the last micro-batch of step BAD."""

    value: float = 1.0

    def forward(self, p, x, key):
        y, saved = super().forward(p, x, key)
        return y, (saved, key is not None and key.step == BAD)

    def backward(self, p, g, saved, dy, want_dx):
        x, is_bad = saved
        dx = super().backward(p, g, x, dy, want_dx)
        if is_bad:
            g["scale"][2] = self.value
        return dx


def model_with(values: Mapping[int, float]) -> nn.Model:
    """Return a model of four stages; `values` are planted in the gradients of stages."""
    own = {f"own{i}": Planted(value=values[i]) if i in values else OwnScale() for i in range(4)}
    return nn.Model({"flat": nn.Flatten(), **own, "out": nn.Linear(10)}, (8, 8))


def train(world, engine: Any, pipe: int, stage: int, value: float, not_finite: Any = "skip"):
    """Return (SHA-256, summary or error) of a run; the value is planted in one replica's stage."""
    values = {stage: value} if world.rank // pipe == BAD_REPLICA else {}
    # Stages of one and of two layers: 0 | 1 | 2 | 3, out; or 0, 1 | 2, 3, out
    counts = {1: [6], 2: [3, 3], 4: [2, 1, 1, 2]}[pipe]
    trainer = Trainer(
        model_with(values), optim.sgd(0.05, 0.9), engine, world=world, mesh=MeshOptions(pipe=pipe),
        pipeline=PipelineOptions(balance=counts) if pipe > 1 else PipelineOptions(),
    )  # fmt: skip
    options = FitOptions(interval_steps=1, prefetch=0, not_finite=not_finite)
    data = samples("images")
    try:
        result: Any = trainer.fit(data, steps=STEPS, batch=12, micro_batches=2, options=options)
    except TrainingError as error:
        result = error
    sha256 = params_sha256(world, trainer.engine)
    trainer.close()
    return sha256, result


def params_sha256(world, engine: Engine) -> str:
    engine.settle()
    return run_facts.trained_sha256(world, engine)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [np.nan, float(np.finfo(np.float32).max)], ids=["nan", "large"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
@on_ranks(4, 8, mpi=())
def test_a_skipped_step_leaves_the_bytes_of_the_data_axis_alone(ranks, name, stage, value):
    leaves_the_bytes_of_the_data_axis(ranks, name, stage, value)


def leaves_the_bytes_of_the_data_axis(ranks, name, stage, value):
    engine = (TOGETHER | APART)[name]
    reference = run_on("threads", 2, lambda w: train(w, engine, 1, stage, value))
    clean = run_on("threads", 2, lambda w: train(w, engine, 1, stage, 0.0))
    assert reference[0][0] != clean[0][0]
    keys = ("steps", "skipped_steps", "dropped_gradients", "train_loss")
    for sha256, summary in ranks(lambda w: train(w, engine, w.size // 2, stage, value)):
        assert sha256 == reference[0][0]
        assert [summary[key] for key in keys] == [reference[0][1][key] for key in keys]
        assert summary["skipped_steps"] == (name in TOGETHER)
        assert summary["dropped_gradients"] in ((None, 0) if name in TOGETHER else (1,))


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
@on_ranks(4, 8, mpi=())
def test_a_run_stops_with_the_rank_of_the_stage_and_the_bytes_before(ranks, name, stage):
    stops_with_the_bytes_before(ranks, name, stage)


def stops_with_the_bytes_before(ranks, name, stage):
    engine, pipe = (TOGETHER | APART)[name], ranks.size // 2
    rank = BAD_REPLICA * pipe + stage * pipe // 4
    (before, _), _ = run_on("threads", 2, lambda w: stopped_before(w, engine))

    for sha256, error in ranks(lambda w: train(w, engine, pipe, stage, np.nan, "stop")):
        assert isinstance(error, TrainingError) and error.exit_code == 3
        message = f"the gradient of 'own{stage}.scale' is not finite at step {BAD} on rank {rank} "
        assert re.match(re.escape(message), str(error)), str(error)
        assert sha256 == before or name in APART


def stopped_before(world, engine: Any):
    """Return the SHA-256 of a run that ends before step BAD."""
    with Trainer(model_with({}), optim.sgd(0.05, 0.9), engine, world=world) as trainer:
        trainer.fit(samples("images"), steps=BAD, batch=12, micro_batches=2)
        return params_sha256(world, trainer.engine), None


#: Of these a row runs over MPI in each run of the tests, of the others with `full`.
OVER_MPI = ("overlap", "shards", "local-sgd")
NAMES = [
    pytest.param(name, marks=() if name in OVER_MPI else pytest.mark.full)
    for name in TOGETHER | APART
]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(mpi=(4,))
def test_over_mpi(ranks, name):
    leaves_the_bytes_of_the_data_axis(ranks, name, 2, np.nan)
    stops_with_the_bytes_before(ranks, name, 3)
