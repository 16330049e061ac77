"""The Replica of a JAX function: parameters read from the arena, gradients copied into it.

    arena.param    --DLPack, no copy-->  arrays of JAX  --jit(value_and_grad)-->  new arrays
    arena.grad     <------------------------------ one copy ----------------------------

Arrays of JAX are immutable, but an update writes the arena: those that alias it exist only within
a call here, which waits for the results before it returns. All gradients arrive at once, so all
slots become ready after the last one was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.precision import CPU_PRECISIONS, Precision
from hpctrain.gradients.replica import Batch, move_planes, need_all, split_batch
from hpctrain.jax.losses import compile_loss, key_words
from hpctrain.jax.model import JaxModel
from hpctrain.jax.parameters import describe_dtypes
from hpctrain.jax.samples import as_leaf
from hpctrain.nn.losses import Total
from hpctrain.nn.metrics.metric import Observer
from hpctrain.transport.shared_memory.host import aligned_zeros

MAX_EVALUATION_ROWS = 256  #: samples that `evaluate` computes at once


class JaxReplica:
    """See `hpctrain.gradients.replica.Replica`."""

    normalizes_batch = False

    def __init__(self, model: JaxModel, precision: Precision, on_gpu: bool):
        """Copy the leaves of `model` into an arena in the dtype of `precision`.

        Raises UsageError for a GPU, and for a precision that is not available.
        """
        _check_precision(precision, on_gpu)
        self.model, self.micro_batches = model, 1
        self.loss = model.loss
        model.dtype = np.dtype(precision)
        is_own = model.leaf_dtypes.keys() == {model.dtype}
        model.casts_samples = model.has_precision or not is_own
        shapes = {name: tuple(leaf.shape) for name, leaf in model.leaves.items()}
        self.arena = arenas.make_arena(shapes, precision)
        self._bind_views()
        for name, leaf in model.leaves.items():
            xp.copy(self._params[name], leaf)
        self._compiled = compile_loss(model.loss)
        self._predict = None if model.predict is None else jax.jit(model.predict)

    @property
    def params(self) -> Any:
        """The pytree of the current parameters, in private memory."""
        return self.model.as_tree([jnp.asarray(x.copy()) for x in self._params.values()])

    def announcements(self, ranks: int) -> list[str]:
        """Return the texts of casts and copies, and of random numbers that depend on the ranks."""
        model, texts = self.model, []
        if model.leaf_dtypes.keys() != {model.dtype} and not model.has_precision:
            texts.append(
                f"params are trained and returned in {model.dtype}, the precision of the run; seen "
                f"{describe_dtypes(model.leaf_dtypes)}"
            )
        if model.weak_leaves:
            texts.append(
                f"params: weakly typed leaves ('{model.weak_leaves[0]}') become arrays of "
                f"{model.dtype}; jnp.asarray(x, dtype) makes one"
            )
        if model.devices:
            texts.append(
                f"params on {', '.join(model.devices)} are copied: a rank computes on the cores of "
                "its process, the first CPU device of JAX"
            )
        if self.loss.takes_key and ranks > 1:
            texts.append(
                "the loss draws from a key of each rank's share, so its random numbers depend on "
                "the number of ranks; a parameter `keys`, one for each sample, does not"
            )
        return texts

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        need_all(key, self._params)
        sums: nn.Sums = {}
        for i, (piece, first) in enumerate(split_batch(batch, self.micro_batches)):
            piece_key = key._replace(first=key.first + first)
            sums = nn.add(sums, self._compute_gradient(piece, scale, piece_key, accumulates=i > 0))
        for name in reversed(self._grads):
            on_ready(name)
        return sums

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        sums: nn.Sums = {}
        for start in range(0, batch.n, MAX_EVALUATION_ROWS):
            piece = batch.part(start, min(start + MAX_EVALUATION_ROWS, batch.n))
            x, y = map_arrays(self.model.as_input, (piece.inputs, piece.targets))
            x, y = self.model.as_arguments(x, y)
            means = self._compiled.means(self._shared_params(), x, y)
            sums = nn.add(sums, self._metric_sums(means, piece.n))
            if observe is not None and self._predict is not None:
                observe(*self.model.metric_arrays(self._predict(self._shared_params(), x), y))
        return sums

    def predict(self, x: Any) -> Any:
        """Return the outputs of the user's `predict` for samples `x` (n, ...), as arrays."""
        if self._predict is None:
            raise UsageError(
                "predict: expected a function of parameters and samples, seen none; give "
                "predict=lambda params, x: ... to ht.jax.Trainer or ht.jax.Model"
            )
        leaves, structure = jax.tree_util.tree_flatten(x)
        arrays = [self.model.as_input(as_leaf(leaf, "predict: x")) for leaf in leaves]
        x = jax.tree_util.tree_unflatten(structure, arrays)
        return jax.tree_util.tree_map(np.array, self._predict(self._shared_params(), x))

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self.arena = move_planes(self.arena, planes)
        self._bind_views()

    def leave_arena(self) -> None:
        """Move the parameters to private memory, with their values."""
        self.move(param=aligned_zeros(len(self.arena.param), self.arena.param.dtype))

    def _compute_gradient(
        self, batch: Batch, scale: float, key: nn.Key, accumulates: bool
    ) -> nn.Sums:
        """Write or add the gradient of a piece of a batch; return its sums."""
        if batch.n == 0:
            for grad in () if accumulates else self._grads.values():
                grad[...] = 0
            return nn.losses.zero_sums(self.loss.terms)
        x, y = map_arrays(self.model.as_input, (batch.inputs, batch.targets))
        factor = self.model.dtype.type(scale * batch.n)  # the loss is a mean over the batch
        arguments = self._shared_params(), *self.model.as_arguments(x, y), factor, key_words(key)
        (_, means), gradients = self._compiled.gradient(*arguments)
        leaves = jax.tree_util.tree_leaves(gradients)
        for grad, leaf in zip(self._grads.values(), leaves, strict=True):
            if accumulates:
                grad += np.asarray(leaf)
            else:
                grad[...] = np.asarray(leaf)
        return self._metric_sums(means, batch.n)

    def _shared_params(self) -> Any:
        """Return the pytree of arrays in the memory of the arena."""
        return self.model.as_tree([jnp.from_dlpack(x) for x in self._params.values()])

    def _metric_sums(self, means: jax.Array, n: int) -> nn.Sums:
        mean_values = np.asarray(means).tolist()
        return {name: Total(n * x, n) for name, x in zip(self.loss.terms, mean_values, strict=True)}

    def _bind_views(self) -> None:
        """Create each leaf's views of the planes."""
        self._params = self.arena.views(self.arena.param)
        self._grads = self.arena.views(self.arena.grad)


def _check_precision(precision: Precision, on_gpu: bool) -> None:
    """Raise UsageError unless JAX can compute here in `precision`."""
    if on_gpu:
        raise UsageError(
            "ht.jax: expected ranks that compute on CPU cores, seen one with a GPU; call "
            "ht.init('cpu') before the Trainer is made"
        )
    if precision not in CPU_PRECISIONS:
        raise UsageError(
            f"precision: expected float32 or float64 with a function of JAX, seen '{precision}'; "
            "products of 16 bits are a matter of the loss function itself"
        )
    if precision == "float64" and not jax.config.jax_enable_x64:
        raise UsageError(
            "precision: float64 needs 64 bits in JAX, seen jax_enable_x64 = False; call "
            "jax.config.update('jax_enable_x64', True) before any array is made"
        )
