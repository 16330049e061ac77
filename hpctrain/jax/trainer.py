"""The Trainer of a JAX function: every engine, checkpoints, resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import hpctrain.world
from hpctrain.core.errors import UsageError
from hpctrain.data import Samples
from hpctrain.gradients.precision import Precision
from hpctrain.jax.losses import LossFunction
from hpctrain.jax.model import JaxModel
from hpctrain.jax.replica import JaxReplica
from hpctrain.jax.samples import RefusedSamples, as_jax_samples
from hpctrain.nn.metrics import Metric, is_name
from hpctrain.optim import Optimizer
from hpctrain.training import trainer
from hpctrain.training.arguments import as_engine, as_optimizer
from hpctrain.world import World


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
        metrics: Iterable[str | Metric] = (),
        precision: Precision | None = None,
        world: World | None = None,
        **options: Any,
    ):
        """Lay the parameters out in an arena and build the engine; collective.

        `loss(params, x, y)` returns the mean over the samples of the batch; with `metrics`, a pair
        (mean, dict of further means). Of the names in `metrics`, "auc", "f1" and other names of
        `ht.metrics` are computed from the outputs of `predict` instead. `JaxLoss` describes random
        numbers. `precision`: float32 or
        float64, for parameters and floating-point samples; by default parameters and samples keep
        their dtypes. `options`: keywords of `ht.Trainer`, such as `seed` and `callbacks`. Raises
        UsageError on all ranks if an argument of any rank does not fit.
        """
        world = world or hpctrain.world.init()

        def make_model() -> tuple[JaxModel, list[str | Metric]]:
            _check_optimizer(optimizer)
            as_optimizer(optimizer), as_engine(engine)
            names = [metrics] if isinstance(metrics, str) else list(metrics)
            own_names: Any = list(filter(_is_own, names))
            model = JaxModel(loss, params, predict, own_names)
            model.has_precision = precision is not None
            return model, [name for name in names if not _is_own(name)]

        model, others = world.on_all_ranks(make_model)
        chosen = world.on_all_ranks(lambda: precision or model.own_precision)
        structure = re.sub("0x[0-9a-f]+", "0x", str(model.structure))  # addresses differ by rank
        world.must_agree(f"{chosen} in {structure}", "params and precision")
        super().__init__(
            model, optimizer, engine, precision=chosen, world=world, metrics=others, **options
        )

    @property
    def params(self) -> Any:
        """The pytree of parameters after the last call of `fit`, in private memory."""
        return self.replica.params

    def fit(self, train: Any, *, evaluate: Any = None, **options: Any) -> dict[str, Any]:
        """Train; see `ht.Trainer.fit`. Pairs (x, y) are pytrees of arrays; y may be None."""
        test = None if evaluate is None else self._as_samples(evaluate, "evaluate")
        return super().fit(self._as_samples(train, "fit"), evaluate=test, **options)

    def evaluate(self, samples: Any) -> dict[str, float | None]:
        """Return the metrics over `samples`; see `ht.Trainer.evaluate`, and `fit`."""
        return super().evaluate(self._as_samples(samples, "evaluate"))

    def close(self) -> None:
        """End the engine's threads and free its links; collective. `params` remain."""
        super().close()
        self.replica.leave_arena()

    def _as_samples(self, value: Any, name: str) -> Samples:
        """Return a data set; the pytrees of every set must have the same structure."""
        try:
            samples, model = as_jax_samples(value, name), self.replica.model
            structure = getattr(samples, "structure", None)
            if model.input_shape is not None and str(structure) != str(model.sample_structure):
                raise UsageError(
                    f"{name}: expected pytrees of (x, y) such as before, {model.sample_structure}, "
                    f"seen {structure}"
                )
            model.sample_structure = structure
            return samples
        except UsageError as error:  # perhaps of this rank alone
            return RefusedSamples(error)


def _is_own(metric: Any) -> bool:
    """Return whether `metric` is the name of a mean that the loss returns."""
    return not isinstance(metric, Metric) and not is_name(metric)


def _check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for what is no optimizer of ours, such as one of Optax, or a schedule."""
    if isinstance(optimizer, str) or hasattr(optimizer, "rate"):
        return
    advice = (
        "a schedule is a rate: ht.optim.adamw(rate=schedule)"
        if callable(optimizer)
        else "Optax's optimizers do not run on parts of flat arrays: take ht.optim.sgd, adamw, "
        "lars or lamb; their rate may be a schedule of Optax, clip_norm is its clip_by_global_norm"
    )
    raise UsageError(
        f"optimizer: expected one such as ht.optim.adamw(rate=1e-3), seen "
        f"{type(optimizer).__name__}; {advice}"
    )
