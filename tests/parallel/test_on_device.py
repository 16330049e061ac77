"""Pipelines on stand-ins for GPUs: the bytes of one of them."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.core import xp
from hpctrain.parallel import MeshOptions, PipelineOptions
from hpctrain.training.trainer import Trainer

MICRO_BATCHES, BATCH, STEPS = 4, 36, 4


def mlp() -> tuple[nn.Model, data.Dataset]:
    train = data.DigitsOptions().load(0).train
    model = nn.MlpOptions(widths=[64, 24, 24, 24, 10], dropout=0.1).build((8, 8), 10)
    return model, data.Dataset(train.x[:100], train.y[:100])


def tied() -> tuple[nn.Model, data.Dataset]:
    model = nn.TransformerOptions(layers=3, width=8, heads=2).build((5,), 256)
    texts = np.random.default_rng(0).integers(0, 256, (100, 6))
    return model, data.Dataset(texts[:, :-1], texts[:, 1:])


def trained(world, make, pipe, schedule="1f1b"):
    model, samples = make()
    pipeline = PipelineOptions(schedule=schedule, balance="even")
    with Trainer(
        model,
        optim.adamw(0.01, clip_norm=1.0),
        engines.AllReduce(reduction="ordered", blocks=2),
        seed=3,
        world=world,
        mesh=MeshOptions(pipe=pipe),
        pipeline=pipeline if pipe > 1 else PipelineOptions(),
    ) as trainer:
        assert xp.on_device(trainer.replica.arena.param) == (world.gpu is not None)
        summary = trainer.fit(
            samples, steps=STEPS, batch=BATCH, micro_batches=MICRO_BATCHES, evaluate=samples
        )
        return {k: summary[k] for k in ("params_sha256", "train_loss", "test_loss")}


GRIDS = {"1f1b": (1, 2), "zb-h1": (2, 2), "zb-v": (1, 2)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", GRIDS)
@pytest.mark.parametrize("make", [mlp, tied])
def test_a_pipeline_on_devices_has_the_bytes_of_one_device(lazy_gpu, make, schedule):
    (expected,) = run_on_gpus(1, lambda w: trained(w, make, 1))
    replicas, pipe = GRIDS[schedule]
    lazy_gpu.counts.clear()
    results = run_on_gpus(replicas * pipe, lambda w: trained(w, make, pipe, schedule))
    assert results == [expected] * (replicas * pipe)
    assert lazy_gpu.counts["implicit"] == 0
