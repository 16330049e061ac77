"""Mixed precision: 16 bits with parameters of 32, on stand-ins that round like a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import TrainingError, UsageError
from hpctrain.gradients import loss_scale
from hpctrain.gradients.mixed import MixedReplica, half_dtype
from hpctrain.gradients.precision import make_replica
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

SIXTEEN = ("bf16", "fp16")
CLOSE = {"bf16": 0.03, "fp16": 0.005}  #: of eight or eleven bits, after some layers
IMAGES, TEXTS = ((8, 8), 10), ((12,), None)
MODELS = {
    "mlp": (nn.MlpOptions(widths=[64, 24, 10]), *IMAGES),
    "cnn": (nn.CnnOptions(channels=[4], hidden=16), *IMAGES),
    "resnet": (nn.ResNetOptions(blocks=1, channels=[8, 16]), *IMAGES),
    "transformer": (nn.TransformerOptions(layers=2, width=16, heads=2), *TEXTS),
}
KEY = nn.Key(0, 0, 0)


def built(name: str) -> nn.Model:
    options, shape, classes = MODELS[name]
    return options.build(shape, classes)


def batch(name: str, n: int = 6) -> Batch:
    draw = np.random.default_rng(1)
    if name == "transformer":
        text = draw.integers(0, 256, (n, 13), np.uint8)
        return Batch.of(text[:, :-1], text[:, 1:].astype(np.int64))
    return Batch.of(draw.standard_normal((n, 8, 8)).astype("float32"), draw.integers(0, 10, n))


def nobody(name: str) -> None:
    pass


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("precision", SIXTEEN)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_32_bits_rounded(gpu, name, precision, pieces):
    if name == "resnet" and pieces > 1:
        return  # it normalizes over the batch
    full = ModelReplica(built(name), 3, np.dtype("float32"))
    small, ready = make_replica(built(name), 3, precision, True), []
    assert isinstance(small, MixedReplica)
    small.micro_batches = pieces
    expected = full.gradient(batch(name), 1 / 6, KEY, nobody)
    sums = small.gradient(batch(name), 1 / 6, KEY, ready.append)
    assert sorted(ready) == sorted(slot.name for slot in full.arena.slots)
    assert small.arena.grad.dtype == np.float32 and gpu.counts["implicit"] == 0
    np.testing.assert_allclose(sums["loss"].sum, expected["loss"].sum, rtol=CLOSE[precision])
    error = np.linalg.norm(small.arena.grad.get() - full.arena.grad)
    assert error <= 6 * CLOSE[precision] * np.linalg.norm(full.arena.grad)  # ReLUs flip
    np.testing.assert_allclose(
        small.evaluate(batch(name))["loss"].sum,
        full.evaluate(batch(name))["loss"].sum,
        rtol=0.05,
    )


def trained(world, precision: str):
    digits = data.DigitsOptions().load(0)
    model = nn.MlpOptions(widths=[64, 64, 10]).build((8, 8), 10)
    trainer = Trainer(model, optim.sgd(0.05, 0.9), engines.AllReduce(), 3, precision, world)
    summary = trainer.fit(digits.train, steps=60, batch=128, evaluate=digits.test)
    trainer.close()
    return summary


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", SIXTEEN)
def test_comes_to_the_loss_of_32_bits(gpu, precision):
    (expected,) = run_on_gpus(1, lambda w: trained(w, "float32"))
    (result,) = run_on_gpus(1, lambda w: trained(w, precision))
    np.testing.assert_allclose(result["test_loss"], expected["test_loss"], rtol=0.02)


def test_an_overflow_is_computed_again_with_half_the_scale(gpu):
    full = ModelReplica(built("mlp"), 3, np.dtype("float32"))
    small = MixedReplica(built("mlp"), 3, np.dtype("float16"), True)
    full.gradient(batch("mlp"), 40.0, KEY, nobody)
    small.gradient(batch("mlp"), 40.0, KEY, nobody)
    assert small.loss_scale.factor < 2.0**15
    error = np.linalg.norm(small.arena.grad.get() - full.arena.grad)
    assert error <= 0.01 * np.linalg.norm(full.arena.grad)


def test_the_scale_grows(gpu, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    small = MixedReplica(built("mlp"), 3, np.dtype("float16"), True)
    small.loss_scale.factor = 4.0
    for _ in range(4):
        small.gradient(batch("mlp"), 1e-3, KEY, nobody)
    assert small.loss_scale.factor == 16.0


def test_small_gradients_do_not_vanish(gpu):
    """Far below the smallest number of float16, they are seen by the scale."""
    small = MixedReplica(built("mlp"), 3, np.dtype("float16"), True)
    small.gradient(batch("mlp"), 1e-7, KEY, nobody)
    observed = np.count_nonzero(small.arena.grad.get())
    small.loss_scale.factor = 1.0
    small.gradient(batch("mlp"), 1e-7, KEY, nobody)
    assert np.count_nonzero(small.arena.grad.get()) < observed / 2


def test_ranks_whose_layers_sum_over_ranks_compute_again_together(gpu):
    requested = []

    def of_two(numbers):
        requested.append(numbers.copy())
        again = len(numbers) == 2 and len(requested) < 12  # the other rank has an overflow
        return numbers + np.array([1.0, 0.0]) if again else numbers

    small = MixedReplica(built("resnet"), 3, np.dtype("float16"), True)
    small.gradient(batch("resnet"), 1 / 6, KEY._replace(sum_over_ranks=of_two), nobody)
    verdicts = [x for x in requested if len(x) == 2]
    assert len(verdicts) > 1 and not any(x.any() for x in verdicts)  # ours was always finite
    assert small.loss_scale.factor == 2.0 ** (15 - len(verdicts) + 1)


def half(world, run, steps, resume=False):
    """Train for `steps` in float16, in the folder `run`; return the hash and the loss scale."""
    digits, engine = data.DigitsOptions().load(0), engines.AllReduce(algorithm="ring")
    model = nn.MlpOptions(widths=[64, 16, 10]).build((8, 8), 10)
    trainer = Trainer(model, optim.sgd(0.05, 0.9), engine, 3, "fp16", world)
    if not resume:
        trainer.replica.loss_scale.factor = 2.0 ** (
            world.rank - 8
        )  # so low that many gradients are rounded
    summary = trainer.fit(
        digits.train,
        steps=steps,
        batch=64,
        out=run,
        resume=resume,
        options=FitOptions(interval_steps=100),
    )
    trainer.close()
    return summary["params_sha256"], trainer.replica.loss_scale.state.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_is_resumed_goes_on_with_the_scales_it_had(gpu, monkeypatch, tmp_path, size):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    complete, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run_on_gpus(size, lambda w: half(w, complete, 11))
    begun = run_on_gpus(size, lambda w: half(w, parts, 7))
    assert begun[0][1] == [2.0**-6, 1]  # a run begins with 2^15
    assert run_on_gpus(size, lambda w: half(w, parts, 11, resume=True)) == expected
    # Other ranks, who had none, take the mean, rounded down to a power of two.
    result = run_on_gpus(3, lambda w: half(w, parts, 11, resume=True))
    assert [item for _, item in result] == [item for _, item in expected] + [expected[0][1]] * (
        3 - size
    )


def test_a_loss_that_is_not_finite_ends_the_run(gpu):
    def body(world):
        model = nn.MlpOptions(widths=[4, 3, 2]).build((4,), 2)
        trainer = Trainer(model, optim.sgd(0.1), engines.AllReduce(), 0, "fp16", world)
        trainer.replica.arena.param[...] = np.inf
        x = np.ones((8, 4), np.float32)
        with pytest.raises(TrainingError, match="not finite at step 0"):
            trainer.fit(data.Dataset(x, np.zeros(8, np.int64)), steps=2, batch=4)

    run_on_gpus(1, body)


def test_parameters_are_rounded_when_they_are_needed(gpu):
    small, reported = MixedReplica(built("mlp"), 3, half_dtype("bf16"), True), []
    small.arena.param[...] = 0
    small.gradient(batch("mlp"), 1.0, KEY._replace(on_need=reported.append), nobody)
    assert set(reported) == {slot.name for slot in small.arena.slots}
    assert small.predict(batch("mlp").inputs).dtype == np.float32
    assert (small.predict(batch("mlp").inputs) == 0).all()


def test_products_are_those_of_the_last_replica(gpu, monkeypatch):
    """Whatever was multiplied before: CuPy looks at CUPY_TF32 at its first product only."""
    import cupy

    monkeypatch.delenv("CUPY_TF32", raising=False)
    products, model = cupy._core._routines_linalg, built("mlp")
    for precision in ("float32", "tf32", "float32", "tf32", "bf16", "tf32", "float64"):
        make_replica(model, 3, precision, True)
        expected = "COMPUTE_TYPE_TF32" if precision == "tf32" else "COMPUTE_TYPE_DEFAULT"
        assert products.get_compute_type(np.float32) == getattr(products, expected), precision


@pytest.mark.parametrize("precision", ["tf32", *SIXTEEN])
def test_cores_have_no_such_products(precision):
    with pytest.raises(UsageError, match=f"'{precision}' needs a GPU; .* float32, float64"):
        make_replica(built("mlp"), 3, precision, False)
