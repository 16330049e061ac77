"""Models on a device: the gradients of the host; only the loss is copied to the host."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.gradients.replica import Batch, ModelReplica

IMAGES = ((8, 8), 10)
TEXTS = ((12,), None)
MODELS = {
    "mlp": (nn.MlpOptions(widths=[64, 24, 10], dropout=0.2), *IMAGES),
    "cnn": (nn.CnnOptions(channels=[4], hidden=16), *IMAGES),
    "resnet": (nn.ResNetOptions(blocks=1, channels=[8, 16]), *IMAGES),
    "recomputed": (nn.ResNetOptions(blocks=1, channels=[4, 8], recompute=True), *IMAGES),
    "transformer": (nn.TransformerOptions(layers=2, width=16, heads=2, dropout=0.1), *TEXTS),
}
#: The same operations on the same numbers; where sums are made otherwise, the last bits differ.
SAME = ("mlp",)


def batch(name: str, n: int = 7) -> Batch:
    draw = np.random.default_rng(1)
    if name == "transformer":
        text = draw.integers(0, 256, (n, 13), np.uint8)
        return Batch.of(text[:, :-1], text[:, 1:].astype(np.int64))
    return Batch.of(draw.standard_normal((n, 8, 8)).astype("float32"), draw.integers(0, 10, n))


def replica(name: str, on_gpu: bool) -> ModelReplica:
    options, shape, classes = MODELS[name]
    return ModelReplica(options.build(shape, classes), 3, np.dtype("float32"), on_gpu)


def computed(name: str, on_gpu: bool, n: int = 7):
    """Return the sums, the gradient and the slots in the order they were ready in."""
    item, ready = replica(name, on_gpu), []
    sums = item.gradient(batch(name, n), 1 / 7, nn.Key(0, 0, 0, samples=n), ready.append)
    return item, sums, ready


@pytest.mark.parametrize("samples", [7, 1, 0])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_host(gpu, name, samples):
    host, expected, order = computed(name, False, samples)
    device, sums, ready = computed(name, True, samples)
    assert ready == order and sums["accuracy"] == expected["accuracy"]
    close = {"rtol": 0, "atol": 0} if name in SAME else {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(sums["loss"].sum, expected["loss"].sum, **close)
    np.testing.assert_allclose(device.arena.grad.get(), host.arena.grad, **close)
    np.testing.assert_allclose(device.arena.buffer.get(), host.arena.buffer, **close)


@pytest.mark.parametrize("name", MODELS)
def test_only_batch_and_loss_are_copied(gpu, name):
    item = replica(name, True)
    item.gradient(batch(name), 1.0, nn.Key(0, 0, 0), lambda slot: None)  # what is made once
    gpu.counts.clear()
    item.gradient(batch(name), 1.0, nn.Key(0, 1, 0), lambda slot: None)
    assert gpu.counts["D2H"] == 1 and gpu.counts["D2H bytes"] == 3 * 8
    assert gpu.counts["H2D"] == 2
    waits = {w: gpu.counts[w] for w in ("stream sync", "event sync", "device sync", "implicit")}
    assert waits == {"stream sync": 0, "event sync": 1, "device sync": 0, "implicit": 0}


def test_the_loss_waits_for_no_gradient(lazy_gpu):
    """The event behind the loss is waited for, not backward, which is behind it."""
    item = replica("cnn", True)
    item.gradient(batch("cnn"), 1.0, nn.Key(0, 0, 0), lambda slot: None)
    assert lazy_gpu.counts["stream sync"] == 0
    late = item.arena.grad._host.copy()
    assert item.arena.grad.get().any() and not late.any()


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(gpu, name):
    reported = [replica(name, on_gpu).evaluate(batch(name)) for on_gpu in (False, True)]
    sums = [nn.losses.pack(item, ("loss", "accuracy")) for item in reported]
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5)
    outputs = replica(name, True).predict(batch(name).inputs)
    assert type(outputs) is np.ndarray


def test_micro_batches_add_up(gpu):
    once, pieces = replica("cnn", True), replica("cnn", True)
    pieces.micro_batches = 3
    for item in (once, pieces):
        item.gradient(batch("cnn"), 1.0, nn.Key(0, 0, 0), lambda slot: None)
    np.testing.assert_allclose(pieces.arena.grad.get(), once.arena.grad.get(), rtol=1e-4, atol=1e-5)


def test_statistics_over_ranks_travel_by_the_host(gpu):
    """Two ranks, of which the other has the same share: the statistics are those of one."""
    item, alone = replica("resnet", True), replica("resnet", True)
    key = nn.Key(0, 0, 0, sum_over_ranks=lambda numbers: numbers + numbers)
    item.gradient(batch("resnet"), 1.0, key, lambda slot: None)
    alone.gradient(batch("resnet"), 1.0, nn.Key(0, 0, 0), lambda slot: None)
    np.testing.assert_allclose(item.arena.grad.get(), alone.arena.grad.get(), rtol=1e-3, atol=1e-5)


REFUSED = {
    "label": (
        "mlp",
        Batch.of(np.zeros((2, 8, 8), "float32"), np.array([0, 11])),
        "label 11 is out",
    ),
    "byte": ("transformer", Batch.of(np.full((1, 12), 300), np.zeros((1, 12), int)), "seen 300"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_wrong_data_is_refused(gpu, wrong):
    name, bad, message = REFUSED[wrong]
    with pytest.raises(UsageError, match=message):
        replica(name, True).gradient(bad, 1.0, nn.Key(0, 0, 0), lambda slot: None)


DRAW = np.random.default_rng(5)
#: loss -> the shape of outputs, targets
LOSSES = {
    "cross_entropy": ((9, 4), DRAW.integers(0, 4, 9)),
    "mean_squared_error": ((9, 3), DRAW.standard_normal((9, 3)).astype("f4")),
    "mean_squared_error, one feature": ((9, 1), DRAW.standard_normal(9)),
    "binary_cross_entropy": ((9, 3), DRAW.integers(0, 2, (9, 3))),
    "binary_cross_entropy, one label": ((9, 1), DRAW.integers(0, 2, 9)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_host(gpu, name):
    import cupy

    shape, targets = LOSSES[name]
    loss, outputs = nn.as_loss(name.partition(",")[0]), DRAW.standard_normal(shape).astype("f4")
    expected, gradient = loss(outputs, targets, 0.5)
    sums, device_gradient = loss(cupy.asarray(outputs), cupy.asarray(targets), 0.5)
    sums = nn.losses.wait_for_sums(sums)
    packed, expected = (nn.losses.pack(item, loss.terms) for item in (sums, expected))
    np.testing.assert_allclose(packed, expected, rtol=1e-6)
    np.testing.assert_allclose(device_gradient.get(), gradient, rtol=1e-5, atol=1e-7)
    assert device_gradient.dtype == np.float32


@pytest.mark.parametrize("tokens", [False, True])
def test_several_inputs(gpu, tokens):
    """Indices of an Embedding keep their dtype, whichever branch they are of."""
    first = {"embedding": nn.Embedding(7, 3), "flat": nn.Flatten()} if tokens else {}
    both = nn.Concatenate({"a": first, "b": {"linear": nn.Linear(4), "relu": nn.ReLU()}})
    model = nn.Model([both, nn.Linear(2)], {"a": (5,), "b": (3,)}, "mean_squared_error")
    a = DRAW.integers(0, 7, (6, 5)).astype(np.uint8)
    inputs = {"a": a, "b": DRAW.standard_normal((6, 3)).astype("f4")}
    results = []
    for on_gpu in (False, True):
        item, ready = ModelReplica(model, 3, np.float32, on_gpu), []
        batch = Batch.of(inputs, np.ones((6, 2), np.float32))
        sums = item.gradient(batch, 0.1, nn.Key(0, 0, 0, samples=6), ready.append)
        sums = nn.losses.pack(sums, model.loss.terms)
        results.append((sums, ready, xp.to_host(item.arena.grad), item.predict(inputs)))
    (sums, order, grad, outputs), (*device, device_outputs) = results
    np.testing.assert_allclose(device[0], sums, rtol=1e-5)
    assert device[1] == order
    np.testing.assert_allclose(device[2], grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(device_outputs, outputs, rtol=1e-4, atol=1e-6)
