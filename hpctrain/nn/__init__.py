"""Layers, losses and models on arrays of NumPy or CuPy; this package does not use MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain import config
from hpctrain.config import usercode
from hpctrain.nn.activations import GELU, ReLU
from hpctrain.nn.attention import CausalAttention
from hpctrain.nn.batch_norm import BatchNorm
from hpctrain.nn.chain import Chain, Recompute, Residual
from hpctrain.nn.conv import Conv2d
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.embedding import Embedding, Positions, Unembedding
from hpctrain.nn.from_function import FunctionModel
from hpctrain.nn.layer import Key, Layer, Parameter
from hpctrain.nn.layer_norm import LayerNorm
from hpctrain.nn.linear import Linear
from hpctrain.nn.losses import Sums, add, cross_entropy, mean_squared_error
from hpctrain.nn.model import Model, initial_values
from hpctrain.nn.pooling import MaxPool2d, MeanPool
from hpctrain.nn.reshape import AddChannel, Flatten, Subsample
from hpctrain.nn.resnet import ResNetOptions
from hpctrain.nn.transformer import TransformerOptions
from hpctrain.nn.zoo import MODELS, CnnOptions, MlpOptions

__all__ = [
    "MODELS",
    "AddChannel",
    "BatchNorm",
    "FunctionModel",
    "CausalAttention",
    "Chain",
    "CnnOptions",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GELU",
    "Key",
    "Layer",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "MeanPool",
    "MlpOptions",
    "Model",
    "Parameter",
    "Positions",
    "ReLU",
    "Recompute",
    "ResNetOptions",
    "Residual",
    "Subsample",
    "Sums",
    "TransformerOptions",
    "Unembedding",
    "add",
    "cross_entropy",
    "initial_values",
    "mean_squared_error",
    "read",
]


def read(table: Mapping[str, Any], folder: str = ".") -> Any:
    """Return the options of a recipe's table `[model]`; raise UsageError for unknown names.

    A `kind` with a colon names a user's function, in a module of `folder` or an installed one; the
    other keys are its arguments.
    """
    if usercode.is_target(table):
        arguments = {key: value for key, value in table.items() if key != "kind"}
        return FunctionModel(target=table["kind"], arguments=arguments, folder=folder)
    return config.read_kind(MODELS, table, "model")
