"""The model of a run, read from a checkpoint: outputs and metrics without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.data import Samples, SelectedSamples, order_of
from hpctrain.data.scaling import Scale, ScaledSamples, scale_of
from hpctrain.gradients.mixed import MixedReplica
from hpctrain.gradients.replica import ModelReplica
from hpctrain.nn.metrics import check_metrics
from hpctrain.training.arguments import as_samples, check_sets
from hpctrain.training.centered_loss import centered_loss
from hpctrain.training.evaluation import Evaluation, SoleEvaluator, bind_metrics

NO_SCALE = Scale()


class TrainedModel:
    """A model with the weights of a checkpoint, in `replica.arena`; see `ht.load`.

    Samples are as in the files of the training data: `scale` is applied to them, as in training.
    """

    def __init__(
        self,
        replica: ModelReplica | MixedReplica,
        scale: Scale = NO_SCALE,
        metrics: Sequence[str] = (),
    ):
        self.replica, self.model, self.scale = replica, replica.model, scale
        self._metrics = check_metrics(metrics)

    def predict(self, x: Any) -> np.ndarray:
        """Return the outputs for samples `x` (n, ...), such as logits (n, classes), on the host."""
        return self.replica.predict(self.scale.apply(x))

    def evaluate(self, samples: Samples | tuple[Any, Any]) -> dict[str, Any]:
        """Return the metrics over `samples`, such as {"loss": 0.31, "accuracy": 0.93}.

        Metrics of the run's recipe are among them.

        Samples that the `load` of a data set has scaled are not scaled again. Raises UsageError for
        samples or targets that do not fit the model.
        """
        samples = as_samples(samples, "evaluate")
        if self.scale.rule != "none" and scale_of(samples) is None:
            samples = ScaledSamples(samples, self.scale)
        if (order := order_of(samples)) is not None:
            samples = SelectedSamples(samples, order.indexes(0, 0))
        check_sets(self.model, self.replica.loss, evaluated=samples)
        metrics = bind_metrics(self._metrics, self.model, samples)
        with centered_loss(self.model, samples):
            return Evaluation(SoleEvaluator(self.replica), metrics).evaluate(samples)

    def __repr__(self) -> str:
        return f"TrainedModel({self.model!r})"
