"""Invalid models are refused when they are built, with the names of the layers."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.core.config import read_kind
from hpctrain.core.errors import UsageError


def chain(shape, **layers):
    return lambda: nn.Model(layers, shape)


POOLS = {"p1": nn.MaxPool2d(), "p2": nn.MaxPool2d()}
MLP, CNN = nn.MlpOptions(widths=[64, 10]), nn.CnnOptions(channels=[2, 2], hidden=3)
TEXT = nn.TransformerOptions(layers=1, width=4, heads=2, length=5)
REFUSED = {
    "linear after conv": (
        chain((4, 4, 1), conv=nn.Conv2d(2, 3), out=nn.Linear(3)),
        r"'out' \(Linear\) cannot follow 'conv' \(Conv2d\): expected vectors .* seen \(2, 2, 2\)",
    ),
    "conv first on vectors": (
        chain((16,), conv=nn.Conv2d(2, 3)),
        r"'conv' \(Conv2d\) cannot follow the input: expected images .* seen \(16,\)",
    ),
    "pooled to nothing": (
        chain((2, 2, 1), **POOLS),
        r"'p2' \(MaxPool2d\) cannot follow 'p1' \(MaxPool2d\): .* at least 2 x 2, seen \(1, 1, 1\)",
    ),
    "nothing to train": (chain((2,), relu=nn.ReLU()), "needs a layer with parameters"),
    "mlp features": (
        lambda: MLP.build((8, 9), 10),
        r"expected 72 first .* seen 64; set .*\[72, 10\]",
    ),
    "mlp classes": (lambda: MLP.build((64,), 11), r"at least 11 last .* seen 10; set .*\[64, 11\]"),
    "cnn of nothing": (lambda: CNN.build(None, 10), "expected the shape of images and"),
    "cnn of vectors": (lambda: CNN.build((64,), 10), r"expected images .* seen \(64,\); .*'mlp'"),
    "cnn of small images": (lambda: CNN.build((3, 3), 10), r"'pool2' .* seen \(1, 1, 2\)"),
    "unknown shared table": (
        chain((3,), a=nn.Linear(4), out=nn.Unembedding("words", 7)),
        r"layer 'out' shares 'words.table': expected \(7, 4\), seen none before it",
    ),
    "shared table of another width": (
        chain(
            (3,),
            words=nn.Embedding(7, 4),
            n=nn.Linear(5, per_position=True),
            out=nn.Unembedding("words", 7),
        ),
        r"shares 'words.table': expected \(7, 5\), seen \(7, 4\)",
    ),
    "inner layers": (
        chain((4,), a=nn.Residual({"b": nn.Linear(3), "c": nn.Conv2d(1, 1)})),
        r"'a' \(Residual\) .* 'c' \(Conv2d\) cannot follow 'b' \(Linear\): expected images",
    ),
    "resnet of vectors": (lambda: nn.ResNetOptions().build((64,), 10), r"images .* seen \(64,\)"),
    "resnet of nothing": (lambda: nn.ResNetOptions().build(None, 10), "seen none"),
    "transformer of images": (
        lambda: TEXT.build((8, 8), 10),
        r"texts of shape \(5,\), seen \(8, 8\)",
    ),
    "transformer of another length": (lambda: TEXT.build((6,), 10), r"\(5,\), seen \(6,\)"),
    "transformer of words": (lambda: TEXT.build((5,), 257), "labels below 256, seen 257"),
    "heads": (
        lambda: nn.TransformerOptions(layers=1, width=6, heads=4).build((5,), 256),
        r"width a multiple of 4 heads, seen \(5, 6\)",
    ),
    "recipe": (lambda: read_kind(nn.MODELS, {"kind": "mpl", "widths": []}, "model"), "mean 'mlp'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_fit_is_refused(name):
    act, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        act()


@pytest.mark.parametrize(
    "table", [{"widths": [3]}, {"widths": [3, 0]}, {"widths": [3, 2], "dropout": 1}]
)
def test_options_out_of_range_are_refused(table):
    with pytest.raises(UsageError):
        nn.MlpOptions(**table)


def test_samples_of_another_shape_are_refused():
    model = CNN.build((8, 8), 10)
    p = nn.initial_values(model.parameters, 0)
    with pytest.raises(UsageError, match=r"samples of shape \(8, 8\), seen \(64,\)"):
        model.evaluate(p, np.ones((2, 64)), np.zeros(2, int))


def test_a_wider_last_layer_than_classes_is_allowed():
    assert MLP.build((8, 8), 7).output_shape == (10,)
