"""The parts that models and losses of other frameworks have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.nn.metrics.metric import MAX_EXAMPLE


class GuestModel:
    """A model that learns the shape of its samples from the first ones."""

    input_shape: Any = None  #: of the samples that were checked first

    def check_sample_shape(self, samples: Any) -> None:
        """Raise UsageError for samples of another shape than those before."""
        shape = samples.sample_shape
        if self.input_shape is None:
            self.input_shape = shape
        if shape != self.input_shape:
            raise UsageError(
                f"the model was given samples of shape {self.input_shape} before, seen {shape}"
            )

    def metric_example(self, samples: Any) -> tuple[np.ndarray, Any]:
        """Return outputs and targets of a few samples as metrics get them, see Replica."""
        self.check_sample_shape(samples)
        rows = np.arange(min(len(samples), MAX_EXAMPLE))
        return self._metric_arrays(*samples.rows(rows))

    def _metric_arrays(self, x: Any, y: Any) -> tuple[np.ndarray, Any]:
        """Return the outputs for samples `x`, and the targets, as metrics get them."""
        raise NotImplementedError


class GuestLoss:
    """A loss that is a function of the user's: only this function knows its targets."""

    def find_fault(self, targets: Any, output_shape: tuple[int, ...]) -> str:
        """Return no fault: the function checks its targets."""
        return ""

    def count_outputs(self, targets: Any) -> int:
        """Raise UsageError: only the user knows."""
        raise UsageError("expected the number of classes beside the data: the loss is a function")
