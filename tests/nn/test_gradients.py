"""Every gradient against central differences, in float64: layers, losses and whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from hpctrain import nn

KEY = nn.Key(seed=1, step=2, first=3, layer=4)
Arrays = dict[str, np.ndarray]


class Case(NamedTuple):
    """A scalar function of arrays and the gradient it is said to have."""

    arrays: Arrays
    value: Callable[[], float]
    gradient: Callable[[], Arrays]


def layer_case(layer, shape, batch=3) -> Case:
    """Weigh the outputs with fixed numbers: that tells a wrong element from a right sum."""
    generator = np.random.default_rng(0)
    every = layer.parameters(shape)
    p = {
        name: item + 0.1 * generator.standard_normal(item.shape)
        for name, item in nn.initial_values(every, 0).items()
    }
    trained = {name: item for name, item in p.items() if every[name].trainable}
    x = generator.standard_normal((batch, *shape))
    weights = generator.standard_normal((batch, *layer.output_shape(shape)))

    def gradient() -> Arrays:
        g = {name: np.full_like(item, np.nan) for name, item in trained.items()}
        return {**g, "x": layer.backward(p, g, layer.forward(p, x, KEY)[1], weights, True)}

    return Case(
        {**trained, "x": x}, lambda: float(np.sum(layer.forward(p, x, KEY)[0] * weights)), gradient
    )


def words_case(width=3) -> Case:
    """An embedding: what goes in are numbers, which have no gradient."""
    layer, x = nn.Embedding(7, width), np.array([[1, 6, 1, 0], [1, 2, 6, 6]], float)
    p = {"table": np.random.default_rng(0).standard_normal((7, width))}
    weights = np.random.default_rng(1).standard_normal((2, 4, width))

    def gradient() -> Arrays:
        g = {"table": np.full((7, width), np.nan)}
        layer.backward(p, g, layer.forward(p, x, KEY)[1], weights, False)
        return g

    return Case(p, lambda: float(np.sum(layer.forward(p, x, KEY)[0] * weights)), gradient)


def loss_case(loss, y, shape=(5, 4)) -> Case:
    z = 3 * np.random.default_rng(0).standard_normal(shape)
    return Case(
        {"z": z}, lambda: 0.3 * loss(z, y)[0]["loss"].sum, lambda: {"z": loss(z, y, 0.3)[1]}
    )


def model_case(model, x=None, y=None, noise=0.0) -> Case:
    generator = np.random.default_rng(0)
    p = nn.initial_values(model.parameters, 1)
    p = {name: item + noise * generator.standard_normal(item.shape) for name, item in p.items()}
    buffers = nn.initial_values(model.buffers, 1)
    x = generator.standard_normal((4, *model.input_shape)) if x is None else x
    y = np.array([2, 0, 1, 2]) if y is None else y

    def run(g: Arrays) -> float:
        return 0.3 * model.gradient(p | buffers, g, x, y, 0.3, KEY, lambda name: None)["loss"].sum

    def gradient() -> Arrays:
        g = {name: np.full_like(item, np.nan) for name, item in p.items()}
        run(g)
        return g

    return Case(p, lambda: run({name: np.empty_like(item) for name, item in p.items()}), gradient)


def text_case(layers=2, **options) -> Case:
    created = nn.TransformerOptions(layers=layers, width=4, heads=2, **options).build((5,), None)
    bytes_ = np.random.default_rng(0).integers(0, 256, (2, 6)).astype(np.uint8)
    # Norms of values as small as at the start bend too much for differences to follow.
    return model_case(created, bytes_[:, :-1], bytes_[:, 1:], noise=1.0)


def two_inputs_case() -> Case:
    draw, branch = np.random.default_rng(0), {"a": nn.Linear(3), "b": nn.GELU(), "c": nn.Linear(2)}
    first = nn.Concatenate({"m": branch, "n": {"d": nn.Dropout(0.4)}, "o": {"a": nn.Linear(2)}})
    shapes = {"m": (4,), "n": (3,), "o": (2,)}
    x = {name: draw.standard_normal((6, *shape)) for name, shape in shapes.items()}
    return model_case(nn.Model([first, nn.Linear(3)], shapes), x, np.arange(6) % 3)


RESNET = {"blocks": 1, "channels": [2, 3]}


class WrongReLU(nn.ReLU):
    """Lets a little through where nothing should pass: the check must see it."""

    def backward(self, p, g, saved, dy, want_dx):
        return dy * np.where(saved > 0, 1, 1e-3)


CASES = {
    "linear": lambda: layer_case(nn.Linear(4), (6,)),
    "relu": lambda: layer_case(nn.ReLU(), (3, 4)),
    "flatten": lambda: layer_case(nn.Flatten(), (2, 3, 2)),
    "add-channel": lambda: layer_case(nn.AddChannel(), (2, 3)),
    "dropout": lambda: layer_case(nn.Dropout(0.4), (5, 2)),
    "conv": lambda: layer_case(nn.Conv2d(3, kernel=3), (5, 4, 2)),
    "conv-1x1": lambda: layer_case(nn.Conv2d(3, kernel=1), (2, 3, 2)),
    "conv-padding": lambda: layer_case(nn.Conv2d(2, kernel=3, padding=1), (3, 4, 1)),
    "conv-stride": lambda: layer_case(nn.Conv2d(2, kernel=2, stride=2), (5, 4, 2)),
    "conv-gaps": lambda: layer_case(nn.Conv2d(2, kernel=2, stride=3, padding=2), (4, 5, 2)),
    "pool": lambda: layer_case(nn.MaxPool2d(), (4, 6, 2)),
    "pool-remainder": lambda: layer_case(nn.MaxPool2d(), (5, 3, 2)),
    "pool-overlap": lambda: layer_case(nn.MaxPool2d(3, stride=1), (5, 4, 2)),
    "gelu": lambda: layer_case(nn.GELU(), (3, 4)),
    "linear-places": lambda: layer_case(nn.Linear(4, per_position=True), (2, 3)),
    "conv-no-bias": lambda: layer_case(nn.Conv2d(2, kernel=3, padding=1, bias=False), (3, 4, 2)),
    "conv-stride-padding": lambda: layer_case(nn.Conv2d(2, 3, stride=2, padding=1), (5, 4, 2)),
    "mean-pool": lambda: layer_case(nn.MeanPool(), (3, 2, 4)),
    "subsample": lambda: layer_case(nn.Subsample(2, 5), (5, 4, 2)),
    "layer-norm": lambda: layer_case(nn.LayerNorm(), (3, 5)),
    "layer-norm-vector": lambda: layer_case(nn.LayerNorm(epsilon=0.1), (4,)),
    "batch-norm": lambda: layer_case(nn.BatchNorm(), (2, 3, 4)),
    "batch-norm-vector": lambda: layer_case(nn.BatchNorm(epsilon=0.1), (4,), batch=5),
    "embedding": words_case,
    "positions": lambda: layer_case(nn.Positions(), (4, 3)),
    "attention": lambda: layer_case(nn.CausalAttention(heads=2, init_std=0.5), (5, 4)),
    "attention-1-head": lambda: layer_case(nn.CausalAttention(heads=1, init_std=0.5), (1, 3)),
    "concatenate": two_inputs_case,
    "chain": lambda: layer_case(nn.Chain({"a": nn.Linear(3), "b": nn.GELU()}), (4,)),
    "residual": lambda: layer_case(nn.Residual({"a": nn.Linear(4), "b": nn.Dropout(0.5)}), (4,)),
    "residual-shortcut": lambda: layer_case(
        nn.Residual({"a": nn.Linear(3)}, {"a": nn.Linear(3), "b": nn.GELU()}), (4,)
    ),
    "recompute": lambda: layer_case(
        nn.Recompute(nn.Chain({"a": nn.BatchNorm(), "b": nn.Dropout(0.5)})), (4,)
    ),
    "cross-entropy": lambda: loss_case(nn.cross_entropy, np.array([0, 3, 1, 1, 2])),
    "cross-entropy-places": lambda: loss_case(
        nn.cross_entropy, np.array([[0, 3], [1, 1], [2, 0]]), (3, 2, 4)
    ),
    "mse": lambda: loss_case(nn.mean_squared_error, np.arange(20.0).reshape(5, 4) / 9),
    "mse-one": lambda: loss_case(nn.mean_squared_error, np.arange(5.0), (5, 1)),
    "bce": lambda: loss_case(nn.binary_cross_entropy, np.arange(20).reshape(5, 4) % 2),
    "bce-one": lambda: loss_case(nn.binary_cross_entropy, np.linspace(0, 1, 5), (5, 1)),
    "bce-places": lambda: loss_case(nn.binary_cross_entropy, np.ones((2, 3, 2)), (2, 3, 2)),
    "mlp": lambda: model_case(nn.MlpOptions(widths=[6, 5, 4, 3]).build((2, 3), 3)),
    "mlp-dropout": lambda: model_case(nn.MlpOptions(widths=[6, 9, 3], dropout=0.5).build(None, 3)),
    "cnn": lambda: model_case(nn.CnnOptions(channels=[2, 3], hidden=4).build((8, 8), 3)),
    "resnet": lambda: model_case(nn.ResNetOptions(**RESNET).build((4, 4), 3)),
    "resnet-recompute": lambda: model_case(
        nn.ResNetOptions(**RESNET, recompute=True).build((4, 4, 2), 3)
    ),
    "transformer": lambda: text_case(dropout=0.3),
    "transformer-recompute": lambda: text_case(layers=1, recompute=True),
    "cnn-colour": lambda: model_case(nn.CnnOptions(channels=[2], hidden=4).build((4, 6, 3), 3)),
}


def check(case: Case) -> None:
    gradient = case.gradient()
    assert gradient.keys() == case.arrays.keys()
    for name, array in case.arrays.items():
        numeric = np.empty_like(array)
        for index in np.ndindex(array.shape):
            numeric[index] = slope(case.value, array, index)
        np.testing.assert_allclose(gradient[name], numeric, rtol=1e-7, atol=2e-9, err_msg=name)


def slope(value: Callable[[], float], array: np.ndarray, index: tuple[int, ...]) -> float:
    middle, h = array[index], 1e-5
    array[index] = middle + h
    above = value()
    array[index] = middle - h
    below = value()
    array[index] = middle
    return (above - below) / (2 * h)


LONG = ("resnet-recompute", "transformer")  # resnet and transformer-recompute show most of the same


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in CASES]
)
def test_the_gradient_is_that_of_central_differences(name):
    check(CASES[name]())


def test_a_wrong_gradient_is_seen():
    with pytest.raises(AssertionError, match="Mismatched"):
        check(layer_case(WrongReLU(), (3, 4)))
