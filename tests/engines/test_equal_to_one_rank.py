"""P ranks equal one rank: the proof that a regime trains what it claims.

SGD with momentum 0.9 at a rate that halves the loss within 50 steps, an uneven last batch:
|w_P - w_1| <= 1e-10 |w_1 - w_0| in float64 and <= 1e-3 in float32, where one flipped ReLU
moves 3e-4. AdamW and LAMB divide by the gradient's own size and LARS by its norm, so their first
gradients are compared.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import collectives, data, engines, nn, optim
from hpctrain.collectives.ring import ring
from hpctrain.engines.synchronous import node_shared_params, update
from hpctrain.gradients.replica import ModelReplica
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

ALGORITHMS = ("auto", *(name for name in collectives.ALLREDUCE if name != "null"))
REST = {
    "shards": engines.AllReduce(shard_optimizer=True, bucket_bytes=1024),
    "shared": engines.AllReduce(share_parameters=True),
    "overlap": engines.AllReduce(overlap="always", bucket_bytes=1024),
    "priority": engines.AllReduce(priority=True, bucket_bytes=1024),
}
WAYS = (*ALGORITHMS, *REST)
TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
MODELS = {
    "mlp": nn.MlpOptions(widths=[64, 24, 10]),
    "cnn": nn.CnnOptions(channels=[4], hidden=16),
    "resnet": nn.ResNetOptions(blocks=1, channels=[8, 16]),  # statistics over all ranks
    "transformer": nn.TransformerOptions(layers=2, width=16, heads=2, dropout=0.1),
}
# An all-reduce is given flat buckets, whatever the model: each of them meets one model, and each
# model all engines.
MET = ("auto", "ring", *(way for way in WAYS if way not in ALGORITHMS))
ROWS = [(model, way) for model in MODELS for way in (WAYS if model == "mlp" else MET)]
STEPS, SAMPLES, BATCH = 30, 151, 37  # the last batch of an epoch has 3 samples: fewer than 5 ranks


@cache
def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


@cache
def texts() -> data.Dataset:
    text = np.frombuffer(b"ring ring, tree; a ring of trees? " * 8, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, 13)[:SAMPLES]
    return data.Dataset(windows[:, :-1], windows[:, 1:])


def samples(model: str) -> data.Dataset:
    return texts() if model == "transformer" else digits()


def built(model: str) -> nn.Model:
    shape, classes = ((12,), None) if model == "transformer" else ((8, 8), 10)
    return MODELS[model].build(shape, classes)


def planes(arena) -> np.ndarray:
    """Return all that was trained, running statistics too."""
    return np.concatenate([arena.param, arena.buffer])


def engine(way: str):
    """Return all-reduce by an algorithm, or another way to come to the same."""
    return REST.get(way) or engines.AllReduce(algorithm=way, bucket_bytes=1024)


def trained(
    world, model: str, precision: str, way: str, steps: int = STEPS, micro_batches: int = 1
):
    """Return the parameters after training, and the losses seen on the way."""
    optimizer = optim.sgd(rate=0.1, momentum=0.9)
    trainer = Trainer(built(model), optimizer, engine(way), precision=precision, world=world)
    summary = trainer.fit(
        samples(model),
        steps=steps,
        batch=BATCH,
        micro_batches=micro_batches,
        options=FitOptions(interval_steps=steps),
    )
    trainer.close()
    return planes(trainer.replica.arena), summary["train_loss"]


@cache
def one_rank(model: str, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return parameters before and after training on one rank."""
    start = planes(ModelReplica(built(model), 0, np.dtype(precision)).arena)
    return start, run_on("threads", 1, lambda w: trained(w, model, precision, "auto")[0])[0]


def relative_distance(w, model: str, precision: str) -> float:
    before, after = one_rank(model, precision)
    return float(np.linalg.norm(w - after) / np.linalg.norm(after - before))


@pytest.fixture
def short_blocks(monkeypatch):
    """Without them these small models would be one shard."""
    for module in (node_shared_params, update):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 512)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(("model", "way"), ROWS)
@on_ranks(2, 3, 4, 5)
def test_p_ranks_equal_one_rank(ranks, way, model):
    for w, _ in ranks(trained, model, "float64", way):
        assert relative_distance(w, model, "float64") <= TOLERANCE["float64"]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(("model", "way"), ROWS)
@on_ranks(2, 5)
def test_p_ranks_equal_one_rank_in_float32(ranks, way, model):
    """As far as rounding lets them: the proof is above, on more numbers of ranks."""
    for w, _ in ranks(trained, model, "float32", way):
        assert relative_distance(w, model, "float32") <= TOLERANCE["float32"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.parametrize("precision", TOLERANCE)
@on_ranks(1, 3, mpi=(2,))
def test_micro_batches_equal_one_batch(ranks, precision, model):
    for w, _ in ranks(trained, model, precision, "auto", STEPS, 4):
        assert relative_distance(w, model, precision) <= TOLERANCE[precision]


@pytest.mark.parametrize("model", MODELS)
def test_the_rate_is_one_that_trains(model):
    """Otherwise the comparison above would compare two models that do not move."""

    def loss_at_start(world):
        return trained(world, model, "float64", "auto", steps=1)[1]

    def loss_of_the_last_steps(world):
        trainer = Trainer(built(model), optim.sgd(0.1, 0.9), precision="float64", world=world)
        trainer.fit(samples(model), steps=50, batch=BATCH)
        return trainer.evaluate(samples(model))["loss"]

    first, last = (run_on("threads", 1, f)[0] for f in (loss_at_start, loss_of_the_last_steps))
    assert last < first / 2


def one_bucket_not_summed(monkeypatch):
    calls: Counter[int] = Counter()

    def forgetful(group, x, op):
        calls[group.link.rank] += 1
        if calls[group.link.rank] > 1:  # all but the first bucket of the first step
            ring(group, x, op)

    monkeypatch.setitem(collectives.ALLREDUCE, "ring", forgetful)


def a_weight_off_by_one_sample(monkeypatch):
    rows = data.Dataset.rows

    def one_less(self, indexes, epoch=0):
        x, y = rows(self, indexes)
        return (x[:-1], y[:-1]) if len(x) == BATCH // 2 else (x, y)

    monkeypatch.setattr(data.Dataset, "rows", one_less)


@pytest.mark.parametrize("plant", [one_bucket_not_summed, a_weight_off_by_one_sample])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_planted_error_fails(monkeypatch, plant, precision):
    one_rank("mlp", precision)
    plant(monkeypatch)
    result = run_on("threads", 2, lambda w: trained(w, "mlp", precision, "ring")[0])
    assert max(relative_distance(w, "mlp", precision) for w in result) > TOLERANCE[precision]


ADAPTIVE = {
    "adamw": optim.adamw(rate=0.01),
    "lars": optim.lars(rate=1.0, weight_decay=1e-4, trust=0.02),
    "lamb": optim.lamb(rate=0.01, clip_norm=1.0),
}


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(2, 3, 4, 5)
def test_adaptive_methods_see_the_gradients_of_one_rank(ranks, algorithm, method):
    expected = run_on("threads", 1, lambda w: first_gradients(w, algorithm, method))[0]
    for result in ranks(first_gradients, algorithm, method):
        for own, alone in zip(result, expected, strict=True):
            assert np.linalg.norm(own - alone) <= 1e-12 * np.linalg.norm(alone)


def first_gradients(world, algorithm: str, method: str) -> list[np.ndarray]:
    """Return the summed gradients of the first three steps of `method`."""
    observed: list[np.ndarray] = []
    optimizer = ADAPTIVE[method]

    def update(grad, *rest):
        observed.append(grad.copy())
        optimizer.update(grad, *rest)

    trainer = Trainer(
        MODELS["mlp"].build((8, 8), 10), optimizer._replace(update=update), engine(algorithm),
        precision="float64", world=world,
    )  # fmt: skip
    trainer.fit(digits(), steps=3, batch=BATCH)
    trainer.close()
    return observed


class Silent(nn.Model):
    """A model that passes on no `on_need` after its first steps."""

    first_steps = 0

    def add_gradient(self, params, grads, x, y, scale, key):
        if key.step >= self.first_steps:
            key = key._replace(on_need=None)
        return super().add_gradient(params, grads, x, y, scale, key)


@pytest.mark.parametrize(("first_steps", "micro_batches"), [(0, 1), (2, 1), (2, 2)])
@on_ranks(2, 3, mpi=(2,))
def test_priority_applies_all_sums_whatever_a_model_calls(ranks, first_steps, micro_batches):
    def body(world):
        results = []
        for way in ("priority", "overlap"):
            model = Silent({"flat": nn.Flatten(), "a": nn.Linear(7), "b": nn.Linear(10)}, (8, 8))
            model.first_steps = first_steps
            trainer = Trainer(model, optim.sgd(0.1, momentum=0.9), engine(way), world=world)
            trainer.fit(digits(), steps=5, batch=BATCH, micro_batches=micro_batches)
            results.append(trainer.replica.arena.param.tobytes())
            trainer.close()
        return results[0] == results[1]

    assert all(ranks(body))
