"""Training on a device ends where training on the host does; engines on stand-ins for GPUs."""

from __future__ import annotations

from ranks import run_on, run_on_gpus

from hpctrain import data, engines, nn, optim, xp
from hpctrain.trainer import Trainer

SAMPLES, BATCH, STEPS = 151, 37, 6  # the last batch of an epoch has 3 samples


def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


def trained(world, engine, optimizer=optim.sgd(0.05, 0.9)):  # noqa: B008
    model = nn.MlpOptions(widths=[64, 24, 10]).build((8, 8), 10)
    trainer = Trainer(model, optimizer, engine, seed=3, world=world)
    summary = trainer.fit(digits(), steps=STEPS, batch=BATCH, evaluate=digits())
    trainer.close()
    arena = trainer.replica.arena
    assert xp.on_device(arena.param) == (world.gpu is not None)
    return xp.to_host(arena.param).copy(), summary


def test_one_device_has_the_bytes_of_the_host(gpu):
    engine = engines.AllReduce()
    ((wanted, on_host),) = run_on("threads", 1, lambda w: trained(w, engine))
    gpu.counts.clear()
    ((found, summary),) = run_on_gpus(1, lambda w: trained(w, engine))
    assert (found == wanted).all() and gpu.counts["implicit"] == 0
    for key in ("train_loss", "test_loss", "test_accuracy", "params_sha256"):
        assert summary[key] == on_host[key], key
