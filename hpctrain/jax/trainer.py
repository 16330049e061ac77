"""The Trainer of a JAX function: every engine, checkpoints, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpctrain.jax.losses import LossFunction
from hpctrain.jax.model import JaxModel
from hpctrain.jax.replica import JaxReplica
from hpctrain.optim import Optimizer
from hpctrain.training import trainer


class Trainer(trainer.Trainer):
    """A loss function, its parameters, an optimizer and an engine; every rank makes its own.

    As `ht.Trainer`, with a function and a pytree in place of the model; see `ht.jax.Model`.
    """

    replica: JaxReplica

    def __init__(
        self,
        loss: LossFunction,
        params: Any,
        optimizer: Optimizer | str,
        engine: Any = "allreduce",
        *,
        predict: Callable[[Any, Any], Any] | None = None,
        metrics: Iterable[str] = (),
        **options: Any,
    ):
        """Lay the parameters out in an arena and build the engine; collective.

        `loss(params, x, y)` returns the mean over the samples of the batch, with `metrics` a pair
        of it and a dict of further means; with a parameter `key` it gets a key of `jax.random`,
        None in evaluation. `options`: those of `ht.Trainer`, such as `seed`, `precision` and
        `callbacks`.
        """
        super().__init__(JaxModel(loss, params, predict, metrics), optimizer, engine, **options)

    @property
    def params(self) -> Any:
        """The pytree of parameters after the last call of `fit`, in private memory."""
        return self.replica.params

    def close(self) -> None:
        """End the engine's threads and free its links; collective. `params` remain."""
        super().close()
        self.replica.leave_arena()
