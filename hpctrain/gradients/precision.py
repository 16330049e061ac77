"""The meaning of `[run] precision`: the dtypes of parameters, of products and between layers.

    name       parameters, gradients, optimizer    products                     between layers
    float64    float64                             float64                      float64
    float32    float32                             float32                      float32
    tf32       float32                             10 bits of mantissa          float32
    bf16       float32                             bfloat16, sums in float32    bfloat16
    fp16       float32                             float16, sums in float32     float16

The last three are made for the units that a GPU has for them; NumPy has no such products.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.gradients.mixed import MixedReplica, dtype_named
from hpctrain.gradients.replica import ModelReplica

Precision = Literal["float32", "float64", "tf32", "bf16", "fp16"]
ON_CORES = ("float32", "float64")


def master(precision: Precision) -> np.dtype:
    """Return the dtype of the parameters."""
    return np.dtype(precision if precision in ON_CORES else "float32")


def to_read(
    model: nn.Model, seed: int, precision: Precision, on_gpu: bool
) -> ModelReplica | MixedReplica:
    """Return the replica for a trained model; float32 where cores lack the precision."""
    if precision not in ON_CORES and not on_gpu:
        precision = "float32"
    return replica_of(model, seed, precision, on_gpu)


def replica_of(
    model: nn.Model, seed: int, precision: Precision, on_gpu: bool
) -> ModelReplica | MixedReplica:
    """Return the replica of `model` that computes in `precision`; see ModelReplica.

    On a GPU, products of all replicas of this process are made as the last one asks: with TF32 if
    that is its precision, else without. Raises UsageError if that needs a GPU, or a package that
    is not installed.
    """
    if precision not in ON_CORES and not on_gpu:
        raise UsageError(
            f"[run] precision: '{precision}' needs a GPU; expected one of {', '.join(ON_CORES)} "
            "where cores compute, or device = 'gpu'"
        )
    if on_gpu:
        xp.allow_tf32(precision == "tf32")
    if precision in ("bf16", "fp16"):
        return MixedReplica(model, seed, dtype_named(precision), on_gpu)
    return ModelReplica(model, seed, master(precision), on_gpu)
