"""The parts that models and losses of other frameworks have in common."""

from __future__ import annotations

from typing import Any

from hpctrain.core.errors import UsageError


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


class GuestLoss:
    """A loss that is a function of the user's: only this function knows its targets."""

    def find_fault(self, targets: Any, output_shape: tuple[int, ...]) -> str:
        """Return no fault: the function checks its targets."""
        return ""

    def count_outputs(self, targets: Any) -> int:
        """Raise UsageError: only the user knows."""
        raise UsageError("expected the number of classes beside the data: the loss is a function")
