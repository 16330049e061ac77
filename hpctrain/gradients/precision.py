"""The dtypes of each `[run] precision`: of parameters, products and activations.

    name       parameters, gradients, optimizer    products                     activations
    float64    float64                             float64                      float64
    float32    float32                             float32                      float32
    tf32       float32                             10 bits of mantissa          float32
    bf16       float32                             bfloat16, sums in float32    bfloat16
    fp16       float32                             float16, sums in float32     float16

The last three need a GPU, which has units for such products; NumPy does not support them.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.allocator import keep_freed_memory
from hpctrain.core.errors import UsageError
from hpctrain.gradients.mixed import MixedReplica, half_dtype
from hpctrain.gradients.replica import ModelReplica

Precision = Literal["float32", "float64", "tf32", "bf16", "fp16"]
CPU_PRECISIONS = ("float32", "float64")


def master_dtype(precision: Precision) -> np.dtype:
    """Return the dtype of the parameters in the arena."""
    return np.dtype(precision if precision in CPU_PRECISIONS else "float32")


def choose_precision(model: Any, precision: Precision | None) -> Precision:
    """Return `precision`; None selects the precision of the model's own parameters, or float32."""
    return getattr(model, "own_precision", "float32") if precision is None else precision


def make_reading_replica(model: Any, seed: int, precision: Precision, on_gpu: bool) -> Any:
    """Return a replica to read a trained model into; float32 if CPU cores lack `precision`."""
    if precision not in CPU_PRECISIONS and not on_gpu:
        precision = "float32"
    return make_replica(model, seed, precision, on_gpu)


def make_replica(model: Any, seed: int, precision: Precision, on_gpu: bool) -> Any:
    """Return the replica of `model` that computes in `precision`; see ModelReplica.

    A model of another framework makes its own: `make_replica(seed, precision, on_gpu)`. On a GPU,
    TF32 is a setting of the process: the last call decides it for all replicas. Raises
    UsageError if `precision` needs a GPU, or a package that is not installed.
    """
    if not on_gpu:
        keep_freed_memory()
    if not isinstance(model, nn.Model):
        return model.make_replica(seed, precision, on_gpu)
    if precision not in CPU_PRECISIONS and not on_gpu:
        raise UsageError(
            f"[run] precision: '{precision}' needs a GPU; expected device = 'gpu', or one of "
            f"{', '.join(CPU_PRECISIONS)}"
        )
    if on_gpu:
        xp.allow_tf32(precision == "tf32")
    if precision in ("bf16", "fp16"):
        return MixedReplica(model, seed, half_dtype(precision), on_gpu)
    return ModelReplica(model, seed, master_dtype(precision), on_gpu)
