"""Trainings of a part of `digits` by workers whose steps take uneven times."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from hpctrain import data, nn, optim
from hpctrain.core.errors import TrainingError
from hpctrain.gradients.replica import ModelReplica
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

SAMPLES, BATCH, STEPS = 151, 37, 12  # the last batch of an epoch has 3 samples
MODELS = {
    "mlp": nn.MlpOptions(widths=[64, 24, 10]),
    "resnet": nn.ResNetOptions(blocks=1, channels=[4, 6]),  # running statistics
}
JITTER = FaultsOptions(step_ms=0.5, jitter=1.0)


@cache
def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


def trainer_of(world, options, model="mlp"):
    built, optimizer = MODELS[model].build((8, 8), 10), optim.sgd(0.05, 0.9, nesterov=True)
    return Trainer(built, optimizer, options, precision="float64", world=world, faults=JITTER)


def fit(world, out, options, model="mlp", **extra):
    """Return the summary, and the parameters and running statistics that this rank holds."""
    trainer = trainer_of(world, options, model)
    # Ranks that are processes have folders of their own.
    out = None if out is None else world.gather(str(out))[0]
    keys = {"steps": STEPS, "batch": BATCH, "options": FitOptions(interval_steps=5), **extra}
    summary = trainer.fit(digits(), out=out, **keys)
    trainer.close()
    arena = trainer.replica.arena
    return summary, np.concatenate([arena.param, arena.buffer])


def must_replay_the_same_bytes(world, folder, options):
    run = world.gather(str(folder / "run"))[0]
    first, _ = fit(world, run, options)
    for i in range(3):
        again, _ = fit(world, folder / str(i), options, replay=run)
        for key in ("params_sha256", "clock_gap_max"):
            assert again[key] == first[key]


def must_continue_from(world, run, options, param):
    """A finished run, resumed by any number of workers, begins with `param` on each of them."""
    _, resumed = fit(world, run, options, resume=True)  # nothing is left to do
    assert np.array_equal(resumed, param)
    summary, _ = fit(world, run, options, resume=True, steps=2 * STEPS)
    assert np.isfinite(summary["train_loss"])


def must_report_a_nan(world, options, message):
    """A step that worker 0 spoils ends the training, all parameters finite; see `plant_nan`."""
    trainer = trainer_of(world, options)
    with pytest.raises(TrainingError, match=message):
        trainer.fit(digits(), steps=STEPS, batch=BATCH)
    assert np.isfinite(trainer.replica.arena.param).all()


def plant_nan(monkeypatch):
    """Let the gradient and the loss of worker 0 in step 3 be NaN."""
    good = ModelReplica.gradient

    def gradient(self, batch, scale, key, on_ready):
        sums = good(self, batch, scale, key, on_ready)
        if key.step == 3 and key.first == 0:  # worker 0
            self.arena.grad[:] = np.nan
            return sums | {"loss": nn.Total(float("nan"), 1)}
        return sums

    monkeypatch.setattr(ModelReplica, "gradient", gradient)
