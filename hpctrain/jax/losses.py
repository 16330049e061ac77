"""The user's loss: a function of parameters and a batch that returns means over its samples.

Engines take the gradient of `scale` times the *sum* of the loss over samples, so that shares of any
length add up: the mean over n samples is multiplied by `scale` n.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.gradients.guests import GuestLoss
from hpctrain.nn.layer import Key
from hpctrain.nn.losses.loss import Metric, mean

MAX_COMPILED = 8  #: loss functions whose compiled forms are kept for the next Trainer
WORD = 0xFFFFFFFF  #: random numbers are seeded by words of 32 bits
#: Returns the mean over the samples of x and y, or (mean, {metric: mean}).
LossFunction = Callable[..., Any]


class JaxLoss(GuestLoss):
    """A function `loss(params, x, y)`, with keys of `jax.random`, and the names of its metrics.

    It returns the mean over the samples of the batch, a scalar; with metrics a pair of that and a
    dict of such means. A parameter `keys` gets a key for each of the n samples, a function of
    (seed, step, position in the global batch); a parameter `key` one for the whole share, other
    numbers with other shares. In evaluation they are None. Means over other things than samples,
    such as the tokens of a masked text, depend on the division of the batch.
    """

    def __init__(self, function: LossFunction, metrics: Iterable[str] = ()):
        """Raise UsageError for a function that is none, and for metrics that are no names."""
        if not callable(function):
            raise UsageError(
                f"loss: expected a function loss(params, x, y), seen {type(function).__name__}"
            )
        metric_names = [metrics] if isinstance(metrics, str) else list(metrics)
        if "loss" in metric_names or not all(isinstance(name, str) for name in metric_names):
            raise UsageError(
                f"metrics: expected names such as ('accuracy',), without 'loss', seen "
                f"{metric_names!r}"
            )
        self._function = function
        self.takes_key, self.takes_keys = _find_key_parameters(function)
        self.terms = ("loss", *metric_names)
        self.metrics: Mapping[str, Metric] = {name: mean(name) for name in self.terms}

    def means(
        self, params: Any, x: Any, y: Any, words: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss, and a vector with the mean of each term; to be traced by JAX.

        `words`: the result of `key_words`; None in evaluation.
        """
        arguments: dict[str, jax.Array | None] = {}
        if self.takes_key:
            arguments["key"] = None if words is None else _random_key(words)
        if self.takes_keys:
            n = len(jax.tree_util.tree_leaves(x)[0])
            arguments["keys"] = None if words is None else _sample_keys(words, n)
        loss, metrics = self._split_result(self._function(params, x, y, **arguments))
        _check_scalar("loss", loss)
        for name, value in metrics.items():
            _check_scalar(f"metric '{name}'", value)
        loss_and_metrics = [loss, *(metrics[name] for name in self.terms[1:])]
        return loss, jnp.stack([jnp.asarray(number, loss.dtype) for number in loss_and_metrics])

    def _split_result(self, value: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the loss and the metrics that the function returned."""
        if len(self.terms) == 1:
            if isinstance(value, tuple):
                raise UsageError(
                    "loss: expected a scalar, seen a tuple; if it is (mean, {metric: mean}), name "
                    "the metrics: ht.jax.Trainer(..., metrics=('accuracy',))"
                )
            return value, {}
        metric_names = list(self.terms[1:])
        is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
        if not is_pair or value[1].keys() != set(metric_names):
            form_text = f"a pair with {list(value[1])}" if is_pair else f"a {type(value).__name__}"
            raise UsageError(
                f"loss: expected (mean, {{metric: mean}}) with the metrics {metric_names}, "
                f"seen {form_text}"
            )
        return value

    def __eq__(self, other: object) -> bool:
        """Return whether both are of the same function and metrics: compiled forms are shared."""
        if not isinstance(other, JaxLoss):
            return NotImplemented
        return self._function is other._function and self.terms == other.terms

    def __hash__(self) -> int:
        return hash((id(self._function), self.terms))

    def __call__(self, outputs: Any, targets: Any, scale: float | None = None) -> Any:
        """Raise UsageError: this loss is a function of parameters and samples."""
        raise UsageError("this loss is a function of JAX: expected the model of ht.jax.Trainer")

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)


class CompiledLoss(NamedTuple):
    """A loss compiled by JAX, for each shape of a batch when it is first seen."""

    #: (params, x, y, factor, words) -> ((factor * loss, means), its gradient)
    gradient: Callable[..., Any]
    means: Callable[..., Any]  #: (params, x, y) -> mean of each term, without a key


@lru_cache(MAX_COMPILED)
def compile_loss(loss: JaxLoss) -> CompiledLoss:
    """Return the compiled forms of `loss`."""

    def scaled(
        params: Any, x: Any, y: Any, factor: jax.Array, words: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        mean, means = loss.means(params, x, y, words)
        return factor * mean, means

    def means(params: Any, x: Any, y: Any) -> jax.Array:
        return loss.means(params, x, y)[1]

    return CompiledLoss(jax.jit(jax.value_and_grad(scaled, has_aux=True)), jax.jit(means))


def key_words(key: Key) -> np.ndarray:
    """Return the numbers that determine the random numbers of a share of a step."""
    return np.array([key.seed & WORD, key.seed >> 32 & WORD, key.step, key.first], np.uint32)


def _random_key(words: jax.Array) -> jax.Array:
    """Return a key of `jax.random` that depends on all of `words`."""
    key = jax.random.key(words[0])
    for i in range(1, len(words)):
        key = jax.random.fold_in(key, words[i])
    return key


def _sample_keys(words: jax.Array, n: int) -> jax.Array:
    """Return a key for each of `n` samples; they depend on its position in the global batch."""
    positions = words[-1] + jnp.arange(n, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(_random_key(words[:-1]), positions)


def _find_key_parameters(function: LossFunction) -> tuple[bool, bool]:
    """Return whether `function` takes `key` and `keys`; arguments that are bound stay.

    Raises UsageError for a function that cannot be called with (params, x, y) and these.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return False, False
    bound = function.keywords if isinstance(function, partial) else {}
    names = [name for name in ("key", "keys") if name in signature.parameters.keys() - bound.keys()]
    try:
        signature.bind(None, None, None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(
            "loss: expected a function loss(params, x, y), with parameters named key or keys for "
            f"random numbers, seen one of {signature} ({error})"
        ) from None
    return "key" in names, "keys" in names


def _check_scalar(name: str, value: Any) -> None:
    """Raise UsageError unless `value` is a scalar; a loss is one of floating-point numbers."""
    shape, dtype = jnp.shape(value), getattr(value, "dtype", None)
    is_loss = name == "loss"
    if shape != () or (is_loss and (dtype is None or not jnp.issubdtype(dtype, jnp.floating))):
        raise UsageError(
            f"{name}: expected a floating-point scalar, the mean over the batch, from the loss "
            f"function, seen shape {shape} of {dtype or type(value).__name__}"
        )
