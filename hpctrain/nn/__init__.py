"""Layers, losses, models: arrays in (NumPy or CuPy), gradients out; knows no MPI."""

from hpctrain.nn.activations import ReLU
from hpctrain.nn.conv import Conv2d
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.layer import Key, Layer, Parameter
from hpctrain.nn.linear import Linear
from hpctrain.nn.losses import Sums, add, cross_entropy
from hpctrain.nn.model import Model, initial_values
from hpctrain.nn.pooling import MaxPool2d
from hpctrain.nn.reshape import AddChannel, Flatten
from hpctrain.nn.zoo import MODELS, CnnOptions, MlpOptions

__all__ = [
    "MODELS",
    "AddChannel",
    "CnnOptions",
    "Conv2d",
    "Dropout",
    "Flatten",
    "Key",
    "Layer",
    "Linear",
    "MaxPool2d",
    "MlpOptions",
    "Model",
    "Parameter",
    "ReLU",
    "Sums",
    "add",
    "cross_entropy",
    "initial_values",
]
