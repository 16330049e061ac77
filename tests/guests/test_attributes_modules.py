"""Each argument and attribute of PyTorch's norms and dropouts is in one column of a table."""

from __future__ import annotations

import inspect
from math import prod

import pytest
import torch
from guests.plain import CLASSES, difference, make_samples, train_on, train_plain
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm, normalization

pytestmark = pytest.mark.either

CHANNELS = 4
NORMS = (batchnorm, instancenorm, normalization)
#: Used: a value other than the default, with which training equals plain PyTorch.
USED = {
    "eps": 0.5,
    "momentum": 0.3,
    "affine": False,
    "elementwise_affine": False,
    "track_running_stats": False,
    "bias": False,
    "num_groups": 2,
    "num_features": CHANNELS,
    "num_channels": CHANNELS,
    "normalized_shape": [CHANNELS, 2],
    "size": 3,
    "alpha": 0.1,
    "beta": 0.5,
    "k": 2.0,
    "dtype": torch.float64,
    "device": "cpu",
    "p": 0.5,
    "inplace": True,
    # set after the layer was made
    "weight": None,
    "running_mean": None,
    "running_var": None,
    "num_batches_tracked": None,
    "training": False,
}
#: Announced or refused, by the tests that are named.
UNUSED = {
    # one process is all that it knows: the Trainer's ranks are all ranks, as in the default group
    "process_group": "the statistics are of all ranks",
}
#: Of nn.Module itself: hooks and tables of parts, for which test_torch_modules.py has rows.
OF_MODULES = {*vars(nn.Module()), "training"}


def is_layer(value):
    return inspect.isclass(value) and issubclass(value, nn.Module)


def find_layers(*modules):
    """Return the public classes that these modules of PyTorch define, without lazy ones."""
    names = [(module, name) for module in modules for name in module.__all__]
    classes = {name: getattr(module, name) for module, name in names}
    return {name: cls for name, cls in classes.items() if is_layer(cls) and "Lazy" not in name}


LAYERS = find_layers(*NORMS)
DROPOUTS = find_layers(dropout)
REQUIRED = ("num_features", "num_groups", "num_channels", "normalized_shape", "size")


def arguments_of(cls):
    return [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]


def make(cls, **options):
    required = {name: USED[name] for name in REQUIRED if name in arguments_of(cls)}
    return cls(**{**required, **options})


def attributes_of(cls):
    layer = make(cls)
    own = vars(layer).keys() | layer._parameters.keys() | layer._buffers.keys()
    return {*arguments_of(cls), *(own - OF_MODULES), "training"} - {"__constants__"}


def unknown(layers):
    """Return the attributes that are in no column."""
    names = {name for cls in layers for name in attributes_of(cls)}
    return names - USED.keys() - UNUSED.keys()


def test_each_attribute_is_in_a_column():
    layers = [*LAYERS.values(), *DROPOUTS.values()]
    assert len(layers) >= 16
    assert unknown(layers) == set()
    names = {name for cls in layers for name in attributes_of(cls)}
    assert {*USED, *UNUSED} <= names
    assert not USED.keys() & UNUSED.keys()


def test_a_new_attribute_is_detected():
    class New(nn.LayerNorm):
        def __init__(self, normalized_shape, eps=1e-5, centers=True):
            super().__init__(normalized_shape, eps)
            self.centers = centers

    assert unknown([New]) == {"centers"}


class Net(nn.Module):
    """A layer between two others, on samples of (CHANNELS, ...)."""

    def __init__(self, layer, dims):
        super().__init__()
        torch.manual_seed(0)
        self.shape = (CHANNELS, *(2, 1, 1)[:dims])
        self.first, self.layer = nn.Linear(6, prod(self.shape)), layer
        self.last = nn.Linear(prod(self.shape), CLASSES)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x)).reshape(len(x), *self.shape)
        return self.last(self.layer(x).flatten(1))


def dims_of(name):
    digit = [int(c) for c in name if c.isdigit()]
    return digit[0] - 1 if name.startswith("BatchNorm1d") else (digit[0] if digit else 1)


def rows():
    for name, cls in LAYERS.items():
        for argument in arguments_of(cls):
            if argument in USED and (argument not in REQUIRED or argument == "num_groups"):
                yield name, argument


@pytest.mark.parametrize("name, argument", rows())
def test_each_argument_of_a_norm_is_used(name, argument):
    """Two ranks equal plain PyTorch."""
    options = {argument: USED[argument]}
    if name.startswith("InstanceNorm"):
        is_momentum = argument == "momentum"
        options = {"affine": argument != "affine", "track_running_stats": is_momentum, **options}
    dims, data = dims_of(name), make_samples(samples=24)
    module = Net(make(LAYERS[name], **options), dims)
    if name == "SyncBatchNorm":  # its own forward pass needs a GPU: BatchNorm is what it is
        plain = Net(make(nn.BatchNorm1d, **options), dims)
        plain.load_state_dict(module.state_dict())
    else:
        plain = module
    plain = train_plain(plain, data, batch=6)
    for trained in train_on(2, module, data, batch=6):
        assert difference(plain, trained) <= 1e-12


def remove(layer, *names):
    for name in names:
        setattr(layer, name, None)


#: changes of a layer after it was made
CHANGES = {
    "eval": lambda layer: layer.eval(),
    "eps": lambda layer: setattr(layer, "eps", 0.5),
    "momentum": lambda layer: setattr(layer, "momentum", 0.3),
    "cumulative": lambda layer: setattr(layer, "momentum", None),
    "no weight": lambda layer: remove(layer, "weight"),
    "no bias": lambda layer: remove(layer, "bias"),
    "no count": lambda layer: remove(layer, "num_batches_tracked"),
    "tracks no more": lambda layer: setattr(layer, "track_running_stats", False),
    "no statistics, eval": lambda layer: remove(layer.eval(), "running_mean", "running_var"),
    "frozen": lambda layer: layer.requires_grad_(False),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_batch_norm_as_it_was_changed_after_it_was_made(change, ranks):
    layer = nn.BatchNorm1d(CHANNELS)
    CHANGES[change](layer)
    module, data = Net(layer, 0), make_samples()
    plain = train_plain(module, data)
    for trained in train_on(ranks, module, data):
        assert difference(plain, trained) <= 1e-12


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropouts_use_their_rate_and_their_mode(name):
    data, results = make_samples(), []
    for p, is_training in ((0.5, True), (0.2, True), (0.5, False), (0.0, True)):
        layer = DROPOUTS[name](p).train(is_training)
        results.append(train_on(1, Net(layer, dims_of(name)), data)[0])
    half, fifth, evaluating, zero = results
    assert difference(evaluating, zero) == 0
    assert difference(half, zero) > 1e-6 and difference(fifth, half) > 1e-6
