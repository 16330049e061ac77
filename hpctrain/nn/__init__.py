"""Layers, losses and models on arrays of NumPy or CuPy; this package does not use MPI.

Layers and built-in models are imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.core import config
from hpctrain.core.config import usercode
from hpctrain.core.lazy import LazyTable, lazy_names
from hpctrain.nn.layer import Key, Layer, Parameter, initial_values
from hpctrain.nn.losses import (
    LOSSES,
    CrossEntropy,
    Loss,
    Sums,
    Total,
    add,
    as_loss,
    balanced_class_weights,
    binary_cross_entropy,
    cross_entropy,
    mean_squared_error,
)
from hpctrain.nn.model import Model

if TYPE_CHECKING:
    from hpctrain.nn.activations import GELU, ReLU
    from hpctrain.nn.attention import CausalAttention
    from hpctrain.nn.batch_norm import BatchNorm
    from hpctrain.nn.chain import Chain, Concatenate, Recompute, Residual
    from hpctrain.nn.cnn import CnnOptions
    from hpctrain.nn.conv import Conv2d, MaxPool2d, MeanPool
    from hpctrain.nn.dropout import Dropout
    from hpctrain.nn.embedding import Embedding, Positions, Unembedding
    from hpctrain.nn.from_function import FunctionModel
    from hpctrain.nn.layer_norm import LayerNorm
    from hpctrain.nn.linear import Linear
    from hpctrain.nn.mlp import MlpOptions
    from hpctrain.nn.reshape import AddChannel, Flatten, Subsample
    from hpctrain.nn.resnet import ResNetOptions
    from hpctrain.nn.transformer import TransformerOptions

__all__ = [
    "LOSSES",
    "MODELS",
    "AddChannel",
    "BatchNorm",
    "FunctionModel",
    "CausalAttention",
    "Chain",
    "CnnOptions",
    "Concatenate",
    "Conv2d",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Flatten",
    "GELU",
    "Key",
    "Layer",
    "LayerNorm",
    "Linear",
    "Loss",
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
    "Total",
    "TransformerOptions",
    "Unembedding",
    "add",
    "as_loss",
    "balanced_class_weights",
    "binary_cross_entropy",
    "cross_entropy",
    "initial_values",
    "mean_squared_error",
    "read",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AddChannel": "reshape",
        "BatchNorm": "batch_norm",
        "CausalAttention": "attention",
        "Chain": "chain",
        "CnnOptions": "cnn",
        "Concatenate": "chain",
        "Conv2d": "conv",
        "Dropout": "dropout",
        "Embedding": "embedding",
        "Flatten": "reshape",
        "FunctionModel": "from_function",
        "GELU": "activations",
        "LayerNorm": "layer_norm",
        "Linear": "linear",
        "MaxPool2d": "conv",
        "MeanPool": "conv",
        "MlpOptions": "mlp",
        "Positions": "embedding",
        "ReLU": "activations",
        "Recompute": "chain",
        "ResNetOptions": "resnet",
        "Residual": "chain",
        "Subsample": "reshape",
        "TransformerOptions": "transformer",
        "Unembedding": "embedding",
    },
)
#: The options class of each built-in model, by the `kind` of a recipe.
MODELS = LazyTable(
    __name__,
    {
        "mlp": "MlpOptions",
        "cnn": "CnnOptions",
        "resnet20": "ResNetOptions",
        "transformer": "TransformerOptions",
    },
)


def read(table: Mapping[str, Any], folder: str = ".") -> Any:
    """Return the options of a recipe's table `[model]`; raise UsageError for unknown names.

    A `kind` with a colon names a user's function, in a module of `folder` or an installed one; the
    other keys are its arguments.
    """
    if usercode.is_target(table):
        arguments = {key: value for key, value in table.items() if key != "kind"}
        from hpctrain.nn.from_function import FunctionModel

        return FunctionModel(target=table["kind"], arguments=arguments, folder=folder)
    return config.read_kind(MODELS, table, "model")
