"""Models on a device: the gradients of the host; only the loss is copied to the host."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import nn
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
        return Batch(text[:, :-1], text[:, 1:].astype(np.int64))
    return Batch(draw.standard_normal((n, 8, 8)).astype("float32"), draw.integers(0, 10, n))


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
    assert ready == order and sums.correct == expected.correct and sums.count == expected.count
    close = {"rtol": 0, "atol": 0} if name in SAME else {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(sums.loss, expected.loss, **close)
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
    np.testing.assert_allclose(reported[1], reported[0], rtol=1e-5)
    outputs = replica(name, True).predict(batch(name).x)
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
    "label": ("mlp", Batch(np.zeros((2, 8, 8), "float32"), np.array([0, 11])), "label 11 is out"),
    "byte": ("transformer", Batch(np.full((1, 12), 300), np.zeros((1, 12), int)), "seen 300"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_wrong_data_is_refused(gpu, wrong):
    name, bad, message = REFUSED[wrong]
    with pytest.raises(UsageError, match=message):
        replica(name, True).gradient(bad, 1.0, nn.Key(0, 0, 0), lambda slot: None)
