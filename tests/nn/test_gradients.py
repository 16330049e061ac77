"""Every gradient against central differences, in float64: layers, loss and whole models."""

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
    p = nn.initial_values(layer.parameters(shape), 0)
    p = {name: one + 0.1 * generator.standard_normal(one.shape) for name, one in p.items()}
    x = generator.standard_normal((batch, *shape))
    weights = generator.standard_normal((batch, *layer.output_shape(shape)))

    def gradient() -> Arrays:
        g = {name: np.full_like(one, np.nan) for name, one in p.items()}
        return {**g, "x": layer.backward(p, g, layer.forward(p, x, KEY)[1], weights, True)}

    return Case(
        {**p, "x": x}, lambda: float(np.sum(layer.forward(p, x, KEY)[0] * weights)), gradient
    )


def loss_case(loss) -> Case:
    z = 3 * np.random.default_rng(0).standard_normal((5, 4))
    y = np.array([0, 3, 1, 1, 2])
    return Case({"z": z}, lambda: 0.3 * loss(z, y)[0].loss, lambda: {"z": loss(z, y, 0.3)[1]})


def model_case(model) -> Case:
    generator = np.random.default_rng(0)
    p = nn.initial_values(model.parameters, 1)
    x, y = generator.standard_normal((4, *model.input_shape)), np.array([2, 0, 1, 2])

    def run(g: Arrays) -> float:
        return 0.3 * model.gradient(p, g, x, y, 0.3, KEY, lambda name: None).loss

    def gradient() -> Arrays:
        g = {name: np.full_like(one, np.nan) for name, one in p.items()}
        run(g)
        return g

    return Case(p, lambda: run({name: np.empty_like(one) for name, one in p.items()}), gradient)


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
    "cross-entropy": lambda: loss_case(nn.cross_entropy),
    "mlp": lambda: model_case(nn.MlpOptions(widths=[6, 5, 4, 3]).build((2, 3), 3)),
    "mlp-dropout": lambda: model_case(nn.MlpOptions(widths=[6, 9, 3], dropout=0.5).build(None, 3)),
    "cnn": lambda: model_case(nn.CnnOptions(channels=[2, 3], hidden=4).build((8, 8), 3)),
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


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_central_differences(name):
    check(CASES[name]())


def test_a_wrong_gradient_is_seen():
    with pytest.raises(AssertionError, match="Mismatched"):
        check(layer_case(WrongReLU(), (3, 4)))
