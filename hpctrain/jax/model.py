"""A loss function and a pytree of parameters as a model of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays
from hpctrain.gradients.guests import GuestModel
from hpctrain.gradients.precision import Precision
from hpctrain.jax.losses import JaxLoss, LossFunction
from hpctrain.jax.parameters import common_dtype, find_devices, find_dtypes, is_weak, named_leaves


class JaxModel(GuestModel):
    """A loss and initial parameters, as the Trainer and `ht.load` use a model.

    `loss` is a function `loss(params, x, y)`; see `JaxLoss`. `params`: a pytree of floating-point
    arrays; it is read once, and not changed. `predict(params, x)` returns outputs for samples `x`,
    an array or a pytree of such. Names of parameters are the paths of the leaves, as
    "layers.0.weight". Without a `precision` all leaves must have one dtype, float32 or float64.
    """

    def __init__(
        self,
        loss: LossFunction,
        params: Any,
        predict: Callable[[Any, Any], Any] | None = None,
        metrics: Iterable[str] = (),
    ):
        """Raise UsageError for parameters that are no floating-point arrays."""
        if predict is not None and not callable(predict):
            raise UsageError(
                f"predict: expected a function predict(params, x), seen {type(predict).__name__}"
            )
        self.loss: Any = JaxLoss(loss, metrics)
        self.predict = predict
        leaves = named_leaves(params)
        self.weak_leaves = [name for name, leaf in leaves.items() if is_weak(leaf)]
        self.devices = find_devices(leaves)
        #: on the host: arrays of JAX may be deleted, or donated, after this call
        self.leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        self.structure = jax.tree_util.tree_structure(params)
        self.leaf_dtypes = find_dtypes(leaves)
        self.has_precision = False  #: whether the user gave one
        self.casts_samples = False  #: whether floating-point samples take the arena's dtype
        self.sample_structure: Any = None  #: of pairs (x, y) that engines cut as tuples of leaves
        self.dtype = np.dtype(np.float32)  #: of the arena of the last replica
        self.targets, self.normalizes_batch = 1, False

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""
        return sum(prod(leaf.shape) for leaf in self.leaves.values())

    def output_shape_for(self, samples: Any) -> tuple[int, ...]:
        """Return the shape of the loss, after tracing it on one of `samples`.

        Raises UsageError for samples of another shape than those before, and for a loss that does
        not return means.
        """
        x, y = map_arrays(self.as_input, samples.rows(np.arange(1)))
        self.check_sample_shape(samples)
        leaves = [jax.ShapeDtypeStruct(x.shape, self.dtype) for x in self.leaves.values()]
        jax.eval_shape(self.loss.means, self.as_tree(leaves), *self.as_arguments(x, y))
        return ()

    def _metric_arrays(self, x: Any, y: Any) -> tuple[np.ndarray, Any]:
        """Return the outputs for samples `x`, and the targets, as metrics get them."""
        if self.predict is None:
            raise UsageError(
                "metrics: expected predict=lambda params, x: ... beside metrics of outputs, seen "
                "none; a metric that the loss itself returns needs another name"
            )
        x, y = self.as_arguments(*map_arrays(self.as_input, (x, y)))
        params = self.as_tree([jnp.asarray(leaf, self.dtype) for leaf in self.leaves.values()])
        return self.metric_arrays(self.predict(params, x), y)

    def metric_arrays(self, outputs: Any, y: Any) -> tuple[np.ndarray, Any]:
        """Return outputs of `predict`, and targets, as arrays; raise UsageError for pytrees."""
        for name, value in {"outputs": outputs, "targets": y}.items():
            if not hasattr(value, "dtype") or value.ndim == 0:
                raise UsageError(
                    f"metrics: expected one array (n, ...) of {name}, seen {type(value).__name__}"
                )
        return np.asarray(outputs), np.asarray(y)

    @property
    def own_precision(self) -> Precision:
        """The dtype that the leaves share; UsageError if they have several, or 16 bits."""
        return common_dtype(self.leaf_dtypes)

    def as_tree(self, leaves: Any) -> Any:
        """Return the pytree of parameters with `leaves`."""
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def as_input(self, x: np.ndarray) -> np.ndarray:
        """Return array `x` of a batch, in the dtype in which the loss takes it."""
        is_cast = self.casts_samples and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(self.dtype, copy=False) if is_cast else x

    def as_arguments(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return a batch as pytrees with the structure of the user's samples and targets."""
        if self.sample_structure is None:
            return x, y
        pair: tuple[Any, Any] = jax.tree_util.tree_unflatten(self.sample_structure, [*x, *y])
        return pair

    def make_replica(self, seed: int, precision: Precision, on_gpu: bool) -> Any:
        """Return the Replica of this model; see `hpctrain.jax.replica`."""
        from hpctrain.jax.replica import JaxReplica

        return JaxReplica(self, precision, on_gpu)

    def __repr__(self) -> str:
        return f"function {self.loss!r} of JAX, {self.parameter_count:,} parameters"
